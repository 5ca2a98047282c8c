//! Git in a sandbox that mounts the agent's workspace read-only and runs no other program.
//!
//! The commands of a collection run one after the other in the same sandbox. `cogni-init` runs them, ends every process
//! and removes every file that a command leaves, and reports the output of each in frames.
//!
//! Git reads files that an agent has written. If such a file takes control of git, git is as confined as the agent was:
//! by the same profile of system calls, by `cogni-init`'s filter and by its rules for Landlock. Git can make no unix
//! socket, and can write only to memory.

mod output;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use tokio::time::{Instant, sleep_until};

use crate::guest::init::command_list::{ListedCommand, encode_commands};
use crate::relay::delivery::DeliveryService;
use crate::relay::git::summarize_stderr;
use crate::relay::repo::extract_commands::{
    ExtractCommand, RELAY_REPOSITORY_TARGET, create_stub_repository,
};
use crate::relay::repo::{GitProgram, ObjectId};
use crate::runner::directory::create_socket_dir;
use crate::sandbox::output::{OutputCapture, OutputStream};
use crate::sandbox::spec::{
    BindMount, MountAccess, RootSource, SandboxLimits, SandboxTask, WorkspaceMount,
};
use crate::sandbox::{self, InitBinary, SandboxDriver, SandboxSpec, StopReason, embedded};

pub(super) use output::OutputTarget;

use output::CommandOutputs;

/// The sandbox that collects the work. It resembles the agent's sandbox, and has this machine's programs if the
/// embedded driver can make it.
pub(super) struct WorkExtractor {
    driver: SandboxDriver,
    request: sandbox::SandboxRequest,
    /// This machine's git, if the sandbox has this machine's programs.
    git: Option<PathBuf>,
    /// The time of the collection.
    time: Duration,
    /// The end of the collection, whatever commands remain. The run's branch and its permit wait for the collection.
    deadline: Instant,
}

impl WorkExtractor {
    /// Makes an extractor for a run that is over and whose workspace is a directory. All commands of the extractor
    /// together may take the relay's time limit.
    ///
    /// # Errors
    /// Returns an error if the sandbox's first process cannot be written to the relay's directory.
    pub(super) fn for_delivery(
        driver: &SandboxDriver,
        request: &sandbox::SandboxRequest,
        relay: &DeliveryService,
    ) -> anyhow::Result<Self> {
        let init = if let Some(path) = &request.spec.init {
            path.clone()
        } else {
            // The agent's image has its own bridge in place of cogni-init. Git needs no bridge, but needs the filter of
            // cogni-init.
            let first = InitBinary::BuiltIn { directory: relay.state_dir().to_owned() };
            first.install_file()?.context("the built-in cogni-init has no file")?
        };
        Ok(Self::new(driver, request, relay.git(), (init, relay.extract_limits().time)))
    }

    fn new(
        driver: &SandboxDriver,
        request: &sandbox::SandboxRequest,
        git: &GitProgram,
        (init, time): (PathBuf, Duration),
    ) -> Self {
        let spec = &request.spec;
        // This machine's git is preferred: the rest of the relay uses the same git, and the image needs no git. Only
        // root can replace the Docker driver by the embedded driver.
        let can_embed = rustix::process::geteuid().is_root();
        let (driver, root) = match driver {
            SandboxDriver::Docker { .. } if can_embed => (
                SandboxDriver::Embedded(embedded::EmbeddedDriverConfig::default()),
                RootSource::Host,
            ),
            SandboxDriver::Docker { .. } => (driver.clone(), spec.root.clone()),
            SandboxDriver::Embedded(_) => (driver.clone(), RootSource::Host),
        };
        let git = (root == RootSource::Host).then(|| git.program().to_owned());
        let spec = SandboxSpec {
            root,
            argv: vec![],
            limits: SandboxLimits {
                max_memory: MAX_MEMORY_BYTES,
                pids: MAX_PROCESSES,
                ..SandboxLimits::default()
            },
            workspace: as_read_only(&spec.workspace),
            // The mounts and volumes of the run may hold secrets, and git does not need them.
            mounts: vec![],
            volumes: vec![],
            init: Some(init),
            has_tunnels: false,
            task: SandboxTask::Commands,
            // Git has nothing to save at its end, and a program that a hostile file made git start gets no time.
            grace: Duration::ZERO,
            ..spec.clone()
        };
        let request = sandbox::SandboxRequest { spec, ..request.clone() };
        Self { driver, request, git, time, deadline: Instant::now() + time }
    }

    /// Runs the commands, one after the other, in one sandbox. Returns the result of each command, in their order: its
    /// standard output, or nothing if the output went into a file. A command that fails does not keep the next command
    /// from running. `head` is the commit that is checked out in the repository of the relay's own; `None` if no
    /// command needs that repository.
    ///
    /// # Errors
    /// Returns an error if the sandbox cannot be made or is lost, or if a file cannot be created.
    pub(super) async fn run_commands<const N: usize>(
        &self,
        commands: [(&ExtractCommand, OutputTarget); N],
        head: Option<ObjectId>,
    ) -> anyhow::Result<[anyhow::Result<Vec<u8>>; N]> {
        let listed = commands.each_ref().map(|(command, _)| self.listed_command(command));
        let request = self.sandbox_request(&listed, head)?;
        // 1. Each command's output goes to a place of its own, of bounded size.
        let mut outputs = CommandOutputs::new(commands.map(|(command, target)| (target, command)));
        let mut output =
            OutputCapture::for_stream(OutputStream::Stdout, KEEP_STDERR_BYTES, &mut outputs);
        let until = async {
            sleep_until(self.deadline).await;
            StopReason::Deadline
        };
        // 2. The sandbox runs until the last command has ended, or until the extractor's time is over.
        let ended = Box::pin(self.driver.run(&request, &mut output, until)).await;
        fs::remove_dir_all(&request.directory)?;
        let stderr = output.stderr.finish().text;
        let ended = ended.context("the sandbox that collects the work failed")?;
        // 3. A command whose end was not reported has the sandbox's end as its reason.
        let why = if ended.cause.is_some() {
            format!("git took more than {:?} to collect the work", self.time)
        } else {
            let stderr = ended.not_started.unwrap_or(stderr);
            format!("git cannot collect the work: {}", summarize_stderr(&stderr))
        };
        Ok(outputs.into_results(&why))
    }

    fn sandbox_request(
        &self,
        commands: &[ListedCommand],
        head: Option<ObjectId>,
    ) -> anyhow::Result<sandbox::SandboxRequest> {
        let mut request = self.request.clone();
        // The sandbox has the name of the agent's sandbox, which is gone. A directory of its own keeps it apart from
        // the files that the agent's sandbox left in the run's directory.
        request.directory.push("extract");
        fs::create_dir(&request.directory)?;
        // A new directory without a socket: git has no way to the run's gateway.
        request.spec.socket_dir = request.directory.join("sock");
        create_socket_dir(&request.spec.socket_dir)?;
        if let Some(head) = head {
            let source = request.directory.join("git");
            create_stub_repository(&source, head)?;
            let target = PathBuf::from(RELAY_REPOSITORY_TARGET);
            request.spec.mounts = vec![BindMount { source, target, access: MountAccess::ReadOnly }];
        }
        request.spec.argv = encode_commands(commands);
        request.spec.env = BTreeMap::new();
        request.spec.limits.max_runtime = self.time + WATCHDOG_MARGIN;
        Ok(request)
    }

    fn listed_command(
        &self,
        ExtractCommand { argv, env, output_bytes }: &ExtractCommand,
    ) -> ListedCommand {
        let mut argv = argv.clone();
        if let (Some(git), Some(program)) = (&self.git, argv.first_mut()) {
            *program = git.display().to_string();
        }
        let env = env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        ListedCommand { max_output_bytes: *output_bytes, env, argv }
    }
}

fn as_read_only(workspace: &WorkspaceMount) -> WorkspaceMount {
    match workspace {
        WorkspaceMount::None | WorkspaceMount::Fresh => WorkspaceMount::None,
        WorkspaceMount::Directory { path, .. } => {
            WorkspaceMount::Directory { path: path.clone(), access: MountAccess::ReadOnly }
        }
    }
}

/// The maximum memory of git in bytes (our choice). Packing holds the objects that it compares in memory. A bundle has
/// a limit of its own.
const MAX_MEMORY_BYTES: u64 = 1 << 30;

/// The maximum number of processes of git and its helpers (our choice).
const MAX_PROCESSES: u32 = 32;

/// The number of bytes that are kept of git's error messages (our choice).
const KEEP_STDERR_BYTES: usize = 4 << 10;

/// The time after the command's own time when the sandbox ends by itself (our choice). The margin matters only if the
/// runner has died.
const WATCHDOG_MARGIN: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::SystemTime;

    use super::*;
    use crate::sandbox::spec::oci::{self, OciHostSettings};
    use crate::sandbox::spec::{HOSTS_FILE, OwnerLabels};

    /// L3, R5: the collecting sandbox has no way to the run's gateway, none of the run's mounts, and no grace period.
    #[test]
    fn an_extractor_has_nothing_of_the_runs_but_the_workspace() {
        let temp_dir = tempfile::tempdir().expect("there is a place for it");
        let own = |name: &str| temp_dir.path().join(name);
        let (driver, run) =
            (SandboxDriver::Embedded(embedded::EmbeddedDriverConfig::default()), own("run"));
        fs::create_dir_all(run.join("sock")).expect("made");
        let secret_mount = BindMount {
            source: own("secret"),
            target: "/secret".into(),
            access: MountAccess::ReadWrite,
        };
        let spec = SandboxSpec {
            run: "run-1".to_owned(),
            root: RootSource::Host,
            argv: vec!["agent".to_owned()],
            uid: 1001,
            env: BTreeMap::from([("OWN".to_owned(), "value".to_owned())]),
            limits: SandboxLimits::default(),
            grace: Duration::from_hours(1),
            workspace: WorkspaceMount::Directory {
                path: own("workspace"),
                access: MountAccess::ReadWrite,
            },
            mounts: vec![secret_mount],
            volumes: vec![],
            socket_dir: run.join("sock"),
            init: Some(own("cogni-init")),
            has_tunnels: false,
            task: SandboxTask::Agent,
        };
        let owner = sandbox::OwnerProcess::this_process().expect("it is there");
        let (run_dir, deadline) = (temp_dir.path().to_owned(), SystemTime::now());
        let request = sandbox::SandboxRequest {
            spec,
            labels: OwnerLabels { owner, run_dir, deadline },
            directory: run,
        };
        let git = GitProgram::find(&own("home")).expect("there is a git");
        let init_and_time = (own("cogni-init"), Duration::from_mins(2));
        let extractor = WorkExtractor::new(&driver, &request, &git, init_and_time);
        let command = ExtractCommand {
            argv: vec!["git".to_owned(), "version".to_owned()],
            env: vec![("TZ", "UTC".to_owned())],
            output_bytes: 9,
        };
        let listed = [extractor.listed_command(&command)];
        let request = extractor.sandbox_request(&listed, Some(ObjectId::NONE)).expect("made");
        let spec = &request.spec;
        assert_eq!(spec.socket_dir, own("run/extract/sock"));
        let names = fs::read_dir(&spec.socket_dir).expect("made");
        let names: Vec<_> = names.map(|entry| entry.expect("it is there").file_name()).collect();
        assert_eq!(names, [HOSTS_FILE]);
        let targets: Vec<_> =
            spec.mounts.iter().map(|mount| (&*mount.target, mount.access)).collect();
        assert_eq!(targets, [(Path::new(RELAY_REPOSITORY_TARGET), MountAccess::ReadOnly)]);
        assert_eq!((spec.grace, spec.env.len()), (Duration::ZERO, 0));
        assert_eq!((&spec.init, spec.task), (&Some(own("cogni-init")), SandboxTask::Commands));
        let program = git.program().display().to_string();
        let expected = format!(
            "/cogni-init --max-runtime 160s --commands --write /dev/shm --write /run --write /tmp -- 9 1 TZ=UTC 2 {program} version"
        );
        assert_eq!(started_with(spec).join(" "), expected);
        let (path, access) = (own("workspace"), MountAccess::ReadOnly);
        assert_eq!(spec.workspace, WorkspaceMount::Directory { path, access });
    }

    /// Returns the first process of a sandbox and its arguments.
    fn started_with(spec: &SandboxSpec) -> Vec<String> {
        let settings = OciHostSettings {
            root: "/root".into(),
            programs: vec![],
            max_files: 1024,
            cgroup: None,
            is_rootless: false,
            limits_sockets: false,
        };
        let spec_json =
            serde_json::to_value(oci::build_oci_spec(spec, &settings)).expect("it is JSON");
        let args = spec_json["process"]["args"].as_array().expect("it has arguments").iter();
        args.filter_map(|argument| Some(argument.as_str()?.to_owned())).collect()
    }
}
