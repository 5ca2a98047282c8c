//! The buffer that requests append to, and the thread that empties it.
//!
//! The thread is there for a destination that takes its time: a worker that wrote would hold up every stream on it, and neither
//! a disk nor a pipe that other processes share can be told not to block. Under load the thread is woken for full batches only: it
//! waits for lines by itself, and sleeps when none has come for an interval. A line so costs 0.33 µs beside its text (330 bytes, one
//! busy CPU); written by the worker in batches as large, it would be 0.26 µs, in nginx' batches of 16 KiB 0.36 µs.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::mem;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::open_file;
use crate::base::timestamp::TimestampFormatter;

/// Owns the thread. Dropped, it has written what was left.
#[derive(Debug)]
pub(super) struct AccessLogWriter {
    shared: Arc<AccessLogWriterShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct AccessLogWriterShared {
    queue: Mutex<LineQueue>,
    /// There is a first line, a full batch, a flush, another file, or the end.
    wanted: Condvar,
    /// A batch has been written or given up.
    done: Condvar,
    lost: AtomicU64,
}

#[derive(Debug, Default)]
struct LineQueue {
    lines: Vec<u8>,
    clock: TimestampFormatter,
    /// The thread waits for a first line, and not for an interval's end.
    is_asleep: bool,
    replacement: Option<File>,
    is_urgent: bool,
    is_closed: bool,
    /// Batches taken, and those of them that are done: a flush waits until they are equal.
    taken: u64,
    done: u64,
}

/// When a file is moved away, and which.
#[derive(Debug)]
pub(super) struct AccessLogRotation {
    pub(super) path: PathBuf,
    pub(super) max_bytes: u64,
}

/// Where the thread writes, and what it remembers of the last write.
#[derive(Debug)]
struct LineBatchSink<W> {
    out: W,
    /// Bytes in it.
    len: u64,
    /// The last write ended within a line.
    is_torn: bool,
    is_failing: bool,
}

/// Why a batch is not written, and how many of its lines are not.
#[derive(Debug)]
struct BatchWriteError {
    lost: usize,
    source: io::Error,
}

impl AccessLogWriter {
    pub(super) fn start_thread(
        file: File,
        rotation: Option<AccessLogRotation>,
    ) -> io::Result<Self> {
        let shared = Arc::new(AccessLogWriterShared {
            queue: Mutex::new(LineQueue {
                lines: Vec::with_capacity(BUFFER_CAPACITY_BYTES),
                ..LineQueue::default()
            }),
            wanted: Condvar::new(),
            done: Condvar::new(),
            lost: AtomicU64::new(0),
        });
        let worker = Arc::clone(&shared);
        let work = move || worker.run_writer_loop(LineBatchSink::for_file(file), rotation.as_ref());
        let thread = thread::Builder::new().name("access-log".into()).spawn(work)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Lets `write` append a line. The lock is held for that, never for a write to the file.
    pub(super) fn append_line(&self, write: impl FnOnce(&mut Vec<u8>, &mut TimestampFormatter)) {
        let mut guard = self.shared.lock_queue();
        let queue = &mut *guard;
        let before = queue.lines.len();
        if before >= MAX_BACKLOG_BYTES {
            drop(guard);
            return self.shared.count_lost_lines(1);
        }
        write(&mut queue.lines, &mut queue.clock);
        let fills_batch = before < MIN_BATCH_BYTES && queue.lines.len() >= MIN_BATCH_BYTES;
        let is_first = mem::take(&mut queue.is_asleep);
        drop(guard);
        if is_first || fills_batch {
            self.shared.wanted.notify_one();
        }
    }

    /// Waits until what was appended before is written, but not for longer than [`FLUSH_TIMEOUT`].
    pub(super) fn wait_flushed(&self) {
        let mut queue = self.shared.lock_queue();
        queue.is_urgent = !queue.lines.is_empty();
        let batch = queue.taken + u64::from(queue.is_urgent);
        self.shared.wanted.notify_one();
        let is_undone = |queue: &mut LineQueue| queue.done < batch;
        drop(self.shared.done.wait_timeout_while(queue, FLUSH_TIMEOUT, is_undone));
    }

    /// What is appended from now on goes into `file`.
    pub(super) fn replace_file(&self, file: File) {
        self.wait_flushed();
        self.shared.lock_queue().replacement = Some(file);
        self.shared.wanted.notify_one();
    }

    pub(super) fn lost_lines(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }
}

impl Drop for AccessLogWriter {
    /// A destination that takes nothing for [`FLUSH_TIMEOUT`] is left to itself: the end of the process must
    /// not hang on a pipe that nobody reads.
    fn drop(&mut self) {
        self.shared.lock_queue().is_closed = true;
        self.wait_flushed();
        let is_idle = self.shared.lock_queue().is_idle();
        if let Some(thread) = self.thread.take().filter(|_| is_idle) {
            drop(thread.join());
        }
    }
}

impl AccessLogWriterShared {
    fn run_writer_loop(
        &self,
        mut output: LineBatchSink<File>,
        rotation: Option<&AccessLogRotation>,
    ) {
        let mut batch = Vec::with_capacity(BUFFER_CAPACITY_BYTES);
        while self.take_batch(&mut batch, &mut output) {
            if let Err(failure) = output.write_batch(&batch) {
                self.count_lost_lines(failure.lost);
            }
            if let Some(rotation) = rotation.filter(|rotation| output.len >= rotation.max_bytes) {
                rotation.rotate_file(&mut output);
            }
            batch.clear();
            self.lock_queue().done += 1;
            self.done.notify_all();
        }
    }

    /// Swaps the appended lines for the empty `batch` once they are worth a write; false at the end.
    fn take_batch(&self, batch: &mut Vec<u8>, output: &mut LineBatchSink<File>) -> bool {
        let mut queue = self.wait_for_more_lines(self.lock_queue());
        while queue.has_no_pending_lines() {
            if queue.is_closed {
                return false;
            }
            batch.shrink_to(BUFFER_CAPACITY_BYTES);
            queue = self.wait_for_more_lines(self.wait_for_first_line(queue));
        }
        if let Some(file) = queue.replacement.take() {
            *output = LineBatchSink::for_file(file);
        }
        mem::swap(&mut queue.lines, batch);
        queue.taken += 1;
        queue.is_urgent = false;
        true
    }

    /// Waits for an interval, in which more lines may come, or until what there is has to be written.
    fn wait_for_more_lines<'a>(
        &self,
        queue: MutexGuard<'a, LineQueue>,
    ) -> MutexGuard<'a, LineQueue> {
        let waited =
            self.wanted.wait_timeout_while(queue, BATCH_INTERVAL, |queue| queue.has_room());
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits for a first line, or the end. Buffers that a busy time has made large are given back.
    fn wait_for_first_line<'a>(
        &self,
        mut queue: MutexGuard<'a, LineQueue>,
    ) -> MutexGuard<'a, LineQueue> {
        queue.lines.shrink_to(BUFFER_CAPACITY_BYTES);
        queue.is_asleep = true;
        let is_idle = |queue: &mut LineQueue| queue.has_no_pending_lines() && !queue.is_closed;
        let waited = self.wanted.wait_while(queue, is_idle);
        let mut queue = waited.unwrap_or_else(PoisonError::into_inner);
        queue.is_asleep = false;
        queue
    }

    fn count_lost_lines(&self, lines: usize) {
        self.lost.fetch_add(lines as u64, Ordering::Relaxed);
    }

    fn lock_queue(&self) -> MutexGuard<'_, LineQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LineQueue {
    fn has_no_pending_lines(&self) -> bool {
        self.lines.is_empty() && self.replacement.is_none()
    }

    fn has_room(&self) -> bool {
        let is_wanted_now = self.is_urgent || self.replacement.is_some() || self.is_closed;
        self.lines.len() < MIN_BATCH_BYTES && !is_wanted_now
    }

    fn is_idle(&self) -> bool {
        self.lines.is_empty() && self.done == self.taken
    }
}

impl AccessLogRotation {
    /// Moves the file to its name with `.1`, in the place of the one there, and begins it anew.
    fn rotate_file(&self, output: &mut LineBatchSink<File>) {
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        match fs::rename(&self.path, old).and_then(|()| open_file(&self.path)) {
            Ok(file) => *output = LineBatchSink::for_file(file),
            Err(error) => {
                tracing::warn!(%error, "cannot move the full access log away; it goes on growing");
                // Tried again when as much is written once more.
                output.len = 0;
            }
        }
    }
}

impl LineBatchSink<File> {
    fn for_file(file: File) -> Self {
        let len = file.metadata().map_or(0, |metadata| metadata.len());
        Self { len, ..Self::new(file) }
    }
}

impl<W: Write> LineBatchSink<W> {
    fn new(out: W) -> Self {
        Self { out, len: 0, is_torn: false, is_failing: false }
    }

    /// Writes a batch, and says in the program's own log when that begins and ceases to fail.
    fn write_batch(&mut self, batch: &[u8]) -> Result<(), BatchWriteError> {
        let written = self.try_write_batch(batch);
        let was_failing = mem::replace(&mut self.is_failing, written.is_err());
        match &written {
            Err(BatchWriteError { source, .. }) if !was_failing => {
                tracing::warn!(error = %source, "cannot write the access log; lines are lost until it can be");
            }
            Ok(()) if was_failing => tracing::info!("the access log is written again"),
            _ => (),
        }
        written
    }

    fn try_write_batch(&mut self, batch: &[u8]) -> Result<(), BatchWriteError> {
        let lines = |bytes: &[u8]| memchr::memchr_iter(b'\n', bytes).count();
        if self.is_torn {
            // Or the next line would be read as the end of the torn one.
            let ended = self.out.write_all(b"\n");
            ended.map_err(|source| BatchWriteError { lost: lines(batch), source })?;
            self.is_torn = false;
        }
        let mut rest = batch;
        let mut pauses = 0;
        while !rest.is_empty() {
            match self.out.write(rest) {
                Ok(0) => return Err(self.abandon_batch(batch, rest, ErrorKind::WriteZero.into())),
                Ok(taken) => {
                    rest = &rest[taken..];
                    self.len += taken as u64;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => (),
                // Some supervisors hand out a stdout that does not block.
                Err(error)
                    if error.kind() == ErrorKind::WouldBlock && pauses < MAX_WRITE_RETRIES =>
                {
                    pauses += 1;
                    thread::park_timeout(WRITE_RETRY_DELAY);
                }
                Err(source) => return Err(self.abandon_batch(batch, rest, source)),
            }
        }
        Ok(())
    }

    fn abandon_batch(&mut self, batch: &[u8], rest: &[u8], source: io::Error) -> BatchWriteError {
        let written = &batch[..batch.len() - rest.len()];
        self.is_torn = written.last().is_some_and(|last| *last != b'\n');
        BatchWriteError { lost: memchr::memchr_iter(b'\n', rest).count(), source }
    }
}

/// Bytes that are worth a write of their own. Ours: two hundred lines, so that they share what it costs to wake the thread.
const MIN_BATCH_BYTES: usize = 64 * 1024;

/// How long a line waits for others. Ours, as nginx' `flush=100ms`.
const BATCH_INTERVAL: Duration = Duration::from_millis(100);

/// What the buffers are made with, and what an idle log keeps of them.
const BUFFER_CAPACITY_BYTES: usize = 16 * 1024;

/// Bytes waiting for a slow destination; a line past that is lost. Ours: three thousand lines.
const MAX_BACKLOG_BYTES: usize = 1024 * 1024;

/// How long a flush waits for the destination. Ours: well under the ten seconds Docker grants a stop.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// How often, and how long each time, a stdout that is full for now is waited for: a second in all.
const MAX_WRITE_RETRIES: u32 = 100;
const WRITE_RETRY_DELAY: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes `room` bytes, then is full.
    struct Disk {
        written: Vec<u8>,
        room: usize,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.room);
            if taken == 0 {
                return Err(ErrorKind::StorageFull.into());
            }
            self.room -= taken;
            self.written.extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_torn_by_a_full_disk_is_counted_and_ended() {
        let batch = b"a=1\nb=2\nc=3\n";
        for room in 0..batch.len() {
            let mut output = LineBatchSink::new(Disk { written: vec![], room });
            let lost = output.write_batch(batch).unwrap_err().lost;
            assert_eq!(lost, 3 - room / 4, "with room for {room} bytes");

            output.out.room = 100;
            output.write_batch(b"d=4\n").unwrap();
            let text = String::from_utf8(output.out.written).unwrap();
            let whole = text.lines().filter(|line| line.len() == 3).count();
            assert!(whole > 3 - lost, "{text:?}");
            assert!(
                text.lines().all(|line| ["a=1", "b=2", "c=3", "d=4"]
                    .iter()
                    .any(|whole| whole.starts_with(line))),
                "{text:?}"
            );
        }
    }
}
