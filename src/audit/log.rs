//! Writing the log, inline, by whoever has something to record.
//!
//! Records are chained into one buffer under one lock. An admission takes the buffer to the file
//! with one `write`; settlements and refusals wait in it for the next admission or
//! [`flush`](Log::flush), so a request costs one system call. Handing the record to a writer thread
//! would cost two context switches instead (`src/manual/decisions/0004`).
//!
//! Checkpoints are signed by the flush that finds the oldest unsigned record too old, so that hardly a call waits for a
//! signature: only a log with very many records since the last one has the next call sign it.
//!
//! **Invariant:** the buffer holds whole records that continue the file. An admission that did not
//! get into the file leaves the buffer and the chain as if it had never been tried; everything else
//! stays until it is written.
//!
//! **Invariant:** the buffer is bounded while the disk is full: nothing is admitted then, so at most
//! [`MAX_UNSETTLED`] settlements arrive, and refusals are counted instead of recorded.

use std::io::{self, BufReader};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::timeout_at;

use super::chain::{Chain, Head, MAX_UNSETTLED};
use super::file::Tail;
use super::key::SigningKey;
use super::peers::Peers;
use super::record::{
    Admitted, Checkpoint, Finished, Opened, Outcome, Record, Refused, Repaired, Session, Settled,
    Started,
};
use super::recover::{self, Scan, Torn};
use super::refusals::Refusals;
use super::sync::Syncer;
use super::{Config, Durability, Error};
use crate::base::clock::Clock;
use crate::base::time::MAX_TIME;
use crate::base::unix::Peer;
use crate::budget::Amount;

/// The audit log of one run. Shared by every thread that serves it.
pub struct Log(Option<Open>);

/// What the file of an earlier process held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// What was charged so far, lost settlements included: where the ledger goes on.
    pub spent: Amount,
    /// Time since the first record: how long the run has been going on.
    pub age: Duration,
    /// Admissions whose settlement was lost, now settled at what they had reserved.
    pub crashed: u64,
    /// Bytes of an incomplete last line, now in a file beside the log.
    pub torn_bytes: u64,
    /// Whether there were records.
    pub resumed: bool,
}

/// What is recorded and not yet written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lag {
    pub records: u64,
    pub bytes: u64,
    /// Whether the last attempt to write or sync failed, so that nothing is admitted.
    pub failing: bool,
}

struct Open {
    state: Mutex<State>,
    /// Told of every record that is only buffered, and of what a flush had to leave.
    unflushed: Notify,
    syncer: Option<Syncer>,
    durability: Durability,
}

struct State {
    chain: Chain,
    clock: Clock,
    /// The run's id as JSON.
    run: String,
    /// Whole records that are in the chain and not yet in the file.
    lines: Vec<u8>,
    tail: Tail,
    failing: bool,
    key: SigningKey,
    public_key: String,
    checkpoint_interval: Duration,
    checkpoint_every: u64,
    max_bytes: u64,
    /// The record up to which the log is signed.
    signed: u64,
    /// When the first record after that one was made; it means nothing where there is none.
    unsigned_since: Option<Instant>,
    peers: Peers,
    refusals: Refusals,
    /// Admissions that have no settlement yet.
    unsettled: usize,
}

impl Log {
    /// Opens a new file, or takes up the one an earlier process of this run left: proves it, moves
    /// an incomplete last line to `<file>.torn-<seq>`, and settles every admission that has no
    /// settlement at what it had reserved. Blocks on the disk.
    pub fn open(config: &Config, started: &Started) -> Result<(Self, Recovered), Error> {
        let Some(path) = &config.path else {
            return Ok((Self::discard(), Recovered::default()));
        };
        let key = SigningKey::new(config.signing_key.as_ref())?;
        let opened = recover::open(path)?;
        let log = Self::take_up((config, path), started, key, &opened);
        // The lock is still ours: nobody else has begun to write the file.
        if log.is_err()
            && let Err(error) = opened.remove_if_unused(path)
        {
            tracing::warn!(%error, path = %path.display(), "an audit log that was not begun stays");
        }
        log
    }

    fn take_up(
        (config, path): (&Config, &Path),
        started: &Started,
        key: SigningKey,
        opened: &recover::Opened,
    ) -> Result<(Self, Recovered), Error> {
        let failed = |source| Error::File { path: path.to_owned(), source };
        let file = Arc::clone(&opened.file);
        let scan = recover::scan(BufReader::new(&*file)).map_err(|e| Error::read(path, e))?;
        belongs(path, &scan, started)?;
        let torn = recover::cut_torn_tail(path, &file, &scan).map_err(failed)?;

        let tail = Tail::new(Arc::clone(&file), scan.whole_bytes);
        let mut state = State::new(tail, scan.chain, key, &started.run);
        let recovered = state.take_up(&scan, torn.as_ref(), started);
        state.checkpoint_interval = config.checkpoint_interval.min(MAX_TIME);
        state.checkpoint_every = config.checkpoint_every;
        state.max_bytes = config.max_bytes;
        state.write().map_err(failed)?;
        let syncer = start_syncer(config, path, file).map_err(failed)?;
        let unflushed = Notify::new();
        let durability = config.durability;
        let open = Open { state: Mutex::new(state), unflushed, syncer, durability };
        Ok((Self(Some(open)), recovered))
    }

    /// Accepts everything and keeps nothing.
    pub fn discard() -> Self {
        Self(None)
    }

    /// Records that a call may go upstream, and returns once that survives what
    /// [`Config::durability`] says. After an error nothing may be sent: the call is not in the log,
    /// or the log has settled it as [`Outcome::NotSent`], as it does when this future is dropped.
    pub async fn admitted(&self, record: &Admitted<'_>) -> Result<(), Error> {
        let Some(open) = &self.0 else { return Ok(()) };
        let end = open.admit(record)?;
        if let (Some(syncer), Durability::Fsync) = (&open.syncer, open.durability) {
            let mut unsent = Unsent { open, request: Some(record.request) };
            syncer.reached(end).await.map_err(|_| Error::Sync)?;
            unsent.request = None;
        }
        Ok(())
    }

    /// Records how an admitted call ended. Never fails and does no I/O.
    pub fn settled(&self, record: &Settled<'_>) {
        if let Some(open) = &self.0 {
            open.state().settle(record);
            open.unflushed.notify_one();
        }
    }

    /// Records a request that was refused. Never fails and does no I/O. Of a flood, the first 64
    /// of each code are recorded singly, the rest by their number, at most once a second.
    pub fn refused(&self, record: &Refused<'_>) {
        if let Some(open) = &self.0 {
            let mut state = open.state();
            if state.refusals.count(record) {
                state.append(record);
            }
            drop(state);
            open.unflushed.notify_one();
        }
    }

    /// Records what an operator did. Never fails and does no I/O.
    pub fn operated<R: Record>(&self, record: &R) {
        if let Some(open) = &self.0 {
            open.state().append(record);
            open.unflushed.notify_one();
        }
    }

    /// Records how far the run's work has come on its way out. Never fails and does no I/O.
    pub fn relayed<R: Record>(&self, record: &R) {
        self.operated(record);
    }

    /// Records who connects, once for each process: the first 64 singly, the connections of the rest by
    /// their number, at most once a second. Never fails; reads from `/proc` where there is a new process.
    pub fn opened(&self, peer: Peer) {
        let Some(open) = &self.0 else { return };
        let (is_recorded, is_counting) = {
            let peers = &mut open.state().peers;
            (peers.count(peer), peers.is_counting())
        };
        if is_recorded {
            let Peer { pid, uid, gid } = peer;
            let cgroup = peer.cgroup();
            open.state().append(&Opened { pid, uid, gid, cgroup: cgroup.as_deref() });
        }
        if is_recorded || is_counting {
            open.unflushed.notify_one();
        }
    }

    /// Waits until there is something to flush or to sign, so that an idle run wakes nobody.
    pub async fn unflushed(&self) {
        let Some(open) = &self.0 else { return std::future::pending().await };
        let due = open.state().checkpoint_due();
        let notified = open.unflushed.notified();
        match due {
            Some(due) => timeout_at(due.into(), notified).await.unwrap_or_default(),
            None => notified.await,
        }
    }

    /// Signs what has waited for that long enough, and writes what is buffered. What cannot be written stays for the next
    /// time.
    pub fn flush(&self) {
        if let Some(open) = &self.0 {
            open.flush(false);
        }
    }

    /// Records the end of the run, signs the whole and syncs it. Blocks on the disk.
    ///
    /// After an error the end is still buffered: [`write_out`](Self::write_out) tries again, and so does whoever drops the log.
    pub fn finish(&self, record: &Finished) -> Result<(), Error> {
        let Some(open) = &self.0 else { return Ok(()) };
        let mut state = open.state();
        state.record_floods(true);
        state.append(record);
        state.sign();
        state.write_out()
    }

    /// Writes and syncs all that is buffered, the end that [`finish`](Self::finish) could not write included. Blocks on the
    /// disk.
    pub fn write_out(&self) -> Result<(), Error> {
        let Some(open) = &self.0 else { return Ok(()) };
        open.state().write_out()
    }

    pub fn lag(&self) -> Lag {
        let Some(open) = &self.0 else { return Lag::default() };
        let state = open.state();
        Lag {
            records: memchr::memchr_iter(b'\n', &state.lines).count() as u64,
            bytes: state.lines.len() as u64,
            failing: state.failing || open.syncer.as_ref().is_some_and(Syncer::has_failed),
        }
    }
}

impl Open {
    fn admit(&self, record: &Admitted<'_>) -> Result<u64, Error> {
        if self.syncer.as_ref().is_some_and(Syncer::has_failed) {
            return Err(Error::Sync);
        }
        let end = self.state().admit(record)?;
        self.written(end);
        Ok(end)
    }

    fn flush(&self, all: bool) {
        let mut state = self.state();
        state.record_floods(all);
        state.sign_if_overdue();
        if state.peers.is_counting() || state.refusals.is_counting() {
            self.unflushed.notify_one();
        }
        if state.lines.is_empty() {
            return;
        }
        // `State::write` has said so where it changed, and the next flush tries again.
        if state.write().is_err() {
            self.unflushed.notify_one();
        }
        let end = state.tail.len();
        drop(state);
        self.written(end);
    }

    fn written(&self, end: u64) {
        if let Some(syncer) = &self.syncer {
            syncer.written(end);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing below panics; if it did, refusing to settle would lose more than going on.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.flush(true);
        // Closing is not enough: a child that another thread is about to start may hold the file, too.
        let _ = self.state().tail.file().unlock();
    }
}

impl State {
    fn new(tail: Tail, chain: Chain, key: SigningKey, run: &str) -> Self {
        Self {
            chain,
            clock: Clock::default(),
            run: serde_json::to_string(run).expect("text is JSON"),
            lines: vec![],
            tail,
            failing: false,
            public_key: key.public().to_string(),
            key,
            // The records of taking up stay together; the first checkpoint comes after them.
            checkpoint_interval: Duration::ZERO,
            checkpoint_every: 0,
            max_bytes: u64::MAX,
            signed: chain.next() - 1,
            unsigned_since: None,
            peers: Peers::default(),
            refusals: Refusals::default(),
            unsettled: 0,
        }
    }

    /// Records what became of the earlier process, and that this one goes on.
    fn take_up(&mut self, scan: &Scan, torn: Option<&Torn>, started: &Started) -> Recovered {
        let resumed = scan.chain != Chain::START;
        if let Some(torn) = torn {
            let kept_in = torn.kept_in.file_name().unwrap_or_default().to_string_lossy();
            self.append(&Repaired { torn_bytes: torn.bytes, kept_in: &kept_in });
        }
        let mut spent = scan.spent;
        for (request, reserved) in &scan.open {
            self.append(&Settled::unseen(request, Outcome::Crashed, *reserved));
            spent = spent + *reserved;
        }
        let public_key = self.public_key.clone();
        self.append(&Session { started, public_key: &public_key, resumed });
        let torn_bytes = torn.map_or(0, |torn| torn.bytes);
        let age = scan.began.and_then(|began| began.elapsed().ok()).unwrap_or_default();
        Recovered { spent, age, crashed: scan.open.len() as u64, torn_bytes, resumed }
    }

    /// Either the record is in the file after this, or it is nowhere.
    fn admit(&mut self, record: &Admitted<'_>) -> Result<u64, Error> {
        if self.unsettled >= MAX_UNSETTLED {
            return Err(Error::Unsettled);
        }
        if self.tail.len() + self.lines.len() as u64 >= self.max_bytes {
            return Err(Error::Full { limit: self.max_bytes });
        }
        // Signed first, so that the admission is the last record and can be taken back.
        self.sign_if_many();
        let before = self.chain;
        let start = self.lines.len();
        self.append(record);
        let length = self.lines.len() - start;
        if let Err(error) = self.write() {
            // Records before it may have left the buffer; it is the last, so it is still the end.
            self.lines.truncate(self.lines.len() - length);
            self.chain = before;
            return Err(Error::Write(error));
        }
        self.unsettled += 1;
        Ok(self.tail.len())
    }

    fn settle(&mut self, record: &Settled<'_>) {
        self.unsettled = self.unsettled.saturating_sub(1);
        self.append(record);
    }

    fn record_floods(&mut self, all: bool) {
        if self.failing && !all {
            return;
        }
        let now = Instant::now();
        if let Some(crowd) = self.peers.due(now, all) {
            self.append(&crowd);
        }
        let mut refusals = std::mem::take(&mut self.refusals);
        for repeated in refusals.due(now, all) {
            self.append(&repeated);
        }
        self.refusals = refusals;
    }

    fn append<R: Record>(&mut self, record: &R) {
        self.sign_if_many();
        if self.unsigned() == 0 {
            self.unsigned_since = Some(Instant::now());
        }
        let head = Head { time: self.clock.now(), run: &self.run };
        self.chain.append(&mut self.lines, head, record);
    }

    /// The number of records after the last checkpoint.
    fn unsigned(&self) -> u64 {
        self.chain.next() - 1 - self.signed
    }

    fn sign_if_many(&mut self) {
        if self.checkpoint_every > 0 && self.unsigned() >= self.checkpoint_every {
            self.sign();
        }
    }

    fn sign_if_overdue(&mut self) {
        // A disk that takes nothing would be given ever more to write.
        if !self.failing && self.checkpoint_due().is_some_and(|due| due <= Instant::now()) {
            self.sign();
        }
    }

    /// When the oldest record without a signature needs one.
    fn checkpoint_due(&self) -> Option<Instant> {
        if self.unsigned() == 0 || self.checkpoint_interval.is_zero() {
            return None;
        }
        self.unsigned_since.map(|since| since + self.checkpoint_interval)
    }

    fn sign(&mut self) {
        let signature = self.key.sign(self.chain.prev());
        let signature = str::from_utf8(&signature).expect("digits are ASCII");
        let record = Checkpoint { signature, public_key: &self.public_key };
        let head = Head { time: self.clock.now(), run: &self.run };
        self.chain.append(&mut self.lines, head, &record);
        self.signed = self.chain.next() - 1;
    }

    fn write_out(&mut self) -> Result<(), Error> {
        self.write().and_then(|()| self.tail.file().sync_data()).map_err(Error::Write)
    }

    fn write(&mut self) -> io::Result<()> {
        let result = self.tail.write(&mut self.lines);
        let run = self.run.trim_matches('"');
        match &result {
            Err(error) if !self.failing => {
                tracing::error!(run, %error, "the audit log cannot be written; nothing is admitted");
            }
            Ok(()) if self.failing => tracing::info!(run, "the audit log can be written again"),
            _ => (),
        }
        self.failing = result.is_err();
        self.lines.shrink_to(KEPT_BUFFER);
        result
    }
}

/// An admission that is in the file and must not be: its call is not sent unless this is disarmed.
struct Unsent<'a> {
    open: &'a Open,
    request: Option<&'a str>,
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        if let Some(request) = self.request {
            let record = Settled::unseen(request, Outcome::NotSent, Amount::default());
            self.open.state().settle(&record);
        }
    }
}

fn belongs(path: &Path, scan: &Scan, started: &Started) -> Result<(), Error> {
    if scan.chain == Chain::START || scan.run == started.run {
        return Ok(());
    }
    let (theirs, ours) = (scan.run.clone(), started.run.clone());
    Err(Error::OtherRun { path: path.into(), theirs, ours })
}

/// Syncs what opening wrote, then starts the thread that goes on with it.
fn start_syncer(
    config: &Config,
    path: &Path,
    file: Arc<std::fs::File>,
) -> io::Result<Option<Syncer>> {
    let pause = match config.durability {
        Durability::Os => return Ok(None),
        Durability::Group => config.sync_every,
        Durability::Fsync => Duration::ZERO,
    };
    file.sync_all()?;
    recover::sync_folder(path)?;
    Syncer::start(file, pause).map(Some)
}

/// Buffer that is kept between writes; what a full disk made it grow beyond this is given back.
const KEPT_BUFFER: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Seek;

    use super::*;
    use crate::audit::verify;

    /// G11: once a sync has failed nothing is admitted, and who waited for it is charged nothing.
    /// `/dev/null` is the one thing everywhere that can be opened and never be synced.
    #[tokio::test]
    async fn a_failed_sync_ends_admissions() {
        let mut file = tempfile::tempfile().unwrap();
        let tail = Tail::new(Arc::new(file.try_clone().unwrap()), 0);
        let state = State::new(tail, Chain::START, SigningKey::new(None).unwrap(), "run-1");
        let unsyncable = File::options().write(true).open("/dev/null").unwrap();
        let log = Log(Some(Open {
            state: Mutex::new(state),
            unflushed: Notify::new(),
            syncer: Some(Syncer::start(Arc::new(unsyncable), Duration::ZERO).unwrap()),
            durability: Durability::Fsync,
        }));
        for _ in 0..2 {
            let error = log.admitted(&admitted()).await.unwrap_err();
            assert!(matches!(error, Error::Sync));
        }
        assert!(log.lag().failing);
        drop(log);

        file.rewind().unwrap();
        let report = verify::check(BufReader::new(file), None).unwrap();
        assert_eq!((report.admitted, report.settled, report.spent), (1, 1, Amount::default()));
    }

    fn admitted() -> Admitted<'static> {
        Admitted {
            request: "call-1",
            route: "chat_completions",
            model: None,
            rules: &[],
            stream: false,
            request_bytes: 0,
            pid: None,
            reserved: Amount { turns: 1, ..Amount::default() },
        }
    }
}
