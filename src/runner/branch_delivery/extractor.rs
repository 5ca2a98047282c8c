//! Git in a sandbox that has the agent's workspace, read-only, and nobody else in it.
//!
//! Git reads what an agent has written. Should that make git do what the agent wants, it is as confined as the agent was: by
//! the same profile of system calls, and behind `cogni-init`'s filter and its rules for Landlock. It makes no unix socket,
//! and writes nowhere but in memory.

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

/// Where the work is taken out: a sandbox like the agent's, and this machine's programs if they can be had.
pub(super) struct WorkExtractor {
    driver: SandboxDriver,
    order: sandbox::SandboxRequest,
    /// This machine's git, where the sandbox has this machine's programs.
    git: Option<PathBuf>,
    /// When the taking out is over, whatever is asked by then: the run's branch and place wait for it.
    deadline: Instant,
}

impl WorkExtractor {
    /// Makes one for a run that is over, and whose workspace is a directory. All that is asked takes no more than the relay
    /// gives it.
    ///
    /// # Errors
    /// The sandbox's first process cannot be written to the relay's directory.
    pub(super) fn for_delivery(
        driver: &SandboxDriver,
        order: &sandbox::SandboxRequest,
        relay: &DeliveryService,
    ) -> anyhow::Result<Self> {
        let init = if let Some(path) = &order.spec.init {
            path.clone()
        } else {
            // The agent's image brings a bridge of its own; git needs none.
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
        // This machine's git is the one that the rest of the relay uses, and no image needs one then.
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
            mounts: vec![],
            volumes: vec![],
            init: Some(init),
            has_gateway: false,
            // Git has nothing to bring to an end, and what it was made to start has no claim to time.
            grace: Duration::ZERO,
            ..spec.clone()
        };
        let order = sandbox::SandboxRequest { spec, ..order.clone() };
        Self { driver, order, git, deadline: Instant::now() + time }
    }

    /// What a command says, where that is not much.
    pub(super) async fn capture_output(
        &self,
        artifacts: &ArtifactDir,
        command: &ExtractCommand,
    ) -> anyhow::Result<Vec<u8>> {
        self.capture_output_with_head(artifacts, command, None).await
    }

    /// What a command says that is asked of a repository of the relay's own, which has `head` checked out.
    pub(super) async fn capture_output_with_head(
        &self,
        artifacts: &ArtifactDir,
        command: &ExtractCommand,
        head: Option<ObjectId>,
    ) -> anyhow::Result<Vec<u8>> {
        let path = artifacts.directory().join("answer");
        let filled = self.write_output_with_head(artifacts, &path, (command, head)).await;
        let answer = fs::read(&path);
        // Nobody needs it any more, whatever has become of it.
        let _ = fs::remove_file(&path);
        filled?;
        Ok(answer?)
    }

    /// Puts what a command says into a file, which is whole then.
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
        let ended = Box::pin(self.driver.run(&order, &mut output, until)).await;
        fs::remove_dir_all(&order.directory)?;
        let said = output.stderr.finish().text;
        let ended = ended.context("there is no sandbox to take the work out with")?;
        if let Some(failure) = sink.failure {
            return Err(failure.into());
        }
        if ended.cause.is_some() {
            bail!("git took more than {:?} to take the work out", command.time);
        }
        if ended.exit_code != Some(0) {
            let why = ended.not_started.unwrap_or(said);
            bail!("git cannot take the work out: {}", why.trim());
        }
        Ok(sink.spool.finish()?)
    }

    fn sandbox_request(
        &self,
        ExtractCommand { argv, env, time, .. }: &ExtractCommand,
        head: Option<ObjectId>,
    ) -> anyhow::Result<sandbox::SandboxRequest> {
        let mut order = self.order.clone();
        // Its name is the agent's sandbox's, which is gone; what that has left in the run's directory is not in its way.
        order.directory.push("extract");
        fs::create_dir(&order.directory)?;
        // The run's socket is not in it.
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

/// Takes output into a file, until it is too much.
struct BoundedFileWriter {
    spool: BoundedFile,
    failure: Option<crate::relay::repo::RepoError>,
}

impl AsyncWrite for BoundedFileWriter {
    /// Into the page cache, in pieces of a pipe's size: nothing is won by another thread.
    fn poll_write(self: Pin<&mut Self>, _: &mut Cx<'_>, piece: &[u8]) -> Poll<io::Result<usize>> {
        let sink = self.get_mut();
        Poll::Ready(match sink.spool.push(piece) {
            Ok(()) => Ok(piece.len()),
            Err(error) => {
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

/// Packing holds what it compares; a bundle has a limit of its own.
const MAX_MEMORY_BYTES: u64 = 1 << 30;

/// Git and its helpers.
const MAX_PROCESSES: u32 = 32;

/// Of what git complains about.
const KEEP_STDERR_BYTES: usize = 4 << 10;

/// The command's own time ends it; this is for a runner that is gone.
const WATCHDOG_MARGIN: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::SystemTime;

    use super::*;
    use crate::sandbox::spec::oci::{self, OciHostSettings};
    use crate::sandbox::spec::{HOSTS_FILE, OwnerLabels};

    /// L3, R5: who takes work out has no way to the run's gateway, nothing that the run was shown, and no grace.
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
            stamp: OwnerLabels { owner, run_dir, deadline },
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

    /// The first process of a sandbox, and its arguments.
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
