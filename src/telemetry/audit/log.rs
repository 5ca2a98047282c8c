//! The writer of the log. Callers write inline, without a writer thread.
//!
//! 1. Records are chained into one buffer under one lock.
//! 2. An admission writes the buffer to the file with one `write`.
//! 3. Settlements and refusals wait in the buffer for the next admission or [`flush`](AuditLog::flush_buffered), so a
//!    request costs one system call. A writer thread would cost two context switches instead
//!    (`src/manual/decisions/0004`).
//! 4. The flush that finds the oldest unsigned record too old signs a checkpoint, so that a call rarely waits for a
//!    signature. Only a log with very many records since the last checkpoint makes the next call sign.
//!
//! **Invariant:** the buffer holds whole records that continue the file. An admission that was not written to the file
//! leaves buffer and chain unchanged. Other records stay in the buffer until they are written.
//!
//! **Invariant:** the buffer is bounded while the disk is full. No call is admitted then, so at most
//! [`MAX_UNSETTLED_CALLS`] settlements arrive, and refusals are counted instead of recorded.

mod approvals;
mod connections;
mod floods;
mod tool_calls;

use std::collections::BTreeMap;
use std::io::{self, BufReader};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Notify;
use tokio::time::timeout_at;

use super::chain::{ChainTip, MAX_UNSETTLED_CALLS, RecordHeader};
use super::fsync::FsyncThread;
use super::key::AuditSigningKey;
use super::log_file::AuditLogFile;
use super::peers::PeerTracker;
use super::records::{
    AuditRecord, CallAdmittedRecord, CallOutcome, CallRefusedRecord, CallSettledRecord,
    CheckpointRecord, LogRepairedRecord, RunFinishedRecord, RunStartedRecord, SessionStartedRecord,
};
use super::recover::{self, AuditLogScan, TornTail};
use super::refusal_counter::RefusalCounter;
use super::tool_records::{ToolOutcome, ToolSettledRecord};
use super::{AuditConfig, AuditDurability, AuditError};
use crate::base::time::MAX_TIME;
use crate::base::timestamp::TimestampFormatter;
use crate::llm::budget::{BudgetAmount, ConnectionSpending, RecentUsage, ToolSpending};

/// The audit log of one run, which all threads that serve the run share.
pub struct AuditLog(Option<OpenAuditLog>);

/// The state that the file of an earlier process held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveredRun {
    /// The amount charged so far, with lost settlements. The ledger continues from this amount.
    pub spent: BudgetAmount,
    /// The time since the first record, which is the age of the run.
    pub age: Duration,
    pub recent: RecentUsage,
    /// The calls and costs of each tool, with lost settlements.
    pub tools: BTreeMap<String, ToolSpending>,
    /// The number of calls of each tool in the last minute.
    pub recent_tools: BTreeMap<String, u64>,
    /// The use of each connection, with lost settlements.
    pub connections: BTreeMap<String, ConnectionSpending>,
    /// The number of requests over each connection in the last minute.
    pub recent_connections: BTreeMap<String, u64>,
    /// The number of admissions whose settlement was lost. They are now settled at their reserved amounts.
    pub crashed: u64,
    /// The number of bytes of an incomplete last line, which are now in a file beside the log.
    pub torn_bytes: u64,
    /// True if the file held records.
    pub resumed: bool,
}

/// The records that are not written yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuditLag {
    pub records: u64,
    pub bytes: u64,
    /// True if the last attempt to write or sync failed. No call is admitted in that state.
    pub failing: bool,
}

struct OpenAuditLog {
    state: Mutex<AuditLogState>,
    /// Notified of every record that is only buffered, and of records that a flush could not write.
    unflushed: Notify,
    syncer: Option<FsyncThread>,
    durability: AuditDurability,
}

struct AuditLogState {
    chain: ChainTip,
    clock: TimestampFormatter,
    /// The run's id as JSON.
    run: String,
    /// Whole records that the chain includes and the file does not include yet.
    lines: Vec<u8>,
    tail: AuditLogFile,
    failing: bool,
    key: AuditSigningKey,
    public_key: String,
    checkpoint_interval: Duration,
    checkpoint_every: u64,
    max_bytes: u64,
    /// The number of the last record that a checkpoint covers.
    signed: u64,
    /// The time of the first record after the last checkpoint; it has no meaning if there is no such record.
    unsigned_since: Option<Instant>,
    peers: PeerTracker,
    refusals: RefusalCounter,
    tool_refusals: RefusalCounter,
    connect_refusals: RefusalCounter,
    /// The number of admissions without a settlement.
    unsettled: usize,
}

impl AuditLog {
    /// Creates a new file, or continues the file of an earlier process of this run. An existing file is verified first,
    /// an incomplete last line is moved to `<file>.torn-<seq>`, and every admission without a settlement is settled at
    /// its reserved amount. Blocks on the disk.
    pub fn open_log(
        config: &AuditConfig,
        started: &RunStartedRecord,
    ) -> Result<(Self, RecoveredRun), AuditError> {
        let Some(path) = &config.path else {
            return Ok((Self::disabled(), RecoveredRun::default()));
        };
        let key = AuditSigningKey::new(config.signing_key.as_ref())?;
        let opened = recover::open_locked(path)?;
        let log = Self::resume_log((config, path), started, key, &opened);
        // The file's lock is still held, so no other process has begun to write the file.
        if log.is_err()
            && let Err(error) = opened.remove_if_unused(path)
        {
            tracing::warn!(%error, path = %path.display(), "an audit log that was not begun stays");
        }
        log
    }

    fn resume_log(
        (config, path): (&AuditConfig, &Path),
        started: &RunStartedRecord,
        key: AuditSigningKey,
        opened: &recover::LockedAuditFile,
    ) -> Result<(Self, RecoveredRun), AuditError> {
        let failed = |source| AuditError::File { path: path.to_owned(), source };
        let file = Arc::clone(&opened.file);
        // 1. Verify the file that an earlier process may have left, before anything in it changes.
        let scan = recover::scan_log(BufReader::new(&*file))
            .map_err(|e| AuditError::from_read_error(path, e))?;
        check_run(path, &scan, started)?;
        // 2. Move an incomplete last line away, so that the file ends with a whole record.
        let torn = recover::move_torn_tail(path, &file, &scan).map_err(failed)?;

        let tail = AuditLogFile::new(Arc::clone(&file), scan.whole_bytes);
        let mut state = AuditLogState::new(tail, scan.chain, key, &started.run);
        // 3. Continue the chain: settle lost calls, and record the start of this process.
        let recovered = state.resume_chain(&scan, torn.as_ref(), started);
        // 4. The limits apply only now, so no checkpoint comes between the records of step 3.
        state.checkpoint_interval = config.checkpoint_interval.min(MAX_TIME);
        state.checkpoint_every = config.checkpoint_every;
        state.max_bytes = config.max_bytes;
        state.write_lines().map_err(failed)?;
        // 5. Sync these records before the thread starts that syncs later ones.
        let syncer = start_syncer(config, path, file).map_err(failed)?;
        let unflushed = Notify::new();
        let durability = config.durability;
        let open = OpenAuditLog { state: Mutex::new(state), unflushed, syncer, durability };
        Ok((Self(Some(open)), recovered))
    }

    /// Returns a log that accepts every record and stores none.
    pub fn disabled() -> Self {
        Self(None)
    }

    /// Returns true if an admission waits until its record is on the disk.
    pub fn waits_for_disk(&self) -> bool {
        let log = self.0.as_ref();
        log.is_some_and(|log| log.syncer.is_some() && log.durability == AuditDurability::Fsync)
    }

    /// Records that a call may go upstream, like [`record_admission`](Self::record_admission), if the admission does not
    /// wait for the disk. Otherwise the function does nothing and returns `None`.
    pub fn record_admission_at_once(
        &self,
        record: &CallAdmittedRecord<'_>,
    ) -> Option<Result<(), AuditError>> {
        if self.waits_for_disk() {
            return None;
        }
        let Some(log) = &self.0 else { return Some(Ok(())) };
        Some(log.write_admission(record).map(drop))
    }

    /// Records that a call may go upstream, and returns when the record has the durability of
    /// [`AuditConfig::durability`]. After an error the call must not be sent: the call is not in the log, or the log
    /// has settled it as [`CallOutcome::NotSent`]. The log also does that if this future is dropped before it is ready.
    pub async fn record_admission(
        &self,
        record: &CallAdmittedRecord<'_>,
    ) -> Result<(), AuditError> {
        let Some(log) = &self.0 else { return Ok(()) };
        let end = log.write_admission(record)?;
        if let (Some(syncer), AuditDurability::Fsync) = (&log.syncer, log.durability) {
            let mut unsent = UnsentAdmissionGuard { log, request: Some(record.request) };
            syncer.wait_synced(end).await.map_err(|_| AuditError::SyncFailed)?;
            unsent.request = None;
        }
        Ok(())
    }

    /// Records the end of an admitted call. Never fails and does no I/O.
    pub fn record_settlement(&self, record: &CallSettledRecord<'_>) {
        if let Some(open) = &self.0 {
            open.lock_state().append_settlement(record);
            open.unflushed.notify_one();
        }
    }

    /// Records a request that was refused. Never fails and does no I/O. The first 64 refusals of each code are recorded
    /// one by one. Later ones are counted, with a record at most once a second. A log that is as large as it may be gets
    /// their numbers at its end.
    pub fn record_refusal(&self, record: &CallRefusedRecord<'_>) {
        if let Some(open) = &self.0 {
            let mut state = open.lock_state();
            let has_room = state.has_room();
            if state.refusals.count_refusal(record.code, record.status, has_room) {
                state.append_record(record);
            }
            drop(state);
            open.unflushed.notify_one();
        }
    }

    /// Records an action of an operator. Never fails and does no I/O.
    pub fn record_operator_action<R: AuditRecord>(&self, record: &R) {
        if let Some(open) = &self.0 {
            open.lock_state().append_record(record);
            open.unflushed.notify_one();
        }
    }

    /// Records a step of the delivery of the run's work. Never fails and does no I/O.
    pub fn record_delivery<R: AuditRecord>(&self, record: &R) {
        self.record_operator_action(record);
    }

    /// Waits until there are records to flush or to sign, so that an idle run wakes no task.
    pub async fn wait_for_data(&self) {
        let Some(open) = &self.0 else { return std::future::pending().await };
        let due = open.lock_state().next_checkpoint_due();
        let notified = open.unflushed.notified();
        match due {
            Some(due) => timeout_at(due.into(), notified).await.unwrap_or_default(),
            None => notified.await,
        }
    }

    /// Signs records that have waited too long for a checkpoint, and writes the buffer. Records that cannot be written
    /// stay for the next flush.
    pub fn flush_buffered(&self) {
        if let Some(open) = &self.0 {
            open.flush_lines(false);
        }
    }

    /// Records the end of the run, signs the log and syncs it. Blocks on the disk.
    ///
    /// After an error the end is still in the buffer: [`write_and_sync`](Self::write_and_sync) and the log's destructor
    /// try again.
    pub fn finish_log(&self, record: &RunFinishedRecord) -> Result<(), AuditError> {
        let Some(open) = &self.0 else { return Ok(()) };
        let mut state = open.lock_state();
        // The order is that of a reader: the counts belong to the run, its end is the last record, and the signature
        // covers both.
        state.record_floods(true);
        state.append_record(record);
        state.append_checkpoint();
        state.write_all_lines()
    }

    /// Writes and syncs the buffer, with an end that [`finish_log`](Self::finish_log) could not write. Blocks on the
    /// disk.
    pub fn write_and_sync(&self) -> Result<(), AuditError> {
        let Some(open) = &self.0 else { return Ok(()) };
        open.lock_state().write_all_lines()
    }

    pub fn lag(&self) -> AuditLag {
        let Some(open) = &self.0 else { return AuditLag::default() };
        let state = open.lock_state();
        AuditLag {
            records: memchr::memchr_iter(b'\n', &state.lines).count() as u64,
            bytes: state.lines.len() as u64,
            failing: state.failing || open.syncer.as_ref().is_some_and(FsyncThread::has_failed),
        }
    }
}

impl OpenAuditLog {
    fn write_admission(&self, record: &impl AuditRecord) -> Result<u64, AuditError> {
        if self.syncer.as_ref().is_some_and(FsyncThread::has_failed) {
            return Err(AuditError::SyncFailed);
        }
        let end = self.lock_state().append_admission(record)?;
        self.notify_written(end);
        Ok(end)
    }

    fn flush_lines(&self, all: bool) {
        let mut state = self.lock_state();
        state.record_floods(all);
        state.sign_if_overdue();
        let counters = [&state.refusals, &state.tool_refusals, &state.connect_refusals];
        let is_counting =
            state.peers.is_counting() || counters.iter().any(|counter| counter.is_counting());
        if is_counting && state.has_room() {
            self.unflushed.notify_one();
        }
        if state.lines.is_empty() {
            return;
        }
        // `AuditLogState::write_lines` has logged the first failure, and the next flush tries again.
        if state.write_lines().is_err() {
            self.unflushed.notify_one();
        }
        let end = state.tail.len();
        drop(state);
        self.notify_written(end);
    }

    fn notify_written(&self, end: u64) {
        if let Some(syncer) = &self.syncer {
            syncer.request_sync(end);
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, AuditLogState> {
        // No code under this lock panics. If it did, refusing settlements would lose more than continuing.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenAuditLog {
    fn drop(&mut self) {
        self.flush_lines(true);
        // The lock is released explicitly: a child process that is about to start may hold the file open, too.
        let _ = self.lock_state().tail.file().unlock();
    }
}

impl AuditLogState {
    fn new(tail: AuditLogFile, chain: ChainTip, key: AuditSigningKey, run: &str) -> Self {
        Self {
            chain,
            clock: TimestampFormatter::default(),
            run: serde_json::to_string(run).expect("text is JSON"),
            lines: vec![],
            tail,
            failing: false,
            public_key: key.public_key().to_string(),
            key,
            // Without limits, the records of `resume_chain` stay together. The first checkpoint comes after them.
            checkpoint_interval: Duration::ZERO,
            checkpoint_every: 0,
            max_bytes: u64::MAX,
            signed: chain.next_seq() - 1,
            unsigned_since: None,
            peers: PeerTracker::default(),
            refusals: RefusalCounter::default(),
            tool_refusals: RefusalCounter::default(),
            connect_refusals: RefusalCounter::default(),
            unsettled: 0,
        }
    }

    /// Records the end of the earlier process, and the start of this process.
    fn resume_chain(
        &mut self,
        scan: &AuditLogScan,
        torn: Option<&TornTail>,
        started: &RunStartedRecord,
    ) -> RecoveredRun {
        let resumed = scan.chain != ChainTip::START;
        if let Some(torn) = torn {
            let kept_in = torn.kept_in.file_name().unwrap_or_default().to_string_lossy();
            self.append_record(&LogRepairedRecord { torn_bytes: torn.bytes, kept_in: &kept_in });
        }
        // A crash has lost the real settlement of these calls. Their cost is unknown, so they are charged in full.
        // They may have used their tokens a moment ago, so they count in the rate's minute, too. The minute has their
        // requests already.
        let now = SystemTime::now();
        let (age, mut recent) = scan.age_and_recent(now);
        let recent_tools = scan.recent.tool_calls_until(now);
        let mut spent = scan.spent;
        for (request, reserved) in &scan.open {
            self.append_record(&CallSettledRecord::for_lost_call(
                request,
                CallOutcome::Crashed,
                *reserved,
            ));
            spent = spent + *reserved;
            let tokens = reserved.total_tokens();
            recent = recent + RecentUsage { requests: 0, tokens };
        }
        let mut tools = scan.tools.clone();
        for lost in &scan.open_tools {
            let call = (lost.call.as_str(), lost.tool.as_str());
            let (outcome, charged) = (ToolOutcome::Crashed, lost.reserved);
            self.append_record(&ToolSettledRecord::for_lost_call(call, outcome, charged));
            spent = spent + charged;
            let account = tools.entry(lost.tool.clone()).or_default();
            account.add_call(charged.cost);
        }
        let connections = self.settle_lost_requests(scan, &mut spent);
        let recent_connections = scan.recent.connection_requests_until(now);
        let public_key = self.public_key.clone();
        self.append_record(&SessionStartedRecord { started, public_key: &public_key, resumed });
        let torn_bytes = torn.map_or(0, |torn| torn.bytes);
        let lost = [scan.open.len(), scan.open_tools.len(), scan.open_connects.len()];
        RecoveredRun {
            spent,
            age,
            recent,
            tools,
            recent_tools,
            connections,
            recent_connections,
            crashed: lost.into_iter().sum::<usize>() as u64,
            torn_bytes,
            resumed,
        }
    }

    /// Appends an admission and writes the buffer. After an error the record is neither in the file nor in the buffer.
    fn append_admission(&mut self, record: &impl AuditRecord) -> Result<u64, AuditError> {
        if self.unsettled >= MAX_UNSETTLED_CALLS {
            return Err(AuditError::TooManyUnsettled);
        }
        if !self.has_room() {
            return Err(AuditError::Full { limit: self.max_bytes });
        }
        // A checkpoint comes before the admission, so that the admission is the last record and can be taken back.
        self.sign_if_many();
        let before = self.chain;
        let start = self.lines.len();
        self.append_record(record);
        let length = self.lines.len() - start;
        if let Err(error) = self.write_lines() {
            // Earlier records may have been written and left the buffer; the admission is still its end.
            self.lines.truncate(self.lines.len() - length);
            self.chain = before;
            return Err(AuditError::Write(error));
        }
        self.unsettled += 1;
        Ok(self.tail.len())
    }

    fn append_settlement(&mut self, record: &impl AuditRecord) {
        self.unsettled = self.unsettled.saturating_sub(1);
        self.append_record(record);
    }

    fn append_record<R: AuditRecord>(&mut self, record: &R) {
        self.sign_if_many();
        if self.unsigned_records() == 0 {
            self.unsigned_since = Some(Instant::now());
        }
        let head = RecordHeader { time: self.clock.format_now(), run: &self.run };
        self.chain.append_record(&mut self.lines, head, record);
    }

    /// The number of records after the last checkpoint.
    fn unsigned_records(&self) -> u64 {
        self.chain.next_seq() - 1 - self.signed
    }

    fn sign_if_many(&mut self) {
        if self.checkpoint_every > 0 && self.unsigned_records() >= self.checkpoint_every {
            self.append_checkpoint();
        }
    }

    fn sign_if_overdue(&mut self) {
        // While the disk fails, each checkpoint would only make the buffer longer.
        if !self.failing && self.next_checkpoint_due().is_some_and(|due| due <= Instant::now()) {
            self.append_checkpoint();
        }
    }

    /// Returns the time when the oldest unsigned record needs a signature.
    fn next_checkpoint_due(&self) -> Option<Instant> {
        if self.unsigned_records() == 0 || self.checkpoint_interval.is_zero() {
            return None;
        }
        self.unsigned_since.map(|since| since + self.checkpoint_interval)
    }

    fn append_checkpoint(&mut self) {
        let signature = self.key.sign_checkpoint(self.chain.last_hash());
        let signature = str::from_utf8(&signature).expect("digits are ASCII");
        let record = CheckpointRecord { signature, public_key: &self.public_key };
        let head = RecordHeader { time: self.clock.format_now(), run: &self.run };
        // The record does not go through `append_record`, which would sign again.
        self.chain.append_record(&mut self.lines, head, &record);
        self.signed = self.chain.next_seq() - 1;
    }

    fn write_all_lines(&mut self) -> Result<(), AuditError> {
        self.write_lines().and_then(|()| self.tail.file().sync_data()).map_err(AuditError::Write)
    }

    fn write_lines(&mut self) -> io::Result<()> {
        // On an error, the lines that were not written stay in the buffer for the next attempt.
        let result = self.tail.write_lines(&mut self.lines);
        // Only a change is logged: a full disk would else fill the log with one line per call.
        if self.failing != result.is_err() {
            let run = self.run.trim_matches('"');
            if let Err(error) = &result {
                tracing::error!(run, %error, "the audit log cannot be written; nothing is admitted");
            } else {
                tracing::info!(run, "the audit log can be written again");
            }
        }
        self.failing = result.is_err();
        self.lines.shrink_to(RETAINED_BUFFER_BYTES);
        result
    }
}

/// A guard for an admission that is not durable yet. Unless it is disarmed, the call is settled as not sent.
struct UnsentAdmissionGuard<'a> {
    log: &'a OpenAuditLog,
    request: Option<&'a str>,
}

impl Drop for UnsentAdmissionGuard<'_> {
    fn drop(&mut self) {
        if let Some(request) = self.request {
            let record = CallSettledRecord::for_lost_call(
                request,
                CallOutcome::NotSent,
                BudgetAmount::default(),
            );
            self.log.lock_state().append_settlement(&record);
        }
    }
}

fn check_run(
    path: &Path,
    scan: &AuditLogScan,
    started: &RunStartedRecord,
) -> Result<(), AuditError> {
    if scan.chain == ChainTip::START || scan.run == started.run {
        return Ok(());
    }
    let (theirs, ours) = (scan.run.clone(), started.run.clone());
    Err(AuditError::OtherRun { path: path.into(), theirs, ours })
}

/// Syncs the records of `resume_log`, then starts the thread that syncs later records.
fn start_syncer(
    config: &AuditConfig,
    path: &Path,
    file: Arc<std::fs::File>,
) -> io::Result<Option<FsyncThread>> {
    let pause = match config.durability {
        AuditDurability::Os => return Ok(None),
        AuditDurability::Group => config.sync_every,
        AuditDurability::Fsync => Duration::ZERO,
    };
    file.sync_all()?;
    recover::sync_directory(path)?;
    FsyncThread::start_thread(file, pause).map(Some)
}

/// The capacity in bytes that the buffer keeps between writes; a full disk may have enlarged it. Our choice.
const RETAINED_BUFFER_BYTES: usize = 64 * 1024;

#[cfg(test)]
mod tests;
