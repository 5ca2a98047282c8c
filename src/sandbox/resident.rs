//! A sandbox in which one run is executed after the other, each told apart by all that makes it a run: its program, its
//! variables, its output and its own socket.
//!
//! It is started as a [`Slot`], and hears of each run on the connection that it waits on. Its first process ends all that
//! a run has started before it tells the run's end, and wipes what is left in memory before it says that it is ready; an
//! engine is asked for nothing in between. One that is not [ready](Resident::is_ready) is good for nothing but its removal.

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

use super::embedded::{PATIENCE, kills_for_memory, pump};
use super::output::{Output, follow};
use super::slot::ANSWER;
use super::{Cause, Driver, Ended, Error, Order, RunSpec, Slot};

/// A sandbox that outlives its runs. Dropped, it ends; what is left of it then is for [`Resident::remove`] or the sweep.
pub struct Resident {
    slot: Slot,
    is_ready: bool,
}

/// Where a run's output comes from.
struct Streams {
    stdout: Receiver,
    stderr: Receiver,
}

impl Resident {
    /// Starts one, and returns when it waits, or `stop` has come before. After an error nothing is left of it.
    ///
    /// # Errors
    /// It could not be made, or does not come to wait.
    pub async fn start(
        driver: &Driver,
        order: Order,
        stop: impl Future<Output = ()>,
    ) -> Result<Self, Error> {
        Ok(Self { slot: Box::pin(Slot::start(driver, order, stop)).await?, is_ready: true })
    }

    /// Whether nothing of an earlier run is left in it, as far as is known without asking.
    pub fn is_ready(&self) -> bool {
        self.is_ready && self.slot.is_waiting()
    }

    /// Asks it whether it waits for a run.
    pub async fn is_well(&mut self) -> bool {
        if !self.is_ready() {
            return false;
        }
        let asked = timeout(ANSWER, async {
            self.slot.host.write_all(&QUESTION).await?;
            self.slot.host.read_u8().await
        });
        self.is_ready = matches!(asked.await, Ok(Ok(WELL)));
        self.is_ready
    }

    /// Executes one run to its end, or until `until` says why it must end before; then nothing of it runs any more.
    ///
    /// # Errors
    /// It does not take the run, or was lost with it.
    pub async fn run<W: AsyncWrite + Unpin>(
        &mut self,
        spec: &RunSpec,
        output: &mut Output<W>,
        until: impl Future<Output = Cause>,
    ) -> Result<Ended, Error> {
        let begun = Instant::now();
        let pid = self.slot.host.peer_cred().ok().and_then(|peer| peer.pid());
        let kills = || pid.map_or(0, kills_for_memory);
        let before = kills();
        // Whoever stops waiting for this does not know how far it has come.
        self.is_ready = false;
        let streams = timeout(ANSWER, tell(&mut self.slot.host, &spec.claim_of_resident())).await;
        let streams = streams
            .map_err(|_| Error::Resident("it does not answer".to_owned()))?
            .map_err(|error| Error::Resident(format!("it did not take the run: {error}")))?;
        let start = begun.elapsed();
        tracing::info!(run = spec.run, ?start, "the run goes on in a resident sandbox");
        let ended =
            Box::pin(watch(&mut self.slot.host, streams, output, (until, spec.grace))).await?;
        let oom_killed = kills() > before;
        // Where the status has not come, it may still; taken for the word after it, it would be the next run's end.
        if ended.exit_code.is_some() {
            let wiped = timeout(WIPE, self.slot.host.read_u8()).await;
            self.is_ready = matches!(wiped, Ok(Ok(WELL)));
        }
        Ok(Ended { oom_killed, start: Some(start), ..ended })
    }

    /// Whatever it does.
    pub async fn remove(self) {
        self.slot.remove().await;
    }
}

/// Returns when it has been heard, with the run's output.
async fn tell(host: &mut UnixStream, claim: &[u8]) -> io::Result<Streams> {
    let (stdout, its_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, its_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    let its = [its_stdout, its_stderr];
    let sent = host.async_io(Interest::WRITABLE, || send(host, claim, &its)).await?;
    drop(its);
    host.write_all(&claim[sent..]).await?;
    if host.read_u8().await? != WELL {
        return Err(io::Error::other("it has answered something else"));
    }
    let receiver = Receiver::from_owned_fd;
    Ok(Streams { stdout: receiver(stdout)?, stderr: receiver(stderr)? })
}

fn send(host: &UnixStream, text: &[u8], with: &[OwnedFd; 2]) -> io::Result<usize> {
    let with = [with[0].as_fd(), with[1].as_fd()];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&with));
    Ok(sendmsg(host, &[IoSlice::new(text)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Follows a run to its end. From `until` on it is told to end, and has `grace` for it. Its exit code is there where its
/// status was read.
async fn watch<W: AsyncWrite + Unpin>(
    host: &mut UnixStream,
    Streams { mut stdout, mut stderr }: Streams,
    output: &mut Output<W>,
    (until, grace): (impl Future<Output = Cause>, Duration),
) -> Result<Ended, Error> {
    let (mut reports, mut words) = host.split();
    let hurry = output.hurry();
    let pump = pump(&mut stdout, &mut stderr, output);
    let mut following = pin!(follow(reports.read_u8(), pump, &hurry));
    let (status, cause) = tokio::select! {
        status = &mut following => (Some(status), None),
        cause = until => {
            // One that is gone hears nothing, and has ended all the same.
            let _ = words.write_all(TERMINATE).await;
            let status = if let Ok(status) = timeout(grace, &mut following).await {
                Some(status)
            } else {
                let _ = words.write_all(KILL).await;
                timeout(PATIENCE, &mut following).await.ok()
            };
            (status, Some(cause))
        }
    };
    let exit_code = match status {
        Some(Ok(status)) => Some(i64::from(status)),
        None => None,
        Some(Err(_)) if cause.is_some() => None,
        Some(Err(error)) if error.kind() == ErrorKind::UnexpectedEof => {
            return Err(Error::Resident("it has ended with its run".to_owned()));
        }
        Some(Err(error)) => return Err(Error::Resident(error.to_string())),
    };
    Ok(Ended { exit_code, cause, ..Ended::default() })
}

/// A claim of nothing, which is answered, and no more.
const QUESTION: [u8; 4] = [0; 4];

/// The answer to a question and to a claim, and the last word on a run.
const WELL: u8 = 0;

const TERMINATE: &[u8] = b"T";
const KILL: &[u8] = b"K";

/// For all the files that a sandbox can hold in memory. One that takes longer is replaced.
const WIPE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use tokio::io::sink;
    use tokio::time::sleep;

    use super::*;
    use crate::sandbox::spec::{Limits, Root, Stamp, Workspace};
    use crate::sandbox::{Owner, Sandbox, embedded};

    /// R7: what comes of a run after it was given up is not taken for what comes of the next.
    #[tokio::test]
    async fn a_status_that_comes_late_is_nobody_elses() {
        let (host, mut theirs) = UnixStream::pair().expect("made");
        let mut resident = Resident { slot: slot(host), is_ready: true };
        let first_process = async {
            let length = theirs.read_u32().await.expect("a claim comes");
            // Its descriptors go unread, and so are closed.
            theirs.read_exact(&mut vec![0; length as usize]).await.expect("all of it");
            theirs.write_all(&[WELL]).await.expect("it is heard");
            let mut words = [0; 2];
            theirs.read_exact(&mut words).await.expect("it is told to end");
            assert_eq!(words, [TERMINATE[0], KILL[0]]);
            sleep(PATIENCE + WIPE / 2).await;
            // An exit code of zero looks like the last word.
            theirs.write_all(&[WELL]).await.expect("somebody is there");
            theirs
        };
        let spec = spec();
        let mut output = Output::new(0, sink());
        let run = resident.run(&spec, &mut output, async { Cause::Deadline });
        let (ended, theirs) = tokio::join!(Box::pin(run), first_process);
        let ended = ended.expect("it is known why");
        assert_eq!((ended.exit_code, ended.cause), (None, Some(Cause::Deadline)));
        assert!(!resident.is_ready(), "it wipes, or does not even that");
        assert!(!resident.is_well().await);
        drop(theirs);
    }

    fn slot(host: UnixStream) -> Slot {
        let settings = embedded::Settings { may_be_unlimited: true, ..Default::default() };
        let owner = Owner::this().expect("it is there");
        let stamp = Stamp { owner, run_dir: "/run".into(), deadline: SystemTime::UNIX_EPOCH };
        let order = Order { spec: spec(), stamp, directory: "/run".into() };
        let sandbox = Sandbox::new(&Driver::Embedded(settings), order).expect("there are such");
        Slot { sandbox, host }
    }

    fn spec() -> RunSpec {
        RunSpec {
            run: "run-late".to_owned(),
            root: Root::Host,
            argv: vec!["true".to_owned()],
            uid: 1001,
            env: [].into(),
            limits: Limits::default(),
            grace: Duration::ZERO,
            workspace: Workspace::None,
            mounts: vec![],
            volumes: vec![],
            socket_dir: "/run".into(),
            init: Some("/cogni-init".into()),
            has_gateway: true,
        }
    }
}
