//! What a sandbox prints: copied to whoever listens as it comes, and kept in bounds.
//!
//! **Invariant:** however much is printed, no more than the limit of each stream and one chunk is held in memory.
//!
//! **Invariant:** however fast a sandbox prints, its run gives way to other tasks after each [`TURN_BYTES`] of output, and takes no
//! more than [`MAX_BYTES_PER_SECOND`] a second from the sandbox's pipes: what is more waits in them, and slows the sandbox down.

use std::collections::VecDeque;
use std::io;
use std::pin::pin;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

/// The two streams of a sandbox, and who listens to them.
#[derive(Debug)]
pub struct OutputCapture<W> {
    pub stdout: HeadTailBuffer,
    pub stderr: HeadTailBuffer,
    /// `None` once nobody listens any more.
    live: Option<W>,
    /// The one stream that is listened to, where it is not both.
    only: Option<OutputStream>,
    hurry: CancellationToken,
    pace: OutputPace,
}

/// How much of a sandbox's output was taken, and when more may be.
#[derive(Debug)]
struct OutputPace {
    /// Taken since the last turn ended.
    turn: u64,
    /// When all that was taken would have been taken at [`MAX_BYTES_PER_SECOND`].
    due: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputStream {
    Stdout,
    Stderr,
}

/// The beginning and the end of one stream.
#[derive(Clone, Debug)]
pub struct HeadTailBuffer {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    max_head: usize,
    max_tail: usize,
    bytes: u64,
}

/// What is kept of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CapturedOutput {
    /// Where something is left out, a line in the middle says how much. What is not UTF-8 is replaced.
    pub text: String,
    /// How much was printed.
    pub bytes: u64,
    pub truncated: bool,
}

impl<W: AsyncWrite + Unpin> OutputCapture<W> {
    /// `limit` is for each stream, in bytes; `live` is given what both print, as it comes.
    pub fn new(limit: usize, live: W) -> Self {
        let (stdout, stderr) = (HeadTailBuffer::new(limit), HeadTailBuffer::new(limit));
        let hurry = CancellationToken::new();
        Self { stdout, stderr, live: Some(live), only: None, hurry, pace: OutputPace::new() }
    }

    /// As [`new`](Self::new), for somebody who listens to one of the two.
    pub fn for_stream(stream: OutputStream, limit: usize, live: W) -> Self {
        Self { only: Some(stream), ..Self::new(limit, live) }
    }

    /// When it is cancelled, nobody waits for the listener any more.
    pub(super) fn detach_token(&self) -> CancellationToken {
        self.hurry.clone()
    }

    /// Takes what one stream has printed. A listener that is slow slows the sandbox down; one that cannot be written to,
    /// or takes nothing for a time, is not asked again. Returns when more may be taken.
    pub async fn push(&mut self, stream: OutputStream, chunk: &[u8]) {
        self.store_and_forward(stream, chunk).await;
        self.pace.throttle(chunk.len()).await;
    }

    async fn store_and_forward(&mut self, stream: OutputStream, chunk: &[u8]) {
        match stream {
            OutputStream::Stdout => self.stdout.push(chunk),
            OutputStream::Stderr => self.stderr.push(chunk),
        }
        if self.only.is_some_and(|only| only != stream) {
            return;
        }
        let Some(mut live) = self.live.take() else { return };
        let copied = async {
            live.write_all(chunk).await?;
            live.flush().await
        };
        if self.write_to_listener(copied).await {
            self.live = Some(live);
        }
    }

    /// Tells the listener that nothing more comes, also where a line has not ended.
    pub async fn close_listener(&mut self) {
        if let Some(mut live) = self.live.take() {
            self.write_to_listener(live.shutdown()).await;
        }
    }

    async fn write_to_listener(&self, told: impl Future<Output = io::Result<()>>) -> bool {
        tokio::select! {
            told = timeout(LISTENER_TIMEOUT, told) => matches!(told, Ok(Ok(()))),
            () = self.hurry.cancelled() => false,
        }
    }
}

impl OutputPace {
    fn new() -> Self {
        Self { turn: 0, due: Instant::now() }
    }

    /// Counts a chunk. A reader that always finds more would keep its worker: tokio's own budget counts reads, not what
    /// is done with the bytes, and once it is used up no timer of the same task fires.
    async fn throttle(&mut self, length: usize) {
        let cost = length as u64 + CHUNK_COST_BYTES;
        self.turn += cost;
        if self.turn < TURN_BYTES {
            return;
        }
        yield_now().await;
        let now = Instant::now();
        let due = self.next_turn_start(now);
        if due > now {
            sleep_until(due).await;
        }
    }

    /// Says when the next turn may begin.
    fn next_turn_start(&mut self, now: Instant) -> Instant {
        let earliest = now.checked_sub(BURST_WINDOW).unwrap_or(now);
        let took =
            Duration::from_nanos(self.turn.saturating_mul(1_000_000_000) / MAX_BYTES_PER_SECOND);
        (self.turn, self.due) = (0, self.due.max(earliest) + took);
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
        let (head, rest) = chunk.split_at(chunk.len().min(self.max_head - self.head.len()));
        self.head.extend_from_slice(head);
        let rest = &rest[rest.len().saturating_sub(self.max_tail)..];
        let too_many = (self.tail.len() + rest.len()).saturating_sub(self.max_tail);
        self.tail.drain(..too_many);
        self.tail.extend(rest);
    }

    pub fn finish(self) -> CapturedOutput {
        let Self { head: mut kept, tail, bytes, .. } = self;
        let left_out = bytes - (kept.len() + tail.len()) as u64;
        if left_out > 0 {
            kept.extend_from_slice(format!("\n[{left_out} bytes left out]\n").as_bytes());
        }
        kept.extend(tail);
        let text = String::from_utf8_lossy(&kept).into_owned();
        CapturedOutput { text, bytes, truncated: left_out > 0 }
    }
}

/// What `end` comes to, once the output is read to its end, or is late: a process that holds it open, or an engine that
/// forgets to close it, must not hold the run.
pub(super) async fn join_with_output<T, E>(
    end: impl Future<Output = Result<T, E>>,
    pump: impl Future<Output = ()>,
    hurry: &CancellationToken,
) -> Result<T, E> {
    let (mut end, mut pump) = (pin!(end), pin!(pump));
    let mut is_read = false;
    let ended = loop {
        tokio::select! {
            ended = &mut end => break ended?,
            () = &mut pump, if !is_read => is_read = true,
        }
    };
    if !is_read && timeout(OUTPUT_DRAIN_TIMEOUT, &mut pump).await.is_err() {
        // It may be the listener that is late.
        hurry.cancel();
        if timeout(FORCED_DRAIN_TIMEOUT, pump).await.is_err() {
            tracing::warn!("the output did not end with the sandbox; the rest is left out");
        }
    }
    Ok(ended)
}

/// From the end to the end of the output. What is on its way by then is some pipes full.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// After that, for what nobody listens to.
const FORCED_DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// For a listener to take one chunk.
const LISTENER_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes of output after which other tasks have their turn: as much as is read at once.
const TURN_BYTES: u64 = 16 << 10;

/// What a chunk costs beside its bytes, so that many small ones are no way around a turn.
const CHUNK_COST_BYTES: u64 = 256;

/// Bytes a second that are taken of one run's output.
const MAX_BYTES_PER_SECOND: u64 = 32 << 20;

/// A sandbox that was quiet for so long has the bytes of that time to spend at once.
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
    async fn whoever_prints_without_end_leaves_turns_to_others() {
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

    /// R5: nobody takes more than the rate of a run's output; what is more waits in its pipe. Who was quiet has some to spend.
    #[tokio::test(flavor = "current_thread")]
    async fn a_run_prints_no_faster_than_its_rate() {
        let begun = Instant::now();
        let (mut pace, mut now, mut taken) = (OutputPace::new(), begun + BURST_WINDOW * 8, 0);
        let second = now + Duration::from_secs(1);
        while now < second {
            pace.turn = TURN_BYTES;
            taken += pace.turn;
            now = now.max(pace.next_turn_start(now));
        }
        let burst = MAX_BYTES_PER_SECOND / 4;
        assert!(
            (MAX_BYTES_PER_SECOND..=MAX_BYTES_PER_SECOND + burst + TURN_BYTES).contains(&taken),
            "{taken}"
        );
    }
}
