//! The driver that needs neither a daemon nor an image: a helper process of this program makes the container.
//!
//! The creation of a container changes the process that makes it, and needs a process with a single thread. So this
//! program starts itself a second time as [`helper`], sends the task over a socket, and receives the container's
//! events. [`rootfs`] assembles the programs that the container sees. [`cgroup`] finds the cgroups for the limits, and
//! removes them.
//!
//! **Invariant:** the container lives no longer than its helper, and the helper no longer than its runner.

mod cgroup;
mod executor;
pub mod helper;
mod messages;
mod network;
mod privilege;
mod rootfs;
mod sealed_copy;

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

use super::output::{OutputCapture, OutputStream, join_with_output};
use super::spec::oci;
use super::{
    SandboxError, SandboxExit, SandboxRequest, SandboxStartOutcome, StopReason, leftovers,
    sandbox_name,
};
use messages::{HelperEvent, HelperSignal, HelperTask};

pub use cgroup::{LeftoverCgroup, cgroup_name, list_leftovers, remove_cgroup};
pub(super) use cgroup::{has_socket_limits, oom_kill_count};
pub use rootfs::shows_host_path;

/// The settings of the embedded driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddedDriverConfig {
    /// Allows a container without limits on memory, processes and processors, if this machine lets this process set
    /// none.
    pub may_be_unlimited: bool,
    /// The path of this program, which is the helper's program too.
    pub program: PathBuf,
}

impl Default for EmbeddedDriverConfig {
    fn default() -> Self {
        Self { may_be_unlimited: false, program: "/proc/self/exe".into() }
    }
}

/// One embedded container, from before its creation until its removal. The files in the run's directory remain.
pub(super) struct EmbeddedSandbox {
    config: EmbeddedDriverConfig,
    name_sockets: Vec<UnixListener>,
    cgroup: Option<PathBuf>,
    helper: Option<HelperProcess>,
}

impl EmbeddedSandbox {
    pub(super) fn new(settings: &EmbeddedDriverConfig) -> Self {
        Self { config: settings.clone(), name_sockets: vec![], cgroup: None, helper: None }
    }

    /// Locks the run's name until this sandbox is dropped, so that the run has no second sandbox. A child process of
    /// this process holds copies of all open files between its fork and its execve. So a released name may stay locked
    /// for some moments, and the call tries again for that time.
    pub(super) async fn lock_name(&mut self, run: &str) -> Result<(), SandboxError> {
        let start = Instant::now();
        let name = loop {
            match bind_name(run) {
                Err(SandboxError::AlreadyExists(_)) if start.elapsed() < NAME_RELEASE_TIMEOUT => {
                    sleep(NAME_RETRY_INTERVAL).await;
                }
                claimed => break claimed?,
            }
        };
        self.name_sockets.push(name);
        Ok(())
    }

    /// Starts the helper, and sends its task.
    pub(super) async fn prepare_helper(
        &mut self,
        request: &SandboxRequest,
    ) -> Result<(), SandboxError> {
        self.lock_name(&request.spec.run).await?;
        let name =
            format!("{}-{}", sandbox_name(&request.spec.run), request.labels.owner.to_file_name());
        let task = helper_task(request, &name)?;
        self.cgroup.clone_from(&task.cgroup);
        self.helper = Some(HelperProcess::start(&self.config.program, &task).await?);
        Ok(())
    }

    pub(super) async fn start(&mut self) -> Result<SandboxStartOutcome, SandboxError> {
        // The helper's first event is the outcome of the start.
        let helper = self.helper.as_mut().expect("the helper has its request");
        match helper.read_event().await? {
            HelperEvent::Started => Ok(SandboxStartOutcome::Running),
            HelperEvent::NotStarted { exit_code, message } => {
                Ok(SandboxStartOutcome::NotStarted { exit_code, message })
            }
            event => Err(unexpected_event(event)),
        }
    }

    /// Follows the container until its exit. Once `until` returns, the container is told to stop, and has `grace` for
    /// that.
    pub(super) async fn follow_until_exit<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
        grace: impl Future<Output = ()>,
    ) -> Result<SandboxExit, SandboxError> {
        let helper = self.helper.as_mut().expect("the helper was started");
        helper.follow_until_exit(output, until, grace).await
    }

    pub(super) async fn remove(self) {
        if let Some(helper) = self.helper {
            helper.shut_down().await;
        }
        // The helper has ended here, so the cgroup has no new processes.
        if let Some(cgroup) = self.cgroup.as_deref() {
            clean_up_cgroup(cgroup).await;
        }
    }
}

/// Binds the run's name as an abstract socket, which is unique on this machine. The kernel frees the name with this
/// process.
fn bind_name(run: &str) -> Result<UnixListener, SandboxError> {
    let address = SocketAddr::from_abstract_name(sandbox_name(run))
        .and_then(|name| UnixListener::bind_addr(&name));
    address.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => SandboxError::AlreadyExists(run.to_owned()),
        _ => SandboxError::EmbeddedFailed(error.to_string()),
    })
}

/// Checks that this process may set limits, or may run a container without limits.
///
/// # Errors
/// Returns [`SandboxError::LimitsUnavailable`], with the missing condition, if neither is the case.
pub fn check_limits_available(settings: &EmbeddedDriverConfig) -> Result<(), SandboxError> {
    match cgroup::check_can_set_limits() {
        Err(why) if !settings.may_be_unlimited => Err(SandboxError::LimitsUnavailable(why)),
        _ => Ok(()),
    }
}

/// Builds the helper's task. The task holds everything that the helper needs to know about this machine.
fn helper_task(request: &SandboxRequest, name: &str) -> Result<HelperTask, SandboxError> {
    let cgroup =
        cgroup::check_can_set_limits().is_ok().then(|| cgroup_name(name, &request.labels.run_dir));
    let is_rootless = !rustix::process::geteuid().is_root();
    let root = request.directory.join("root");
    let programs = rootfs::prepare_rootfs(&request.spec.root, &root, request.spec.uid)?;
    let max_files = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let settings = oci::OciHostSettings {
        root,
        programs,
        max_files,
        cgroup: cgroup.clone(),
        limits_sockets: has_socket_limits(),
        is_rootless,
    };
    Ok(HelperTask {
        name: sandbox_name(&request.spec.run),
        config: oci::build_oci_spec(&request.spec, &settings),
        directory: request.directory.join("container"),
        cgroup,
        is_rootless,
    })
}

/// Returns a sealed copy of the program; `None` if root makes the sandbox, whose user may not write root's files.
async fn sealed_copy(program: &Path) -> io::Result<Option<Arc<File>>> {
    if rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let program = program.to_owned();
    let copied = tokio::task::spawn_blocking(move || sealed_copy::sealed_copy(&program));
    Ok(Some(copied.await??))
}

/// A helper process that runs.
struct HelperProcess {
    child: Child,
    events: BufReader<OwnedReadHalf>,
    signals: OwnedWriteHalf,
    stdout: ChildStdout,
    stderr: ChildStderr,
}

impl HelperProcess {
    async fn start(program: &Path, task: &HelperTask) -> Result<Self, SandboxError> {
        let cannot = |error: io::Error| {
            SandboxError::EmbeddedFailed(format!("the helper cannot be started: {error}"))
        };
        // The helper executes the copy by its descriptor, so no path to a writable file exists.
        let copy = sealed_copy(program).await.map_err(cannot)?;
        let in_memory =
            copy.as_ref().map(|copy| format!("/proc/self/fd/{}", copy.as_raw_fd()).into());
        let program: PathBuf = in_memory.unwrap_or_else(|| program.to_owned());
        let (driver_end, helper_end) = StdStream::pair().map_err(cannot)?;
        driver_end.set_nonblocking(true).map_err(cannot)?;
        let mut command = Command::new(program);
        command
            .arg0(helper::HELPER_PROGRAM_NAME)
            // The list of processes shows this argument to the operator.
            .arg(&task.name)
            // The helper does not need this process's secrets.
            .env_clear()
            // A terminal's interrupt must reach this process only: it gives the container its grace.
            .process_group(0)
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(helper_end)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // The container must not outlive this process, also if the future is dropped.
            .kill_on_drop(true);
        let mut child = command.spawn().map_err(cannot)?;
        // The command holds the helper's end of the socket. With a copy in this process, the socket would stay open
        // after the helper's end.
        drop(command);
        let (events, mut signals) = UnixStream::from_std(driver_end).map_err(cannot)?.into_split();
        signals.write_all(&messages::encode_line(task)).await.map_err(cannot)?;
        let stdout = child.stdout.take().expect("it is piped");
        let stderr = child.stderr.take().expect("it is piped");
        Ok(Self { child, events: BufReader::new(events), signals, stdout, stderr })
    }

    /// Reads the helper's next event.
    async fn read_event(&mut self) -> Result<HelperEvent, SandboxError> {
        read_next_event(&mut self.events).await
    }

    /// Follows the container until its exit. Once `until` returns, the container is told to stop, and has `grace` for
    /// that.
    async fn follow_until_exit<W: AsyncWrite + Unpin>(
        &mut self,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
        grace: impl Future<Output = ()>,
    ) -> Result<SandboxExit, SandboxError> {
        let Self { events, signals, stdout, stderr, .. } = self;
        let detach_token = output.detach_token();
        let pump = copy_output(stdout, stderr, output);
        let mut following = pin!(join_with_output(read_next_event(events), pump, &detach_token));
        let (event, cause) = tokio::select! {
            event = &mut following => (event?, None),
            cause = until => {
                // 1. Ask the program to end.
                send_signal(signals, HelperSignal::Terminate).await;
                let event = tokio::select! {
                    biased;
                    event = &mut following => event?,
                    () = grace => {
                        // 2. The grace is over: kill the program, and wait a limited time for the event.
                        send_signal(signals, HelperSignal::Kill).await;
                        timeout(KILL_TIMEOUT, &mut following).await.unwrap_or(Ok(HelperEvent::Lost))?
                    }
                };
                (event, Some(cause))
            }
        };
        match event {
            HelperEvent::Ended { exit_code, oom_killed } => Ok(SandboxExit {
                exit_code: Some(exit_code),
                cause,
                oom_killed,
                ..SandboxExit::default()
            }),
            // A stop was requested, so a helper that is gone is no error.
            HelperEvent::Lost if cause.is_some() => {
                Ok(SandboxExit { cause, ..SandboxExit::default() })
            }
            event => Err(unexpected_event(event)),
        }
    }

    /// Waits for the helper's end, and kills a helper that does not end; the container dies with the helper. Another
    /// process may still hold the output: a child on its way to become the container, which ends as soon as it sees
    /// that the helper is gone.
    async fn shut_down(self) {
        let Self { mut child, signals, mut stdout, mut stderr, .. } = self;
        // The closed socket tells the helper that its driver is gone.
        drop(signals);
        if timeout(HELPER_EXIT_TIMEOUT, child.wait()).await.is_err() {
            let _ = child.kill().await;
        }
        let (mut discarded_stdout, mut discarded_stderr) = (sink(), sink());
        let rest = async {
            tokio::join!(
                copy(&mut stdout, &mut discarded_stdout),
                copy(&mut stderr, &mut discarded_stderr)
            )
        };
        if timeout(HELPER_EXIT_TIMEOUT, rest).await.is_err() {
            tracing::warn!("a process holds the output of a container that has ended");
        }
    }
}

async fn read_next_event(
    events: &mut BufReader<OwnedReadHalf>,
) -> Result<HelperEvent, SandboxError> {
    let mut line = vec![];
    match events.read_until(b'\n', &mut line).await {
        Ok(1..) => serde_json::from_slice(&line)
            .map_err(|error| SandboxError::EmbeddedFailed(error.to_string())),
        Ok(0) | Err(_) => Ok(HelperEvent::Lost),
    }
}

/// Sends a signal for the container to the helper. A helper that is gone has ended the container already.
async fn send_signal(signals: &mut OwnedWriteHalf, signal: HelperSignal) {
    if let Err(error) = signals.write_all(&messages::encode_line(&signal)).await {
        tracing::debug!(%error, ?signal, "cannot signal the container");
    }
}

fn unexpected_event(event: HelperEvent) -> SandboxError {
    let why = match event {
        HelperEvent::Failed { message } => message,
        _ => "the helper process has ended".to_owned(),
    };
    SandboxError::EmbeddedFailed(why)
}

/// Copies both streams until both have ended.
pub(super) async fn copy_output<W: AsyncWrite + Unpin>(
    stdout: &mut (impl AsyncRead + Unpin),
    stderr: &mut (impl AsyncRead + Unpin),
    output: &mut OutputCapture<W>,
) {
    let (mut from_stdout, mut from_stderr) =
        // Each stream has its own flag, because one may end long before the other.
        (vec![0; READ_BUFFER_BYTES], vec![0; READ_BUFFER_BYTES]);
    let (mut stdout_ends, mut stderr_ends) = (false, false);
    while !(stdout_ends && stderr_ends) {
        // A read error counts as an end: the exit code says more about it.
        tokio::select! {
            read = stdout.read(&mut from_stdout), if !stdout_ends => match read {
                Ok(length @ 1..) => output.push(OutputStream::Stdout, &from_stdout[..length]).await,
                Ok(0) | Err(_) => stdout_ends = true,
            },
            read = stderr.read(&mut from_stderr), if !stderr_ends => match read {
                Ok(length @ 1..) => output.push(OutputStream::Stderr, &from_stderr[..length]).await,
                Ok(0) | Err(_) => stderr_ends = true,
            },
        }
    }
}

/// Removes the container's cgroup. A helper that had enough time has removed it already.
async fn clean_up_cgroup(cgroup: &Path) {
    let group = cgroup.to_owned();
    let removed = tokio::task::spawn_blocking(move || remove_cgroup(&group)).await;
    if let Ok(Err(error)) = removed {
        tracing::error!(%error, "a group of processes is left behind");
        // A later sweep of this process tries again.
        leftovers::register(cgroup.to_string_lossy());
    }
}

/// The time from SIGKILL to the event of the container's end.
pub(super) const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// The time for a helper that only has to clean up.
const HELPER_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The time between a child's fork and its execve, on a busy machine.
const NAME_RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

const NAME_RETRY_INTERVAL: Duration = Duration::from_millis(5);

const READ_BUFFER_BYTES: usize = 16 << 10;
