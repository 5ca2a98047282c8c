//! The buffer that requests append to, and the thread that empties the buffer.
//!
//! The thread exists because a destination may be slow. A worker that writes would delay each of its streams, and
//! neither a disk nor a pipe shared with other processes can be made non-blocking. Under load the thread is woken for
//! full batches only. Otherwise the thread waits for lines by itself, and sleeps when no line has come for an interval.
//! A line costs 0.33 µs beside its text (330 bytes, one busy CPU). Batches of this size written by the worker would
//! cost 0.26 µs, batches of 16 KiB like nginx's 0.36 µs.

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

/// The owner of the writing thread. Dropping the writer writes the remaining lines.
#[derive(Debug)]
pub(super) struct AccessLogWriter {
    shared: Arc<AccessLogWriterShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct AccessLogWriterShared {
    queue: Mutex<LineQueue>,
    /// Notified for a first line, a full batch, a flush, another file, or the end.
    wake: Condvar,
    /// Notified when a batch has been written or abandoned.
    done: Condvar,
    lost: AtomicU64,
}

#[derive(Debug, Default)]
struct LineQueue {
    lines: Vec<u8>,
    clock: TimestampFormatter,
    /// True while the thread waits for a first line, and not for the end of an interval.
    is_asleep: bool,
    replacement: Option<File>,
    is_urgent: bool,
    is_closed: bool,
    /// The number of batches that the thread has taken. A flush waits until `done` is equal.
    taken: u64,
    done: u64,
}

/// The rule for renaming a full file.
#[derive(Debug)]
pub(super) struct AccessLogRotation {
    pub(super) path: PathBuf,
    pub(super) max_bytes: u64,
}

/// The destination of the thread, with the state of its last write.
#[derive(Debug)]
struct LineBatchSink<W> {
    out: W,
    /// The number of bytes in the destination.
    len: u64,
    /// True if the last write ended within a line.
    is_torn: bool,
    is_failing: bool,
}

/// The error of a batch, with the number of its lost lines.
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
            wake: Condvar::new(),
            done: Condvar::new(),
            lost: AtomicU64::new(0),
        });
        // The thread holds only the shared part, so dropping the writer can end the thread.
        let worker = Arc::clone(&shared);
        let work = move || worker.run_writer_loop(LineBatchSink::for_file(file), rotation.as_ref());
        let thread = thread::Builder::new().name("access-log".into()).spawn(work)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Calls `write` to append a line. The lock is held during that call, and never during a write to the file.
    pub(super) fn append_line(&self, write: impl FnOnce(&mut Vec<u8>, &mut TimestampFormatter)) {
        let mut guard = self.shared.lock_queue();
        let queue = &mut *guard;
        let before = queue.lines.len();
        // The destination has not kept up. Losing this line keeps the memory of the process bounded.
        if before >= MAX_BACKLOG_BYTES {
            drop(guard);
            return self.shared.count_lost_lines(1);
        }
        write(&mut queue.lines, &mut queue.clock);
        // The thread is woken only when it must act: for the line that completes a batch, or for a first line while it
        // sleeps.
        let fills_batch = before < MIN_BATCH_BYTES && queue.lines.len() >= MIN_BATCH_BYTES;
        let is_first = mem::take(&mut queue.is_asleep);
        // The lock is released first, so that the woken thread does not wait for it.
        drop(guard);
        if is_first || fills_batch {
            self.shared.wake.notify_one();
        }
    }

    /// Waits until the lines appended before are written, for at most [`FLUSH_TIMEOUT`].
    pub(super) fn wait_flushed(&self) {
        let mut queue = self.shared.lock_queue();
        // Lines in the queue form one more batch. Without such lines, only a batch in progress is waited for.
        queue.is_urgent = !queue.lines.is_empty();
        let batch = queue.taken + u64::from(queue.is_urgent);
        self.shared.wake.notify_one();
        let is_undone = |queue: &mut LineQueue| queue.done < batch;
        drop(self.shared.done.wait_timeout_while(queue, FLUSH_TIMEOUT, is_undone));
    }

    /// Switches to `file` for all lines that are appended from now on.
    pub(super) fn replace_file(&self, file: File) {
        // The lines up to now belong to the old file.
        self.wait_flushed();
        self.shared.lock_queue().replacement = Some(file);
        self.shared.wake.notify_one();
    }

    pub(super) fn lost_lines(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }
}

impl Drop for AccessLogWriter {
    /// Flushes, closes the queue and joins the thread. If the destination takes nothing for [`FLUSH_TIMEOUT`], the
    /// thread is left running: the end of the process must not hang on a pipe without a reader.
    fn drop(&mut self) {
        self.shared.lock_queue().is_closed = true;
        self.wait_flushed();
        // A thread that is not idle hangs in a write, and joining it would hang, too.
        let is_idle = self.shared.lock_queue().is_idle();
        if let Some(thread) = self.thread.take().filter(|_| is_idle) {
            drop(thread.join());
        }
    }
}

impl AccessLogWriterShared {
    /// Writes batches until the queue is closed.
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
            // Only now: a flush waits until the batch is in the file, also if its lines were lost.
            self.lock_queue().done += 1;
            self.done.notify_all();
        }
    }

    /// Swaps the appended lines for the empty `batch` once they are worth a write. Returns false at the end.
    fn take_batch(&self, batch: &mut Vec<u8>, output: &mut LineBatchSink<File>) -> bool {
        // 1. Give lines an interval to gather, unless the queue must be written at once.
        let mut queue = self.wait_for_more_lines(self.lock_queue());
        // 2. No line came within the interval: end, or sleep until the first line. Large buffers are shrunk before.
        while queue.has_no_pending_lines() {
            if queue.is_closed {
                return false;
            }
            batch.shrink_to(BUFFER_CAPACITY_BYTES);
            queue = self.wait_for_more_lines(self.wait_for_first_line(queue));
        }
        // 3. Switch the file. The lines before the switch were flushed by `replace_file`.
        if let Some(file) = queue.replacement.take() {
            *output = LineBatchSink::for_file(file);
        }
        // 4. Take the lines by a swap: requests append to the other buffer while this thread writes.
        mem::swap(&mut queue.lines, batch);
        queue.taken += 1;
        queue.is_urgent = false;
        true
    }

    /// Waits for an interval in which more lines may come, or until the lines must be written.
    fn wait_for_more_lines<'a>(
        &self,
        queue: MutexGuard<'a, LineQueue>,
    ) -> MutexGuard<'a, LineQueue> {
        let waited = self.wake.wait_timeout_while(queue, BATCH_INTERVAL, |queue| queue.has_room());
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits for a first line, or for the end. Buffers that a busy time has enlarged are shrunk.
    fn wait_for_first_line<'a>(
        &self,
        mut queue: MutexGuard<'a, LineQueue>,
    ) -> MutexGuard<'a, LineQueue> {
        queue.lines.shrink_to(BUFFER_CAPACITY_BYTES);
        // The next line's request sees this flag and wakes the thread.
        queue.is_asleep = true;
        let is_idle = |queue: &mut LineQueue| queue.has_no_pending_lines() && !queue.is_closed;
        let waited = self.wake.wait_while(queue, is_idle);
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
    /// Returns true if there is nothing to write and no file to switch to.
    fn has_no_pending_lines(&self) -> bool {
        self.lines.is_empty() && self.replacement.is_none()
    }

    /// Returns true if the queue may wait for more lines.
    fn has_room(&self) -> bool {
        let is_wanted_now = self.is_urgent || self.replacement.is_some() || self.is_closed;
        self.lines.len() < MIN_BATCH_BYTES && !is_wanted_now
    }

    /// Returns true if every appended line is written or counted as lost.
    fn is_idle(&self) -> bool {
        self.lines.is_empty() && self.done == self.taken
    }
}

impl AccessLogRotation {
    /// Renames the full file with the suffix `.1`, which replaces an older one, and begins a new file.
    fn rotate_file(&self, output: &mut LineBatchSink<File>) {
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        match fs::rename(&self.path, old).and_then(|()| open_file(&self.path)) {
            Ok(file) => *output = LineBatchSink::for_file(file),
            Err(error) => {
                tracing::warn!(%error, "cannot rename the full access log; the file keeps growing");
                // Retried when another `max_bytes` bytes are written, not after each batch.
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

    /// Writes a batch. The program's own log reports when writing starts to fail and when it works again.
    fn write_batch(&mut self, batch: &[u8]) -> Result<(), BatchWriteError> {
        let written = self.try_write_batch(batch);
        let was_failing = mem::replace(&mut self.is_failing, written.is_err());
        match &written {
            Err(BatchWriteError { source, .. }) if !was_failing => {
                tracing::warn!(error = %source, "cannot write the access log; lines are lost until writing works again");
            }
            Ok(()) if was_failing => tracing::info!("the access log is written again"),
            _ => (),
        }
        written
    }

    fn try_write_batch(&mut self, batch: &[u8]) -> Result<(), BatchWriteError> {
        let lines = |bytes: &[u8]| memchr::memchr_iter(b'\n', bytes).count();
        if self.is_torn {
            // Without this line end, the next line would look like the end of the torn line.
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
                // Some supervisors hand out a non-blocking stdout. A full pipe is then an error and not a wait.
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

    /// Ends a batch after an error. The lines without their line end in the file are lost.
    fn abandon_batch(&mut self, batch: &[u8], rest: &[u8], source: io::Error) -> BatchWriteError {
        let written = &batch[..batch.len() - rest.len()];
        self.is_torn = written.last().is_some_and(|last| *last != b'\n');
        BatchWriteError { lost: memchr::memchr_iter(b'\n', rest).count(), source }
    }
}

/// The size of the queue that is worth a write of its own, in bytes. Our choice: two hundred lines, which share the
/// cost of waking the thread.
const MIN_BATCH_BYTES: usize = 64 * 1024;

/// The time that a line waits for further lines. Our choice, equal to nginx's `flush=100ms`.
const BATCH_INTERVAL: Duration = Duration::from_millis(100);

/// The initial capacity of the buffers, to which an idle log shrinks them, in bytes.
const BUFFER_CAPACITY_BYTES: usize = 16 * 1024;

/// The largest size of lines that wait for a slow destination, in bytes. Further lines are lost. Our choice: three
/// thousand lines.
const MAX_BACKLOG_BYTES: usize = 1024 * 1024;

/// The longest time that a flush waits for the destination. Our choice: well under the ten seconds that Docker grants a
/// stop.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The largest number of waits for a stdout that is full. With [`WRITE_RETRY_DELAY`], the waits are a second in all.
const MAX_WRITE_RETRIES: u32 = 100;
/// The duration of one wait for a stdout that is full.
const WRITE_RETRY_DELAY: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    /// A destination that takes `room` bytes, and then is full.
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
