//! A sandbox in which one run is executed after the other, each told apart by all that makes it a run: its program, its
//! variables, its output and its own socket.
//!
//! It is started as a [`WarmSlot`], and hears of each run on the connection that it waits on. Its first process ends all that
//! a run has started before it tells the run's end, and wipes what is left in memory before it says that it is ready; an
//! engine is asked for nothing in between. One that is not [ready](LongRunningSandbox::is_ready) is good for nothing but its removal.

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
use super::warm_slot::CLAIM_TIMEOUT;
use super::{
    SandboxDriver, SandboxError, SandboxExit, SandboxRequest, SandboxSpec, StopReason, WarmSlot,
};

/// A sandbox that outlives its runs. Dropped, it ends; what is left of it then is for [`LongRunningSandbox::remove`] or the sweep.
pub struct LongRunningSandbox {
    slot: WarmSlot,
    is_ready: bool,
}

/// Where a run's output comes from.
struct RunStreams {
    stdout: Receiver,
    stderr: Receiver,
}

impl LongRunningSandbox {
    /// Starts one, and returns when it waits, or `stop` has come before. After an error nothing is left of it.
    ///
    /// # Errors
    /// It could not be made, or does not come to wait.
    pub async fn start(
        driver: &SandboxDriver,
        order: SandboxRequest,
        stop: impl Future<Output = ()>,
    ) -> Result<Self, SandboxError> {
        Ok(Self { slot: Box::pin(WarmSlot::start(driver, order, stop)).await?, is_ready: true })
    }

    /// Whether nothing of an earlier run is left in it, as far as is known without asking.
    pub fn is_ready(&self) -> bool {
        self.is_ready && self.slot.is_waiting()
    }

    /// Asks it whether it waits for a run.
    pub async fn is_healthy(&mut self) -> bool {
        if !self.is_ready() {
            return false;
        }
        let asked = timeout(CLAIM_TIMEOUT, async {
            self.slot.host.write_all(&PING_CLAIM).await?;
            self.slot.host.read_u8().await
        });
        self.is_ready = matches!(asked.await, Ok(Ok(ACK_BYTE)));
        self.is_ready
    }

    /// Executes one run to its end, or until `until` says why it must end before; then nothing of it runs any more.
    ///
    /// # Errors
    /// It does not take the run, or was lost with it.
    pub async fn run<W: AsyncWrite + Unpin>(
        &mut self,
        spec: &SandboxSpec,
        output: &mut OutputCapture<W>,
        until: impl Future<Output = StopReason>,
    ) -> Result<SandboxExit, SandboxError> {
        let begun = Instant::now();
        let pid = self.slot.host.peer_cred().ok().and_then(|peer| peer.pid());
        let kills = || pid.map_or(0, oom_kill_count);
        let before = kills();
        // Whoever stops waiting for this does not know how far it has come.
        self.is_ready = false;
        let streams = timeout(
            CLAIM_TIMEOUT,
            send_claim(&mut self.slot.host, &spec.encode_long_running_claim()),
        )
        .await;
        let streams = streams
            .map_err(|_| SandboxError::Resident("it does not answer".to_owned()))?
            .map_err(|error| SandboxError::Resident(format!("it did not take the run: {error}")))?;
        let start = begun.elapsed();
        tracing::info!(run = spec.run, ?start, "the run goes on in a resident sandbox");
        let ended =
            Box::pin(follow_until_exit(&mut self.slot.host, streams, output, (until, spec.grace)))
                .await?;
        let oom_killed = kills() > before;
        // Where the status has not come, it may still; taken for the word after it, it would be the next run's end.
        if ended.exit_code.is_some() {
            let wiped = timeout(CLEANUP_TIMEOUT, self.slot.host.read_u8()).await;
            self.is_ready = matches!(wiped, Ok(Ok(ACK_BYTE)));
        }
        Ok(SandboxExit { oom_killed, start: Some(start), ..ended })
    }

    /// Whatever it does.
    pub async fn remove(self) {
        self.slot.remove().await;
    }
}

/// Returns when it has been heard, with the run's output.
async fn send_claim(host: &mut UnixStream, claim: &[u8]) -> io::Result<RunStreams> {
    let (stdout, its_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, its_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    let its = [its_stdout, its_stderr];
    let sent = host.async_io(Interest::WRITABLE, || send_with_fds(host, claim, &its)).await?;
    drop(its);
    host.write_all(&claim[sent..]).await?;
    if host.read_u8().await? != ACK_BYTE {
        return Err(io::Error::other("it has answered something else"));
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

/// Follows a run to its end. From `until` on it is told to end, and has `grace` for it. Its exit code is there where its
/// status was read.
async fn follow_until_exit<W: AsyncWrite + Unpin>(
    host: &mut UnixStream,
    RunStreams { mut stdout, mut stderr }: RunStreams,
    output: &mut OutputCapture<W>,
    (until, grace): (impl Future<Output = StopReason>, Duration),
) -> Result<SandboxExit, SandboxError> {
    let (mut reports, mut words) = host.split();
    let hurry = output.detach_token();
    let pump = copy_output(&mut stdout, &mut stderr, output);
    let mut following = pin!(join_with_output(reports.read_u8(), pump, &hurry));
    let (status, cause) = tokio::select! {
        status = &mut following => (Some(status), None),
        cause = until => {
            // One that is gone hears nothing, and has ended all the same.
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
    let exit_code = match status {
        Some(Ok(status)) => Some(i64::from(status)),
        None => None,
        Some(Err(_)) if cause.is_some() => None,
        Some(Err(error)) if error.kind() == ErrorKind::UnexpectedEof => {
            return Err(SandboxError::Resident("it has ended with its run".to_owned()));
        }
        Some(Err(error)) => return Err(SandboxError::Resident(error.to_string())),
    };
    Ok(SandboxExit { exit_code, cause, ..SandboxExit::default() })
}

/// A claim of nothing, which is answered, and no more.
const PING_CLAIM: [u8; 4] = [0; 4];

/// The answer to a question and to a claim, and the last word on a run.
const ACK_BYTE: u8 = 0;

const TERMINATE_COMMAND: &[u8] = b"T";
const KILL_COMMAND: &[u8] = b"K";

/// For all the files that a sandbox can hold in memory. One that takes longer is replaced.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use tokio::io::sink;
    use tokio::time::sleep;

    use super::*;
    use crate::sandbox::spec::{OwnerLabels, RootSource, SandboxLimits, WorkspaceMount};
    use crate::sandbox::{OwnerProcess, SandboxHandle, embedded};

    /// R7: what comes of a run after it was given up is not taken for what comes of the next.
    #[tokio::test]
    async fn a_status_that_comes_late_is_nobody_elses() {
        let (host, mut theirs) = UnixStream::pair().expect("made");
        let mut resident = LongRunningSandbox { slot: slot(host), is_ready: true };
        let first_process = async {
            let length = theirs.read_u32().await.expect("a claim comes");
            // Its descriptors go unread, and so are closed.
            theirs.read_exact(&mut vec![0; length as usize]).await.expect("all of it");
            theirs.write_all(&[ACK_BYTE]).await.expect("it is heard");
            let mut words = [0; 2];
            theirs.read_exact(&mut words).await.expect("it is told to end");
            assert_eq!(words, [TERMINATE_COMMAND[0], KILL_COMMAND[0]]);
            sleep(KILL_TIMEOUT + CLEANUP_TIMEOUT / 2).await;
            // An exit code of zero looks like the last word.
            theirs.write_all(&[ACK_BYTE]).await.expect("somebody is there");
            theirs
        };
        let spec = spec();
        let mut output = OutputCapture::new(0, sink());
        let run = resident.run(&spec, &mut output, async { StopReason::Deadline });
        let (ended, theirs) = tokio::join!(Box::pin(run), first_process);
        let ended = ended.expect("it is known why");
        assert_eq!((ended.exit_code, ended.cause), (None, Some(StopReason::Deadline)));
        assert!(!resident.is_ready(), "it wipes, or does not even that");
        assert!(!resident.is_healthy().await);
        drop(theirs);
    }

    fn slot(host: UnixStream) -> WarmSlot {
        let settings =
            embedded::EmbeddedDriverConfig { may_be_unlimited: true, ..Default::default() };
        let owner = OwnerProcess::this_process().expect("it is there");
        let stamp = OwnerLabels { owner, run_dir: "/run".into(), deadline: SystemTime::UNIX_EPOCH };
        let order = SandboxRequest { spec: spec(), stamp, directory: "/run".into() };
        let sandbox =
            SandboxHandle::new(&SandboxDriver::Embedded(settings), order).expect("there are such");
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
            has_gateway: true,
        }
    }
}
