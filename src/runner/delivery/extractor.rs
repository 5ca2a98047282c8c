//! Git in a sandbox that has the agent's workspace, read-only, and nobody else in it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context as Cx, Poll};
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::io::AsyncWrite;
use tokio::time::sleep;

use crate::relay::artifact::Spool;
use crate::relay::extract::Command;
use crate::relay::{Artifacts, Git};
use crate::sandbox::output::{Output, Stream};
use crate::sandbox::spec::{Access, Limits, Root, Workspace};
use crate::sandbox::{self, Cause, Driver, RunSpec, embedded};

/// Where the work is taken out: a sandbox like the agent's, and this machine's programs if they can be had.
pub(super) struct Extractor {
    driver: Driver,
    order: sandbox::Order,
    /// This machine's git, where the sandbox has this machine's programs.
    git: Option<PathBuf>,
}

impl Extractor {
    /// Of a run that is over, and whose workspace is a directory.
    pub(super) fn new(driver: &Driver, order: &sandbox::Order, git: &Git) -> Self {
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
            init: None,
            ..spec.clone()
        };
        Self { driver, order: sandbox::Order { spec, ..order.clone() }, git }
    }

    /// What a command says, where that is not much.
    pub(super) async fn answer(
        &self,
        artifacts: &Artifacts,
        command: &Command,
    ) -> anyhow::Result<Vec<u8>> {
        let path = artifacts.directory().join("answer");
        let filled = self.fill(artifacts, &path, command).await;
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
        let spool = artifacts.spool(PathBuf::from(path), command.output_bytes)?;
        let mut sink = Sink { spool, failure: None };
        let mut output = Output::of(Stream::Stdout, KEPT_BYTES, &mut sink);
        let order = self.order(command)?;
        let until = async {
            sleep(command.time).await;
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

    fn order(&self, Command { argv, env, time, .. }: &Command) -> anyhow::Result<sandbox::Order> {
        let mut order = self.order.clone();
        // Its name is the agent's sandbox's, which is gone; what that has left in the run's directory is not in its way.
        order.directory.push("extract");
        fs::create_dir(&order.directory)?;
        order.spec.argv.clone_from(argv);
        if let (Some(git), Some(program)) = (&self.git, order.spec.argv.first_mut()) {
            *program = git.display().to_string();
        }
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
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
