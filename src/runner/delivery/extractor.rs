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

use crate::delivery::Relay;
use crate::relay::artifact::Spool;
use crate::relay::extract::{Command, OWN_REPOSITORY, make_repository};
use crate::relay::{Artifacts, Git, Sha};
use crate::runner::directory::make_socket_dir;
use crate::sandbox::output::{Output, Stream};
use crate::sandbox::spec::{Access, Limits, Mount, Root, Workspace};
use crate::sandbox::{self, Cause, Driver, First, RunSpec, embedded};

/// Where the work is taken out: a sandbox like the agent's, and this machine's programs if they can be had.
pub(super) struct Extractor {
    driver: Driver,
    order: sandbox::Order,
    /// This machine's git, where the sandbox has this machine's programs.
    git: Option<PathBuf>,
    /// When the taking out is over, whatever is asked by then: the run's branch and place wait for it.
    deadline: Instant,
}

impl Extractor {
    /// Makes one for a run that is over, and whose workspace is a directory. All that is asked takes no more than the relay
    /// gives it.
    ///
    /// # Errors
    /// The sandbox's first process cannot be written to the relay's directory.
    pub(super) fn of_relay(
        driver: &Driver,
        order: &sandbox::Order,
        relay: &Relay,
    ) -> anyhow::Result<Self> {
        let init = if let Some(path) = &order.spec.init {
            path.clone()
        } else {
            // The agent's image brings a bridge of its own; git needs none.
            let first = First::BuiltIn { directory: relay.state_dir().to_owned() };
            first.file()?.context("the built-in cogni-init has no file")?
        };
        Ok(Self::new(driver, order, relay.git(), (init, relay.limits().time)))
    }

    fn new(
        driver: &Driver,
        order: &sandbox::Order,
        git: &Git,
        (init, time): (PathBuf, Duration),
    ) -> Self {
        let spec = &order.spec;
        // This machine's git is the one that the rest of the relay uses, and no image needs one then.
        let can_embed = rustix::process::geteuid().is_root();
        let (driver, root) = match driver {
            Driver::Docker { .. } if can_embed => {
                (Driver::Embedded(embedded::Settings::default()), Root::Host)
            }
            Driver::Docker { .. } => (driver.clone(), spec.root.clone()),
            Driver::Embedded(_) => (driver.clone(), Root::Host),
        };
        let git = (root == Root::Host).then(|| git.program().to_owned());
        let spec = RunSpec {
            root,
            argv: vec![],
            limits: Limits { max_memory: MEMORY, pids: PROCESSES, ..Limits::default() },
            workspace: read_only(&spec.workspace),
            mounts: vec![],
            volumes: vec![],
            init: Some(init),
            has_gateway: false,
            // Git has nothing to bring to an end, and what it was made to start has no claim to time.
            grace: Duration::ZERO,
            ..spec.clone()
        };
        let order = sandbox::Order { spec, ..order.clone() };
        Self { driver, order, git, deadline: Instant::now() + time }
    }

    /// What a command says, where that is not much.
    pub(super) async fn answer(
        &self,
        artifacts: &Artifacts,
        command: &Command,
    ) -> anyhow::Result<Vec<u8>> {
        self.answer_beside(artifacts, command, None).await
    }

    /// What a command says that is asked of a repository of the relay's own, which has `head` checked out.
    pub(super) async fn answer_beside(
        &self,
        artifacts: &Artifacts,
        command: &Command,
        head: Option<Sha>,
    ) -> anyhow::Result<Vec<u8>> {
        let path = artifacts.directory().join("answer");
        let filled = self.fill_beside(artifacts, &path, (command, head)).await;
        let answer = fs::read(&path);
        // Nobody needs it any more, whatever has become of it.
        let _ = fs::remove_file(&path);
        filled?;
        Ok(answer?)
    }

    /// Puts what a command says into a file, which is whole then.
    pub(super) async fn fill(
        &self,
        artifacts: &Artifacts,
        path: &Path,
        command: &Command,
    ) -> anyhow::Result<()> {
        self.fill_beside(artifacts, path, (command, None)).await
    }

    async fn fill_beside(
        &self,
        artifacts: &Artifacts,
        path: &Path,
        (command, head): (&Command, Option<Sha>),
    ) -> anyhow::Result<()> {
        let end = self.deadline.min(Instant::now() + command.time);
        let spool = artifacts.spool(PathBuf::from(path), command.output_bytes)?;
        let mut sink = Sink { spool, failure: None };
        let mut output = Output::of(Stream::Stdout, KEPT_BYTES, &mut sink);
        let order = self.order(command, head)?;
        let until = async {
            sleep_until(end).await;
            Cause::Deadline
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

    fn order(
        &self,
        Command { argv, env, time, .. }: &Command,
        head: Option<Sha>,
    ) -> anyhow::Result<sandbox::Order> {
        let mut order = self.order.clone();
        // Its name is the agent's sandbox's, which is gone; what that has left in the run's directory is not in its way.
        order.directory.push("extract");
        fs::create_dir(&order.directory)?;
        // The run's socket is not in it.
        order.spec.socket_dir = order.directory.join("sock");
        make_socket_dir(&order.spec.socket_dir)?;
        if let Some(head) = head {
            let source = order.directory.join("git");
            make_repository(&source, head)?;
            let target = PathBuf::from(OWN_REPOSITORY);
            order.spec.mounts = vec![Mount { source, target, access: Access::ReadOnly }];
        }
        order.spec.argv.clone_from(argv);
        if let (Some(git), Some(program)) = (&self.git, order.spec.argv.first_mut()) {
            *program = git.display().to_string();
        }
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
        order.spec.env = env.collect();
        order.spec.limits.max_runtime = *time + SPARE;
        Ok(order)
    }
}

fn read_only(workspace: &Workspace) -> Workspace {
    match workspace {
        Workspace::None | Workspace::Fresh => Workspace::None,
        Workspace::Directory { path, .. } => {
            Workspace::Directory { path: path.clone(), access: Access::ReadOnly }
        }
    }
}

/// Takes output into a file, until it is too much.
struct Sink {
    spool: Spool,
    failure: Option<crate::relay::Error>,
}

impl AsyncWrite for Sink {
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
const MEMORY: u64 = 1 << 30;

/// Git and its helpers.
const PROCESSES: u32 = 32;

/// Of what git complains about.
const KEPT_BYTES: usize = 4 << 10;

/// The command's own time ends it; this is for a runner that is gone.
const SPARE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::SystemTime;

    use super::*;
    use crate::sandbox::spec::oci::{self, Place};
    use crate::sandbox::spec::{HOSTS, Stamp};

    /// L3, R5: who takes work out has no way to the run's gateway, nothing that the run was shown, and no grace.
    #[test]
    fn an_extractor_has_nothing_of_the_runs_but_the_workspace() {
        let place = tempfile::tempdir().expect("there is a place for it");
        let own = |name: &str| place.path().join(name);
        let (driver, run) = (Driver::Embedded(embedded::Settings::default()), own("run"));
        fs::create_dir_all(run.join("sock")).expect("made");
        let shown =
            Mount { source: own("secret"), target: "/secret".into(), access: Access::ReadWrite };
        let spec = RunSpec {
            run: "run-1".to_owned(),
            root: Root::Host,
            argv: vec!["agent".to_owned()],
            uid: 1001,
            env: BTreeMap::from([("OWN".to_owned(), "value".to_owned())]),
            limits: Limits::default(),
            grace: Duration::from_hours(1),
            workspace: Workspace::Directory { path: own("workspace"), access: Access::ReadWrite },
            mounts: vec![shown],
            volumes: vec![],
            socket_dir: run.join("sock"),
            init: Some(own("cogni-init")),
            has_gateway: true,
        };
        let owner = sandbox::Owner::this().expect("it is there");
        let (run_dir, deadline) = (place.path().to_owned(), SystemTime::now());
        let order =
            sandbox::Order { spec, stamp: Stamp { owner, run_dir, deadline }, directory: run };
        let git = Git::find(&own("home")).expect("there is a git");
        let given = (own("cogni-init"), Duration::from_mins(2));
        let extractor = Extractor::new(&driver, &order, &git, given);
        let command = Command {
            argv: vec!["git".to_owned()],
            env: vec![],
            time: Duration::from_mins(1),
            output_bytes: 1,
        };
        let order = extractor.order(&command, Some(Sha::NONE)).expect("made");
        let spec = &order.spec;
        assert_eq!(spec.socket_dir, own("run/extract/sock"));
        let names: Vec<_> = fs::read_dir(&spec.socket_dir)
            .expect("made")
            .map(|entry| entry.expect("it is there").file_name())
            .collect();
        assert_eq!(names, [HOSTS]);
        let targets: Vec<_> =
            spec.mounts.iter().map(|mount| (&*mount.target, mount.access)).collect();
        assert_eq!(targets, [(Path::new(OWN_REPOSITORY), Access::ReadOnly)]);
        assert_eq!((spec.grace, spec.env.len()), (Duration::ZERO, 0));
        assert_eq!((&spec.init, spec.has_gateway), (&Some(own("cogni-init")), false));
        let program = git.program().display().to_string();
        let expected = [
            "/cogni-init",
            "--max-runtime",
            "100s",
            "--no-gateway",
            "--write",
            "/dev/shm",
            "--write",
            "/run",
            "--write",
            "/tmp",
            "--",
            &program,
        ];
        assert_eq!(started_with(spec), expected);
        let path = own("workspace");
        assert_eq!(spec.workspace, Workspace::Directory { path, access: Access::ReadOnly });
    }

    /// The first process of a sandbox, and its arguments.
    fn started_with(spec: &RunSpec) -> Vec<String> {
        let place = Place {
            root: "/root".into(),
            programs: vec![],
            max_files: 1024,
            cgroup: None,
            is_rootless: false,
            limits_sockets: false,
        };
        let made = serde_json::to_value(oci::config(spec, &place)).expect("it is JSON");
        let args = made["process"]["args"].as_array().expect("it has arguments").iter();
        args.filter_map(|argument| Some(argument.as_str()?.to_owned())).collect()
    }
}
