//! Git in a sandbox that mounts the agent's workspace read-only and runs no other program.
//!
//! Git reads files that an agent has written. If such a file takes control of git, git is as confined as the agent was:
//! by the same profile of system calls, by `cogni-init`'s filter and by its rules for Landlock. Git can make no unix
//! socket, and can write only to memory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context as Cx, Poll};
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::io::AsyncWrite;
use tokio::time::{Instant, sleep_until};

use crate::relay::delivery::DeliveryService;
use crate::relay::repo::artifact::BoundedFile;
use crate::relay::repo::extract_commands::{
    ExtractCommand, RELAY_REPOSITORY_TARGET, create_stub_repository,
};
use crate::relay::repo::{ArtifactDir, GitProgram, ObjectId};
use crate::runner::directory::create_socket_dir;
use crate::sandbox::output::{OutputCapture, OutputStream};
use crate::sandbox::spec::{BindMount, MountAccess, RootSource, SandboxLimits, WorkspaceMount};
use crate::sandbox::{self, InitBinary, SandboxDriver, SandboxSpec, StopReason, embedded};

/// The sandbox that collects the work. It resembles the agent's sandbox, and has this machine's programs if the
/// embedded driver can make it.
pub(super) struct WorkExtractor {
    driver: SandboxDriver,
    order: sandbox::SandboxRequest,
    /// This machine's git, if the sandbox has this machine's programs.
    git: Option<PathBuf>,
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
        order: &sandbox::SandboxRequest,
        relay: &DeliveryService,
    ) -> anyhow::Result<Self> {
        let init = if let Some(path) = &order.spec.init {
            path.clone()
        } else {
            // The agent's image has its own bridge in place of cogni-init. Git needs no bridge, but needs the filter of
            // cogni-init.
            let first = InitBinary::BuiltIn { directory: relay.state_dir().to_owned() };
            first.install_file()?.context("the built-in cogni-init has no file")?
        };
        Ok(Self::new(driver, order, relay.git(), (init, relay.extract_limits().time)))
    }

    fn new(
        driver: &SandboxDriver,
        order: &sandbox::SandboxRequest,
        git: &GitProgram,
        (init, time): (PathBuf, Duration),
    ) -> Self {
        let spec = &order.spec;
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
            has_gateway: false,
            // Git has nothing to save at its end, and a program that a hostile file made git start gets no time.
            grace: Duration::ZERO,
            ..spec.clone()
        };
        let order = sandbox::SandboxRequest { spec, ..order.clone() };
        Self { driver, order, git, deadline: Instant::now() + time }
    }

    /// Runs a command, and returns its standard output, which has to be small.
    pub(super) async fn capture_output(
        &self,
        artifacts: &ArtifactDir,
        command: &ExtractCommand,
    ) -> anyhow::Result<Vec<u8>> {
        self.capture_output_with_head(artifacts, command, None).await
    }

    /// Runs a command in a repository of the relay that has `head` checked out, and returns the standard output. If
    /// `head` is `None`, the command has no such repository.
    pub(super) async fn capture_output_with_head(
        &self,
        artifacts: &ArtifactDir,
        command: &ExtractCommand,
        head: Option<ObjectId>,
    ) -> anyhow::Result<Vec<u8>> {
        let path = artifacts.directory().join("answer");
        let filled = self.write_output_with_head(artifacts, &path, (command, head)).await;
        let answer = fs::read(&path);
        // The file is removed after a failed command, too. A leftover file is harmless.
        let _ = fs::remove_file(&path);
        filled?;
        Ok(answer?)
    }

    /// Runs a command, and writes its complete standard output into a file.
    pub(super) async fn write_output(
        &self,
        artifacts: &ArtifactDir,
        path: &Path,
        command: &ExtractCommand,
    ) -> anyhow::Result<()> {
        self.write_output_with_head(artifacts, path, (command, None)).await
    }

    async fn write_output_with_head(
        &self,
        artifacts: &ArtifactDir,
        path: &Path,
        (command, head): (&ExtractCommand, Option<ObjectId>),
    ) -> anyhow::Result<()> {
        // 1. The output goes into a file of bounded size; a failed write ends the sandbox's output.
        let end = self.deadline.min(Instant::now() + command.time);
        let spool = artifacts.create_bounded(PathBuf::from(path), command.output_bytes)?;
        let mut sink = BoundedFileWriter { spool, failure: None };
        let mut output =
            OutputCapture::for_stream(OutputStream::Stdout, KEEP_STDERR_BYTES, &mut sink);
        let order = self.sandbox_request(command, head)?;
        let until = async {
            sleep_until(end).await;
            StopReason::Deadline
        };
        // 2. The sandbox runs until git has ended, or until the command's time or the extractor's time is over.
        let ended = Box::pin(self.driver.run(&order, &mut output, until)).await;
        fs::remove_dir_all(&order.directory)?;
        let said = output.stderr.finish().text;
        // 3. Of several errors, the cause is returned: a full file makes git fail, too.
        let ended = ended.context("the sandbox that collects the work failed")?;
        if let Some(failure) = sink.failure {
            return Err(failure.into());
        }
        if ended.cause.is_some() {
            bail!("git took more than {:?} to collect the work", command.time);
        }
        if ended.exit_code != Some(0) {
            let why = ended.not_started.unwrap_or(said);
            bail!("git cannot collect the work: {}", why.trim());
        }
        Ok(sink.spool.finish()?)
    }

    fn sandbox_request(
        &self,
        ExtractCommand { argv, env, time, .. }: &ExtractCommand,
        head: Option<ObjectId>,
    ) -> anyhow::Result<sandbox::SandboxRequest> {
        let mut order = self.order.clone();
        // The sandbox has the name of the agent's sandbox, which is gone. A directory of its own keeps it apart from
        // the files that the agent's sandbox left in the run's directory.
        order.directory.push("extract");
        fs::create_dir(&order.directory)?;
        // A new directory without a socket: git has no way to the run's gateway.
        order.spec.socket_dir = order.directory.join("sock");
        create_socket_dir(&order.spec.socket_dir)?;
        if let Some(head) = head {
            let source = order.directory.join("git");
            create_stub_repository(&source, head)?;
            let target = PathBuf::from(RELAY_REPOSITORY_TARGET);
            order.spec.mounts = vec![BindMount { source, target, access: MountAccess::ReadOnly }];
        }
        order.spec.argv.clone_from(argv);
        if let (Some(git), Some(program)) = (&self.git, order.spec.argv.first_mut()) {
            *program = git.display().to_string();
        }
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
        order.spec.env = env.collect();
        order.spec.limits.max_runtime = *time + WATCHDOG_MARGIN;
        Ok(order)
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

/// A writer that copies output into a file until the file's size limit.
struct BoundedFileWriter {
    spool: BoundedFile,
    failure: Option<crate::relay::repo::RepoError>,
}

impl AsyncWrite for BoundedFileWriter {
    /// Writes a piece in place, without a blocking thread: a piece has at most a pipe's size and goes to the page
    /// cache.
    fn poll_write(self: Pin<&mut Self>, _: &mut Cx<'_>, piece: &[u8]) -> Poll<io::Result<usize>> {
        let sink = self.get_mut();
        Poll::Ready(match sink.spool.push(piece) {
            Ok(()) => Ok(piece.len()),
            Err(error) => {
                // The capture sees only an I/O error. The reason stays in `failure` for the caller.
                sink.failure = Some(error);
                Err(io::ErrorKind::FileTooLarge.into())
            }
        })
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Cx<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Cx<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
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
    use std::collections::BTreeMap;
    use std::time::SystemTime;

    use super::*;
    use crate::sandbox::spec::oci::{self, OciHostSettings};
    use crate::sandbox::spec::{HOSTS_FILE, OwnerLabels};

    /// L3, R5: the collecting sandbox has no way to the run's gateway, none of the run's mounts, and no grace period.
    #[test]
    fn an_extractor_has_nothing_of_the_runs_but_the_workspace() {
        let place = tempfile::tempdir().expect("there is a place for it");
        let own = |name: &str| place.path().join(name);
        let (driver, run) =
            (SandboxDriver::Embedded(embedded::EmbeddedDriverConfig::default()), own("run"));
        fs::create_dir_all(run.join("sock")).expect("made");
        let shown = BindMount {
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
            mounts: vec![shown],
            volumes: vec![],
            socket_dir: run.join("sock"),
            init: Some(own("cogni-init")),
            has_gateway: true,
        };
        let owner = sandbox::OwnerProcess::this_process().expect("it is there");
        let (run_dir, deadline) = (place.path().to_owned(), SystemTime::now());
        let order = sandbox::SandboxRequest {
            spec,
            labels: OwnerLabels { owner, run_dir, deadline },
            directory: run,
        };
        let git = GitProgram::find(&own("home")).expect("there is a git");
        let given = (own("cogni-init"), Duration::from_mins(2));
        let extractor = WorkExtractor::new(&driver, &order, &git, given);
        let command = ExtractCommand {
            argv: vec!["git".to_owned()],
            env: vec![],
            time: Duration::from_mins(1),
            output_bytes: 1,
        };
        let order = extractor.sandbox_request(&command, Some(ObjectId::NONE)).expect("made");
        let spec = &order.spec;
        assert_eq!(spec.socket_dir, own("run/extract/sock"));
        let names = fs::read_dir(&spec.socket_dir).expect("made");
        let names: Vec<_> = names.map(|entry| entry.expect("it is there").file_name()).collect();
        assert_eq!(names, [HOSTS_FILE]);
        let targets: Vec<_> =
            spec.mounts.iter().map(|mount| (&*mount.target, mount.access)).collect();
        assert_eq!(targets, [(Path::new(RELAY_REPOSITORY_TARGET), MountAccess::ReadOnly)]);
        assert_eq!((spec.grace, spec.env.len()), (Duration::ZERO, 0));
        assert_eq!((&spec.init, spec.has_gateway), (&Some(own("cogni-init")), false));
        let program = git.program().display().to_string();
        let expected = format!(
            "/cogni-init --max-runtime 100s --no-gateway --write /dev/shm --write /run --write /tmp -- {program}"
        );
        assert_eq!(started_with(spec).join(" "), expected);
        let (path, access) = (own("workspace"), MountAccess::ReadOnly);
        assert_eq!(spec.workspace, WorkspaceMount::Directory { path, access });
    }

    /// Returns the first process of a sandbox and its arguments.
    fn started_with(spec: &SandboxSpec) -> Vec<String> {
        let place = OciHostSettings {
            root: "/root".into(),
            programs: vec![],
            max_files: 1024,
            cgroup: None,
            is_rootless: false,
            limits_sockets: false,
        };
        let made = serde_json::to_value(oci::build_oci_spec(spec, &place)).expect("it is JSON");
        let args = made["process"]["args"].as_array().expect("it has arguments").iter();
        args.filter_map(|argument| Some(argument.as_str()?.to_owned())).collect()
    }
}
