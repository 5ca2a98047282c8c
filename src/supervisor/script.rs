//! What an agent says while it works, as its watchers are told it.
//!
//! The words are the agent's: they are passed on as far as they are understood, and believed in nothing.
//!
//! **Invariant:** what is looked at costs a bounded time a second, whatever an agent writes: only lines that begin as an
//! event does are read as JSON, and of those no more than [`LINES`] and [`BYTES`] a second. The rest is counted as dropped.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use memchr::{memchr, memmem};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncWrite;
use tokio::time::Instant;

use crate::catalog::Stream;
use crate::journal::{Feed, Kind};

/// Listens to an agent's standard error.
pub(super) struct Script {
    feed: Feed,
    stream: Stream,
    /// The beginning of a line.
    line: Vec<u8>,
    /// The line that is being written cannot be an event.
    is_skipped: bool,
    share: Share,
}

/// What may be read as JSON now, at most that of one second.
#[derive(Debug)]
struct Share {
    lines: u64,
    bytes: u64,
    /// Until when it was added to.
    since: Instant,
}

/// One line, as `sandbox:agent` writes it.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Said {
    TextDelta { text: String },
    ToolCall { id: String, argv: Vec<String> },
    ToolResult { id: String, exit_code: Option<i32> },
}

impl Script {
    pub(super) fn new(feed: Feed, stream: Stream) -> Self {
        Self { feed, stream, line: vec![], is_skipped: false, share: Share::new() }
    }

    fn hear(&mut self, mut chunk: &[u8]) {
        self.share.grow(Instant::now());
        while !chunk.is_empty() {
            if self.is_skipped || (self.line.is_empty() && chunk[0] != BEGINNING) {
                // Not line by line: most bytes of a flood are at no beginning of an event.
                self.is_skipped = !chunk.ends_with(b"\n");
                self.line.clear();
                let Some(end) = memmem::find(chunk, b"\n{") else { return };
                self.is_skipped = false;
                chunk = &chunk[end + 1..];
            }
            let end = memchr(b'\n', chunk);
            self.extend(&chunk[..end.unwrap_or(chunk.len())]);
            let Some(end) = end else { return };
            if !self.is_skipped {
                self.tell();
            }
            self.line.clear();
            self.is_skipped = false;
            chunk = &chunk[end + 1..];
        }
    }

    fn extend(&mut self, part: &[u8]) {
        self.is_skipped |= self.line.len() + part.len() > MAX_LINE;
        if !self.is_skipped {
            self.line.extend_from_slice(part);
        }
    }

    /// A line that is none of these is somebody else's, and is in the output.
    fn tell(&mut self) {
        if !self.share.take(self.line.len()) {
            self.feed.leave_out();
            return;
        }
        let Ok(said) = serde_json::from_slice::<Said>(&self.line) else { return };
        let (kind, data) = said.into_event();
        self.feed.tell(kind, &data);
    }
}

impl Share {
    fn new() -> Self {
        Self { lines: LINES, bytes: BYTES, since: Instant::now() }
    }

    /// Adds what has come since the last time, in whole milliseconds.
    fn grow(&mut self, now: Instant) {
        let past = u64::try_from((now - self.since).as_millis()).unwrap_or(u64::MAX).min(1000);
        if past > 0 {
            self.since = now;
            self.lines = LINES.min(self.lines + LINES * past / 1000);
            self.bytes = BYTES.min(self.bytes + BYTES * past / 1000);
        }
    }

    fn take(&mut self, length: usize) -> bool {
        let left = (self.lines.checked_sub(1), self.bytes.checked_sub(length as u64));
        let (Some(lines), Some(bytes)) = left else { return false };
        (self.lines, self.bytes) = (lines, bytes);
        true
    }
}

impl Said {
    fn into_event(self) -> (Kind, Value) {
        match self {
            Self::TextDelta { text } => (Kind::TextDelta, json!({ "text": text })),
            Self::ToolCall { id, argv } => (Kind::ToolCall, json!({"id": id, "argv": argv})),
            Self::ToolResult { id, exit_code } => {
                (Kind::ToolResult, json!({"id": id, "exit_code": exit_code}))
            }
        }
    }
}

/// It takes everything at once, so no agent is ever held up by whoever watches.
impl AsyncWrite for Script {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
        chunk: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.stream == Stream::Events {
            self.hear(chunk);
        }
        Poll::Ready(Ok(chunk.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.hear(b"\n");
        Poll::Ready(Ok(()))
    }
}

/// Bytes of a line. A tool's arguments are bounded below that by our agent.
const MAX_LINE: usize = 256 << 10;

/// Lines of a run that are read as JSON in a second: more than models write.
const LINES: u64 = 2000;

/// Their bytes: as many as a run's watchers are told in all.
const BYTES: u64 = 1 << 20;

/// Of an event's line.
const BEGINNING: u8 = b'{';

#[cfg(test)]
mod tests {
    use super::*;

    /// R5: a line that cannot be an event is not read as one, and of those that can, a second's worth at a time; what is
    /// left out is counted.
    #[test]
    fn a_flood_of_lines_is_counted_and_not_read() {
        let feed = Feed::new("run-1", 0);
        let mut script = Script::new(feed.clone(), Stream::Events);
        script.hear(&b"\nsaid {\n".repeat(10_000));
        assert_eq!((script.share.lines, feed.dropped()), (LINES, 0));
        let line = b"{\"type\":\"text_delta\",\"text\":\"hello\"}\n";
        script.hear(&line.repeat(5000));
        assert_eq!(feed.dropped(), 5000 - LINES);
        assert!(feed.has_told(Kind::TextDelta));
        let second = script.share.since + std::time::Duration::from_secs(1);
        script.share.grow(second);
        assert_eq!((script.share.lines, script.share.bytes), (LINES, BYTES));
    }

    /// Wherever its chunks are cut, the same events are heard among the lines that are none.
    #[test]
    fn events_are_heard_however_they_are_cut() {
        let said = "x {\n\n{\"type\":\"tool_result\",\"id\":\"a\",\"exit_code\":0}\r\n{\n{}\n{\"type\":\"text_delta\",\"text\":\"b\"}\n\n";
        for size in 1..=said.len() {
            let feed = Feed::new("run-1", 0);
            let mut script = Script::new(feed.clone(), Stream::Events);
            said.as_bytes().chunks(size).for_each(|chunk| script.hear(chunk));
            let told = LINES - script.share.lines;
            assert!(feed.has_told(Kind::ToolResult) && feed.has_told(Kind::TextDelta), "{size}");
            assert_eq!(told, 4, "{size}");
        }
    }
}
