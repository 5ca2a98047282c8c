//! The output of a sandbox: copied to a listener as it arrives, and stored within limits.
//!
//! **Invariant:** however much is printed, no more than the limit of each stream and one chunk is held in memory.
//!
//! **Invariant:** at any rate of output, the run's task yields to other tasks after each [`TURN_BYTES`] of output, and
//! reads no more than [`MAX_BYTES_PER_SECOND`] a second from the sandbox's pipes. Further output waits in the pipes,
//! and slows the sandbox down.

use std::collections::VecDeque;
use std::io;
use std::pin::pin;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

/// The two captured streams of a sandbox, and their listener.
#[derive(Debug)]
pub struct OutputCapture<W> {
    pub stdout: HeadTailBuffer,
    pub stderr: HeadTailBuffer,
    /// The listener; `None` once the listener has failed, was too slow, or is closed.
    live: Option<W>,
    /// The stream that the listener gets, if it does not get both.
    only: Option<OutputStream>,
    force_stop: CancellationToken,
    /// Cancelled when a stream has more bytes than its limit.
    overflow: CancellationToken,
    pace: OutputPace,
}

/// The pace at which a sandbox's output is read.
#[derive(Debug)]
struct OutputPace {
    /// The cost of the bytes that were read since the last turn ended.
    turn_cost: u64,
    /// The time at which everything read so far would have been read at [`MAX_BYTES_PER_SECOND`].
    due: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputStream {
    Stdout,
    Stderr,
}

/// The beginning and the end of one stream, within a limit of bytes.
#[derive(Clone, Debug)]
pub struct HeadTailBuffer {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    max_head: usize,
    max_tail: usize,
    bytes: u64,
}

/// The stored output of one stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CapturedOutput {
    /// The text. Where bytes are left out, a line in the middle states their number. Invalid UTF-8 is replaced.
    pub text: String,
    /// The number of bytes that the sandbox printed.
    pub bytes: u64,
    pub truncated: bool,
}

impl<W: AsyncWrite + Unpin> OutputCapture<W> {
    /// Creates a capture. `limit` bounds each stream, in bytes; `live` gets the output of both streams as it arrives.
    pub fn new(limit: usize, live: W) -> Self {
        let (stdout, stderr) = (HeadTailBuffer::new(limit), HeadTailBuffer::new(limit));
        let (force_stop, overflow) = (CancellationToken::new(), CancellationToken::new());
        let pace = OutputPace::new();
        Self { stdout, stderr, live: Some(live), only: None, force_stop, overflow, pace }
    }

    /// Creates a capture as [`new`](Self::new) does, but with a listener for only one of the two streams.
    pub fn for_stream(stream: OutputStream, limit: usize, live: W) -> Self {
        Self { only: Some(stream), ..Self::new(limit, live) }
    }

    /// Returns the token that makes the capture stop waiting for the listener.
    pub(super) fn detach_token(&self) -> CancellationToken {
        self.force_stop.clone()
    }

    /// Returns a token that is cancelled when a stream has more bytes than its limit, for a caller to whom a part of the
    /// output is worth nothing.
    pub fn overflow_token(&self) -> CancellationToken {
        self.overflow.clone()
    }

    /// Stores and forwards a chunk of one stream, and returns when more may be read. A slow listener slows the sandbox
    /// down. A listener that fails, or accepts nothing for [`LISTENER_TIMEOUT`], gets no further output.
    pub async fn push(&mut self, stream: OutputStream, chunk: &[u8]) {
        self.store_and_forward(stream, chunk).await;
        self.pace.throttle(chunk.len()).await;
    }

    async fn store_and_forward(&mut self, stream: OutputStream, chunk: &[u8]) {
        let buffer = match stream {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        };
        buffer.push(chunk);
        if buffer.is_overflowing() {
            self.overflow.cancel();
        }
        if self.only.is_some_and(|only| only != stream) {
            return;
        }
        // The listener is taken out, so that it is dropped after a failed or late write.
        let Some(mut live) = self.live.take() else { return };
        let copied = async {
            live.write_all(chunk).await?;
            live.flush().await
        };
        if self.write_to_listener(copied).await {
            self.live = Some(live);
        }
    }

    /// Closes the listener, also if the last line has no end.
    pub async fn close_listener(&mut self) {
        if let Some(mut live) = self.live.take() {
            self.write_to_listener(live.shutdown()).await;
        }
    }

    async fn write_to_listener(&self, written: impl Future<Output = io::Result<()>>) -> bool {
        tokio::select! {
            written = timeout(LISTENER_TIMEOUT, written) => matches!(written, Ok(Ok(()))),
            () = self.force_stop.cancelled() => false,
        }
    }
}

impl OutputPace {
    fn new() -> Self {
        Self { turn_cost: 0, due: Instant::now() }
    }

    /// Counts a chunk, and yields to other tasks at the end of a turn. A reader that always finds more output would
    /// occupy its worker thread. Tokio's own budget counts reads, but not the work on the bytes; once the budget is
    /// used up, no timer of the same task fires.
    async fn throttle(&mut self, length: usize) {
        let cost = length as u64 + CHUNK_COST_BYTES;
        self.turn_cost += cost;
        if self.turn_cost < TURN_BYTES {
            return;
        }
        yield_now().await;
        let now = Instant::now();
        let due = self.next_turn_start(now);
        if due > now {
            sleep_until(due).await;
        }
    }

    /// Returns the time at which the next turn may begin.
    fn next_turn_start(&mut self, now: Instant) -> Instant {
        // A sandbox that was quiet may catch up, but only for the length of the burst window.
        let earliest = now.checked_sub(BURST_WINDOW).unwrap_or(now);
        let took = Duration::from_nanos(
            self.turn_cost.saturating_mul(1_000_000_000) / MAX_BYTES_PER_SECOND,
        );
        (self.turn_cost, self.due) = (0, self.due.max(earliest) + took);
        self.due
    }
}

impl HeadTailBuffer {
    /// Keeps up to `limit` bytes: half of it from the beginning, the rest from the end.
    pub fn new(limit: usize) -> Self {
        let max_head = limit / 2;
        Self { head: vec![], tail: VecDeque::new(), max_head, max_tail: limit - max_head, bytes: 0 }
    }

    pub fn push(&mut self, chunk: &[u8]) {
        self.bytes += chunk.len() as u64;
        // The head fills first; only then does the tail get bytes.
        let (head, rest) = chunk.split_at(chunk.len().min(self.max_head - self.head.len()));
        self.head.extend_from_slice(head);
        // A chunk longer than the tail replaces the whole tail, so only the chunk's end is copied.
        let rest = &rest[rest.len().saturating_sub(self.max_tail)..];
        let too_many = (self.tail.len() + rest.len()).saturating_sub(self.max_tail);
        self.tail.drain(..too_many);
        self.tail.extend(rest);
    }

    /// Returns true if bytes are left out.
    fn is_overflowing(&self) -> bool {
        self.bytes > (self.head.len() + self.tail.len()) as u64
    }

    pub fn finish(self) -> CapturedOutput {
        let Self { head: mut output, tail, bytes, .. } = self;
        let left_out = bytes - (output.len() + tail.len()) as u64;
        if left_out > 0 {
            output.extend_from_slice(format!("\n[{left_out} bytes left out]\n").as_bytes());
        }
        output.extend(tail);
        let text = String::from_utf8_lossy(&output).into_owned();
        CapturedOutput { text, bytes, truncated: left_out > 0 }
    }
}

/// Returns the result of `end`, once the output is read completely or is late. A process that keeps the output open,
/// or an engine that does not close it, must not delay the run's end.
pub(super) async fn join_with_output<T, E>(
    end: impl Future<Output = Result<T, E>>,
    pump: impl Future<Output = ()>,
    detach_token: &CancellationToken,
) -> Result<T, E> {
    let (mut end, mut pump) = (pin!(end), pin!(pump));
    let mut is_read = false;
    // Both are polled together: a sandbox whose pipes are full cannot end before its output is read.
    let ended = loop {
        tokio::select! {
            ended = &mut end => break ended?,
            () = &mut pump, if !is_read => is_read = true,
        }
    };
    // 1. The sandbox has ended, but its output has not: wait for the bytes that are still in the pipes.
    if !is_read && timeout(OUTPUT_DRAIN_TIMEOUT, &mut pump).await.is_err() {
        // 2. A slow listener may be the cause: stop waiting for the listener, and read the rest without it.
        detach_token.cancel();
        if timeout(FORCED_DRAIN_TIMEOUT, pump).await.is_err() {
            tracing::warn!("the output did not end with the sandbox; the rest is left out");
        }
    }
    Ok(ended)
}

/// The time from the sandbox's end to the end of its output. At most some full pipes are on the way then.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// The further time to read the output after the listener was given up.
const FORCED_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// The time that a listener may take for one chunk.
const LISTENER_TIMEOUT: Duration = Duration::from_secs(10);

/// The bytes of output after which other tasks get their turn: as many as one read returns.
const TURN_BYTES: u64 = 16 << 10;

/// The cost of a chunk in addition to its bytes, so that many small chunks also end a turn.
const CHUNK_COST_BYTES: u64 = 256;

/// The maximum output of one run, in bytes per second.
const MAX_BYTES_PER_SECOND: u64 = 32 << 20;

/// The quiet time whose unused bytes a sandbox may print at once afterwards.
const BURST_WINDOW: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use tokio::io::sink;
    use tokio::task::{LocalSet, spawn_local};

    use super::*;

    /// R5: however fast a sandbox prints, in large chunks or in small ones, other tasks have their turns.
    #[tokio::test(flavor = "current_thread")]
    async fn a_sandbox_that_prints_without_end_leaves_turns_to_others() {
        for (chunk, count) in [(16 << 10, 64), (1, 4096)] {
            let tasks = LocalSet::new();
            let turns = Rc::new(Cell::new(0));
            let counted = Rc::clone(&turns);
            tasks.spawn_local(async move {
                loop {
                    counted.set(counted.get() + 1);
                    yield_now().await;
                }
            });
            let seen = tasks.run_until(async {
                let printed = spawn_local(async move {
                    let mut output = OutputCapture::new(64, sink());
                    for _ in 0..count {
                        output.push(OutputStream::Stderr, &vec![b'\n'; chunk]).await;
                    }
                    turns.get()
                });
                printed.await.expect("it ends")
            });
            let seen = seen.await;
            assert!(seen >= 60, "{seen} turns beside {count} chunks of {chunk}");
        }
    }

    /// R5: no run prints faster than its rate; the rest of the output waits in the pipe. After a quiet time, a burst
    /// is allowed.
    #[tokio::test(flavor = "current_thread")]
    async fn a_run_prints_no_faster_than_its_rate() {
        let start = Instant::now();
        let (mut pace, mut now, mut taken) = (OutputPace::new(), start + BURST_WINDOW * 8, 0);
        let second = now + Duration::from_secs(1);
        while now < second {
            pace.turn_cost = TURN_BYTES;
            taken += pace.turn_cost;
            now = now.max(pace.next_turn_start(now));
        }
        let burst = MAX_BYTES_PER_SECOND / 4;
        assert!(
            (MAX_BYTES_PER_SECOND..=MAX_BYTES_PER_SECOND + burst + TURN_BYTES).contains(&taken),
            "{taken}"
        );
    }
}
