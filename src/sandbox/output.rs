//! What a sandbox prints: copied to whoever listens as it comes, and kept in bounds.
//!
//! **Invariant:** however much is printed, no more than the limit of each stream and one chunk is held in memory.

use std::collections::VecDeque;
use std::io;
use std::pin::pin;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// The two streams of a sandbox, and who listens to them.
#[derive(Debug)]
pub struct Output<W> {
    pub stdout: Capture,
    pub stderr: Capture,
    /// `None` once nobody listens any more.
    live: Option<W>,
    /// The one stream that is listened to, where it is not both.
    only: Option<Stream>,
    hurry: CancellationToken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// The beginning and the end of one stream.
#[derive(Clone, Debug)]
pub struct Capture {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    max_head: usize,
    max_tail: usize,
    bytes: u64,
}

/// What is kept of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// Where something is left out, a line in the middle says how much. What is not UTF-8 is replaced.
    pub text: String,
    /// How much was printed.
    pub bytes: u64,
    pub truncated: bool,
}

impl<W: AsyncWrite + Unpin> Output<W> {
    /// `limit` is for each stream, in bytes; `live` is given what both print, as it comes.
    pub fn new(limit: usize, live: W) -> Self {
        let (stdout, stderr) = (Capture::new(limit), Capture::new(limit));
        let hurry = CancellationToken::new();
        Self { stdout, stderr, live: Some(live), only: None, hurry }
    }

    /// As [`new`](Self::new), for somebody who listens to one of the two.
    pub fn of(stream: Stream, limit: usize, live: W) -> Self {
        Self { only: Some(stream), ..Self::new(limit, live) }
    }

    /// When it is cancelled, nobody waits for the listener any more.
    pub(super) fn hurry(&self) -> CancellationToken {
        self.hurry.clone()
    }

    /// Takes what one stream has printed. A listener that is slow slows the sandbox down; one that cannot be written to,
    /// or takes nothing for a time, is not asked again.
    pub async fn push(&mut self, stream: Stream, chunk: &[u8]) {
        match stream {
            Stream::Stdout => self.stdout.push(chunk),
            Stream::Stderr => self.stderr.push(chunk),
        }
        if self.only.is_some_and(|only| only != stream) {
            return;
        }
        let Some(mut live) = self.live.take() else { return };
        let copied = async {
            live.write_all(chunk).await?;
            live.flush().await
        };
        if self.is_heard(copied).await {
            self.live = Some(live);
        }
    }

    /// Tells the listener that nothing more comes, also where a line has not ended.
    pub async fn end(&mut self) {
        if let Some(mut live) = self.live.take() {
            self.is_heard(live.shutdown()).await;
        }
    }

    async fn is_heard(&self, told: impl Future<Output = io::Result<()>>) -> bool {
        tokio::select! {
            told = timeout(LISTENER, told) => matches!(told, Ok(Ok(()))),
            () = self.hurry.cancelled() => false,
        }
    }
}

impl Capture {
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

    pub fn finish(self) -> Captured {
        let Self { head: mut kept, tail, bytes, .. } = self;
        let left_out = bytes - (kept.len() + tail.len()) as u64;
        if left_out > 0 {
            kept.extend_from_slice(format!("\n[{left_out} bytes left out]\n").as_bytes());
        }
        kept.extend(tail);
        let text = String::from_utf8_lossy(&kept).into_owned();
        Captured { text, bytes, truncated: left_out > 0 }
    }
}

/// What `end` comes to, once the output is read to its end, or is late: a process that holds it open, or an engine that
/// forgets to close it, must not hold the run.
pub(super) async fn follow<T, E>(
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
    if !is_read && timeout(REST_OF_OUTPUT, &mut pump).await.is_err() {
        // It may be the listener that is late.
        hurry.cancel();
        if timeout(LAST_OF_OUTPUT, pump).await.is_err() {
            tracing::warn!("the output did not end with the sandbox; the rest is left out");
        }
    }
    Ok(ended)
}

/// From the end to the end of the output. What is on its way by then is some pipes full.
const REST_OF_OUTPUT: Duration = Duration::from_secs(2);

/// After that, for what nobody listens to.
const LAST_OF_OUTPUT: Duration = Duration::from_secs(1);

/// For a listener to take one chunk.
const LISTENER: Duration = Duration::from_secs(10);
