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
use crate::base::clock::Clock;

/// Owns the thread. Dropped, it has written what was left.
#[derive(Debug)]
pub(super) struct Writer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// There is a first line, a full batch, a flush, another file, or the end.
    wanted: Condvar,
    /// A batch has been written or given up.
    done: Condvar,
    lost: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    lines: Vec<u8>,
    clock: Clock,
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
pub(super) struct Rotation {
    pub(super) path: PathBuf,
    pub(super) max_bytes: u64,
}

/// Where the thread writes, and what it remembers of the last write.
#[derive(Debug)]
struct Output<W> {
    out: W,
    /// Bytes in it.
    len: u64,
    /// The last write ended within a line.
    is_torn: bool,
    is_failing: bool,
}

/// Why a batch is not written, and how many of its lines are not.
#[derive(Debug)]
struct Failure {
    lost: usize,
    source: io::Error,
}

impl Writer {
    pub(super) fn start(file: File, rotation: Option<Rotation>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue { lines: Vec::with_capacity(ROOM), ..Queue::default() }),
            wanted: Condvar::new(),
            done: Condvar::new(),
            lost: AtomicU64::new(0),
        });
        let worker = Arc::clone(&shared);
        let work = move || worker.work(Output::of(file), rotation.as_ref());
        let thread = thread::Builder::new().name("access-log".into()).spawn(work)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Lets `write` append a line. The lock is held for that, never for a write to the file.
    pub(super) fn append(&self, write: impl FnOnce(&mut Vec<u8>, &mut Clock)) {
        let mut guard = self.shared.queue();
        let queue = &mut *guard;
        let before = queue.lines.len();
        if before >= MAX_BACKLOG {
            drop(guard);
            return self.shared.lose(1);
        }
        write(&mut queue.lines, &mut queue.clock);
        let fills_batch = before < BATCH && queue.lines.len() >= BATCH;
        let is_first = mem::take(&mut queue.is_asleep);
        drop(guard);
        if is_first || fills_batch {
            self.shared.wanted.notify_one();
        }
    }

    /// Waits until what was appended before is written, but not for longer than [`PATIENCE`].
    pub(super) fn flush(&self) {
        let mut queue = self.shared.queue();
        queue.is_urgent = !queue.lines.is_empty();
        let batch = queue.taken + u64::from(queue.is_urgent);
        self.shared.wanted.notify_one();
        let is_undone = |queue: &mut Queue| queue.done < batch;
        drop(self.shared.done.wait_timeout_while(queue, PATIENCE, is_undone));
    }

    /// What is appended from now on goes into `file`.
    pub(super) fn replace(&self, file: File) {
        self.flush();
        self.shared.queue().replacement = Some(file);
        self.shared.wanted.notify_one();
    }

    pub(super) fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }
}

impl Drop for Writer {
    /// A destination that takes nothing for [`PATIENCE`] is left to itself: the end of the process must
    /// not hang on a pipe that nobody reads.
    fn drop(&mut self) {
        self.shared.queue().is_closed = true;
        self.flush();
        let is_idle = self.shared.queue().is_idle();
        if let Some(thread) = self.thread.take().filter(|_| is_idle) {
            drop(thread.join());
        }
    }
}

impl Shared {
    fn work(&self, mut output: Output<File>, rotation: Option<&Rotation>) {
        let mut batch = Vec::with_capacity(ROOM);
        while self.take(&mut batch, &mut output) {
            if let Err(failure) = output.write(&batch) {
                self.lose(failure.lost);
            }
            if let Some(rotation) = rotation.filter(|rotation| output.len >= rotation.max_bytes) {
                rotation.rotate(&mut output);
            }
            batch.clear();
            self.queue().done += 1;
            self.done.notify_all();
        }
    }

    /// Swaps the appended lines for the empty `batch` once they are worth a write; false at the end.
    fn take(&self, batch: &mut Vec<u8>, output: &mut Output<File>) -> bool {
        let mut queue = self.wait_for_others(self.queue());
        while queue.has_nothing_to_write() {
            if queue.is_closed {
                return false;
            }
            batch.shrink_to(ROOM);
            queue = self.wait_for_others(self.sleep(queue));
        }
        if let Some(file) = queue.replacement.take() {
            *output = Output::of(file);
        }
        mem::swap(&mut queue.lines, batch);
        queue.taken += 1;
        queue.is_urgent = false;
        true
    }

    /// Waits for an interval, in which more lines may come, or until what there is has to be written.
    fn wait_for_others<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        let waited = self.wanted.wait_timeout_while(queue, INTERVAL, |queue| queue.may_grow());
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits for a first line, or the end. Buffers that a busy time has made large are given back.
    fn sleep<'a>(&self, mut queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        queue.lines.shrink_to(ROOM);
        queue.is_asleep = true;
        let is_idle = |queue: &mut Queue| queue.has_nothing_to_write() && !queue.is_closed;
        let waited = self.wanted.wait_while(queue, is_idle);
        let mut queue = waited.unwrap_or_else(PoisonError::into_inner);
        queue.is_asleep = false;
        queue
    }

    fn lose(&self, lines: usize) {
        self.lost.fetch_add(lines as u64, Ordering::Relaxed);
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn has_nothing_to_write(&self) -> bool {
        self.lines.is_empty() && self.replacement.is_none()
    }

    fn may_grow(&self) -> bool {
        let is_wanted_now = self.is_urgent || self.replacement.is_some() || self.is_closed;
        self.lines.len() < BATCH && !is_wanted_now
    }

    fn is_idle(&self) -> bool {
        self.lines.is_empty() && self.done == self.taken
    }
}

impl Rotation {
    /// Moves the file to its name with `.1`, in the place of the one there, and begins it anew.
    fn rotate(&self, output: &mut Output<File>) {
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        match fs::rename(&self.path, old).and_then(|()| open_file(&self.path)) {
            Ok(file) => *output = Output::of(file),
            Err(error) => {
                tracing::warn!(%error, "cannot move the full access log away; it goes on growing");
                // Tried again when as much is written once more.
                output.len = 0;
            }
        }
    }
}

impl Output<File> {
    fn of(file: File) -> Self {
        let len = file.metadata().map_or(0, |metadata| metadata.len());
        Self { len, ..Self::new(file) }
    }
}

impl<W: Write> Output<W> {
    fn new(out: W) -> Self {
        Self { out, len: 0, is_torn: false, is_failing: false }
    }

    /// Writes a batch, and says in the program's own log when that begins and ceases to fail.
    fn write(&mut self, batch: &[u8]) -> Result<(), Failure> {
        let written = self.deliver(batch);
        let was_failing = mem::replace(&mut self.is_failing, written.is_err());
        match &written {
            Err(Failure { source, .. }) if !was_failing => {
                tracing::warn!(error = %source, "cannot write the access log; lines are lost until it can be");
            }
            Ok(()) if was_failing => tracing::info!("the access log is written again"),
            _ => (),
        }
        written
    }

    fn deliver(&mut self, batch: &[u8]) -> Result<(), Failure> {
        let lines = |bytes: &[u8]| memchr::memchr_iter(b'\n', bytes).count();
        if self.is_torn {
            // Or the next line would be read as the end of the torn one.
            let ended = self.out.write_all(b"\n");
            ended.map_err(|source| Failure { lost: lines(batch), source })?;
            self.is_torn = false;
        }
        let mut rest = batch;
        let mut pauses = 0;
        while !rest.is_empty() {
            match self.out.write(rest) {
                Ok(0) => return Err(self.give_up(batch, rest, ErrorKind::WriteZero.into())),
                Ok(taken) => {
                    rest = &rest[taken..];
                    self.len += taken as u64;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => (),
                // Some supervisors hand out a stdout that does not block.
                Err(error) if error.kind() == ErrorKind::WouldBlock && pauses < MAX_PAUSES => {
                    pauses += 1;
                    thread::park_timeout(PAUSE);
                }
                Err(source) => return Err(self.give_up(batch, rest, source)),
            }
        }
        Ok(())
    }

    fn give_up(&mut self, batch: &[u8], rest: &[u8], source: io::Error) -> Failure {
        let written = &batch[..batch.len() - rest.len()];
        self.is_torn = written.last().is_some_and(|last| *last != b'\n');
        Failure { lost: memchr::memchr_iter(b'\n', rest).count(), source }
    }
}

/// Bytes that are worth a write of their own. Ours: two hundred lines, so that they share what it costs to wake the thread.
const BATCH: usize = 64 * 1024;

/// How long a line waits for others. Ours, as nginx' `flush=100ms`.
const INTERVAL: Duration = Duration::from_millis(100);

/// What the buffers are made with, and what an idle log keeps of them.
const ROOM: usize = 16 * 1024;

/// Bytes waiting for a slow destination; a line past that is lost. Ours: three thousand lines.
const MAX_BACKLOG: usize = 1024 * 1024;

/// How long a flush waits for the destination. Ours: well under the ten seconds Docker grants a stop.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often, and how long each time, a stdout that is full for now is waited for: a second in all.
const MAX_PAUSES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(10);

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
            let mut output = Output::new(Disk { written: vec![], room });
            let lost = output.write(batch).unwrap_err().lost;
            assert_eq!(lost, 3 - room / 4, "with room for {room} bytes");

            output.out.room = 100;
            output.write(b"d=4\n").unwrap();
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
