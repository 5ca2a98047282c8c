//! The driver that needs neither a daemon nor an image: a container of our own, made by a helper process.
//!
//! Making a container changes the process that makes it, and needs one that has a single thread. So this program starts
//! itself once more as [`helper`], gives it the order over a socket, and hears from it how the container fares. [`root`]
//! puts together what the container sees of this machine's programs, [`cgroup`] finds its limits and takes them away.
//!
//! **Invariant:** the container lives no longer than its helper, and the helper no longer than its runner.

mod cgroup;
pub mod helper;
mod messages;
mod network;
mod payload;
mod privilege;
mod root;
mod sealed;

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream as StdStream};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tokio::io::{
    AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, copy, sink,
};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child, ChildStderr, ChildStdout, Command};
use tokio::time::{Instant, sleep, timeout};

use super::driver::Started;
use super::output::{Output, Stream, follow};
use super::spec::oci;
use super::{Cause, Ended, Error, Order, left, name_of};
use messages::{Event, Signal, Task};

pub use cgroup::{Leftover, group_of, leftovers, remove};
pub(super) use cgroup::{kills_for_memory, limits_sockets};

/// How a container of our own is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where this machine does not let us set limits on memory, processes and processors: whether a container may do
    /// without.
    pub may_be_unlimited: bool,
    /// This program, which is the helper too.
    pub program: PathBuf,
}

impl Default for Settings {
    fn default() -> Self {
        Self { may_be_unlimited: false, program: "/proc/self/exe".into() }
    }
}

/// One container of our own, from before it is made until nothing is left of it but what is in the run's directory.
pub(super) struct Sandbox {
    settings: Settings,
    names: Vec<UnixListener>,
    cgroup: Option<PathBuf>,
    helper: Option<Helper>,
}

impl Sandbox {
    pub(super) fn new(settings: &Settings) -> Self {
        Self { settings: settings.clone(), names: vec![], cgroup: None, helper: None }
    }

    /// Makes it the only one of this run, until nothing is left of it. A program that is just being started elsewhere in
    /// this process holds a copy of whatever we have open until it is executed, so a name that was given back may be
    /// taken for some moments more.
    pub(super) async fn take_name(&mut self, run: &str) -> Result<(), Error> {
        let begun = Instant::now();
        let name = loop {
            match claim(run) {
                Err(Error::Taken(_)) if begun.elapsed() < GIVEN_BACK => sleep(AGAIN).await,
                claimed => break claimed?,
            }
        };
        self.names.push(name);
        Ok(())
    }

    /// Gives a helper its order.
    pub(super) async fn prepare(&mut self, order: &Order) -> Result<(), Error> {
        self.take_name(&order.spec.run).await?;
        let name = format!("{}-{}", name_of(&order.spec.run), order.stamp.owner.to_file_name());
        let task = task(order, &name)?;
        self.cgroup.clone_from(&task.cgroup);
        self.helper = Some(Helper::start(&self.settings.program, &task).await?);
        Ok(())
    }

    pub(super) async fn start(&mut self) -> Result<Started, Error> {
        let helper = self.helper.as_mut().expect("it has its order");
        match helper.event().await? {
            Event::Started => Ok(Started::Running),
            Event::NotStarted { exit_code, message } => Ok(Started::Not { exit_code, message }),
            event => Err(lost(event)),
        }
    }

    /// Follows what was started to its end. From `until` on it is told to end, and has `grace` for it.
    pub(super) async fn watch<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut Output<W>,
        until: impl Future<Output = Cause>,
        grace: impl Future<Output = ()>,
    ) -> Result<Ended, Error> {
        let helper = self.helper.as_mut().expect("it was started");
        helper.watch(output, until, grace).await
    }

    pub(super) async fn remove(self) {
        if let Some(helper) = self.helper {
            helper.end().await;
        }
        if let Some(cgroup) = self.cgroup.as_deref() {
            tidy_up(cgroup).await;
        }
    }
}

/// A run's claim to be the only one of its name on this machine. The kernel forgets it with this process.
fn claim(run: &str) -> Result<UnixListener, Error> {
    let address = SocketAddr::from_abstract_name(name_of(run))
        .and_then(|name| UnixListener::bind_addr(&name));
    address.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => Error::Taken(run.to_owned()),
        _ => Error::Embedded(error.to_string()),
    })
}

/// Whether this machine lets us set limits, or may do without.
///
/// # Errors
/// Neither; with what would.
pub fn check(settings: &Settings) -> Result<(), Error> {
    match cgroup::may_be_set() {
        Err(why) if !settings.may_be_unlimited => Err(Error::Unlimited(why)),
        _ => Ok(()),
    }
}

/// What the helper is given: all that it needs to know, so that it has to look at nothing by itself.
fn task(order: &Order, name: &str) -> Result<Task, Error> {
    let cgroup = cgroup::may_be_set().is_ok().then(|| group_of(name, &order.stamp.run_dir));
    let is_rootless = !rustix::process::geteuid().is_root();
    let root = order.directory.join("root");
    let programs = root::prepare(&order.spec.root, &root, order.spec.uid)?;
    let max_files = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let place = oci::Place {
        root,
        programs,
        max_files,
        cgroup: cgroup.clone(),
        limits_sockets: limits_sockets(),
        is_rootless,
    };
    Ok(Task {
        name: name_of(&order.spec.run),
        config: oci::config(&order.spec, &place),
        directory: order.directory.join("container"),
        cgroup,
        is_rootless,
    })
}

/// None where root makes the sandbox: its user may not write what is root's.
async fn sealed_copy(program: &Path) -> io::Result<Option<Arc<File>>> {
    if rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let program = program.to_owned();
    let copied = tokio::task::spawn_blocking(move || sealed::copy(&program));
    Ok(Some(copied.await??))
}

/// The helper, while it lives.
struct Helper {
    child: Child,
    events: BufReader<OwnedReadHalf>,
    signals: OwnedWriteHalf,
    stdout: ChildStdout,
    stderr: ChildStderr,
}

impl Helper {
    async fn start(program: &Path, task: &Task) -> Result<Self, Error> {
        let cannot = |error: io::Error| Error::Embedded(format!("no helper: {error}"));
        let copy = sealed_copy(program).await.map_err(cannot)?;
        let in_memory =
            copy.as_ref().map(|copy| format!("/proc/self/fd/{}", copy.as_raw_fd()).into());
        let program: PathBuf = in_memory.unwrap_or_else(|| program.to_owned());
        let (ours, theirs) = StdStream::pair().map_err(cannot)?;
        ours.set_nonblocking(true).map_err(cannot)?;
        let mut command = Command::new(program);
        command
            .arg0(helper::NAME)
            // For whoever looks at this machine's processes.
            .arg(&task.name)
            // It has no use for our secrets.
            .env_clear()
            // A terminal's interrupt is for us: the container has its grace.
            .process_group(0)
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().map_err(cannot)?;
        // It holds the other end of our socket.
        drop(command);
        let (events, mut signals) = UnixStream::from_std(ours).map_err(cannot)?.into_split();
        signals.write_all(&messages::line(task)).await.map_err(cannot)?;
        let stdout = child.stdout.take().expect("it is piped");
        let stderr = child.stderr.take().expect("it is piped");
        Ok(Self { child, events: BufReader::new(events), signals, stdout, stderr })
    }

    /// What it says next.
    async fn event(&mut self) -> Result<Event, Error> {
        next_event(&mut self.events).await
    }

    /// Follows the container to its end. From `until` on it is told to end, and has `grace` for it.
    async fn watch<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut Output<W>,
        until: impl Future<Output = Cause>,
        grace: impl Future<Output = ()>,
    ) -> Result<Ended, Error> {
        let Self { events, signals, stdout, stderr, .. } = self;
        let hurry = output.hurry();
        let pump = pump(stdout, stderr, output);
        let mut following = pin!(follow(next_event(events), pump, &hurry));
        let (event, cause) = tokio::select! {
            event = &mut following => (event?, None),
            cause = until => {
                signal(signals, Signal::Terminate).await;
                let event = tokio::select! {
                    biased;
                    event = &mut following => event?,
                    () = grace => {
                        signal(signals, Signal::Kill).await;
                        timeout(PATIENCE, &mut following).await.unwrap_or(Ok(Event::Lost))?
                    }
                };
                (event, Some(cause))
            }
        };
        match event {
            Event::Ended { exit_code, oom_killed } => {
                Ok(Ended { exit_code: Some(exit_code), cause, oom_killed, ..Ended::default() })
            }
            Event::Lost if cause.is_some() => Ok(Ended { cause, ..Ended::default() }),
            event => Err(lost(event)),
        }
    }

    /// Where it has not ended by itself, its death is the container's too. Whoever still holds the output by then has
    /// been on the way to become the container, and sees in a moment that there is nothing to become any more.
    async fn end(self) {
        let Self { mut child, signals, mut stdout, mut stderr, .. } = self;
        drop(signals);
        if timeout(LAST_WORDS, child.wait()).await.is_err() {
            let _ = child.kill().await;
        }
        let (mut nobody, mut nobody_else) = (sink(), sink());
        let rest = async {
            tokio::join!(copy(&mut stdout, &mut nobody), copy(&mut stderr, &mut nobody_else))
        };
        if timeout(LAST_WORDS, rest).await.is_err() {
            tracing::warn!("something holds the output of a container that is gone");
        }
    }
}

async fn next_event(events: &mut BufReader<OwnedReadHalf>) -> Result<Event, Error> {
    let mut line = vec![];
    match events.read_until(b'\n', &mut line).await {
        Ok(1..) => {
            serde_json::from_slice(&line).map_err(|error| Error::Embedded(error.to_string()))
        }
        Ok(0) | Err(_) => Ok(Event::Lost),
    }
}

/// Best effort: a helper that is gone has taken the container with it.
async fn signal(signals: &mut OwnedWriteHalf, signal: Signal) {
    if let Err(error) = signals.write_all(&messages::line(&signal)).await {
        tracing::debug!(%error, ?signal, "cannot signal the container");
    }
}

fn lost(event: Event) -> Error {
    let why = match event {
        Event::Failed { message } => message,
        _ => "the process that made it is gone".to_owned(),
    };
    Error::Embedded(why)
}

/// Takes both streams to their ends.
pub(super) async fn pump<W: AsyncWrite + Unpin>(
    stdout: &mut (impl AsyncRead + Unpin),
    stderr: &mut (impl AsyncRead + Unpin),
    output: &mut Output<W>,
) {
    let (mut from_stdout, mut from_stderr) = (vec![0; CHUNK], vec![0; CHUNK]);
    let (mut stdout_ends, mut stderr_ends) = (false, false);
    while !(stdout_ends && stderr_ends) {
        // An error is an end as well: the exit code says more about it.
        tokio::select! {
            read = stdout.read(&mut from_stdout), if !stdout_ends => match read {
                Ok(length @ 1..) => output.push(Stream::Stdout, &from_stdout[..length]).await,
                Ok(0) | Err(_) => stdout_ends = true,
            },
            read = stderr.read(&mut from_stderr), if !stderr_ends => match read {
                Ok(length @ 1..) => output.push(Stream::Stderr, &from_stderr[..length]).await,
                Ok(0) | Err(_) => stderr_ends = true,
            },
        }
    }
}

/// The helper has done this already, if it was given the time.
async fn tidy_up(cgroup: &Path) {
    let group = cgroup.to_owned();
    let removed = tokio::task::spawn_blocking(move || remove(&group)).await;
    if let Ok(Err(error)) = removed {
        tracing::error!(%error, "a group of processes is left behind");
        left::note(cgroup.to_string_lossy());
    }
}

/// From SIGKILL to the end that follows from it.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// For a helper that has nothing to do any more but to tidy up.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// From a program's start to its execution, on a machine that is busy.
const GIVEN_BACK: Duration = Duration::from_secs(2);

const AGAIN: Duration = Duration::from_millis(5);

const CHUNK: usize = 16 << 10;
