//! A sandbox that executes one run after the other. Each run has its own program, variables, output and socket.
//!
//! The sandbox is started as a [`WarmSlot`], and receives each run on the connection that the slot waits on. Its first
//! process ends everything that a run has started before it reports the run's exit code. It clears the memory file
//! systems before it reports that it is ready. No engine is asked for anything between two runs. A sandbox that is not
//! [ready](LongRunningSandbox::is_ready) can only be removed.

use std::io::{self, ErrorKind, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::time::Duration;

use rustix::cmsg_space;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::pipe::Receiver;
use tokio::time::{Instant, timeout};

use super::embedded::{KILL_TIMEOUT, copy_output, oom_kill_count};
use super::output::{OutputCapture, join_with_output};
use super::slot_claim::CLAIM_TIMEOUT;
use super::{
    SandboxDriver, SandboxError, SandboxExit, SandboxRequest, SandboxSpec, StopReason, WarmSlot,
};

/// A sandbox that outlives its runs. A drop ends the sandbox; [`LongRunningSandbox::remove`] or the sweep removes its
/// leftovers.
pub struct LongRunningSandbox {
    slot: WarmSlot,
    is_ready: bool,
}

/// The reading ends of a run's output pipes.
struct RunStreams {
    stdout: Receiver,
    stderr: Receiver,
}

impl LongRunningSandbox {
    /// Starts a sandbox, and returns when it waits for a run or `stop` has completed. After an error the sandbox is
    /// removed.
    ///
    /// # Errors
    /// Returns an error if the sandbox cannot be made, or does not begin to wait.
    pub async fn start(
        driver: &SandboxDriver,
        request: SandboxRequest,
        stop: impl Future<Output = ()>,
    ) -> Result<Self, SandboxError> {
        Ok(Self { slot: Box::pin(WarmSlot::start(driver, request, stop)).await?, is_ready: true })
    }

    /// Returns true if nothing of an earlier run is left in the sandbox, as far as this process knows without asking.
    pub fn is_ready(&self) -> bool {
        self.is_ready && self.slot.is_connected()
    }

    /// Sends a ping to the sandbox's first process, and returns true if it waits for a run.
    pub async fn is_healthy(&mut self) -> bool {
        if !self.is_ready() {
            return false;
        }
        let ping = timeout(CLAIM_TIMEOUT, async {
            self.slot.host.write_all(&PING_CLAIM).await?;
            self.slot.host.read_u8().await
        });
        self.is_ready = matches!(ping.await, Ok(Ok(ACK_BYTE)));
        self.is_ready
    }

    /// Executes one run until it ends, or until `until` returns a reason to stop it. Afterwards no process of the run
    /// is left.
    ///
    /// # Errors
    /// Returns [`SandboxError::LongRunningLost`] if the sandbox does not accept the run, or ends during the run.
    pub async fn run<W: AsyncWrite + Unpin>(
        &mut self,
        spec: &SandboxSpec,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
    ) -> Result<SandboxExit, SandboxError> {
        let run_start = Instant::now();
        // The kernel's OOM counter covers all runs of the sandbox, so only its increase belongs to this run.
        let pid = self.slot.host.peer_cred().ok().and_then(|peer| peer.pid());
        let kills = || pid.map_or(0, oom_kill_count);
        let before = kills();
        // A caller that drops this future leaves the sandbox in an unknown state, so it is not ready until the end is
        // known.
        self.is_ready = false;
        let streams = timeout(
            CLAIM_TIMEOUT,
            send_claim(&mut self.slot.host, &spec.encode_long_running_claim()),
        )
        .await;
        let streams = streams
            .map_err(|_| {
                SandboxError::LongRunningLost("the first process does not answer".to_owned())
            })?
            .map_err(|error| {
                SandboxError::LongRunningLost(format!(
                    "the first process did not accept the run: {error}"
                ))
            })?;
        let start = run_start.elapsed();
        tracing::info!(run = spec.run, ?start, "the run goes on in a long-running sandbox");
        let ended =
            Box::pin(follow_until_exit(&mut self.slot.host, streams, output, (until, spec.grace)))
                .await?;
        let oom_killed = kills() > before;
        // Without an exit code, the status byte may still arrive later. It would then be read as the next
        // acknowledgement.
        if ended.exit_code.is_some() {
            let wiped = timeout(CLEANUP_TIMEOUT, self.slot.host.read_u8()).await;
            self.is_ready = matches!(wiped, Ok(Ok(ACK_BYTE)));
        }
        Ok(SandboxExit { oom_killed, start: Some(start), ..ended })
    }

    /// Removes the sandbox in every state.
    pub async fn remove(self) {
        self.slot.remove().await;
    }
}

/// Sends the claim with the pipes for the run's output, and returns the reading ends when the claim is acknowledged.
async fn send_claim(host: &mut UnixStream, claim: &[u8]) -> io::Result<RunStreams> {
    let (stdout, sandbox_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, sandbox_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    let sandbox_ends = [sandbox_stdout, sandbox_stderr];
    // The descriptors go with the first byte. A short write is possible; the rest needs no descriptors.
    let sent =
        host.async_io(Interest::WRITABLE, || send_with_fds(host, claim, &sandbox_ends)).await?;
    // The sandbox must hold the only writing ends, or the output would never end.
    drop(sandbox_ends);
    host.write_all(&claim[sent..]).await?;
    if host.read_u8().await? != ACK_BYTE {
        return Err(io::Error::other("the first process sent an unexpected answer"));
    }
    let receiver = Receiver::from_owned_fd;
    Ok(RunStreams { stdout: receiver(stdout)?, stderr: receiver(stderr)? })
}

fn send_with_fds(host: &UnixStream, text: &[u8], with: &[OwnedFd; 2]) -> io::Result<usize> {
    let with = [with[0].as_fd(), with[1].as_fd()];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&with));
    Ok(sendmsg(host, &[IoSlice::new(text)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Follows a run until its end. Once `until` returns, the run receives the order to stop, and is killed after `grace`.
/// The exit code is set only if the run's status was read.
async fn follow_until_exit<W: AsyncWrite + Unpin>(
    host: &mut UnixStream,
    RunStreams { mut stdout, mut stderr }: RunStreams,
    output: &mut OutputCapture<W>,
    (until, grace): (impl Future<Output = StopReason>, Duration),
) -> Result<SandboxExit, SandboxError> {
    let (mut reports, mut words) = host.split();
    let detach_token = output.detach_token();
    let pump = copy_output(&mut stdout, &mut stderr, output);
    let mut following = pin!(join_with_output(reports.read_u8(), pump, &detach_token));
    let (status, cause) = tokio::select! {
        status = &mut following => (Some(status), None),
        cause = until => {
            // A sandbox that has ended cannot read the command; its end is seen on the same connection.
            let _ = words.write_all(TERMINATE_COMMAND).await;
            let status = if let Ok(status) = timeout(grace, &mut following).await {
                Some(status)
            } else {
                let _ = words.write_all(KILL_COMMAND).await;
                timeout(KILL_TIMEOUT, &mut following).await.ok()
            };
            (status, Some(cause))
        }
    };
    // A lost connection is an error only if the run was not ordered to stop.
    let exit_code = match status {
        Some(Ok(status)) => Some(i64::from(status)),
        None => None,
        Some(Err(_)) if cause.is_some() => None,
        Some(Err(error)) if error.kind() == ErrorKind::UnexpectedEof => {
            return Err(SandboxError::LongRunningLost("the sandbox ended with its run".to_owned()));
        }
        Some(Err(error)) => return Err(SandboxError::LongRunningLost(error.to_string())),
    };
    Ok(SandboxExit { exit_code, cause, ..SandboxExit::default() })
}

/// An empty claim, which is only acknowledged.
const PING_CLAIM: [u8; 4] = [0; 4];

/// The acknowledgement of a ping and of a claim, and the report that a run's leftovers are cleared.
const ACK_BYTE: u8 = 0;

/// The command that starts the grace of the run.
const TERMINATE_COMMAND: &[u8] = b"T";
/// The command that kills the run.
const KILL_COMMAND: &[u8] = b"K";

/// The time to clear all files that a sandbox can hold in memory. A slower sandbox is replaced.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use tokio::io::sink;
    use tokio::time::sleep;

    use super::*;
    use crate::sandbox::spec::{
        OwnerLabels, RootSource, SandboxLimits, SandboxTask, WorkspaceMount,
    };
    use crate::sandbox::{OwnerProcess, SandboxHandle, embedded};

    /// R7: a run's late status is not taken for the status of the next run.
    #[tokio::test]
    async fn a_late_status_is_not_that_of_the_next_run() {
        let (host, mut sandbox_end) = UnixStream::pair().expect("made");
        let mut sandbox = LongRunningSandbox { slot: slot(host), is_ready: true };
        let first_process = async {
            let length = sandbox_end.read_u32().await.expect("a claim comes");
            // Its descriptors go unread, and so are closed.
            sandbox_end.read_exact(&mut vec![0; length as usize]).await.expect("all of it");
            sandbox_end.write_all(&[ACK_BYTE]).await.expect("it is heard");
            let mut words = [0; 2];
            sandbox_end.read_exact(&mut words).await.expect("it is told to end");
            assert_eq!(words, [TERMINATE_COMMAND[0], KILL_COMMAND[0]]);
            sleep(KILL_TIMEOUT + CLEANUP_TIMEOUT / 2).await;
            // An exit code of zero looks like the last word.
            sandbox_end.write_all(&[ACK_BYTE]).await.expect("the host still reads");
            sandbox_end
        };
        let spec = spec();
        let mut output = OutputCapture::new(0, sink());
        let run = sandbox.run(&spec, &mut output, async { StopReason::Deadline });
        let (ended, sandbox_end) = tokio::join!(Box::pin(run), first_process);
        let ended = ended.expect("it is known why");
        assert_eq!((ended.exit_code, ended.cause), (None, Some(StopReason::Deadline)));
        assert!(!sandbox.is_ready(), "it wipes, or does not even that");
        assert!(!sandbox.is_healthy().await);
        drop(sandbox_end);
    }

    fn slot(host: UnixStream) -> WarmSlot {
        let settings =
            embedded::EmbeddedDriverConfig { may_be_unlimited: true, ..Default::default() };
        let owner = OwnerProcess::this_process().expect("it is there");
        let labels =
            OwnerLabels { owner, run_dir: "/run".into(), deadline: SystemTime::UNIX_EPOCH };
        let request = SandboxRequest { spec: spec(), labels, directory: "/run".into() };
        let sandbox = SandboxHandle::new(&SandboxDriver::Embedded(settings), request)
            .expect("there are such");
        WarmSlot { sandbox, host }
    }

    fn spec() -> SandboxSpec {
        SandboxSpec {
            run: "run-late".to_owned(),
            root: RootSource::Host,
            argv: vec!["true".to_owned()],
            uid: 1001,
            env: [].into(),
            limits: SandboxLimits::default(),
            grace: Duration::ZERO,
            workspace: WorkspaceMount::None,
            mounts: vec![],
            volumes: vec![],
            socket_dir: "/run".into(),
            init: Some("/cogni-init".into()),
            has_tunnels: false,
            task: SandboxTask::Agent,
        }
    }
}
