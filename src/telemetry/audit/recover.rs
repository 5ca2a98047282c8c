//! Continues a log that an earlier process left behind.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::fs::OFlags;

use super::AuditError;
use super::chain::{ChainBreakReason, ChainTip};
use super::read::{self, AuditEntry, AuditEvent, AuditReader, ChainBreakError};
use super::verify::{AuditVerifyReportBuilder, LogAmounts, UnsettledConnect, UnsettledToolCall};
use crate::llm::budget::{BudgetAmount, ConnectionSpending, RecentUsage, ToolSpending};

/// The content of a log that a new process needs.
#[derive(Debug)]
pub struct AuditLogScan {
    /// The chain, which the next record continues.
    pub chain: ChainTip,
    /// The offset of the end of the last whole record. Bytes after it belong to an incomplete line.
    pub whole_bytes: u64,
    /// The run of the records; empty if there are no records.
    pub run: String,
    /// The time that the records span.
    pub span: RecordedSpan,
    /// The calls of the last minutes before the log's end.
    pub recent: RecentCalls,
    /// The amount that the settled calls were charged.
    pub spent: BudgetAmount,
    /// The admissions without a settlement, in their order, with their reserved amounts.
    pub open: Vec<(String, BudgetAmount)>,
    /// The settled calls of each tool.
    pub tools: BTreeMap<String, ToolSpending>,
    /// The tools' admissions without a settlement, in their order.
    pub open_tools: Vec<UnsettledToolCall>,
    /// The settled requests over each connection.
    pub connections: BTreeMap<String, ConnectionSpending>,
    /// The connections' admissions without a settlement, in their order.
    pub open_connects: Vec<UnsettledConnect>,
}

/// The time that a log's records span. A run's deadline counts from it, so a clock that was set back takes nothing away:
/// each stretch of records between two such steps adds its own length.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecordedSpan {
    elapsed: Duration,
    /// The latest time since the clock was set back last.
    latest: Option<SystemTime>,
}

impl RecordedSpan {
    /// Adds the time of the next record.
    fn add_time(&mut self, time: SystemTime) {
        let latest = *self.latest.get_or_insert(time);
        match time.duration_since(latest) {
            Ok(passed) => self.elapsed = self.elapsed.saturating_add(passed),
            // Records of concurrent calls may be a moment out of order.
            Err(behind) if behind.duration() < MIN_STEP_BACK => return,
            Err(_) => (),
        }
        self.latest = Some(time);
    }

    /// Returns the elapsed time at `now`, which is never less than the records span.
    fn elapsed_until(mut self, now: SystemTime) -> Duration {
        self.add_time(now);
        self.elapsed
    }
}

/// The smallest step of a clock that begins a new stretch. Our choice: records lie much closer together.
const MIN_STEP_BACK: Duration = Duration::from_secs(10);

/// The admitted calls and the charged tokens of the last minute of a log, second by second.
#[derive(Clone, Debug, Default)]
pub struct RecentCalls(VecDeque<RecentSecond>);

#[derive(Clone, Debug)]
struct RecentSecond {
    start: SystemTime,
    usage: RecentUsage,
    /// The number of admitted calls of each tool.
    tools: BTreeMap<String, u64>,
    /// The number of admitted requests over each connection.
    connections: BTreeMap<String, u64>,
}

impl RecentCalls {
    fn add_entry(&mut self, entry: &AuditEntry) {
        let (mut usage, mut called, mut connected) = (RecentUsage::default(), None, None);
        match &entry.event {
            AuditEvent::Admitted(_) => usage.requests = 1,
            AuditEvent::Settled(call) => usage.tokens = call.charged.total_tokens(),
            AuditEvent::ToolAdmitted(call) => called = Some(&call.tool),
            AuditEvent::ConnectAdmitted(request) => connected = Some(&request.connection),
            _ => return,
        }
        let Ok(time) = humantime::parse_rfc3339(&entry.time) else { return };
        let second = self.second_at(time);
        second.usage = second.usage + usage;
        if let Some(tool) = called {
            *second.tools.entry(tool.clone()).or_default() += 1;
        }
        if let Some(connection) = connected {
            *second.connections.entry(connection.clone()).or_default() += 1;
        }
        while self.0.front().is_some_and(|first| !is_within(first.start, time, RATE_WINDOW)) {
            self.0.pop_front();
        }
    }

    /// Returns the second that a time is in, which begins with the time if no earlier one has it.
    fn second_at(&mut self, time: SystemTime) -> &mut RecentSecond {
        let last = self.0.back();
        if !last.is_some_and(|last| is_within(last.start, time, Duration::from_secs(1))) {
            let (tools, connections) = (BTreeMap::new(), BTreeMap::new());
            let usage = RecentUsage::default();
            self.0.push_back(RecentSecond { start: time, usage, tools, connections });
        }
        self.0.back_mut().expect("one was added")
    }

    /// Returns the usage of the minute before `now`. If the clock was set back since then, no time counts as passed.
    pub fn until(&self, now: SystemTime) -> RecentUsage {
        self.seconds_until(now).fold(RecentUsage::default(), |sum, second| sum + second.usage)
    }

    /// Returns the number of calls of each tool in the minute before `now`.
    pub fn tool_calls_until(&self, now: SystemTime) -> BTreeMap<String, u64> {
        let mut calls = BTreeMap::new();
        for (tool, count) in self.seconds_until(now).flat_map(|second| &second.tools) {
            *calls.entry(tool.clone()).or_default() += count;
        }
        calls
    }

    /// Returns the number of requests over each connection in the minute before `now`.
    pub fn connection_requests_until(&self, now: SystemTime) -> BTreeMap<String, u64> {
        let mut requests = BTreeMap::new();
        for (name, count) in self.seconds_until(now).flat_map(|second| &second.connections) {
            *requests.entry(name.clone()).or_default() += count;
        }
        requests
    }

    fn seconds_until(&self, now: SystemTime) -> impl Iterator<Item = &RecentSecond> {
        self.0.iter().filter(move |second| is_within(second.start, now, RATE_WINDOW))
    }
}

/// Returns true if `later` is less than `span` after `earlier`, or before it.
fn is_within(earlier: SystemTime, later: SystemTime, span: Duration) -> bool {
    later.duration_since(earlier).is_ok_and(|elapsed| elapsed < span) || later < earlier
}

/// The size of an incomplete last line, and the file that holds it now.
#[derive(Debug)]
pub(super) struct TornTail {
    pub(super) bytes: u64,
    pub(super) kept_in: PathBuf,
}

/// Reads a whole log and verifies it. An incomplete last line is no error, because a crash in the middle of a write
/// leaves one. Any other change is an error.
pub fn scan_log(log: impl BufRead) -> Result<AuditLogScan, read::AuditReadError> {
    let mut reader = AuditReader::new(log);
    let mut builder = AuditVerifyReportBuilder::new(None);
    let (mut recent, mut span) = (RecentCalls::default(), RecordedSpan::default());
    loop {
        match reader.next_entry() {
            Ok(Some(entry)) => {
                recent.add_entry(&entry);
                if let Ok(time) = humantime::parse_rfc3339(&entry.time) {
                    span.add_time(time);
                }
                builder.add_entry(&entry)?;
            }
            // A torn line ends the log. The reader's position is behind the last whole record.
            Ok(None)
            | Err(read::AuditReadError::Broken(ChainBreakError {
                why: ChainBreakReason::Torn,
                ..
            })) => break,
            Err(error) => return Err(error),
        }
    }
    let end = reader.position();
    let run = builder.run_id().to_owned();
    let LogAmounts { spent, open, tools, open_tools, connections, open_connects } =
        builder.into_amounts();
    let (chain, whole_bytes) = (end.chain, end.offset);
    Ok(AuditLogScan {
        chain,
        whole_bytes,
        run,
        span,
        recent,
        spent,
        open,
        tools,
        open_tools,
        connections,
        open_connects,
    })
}

impl AuditLogScan {
    /// Returns the age of the run and its usage in the last minute, at `now`.
    pub(super) fn age_and_recent(&self, now: SystemTime) -> (Duration, RecentUsage) {
        (self.age(now), self.recent.until(now))
    }

    /// Returns how long the run has been going on at `now`: the time since its first record, and at least the time
    /// that the records span, in case the clock was set back.
    pub fn age(&self, now: SystemTime) -> Duration {
        self.span.elapsed_until(now)
    }
}

/// An open log that no other process writes.
#[derive(Debug)]
pub(super) struct LockedAuditFile {
    pub(super) file: Arc<File>,
    is_new: bool,
}

impl LockedAuditFile {
    /// Removes a file that this process made without writing a record. An empty file would look like a truncated log.
    pub(super) fn remove_if_unused(&self, path: &Path) -> io::Result<()> {
        if self.is_new && self.file.metadata()?.len() == 0 {
            std::fs::remove_file(path)?;
        }
        Ok(())
    }
}

/// Opens or creates a log for appending and makes sure that no other process writes it.
pub(super) fn open_locked(path: &Path) -> Result<LockedAuditFile, AuditError> {
    let failed = |source| AuditError::File { path: path.into(), source };
    // The type is checked before the file is opened: opening a FIFO would wait for its other end. A symbolic link is
    // refused: a user who can write to the directory of the logs could choose the file that is written.
    if path.symlink_metadata().is_ok_and(|metadata| !metadata.is_file()) {
        return Err(AuditError::NotAFile { path: path.into() });
    }
    // The file is created exclusively first, so that this process knows that the file is its own.
    let created = private_append_options(OpenOptions::new().read(true)).create_new(true).open(path);
    let is_new = created.is_ok();
    let file = match created {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            private_append_options(OpenOptions::new().read(true)).open(path)
        }
        created => created,
    };
    let file = file.map_err(failed)?;
    match file.try_lock() {
        // Another process may have created the file, and removed it between the open and the lock.
        Ok(()) if file.metadata().map_err(failed)?.nlink() > 0 => {
            Ok(LockedAuditFile { file: Arc::new(file), is_new })
        }
        Ok(()) | Err(std::fs::TryLockError::WouldBlock) => {
            Err(AuditError::Locked { path: path.into() })
        }
        Err(std::fs::TryLockError::Error(source)) => Err(failed(source)),
    }
}

/// Moves the bytes after the last whole record to a file of their own.
///
/// The bytes are on disk in that file before they leave the log. They are appended there, so that no byte is lost if a
/// crash interrupts this repair and a later process repeats it.
pub(super) fn move_torn_tail(
    path: &Path,
    log: &File,
    scan: &AuditLogScan,
) -> io::Result<Option<TornTail>> {
    let bytes = log.metadata()?.len() - scan.whole_bytes;
    if bytes == 0 {
        return Ok(None);
    }
    let mut kept_in = path.as_os_str().to_owned();
    kept_in.push(format!(".torn-{}", scan.chain.next_seq()));
    let kept_in = PathBuf::from(kept_in);
    // 1. Copy the bytes.
    let mut keep = private_append_options(&mut OpenOptions::new()).open(&kept_in)?;
    let mut from = log;
    from.seek(SeekFrom::Start(scan.whole_bytes))?;
    io::copy(&mut BufReader::new(from), &mut keep)?;
    // 2. Make the copy and its name durable.
    keep.sync_all()?;
    sync_directory(&kept_in)?;
    // 3. Only now remove the bytes from the log.
    log.set_len(scan.whole_bytes)?;
    Ok(Some(TornTail { bytes, kept_in }))
}

/// Syncs the directory of a file, so that the file's name is durable.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// Sets the options of a log file: append only, readable by its owner only, never through a link.
fn private_append_options(options: &mut OpenOptions) -> &mut OpenOptions {
    use std::os::unix::fs::OpenOptionsExt as _;
    options.append(true).create(true).mode(0o600).custom_flags(OPEN_NO_FOLLOW)
}

/// The time over which the rates of a run count. One second more than a minute, because the calls of a second are
/// counted at the second's start.
const RATE_WINDOW: Duration = Duration::from_secs(61);

/// The flag with which `open` fails if the last part of the path is a symbolic link (open(2)).
const OPEN_NO_FOLLOW: i32 = OFlags::NOFOLLOW.bits().cast_signed();

#[cfg(test)]
mod tests {
    use super::*;

    /// G9: A clock that is set back between two processes, and again before the next one, gives a run no time back.
    #[test]
    fn no_step_back_of_the_clock_shortens_the_span() {
        let begun = SystemTime::UNIX_EPOCH + Duration::from_hours(24 * 20_000);
        let minute = Duration::from_mins(1);
        let days = Duration::from_hours(24 * 40);
        let mut span = RecordedSpan::default();
        assert_eq!(span.elapsed_until(begun), Duration::ZERO);
        span.add_time(begun);
        span.add_time(begun + 50 * minute);
        // A restart under a clock that is 40 days behind.
        assert_eq!(span.elapsed_until(begun - days), 50 * minute);
        span.add_time(begun - days);
        span.add_time(begun - days + 5 * minute);
        // The next restart still knows both stretches.
        assert_eq!(span.elapsed_until(begun - days + 6 * minute), 56 * minute);
        assert_eq!(span.elapsed_until(begun - 2 * days), 55 * minute);
        // Records that are a moment out of order add nothing twice.
        span.add_time(begun - days + 5 * minute - Duration::from_secs(1));
        assert_eq!(span.elapsed_until(begun - days + 5 * minute), 55 * minute);
    }
}
