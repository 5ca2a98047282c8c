//! What an agent says while it works, as its watchers are told it.
//!
//! The words are the agent's: they are passed on as far as they are understood, and believed in nothing.
//!
//! **Invariant:** what is looked at costs a bounded time a second, whatever an agent writes: only lines that begin as an
//! event does are read as JSON, and of those no more than [`MAX_LINES_PER_SECOND`] and [`MAX_BYTES_PER_SECOND`] a second. The rest is counted as dropped.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use memchr::{memchr, memmem};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncWrite;
use tokio::time::Instant;

use crate::runner::agents::AgentStreamFormat;
use crate::service::store::{EventFeed, RunEventKind};

/// Listens to an agent's standard error.
pub(super) struct AgentEventParser {
    feed: EventFeed,
    stream: AgentStreamFormat,
    /// The beginning of a line.
    line: Vec<u8>,
    /// The line that is being written cannot be an event.
    is_skipped: bool,
    share: ParseAllowance,
}

/// What may be read as JSON now, at most that of one second.
#[derive(Debug)]
struct ParseAllowance {
    lines: u64,
    bytes: u64,
    /// Until when it was added to.
    since: Instant,
}

/// One line, as `sandbox:agent` writes it.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum AgentEvent {
    TextDelta { text: String },
    ToolCall { id: String, argv: Vec<String> },
    ToolResult { id: String, exit_code: Option<i32> },
}

impl AgentEventParser {
    pub(super) fn new(feed: EventFeed, stream: AgentStreamFormat) -> Self {
        Self { feed, stream, line: vec![], is_skipped: false, share: ParseAllowance::new() }
    }

    fn feed_chunk(&mut self, mut chunk: &[u8]) {
        self.share.refill(Instant::now());
        while !chunk.is_empty() {
            if self.is_skipped || (self.line.is_empty() && chunk[0] != EVENT_LINE_START) {
                // Not line by line: most bytes of a flood are at no beginning of an event.
                self.is_skipped = !chunk.ends_with(b"\n");
                self.line.clear();
                let Some(end) = memmem::find(chunk, b"\n{") else { return };
                self.is_skipped = false;
                chunk = &chunk[end + 1..];
            }
            let end = memchr(b'\n', chunk);
            self.extend_line(&chunk[..end.unwrap_or(chunk.len())]);
            let Some(end) = end else { return };
            if !self.is_skipped {
                self.publish_line();
            }
            self.line.clear();
            self.is_skipped = false;
            chunk = &chunk[end + 1..];
        }
    }

    fn extend_line(&mut self, part: &[u8]) {
        self.is_skipped |= self.line.len() + part.len() > MAX_LINE_BYTES;
        if !self.is_skipped {
            self.line.extend_from_slice(part);
        }
    }

    /// A line that is none of these is somebody else's, and is in the output.
    fn publish_line(&mut self) {
        if !self.share.try_take(self.line.len()) {
            self.feed.count_dropped();
            return;
        }
        let Ok(said) = serde_json::from_slice::<AgentEvent>(&self.line) else { return };
        let (kind, data) = said.into_event();
        self.feed.publish(kind, &data);
    }
}

impl ParseAllowance {
    fn new() -> Self {
        Self { lines: MAX_LINES_PER_SECOND, bytes: MAX_BYTES_PER_SECOND, since: Instant::now() }
    }

    /// Adds what has come since the last time, in whole milliseconds.
    fn refill(&mut self, now: Instant) {
        let past = u64::try_from((now - self.since).as_millis()).unwrap_or(u64::MAX).min(1000);
        if past > 0 {
            self.since = now;
            self.lines = MAX_LINES_PER_SECOND.min(self.lines + MAX_LINES_PER_SECOND * past / 1000);
            self.bytes = MAX_BYTES_PER_SECOND.min(self.bytes + MAX_BYTES_PER_SECOND * past / 1000);
        }
    }

    fn try_take(&mut self, length: usize) -> bool {
        let left = (self.lines.checked_sub(1), self.bytes.checked_sub(length as u64));
        let (Some(lines), Some(bytes)) = left else { return false };
        (self.lines, self.bytes) = (lines, bytes);
        true
    }
}

impl AgentEvent {
    fn into_event(self) -> (RunEventKind, Value) {
        match self {
            Self::TextDelta { text } => (RunEventKind::TextDelta, json!({ "text": text })),
            Self::ToolCall { id, argv } => {
                (RunEventKind::ToolCall, json!({"id": id, "argv": argv}))
            }
            Self::ToolResult { id, exit_code } => {
                (RunEventKind::ToolResult, json!({"id": id, "exit_code": exit_code}))
            }
        }
    }
}

/// It takes everything at once, so no agent is ever held up by whoever watches.
impl AsyncWrite for AgentEventParser {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
        chunk: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.stream == AgentStreamFormat::Events {
            self.feed_chunk(chunk);
        }
        Poll::Ready(Ok(chunk.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.feed_chunk(b"\n");
        Poll::Ready(Ok(()))
    }
}

/// Bytes of a line. A tool's arguments are bounded below that by our agent.
const MAX_LINE_BYTES: usize = 256 << 10;

/// Lines of a run that are read as JSON in a second: more than models write.
const MAX_LINES_PER_SECOND: u64 = 2000;

/// Their bytes: as many as a run's watchers are told in all.
const MAX_BYTES_PER_SECOND: u64 = 1 << 20;

/// Of an event's line.
const EVENT_LINE_START: u8 = b'{';

#[cfg(test)]
mod tests {
    use super::*;

    /// R5: a line that cannot be an event is not read as one, and of those that can, a second's worth at a time; what is
    /// left out is counted.
    #[test]
    fn a_flood_of_lines_is_counted_and_not_read() {
        let feed = EventFeed::new("run-1", 0);
        let mut script = AgentEventParser::new(feed.clone(), AgentStreamFormat::Events);
        script.feed_chunk(&b"\nsaid {\n".repeat(10_000));
        assert_eq!((script.share.lines, feed.dropped_count()), (MAX_LINES_PER_SECOND, 0));
        let line = b"{\"type\":\"text_delta\",\"text\":\"hello\"}\n";
        script.feed_chunk(&line.repeat(5000));
        assert_eq!(feed.dropped_count(), 5000 - MAX_LINES_PER_SECOND);
        assert!(feed.has_published(RunEventKind::TextDelta));
        let second = script.share.since + std::time::Duration::from_secs(1);
        script.share.refill(second);
        assert_eq!(
            (script.share.lines, script.share.bytes),
            (MAX_LINES_PER_SECOND, MAX_BYTES_PER_SECOND)
        );
    }

    /// Wherever its chunks are cut, the same events are heard among the lines that are none.
    #[test]
    fn events_are_heard_however_they_are_cut() {
        let said = "x {\n\n{\"type\":\"tool_result\",\"id\":\"a\",\"exit_code\":0}\r\n{\n{}\n{\"type\":\"text_delta\",\"text\":\"b\"}\n\n";
        for size in 1..=said.len() {
            let feed = EventFeed::new("run-1", 0);
            let mut script = AgentEventParser::new(feed.clone(), AgentStreamFormat::Events);
            said.as_bytes().chunks(size).for_each(|chunk| script.feed_chunk(chunk));
            let told = MAX_LINES_PER_SECOND - script.share.lines;
            assert!(
                feed.has_published(RunEventKind::ToolResult)
                    && feed.has_published(RunEventKind::TextDelta),
                "{size}"
            );
            assert_eq!(told, 4, "{size}");
        }
    }
}
