//! Turns the events of an agent's standard error into events for the run's watchers.
//!
//! The texts are the agent's. The parser passes them on if it can parse them, and trusts none of them.
//!
//! **Invariant:** the parser's cost per second is bounded, whatever an agent writes. Only lines that begin like an
//! event are parsed as JSON, at most [`MAX_LINES_PER_SECOND`] and [`MAX_BYTES_PER_SECOND`] a second. The parser counts
//! the other event lines as dropped.

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

/// A parser of the events in an agent's standard error.
pub(super) struct AgentEventParser {
    feed: EventFeed,
    stream: AgentStreamFormat,
    /// The received part of the current line.
    line: Vec<u8>,
    /// True if the current line cannot be an event.
    is_skipped: bool,
    share: ParseAllowance,
}

/// The lines and bytes that may be parsed as JSON now, at most those of one second.
#[derive(Debug)]
struct ParseAllowance {
    lines: u64,
    bytes: u64,
    /// The time of the last refill.
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
                // Search for the next start of an event in one pass instead of line by line: in a flood of other
                // output, almost no line starts an event.
                // If the chunk has no further event, the next chunk begins in the middle of a line, unless this chunk
                // ends with a newline.
                self.is_skipped = !chunk.ends_with(b"\n");
                self.line.clear();
                let Some(end) = memmem::find(chunk, b"\n{") else { return };
                self.is_skipped = false;
                chunk = &chunk[end + 1..];
            }
            // `chunk` now continues a possible event, or begins one.
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

    /// Publishes the current line if it is an event. Every other line is ordinary output, which the run's result
    /// contains.
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

    /// Adds the allowance since the last refill, in whole milliseconds.
    fn refill(&mut self, now: Instant) {
        let past = u64::try_from((now - self.since).as_millis()).unwrap_or(u64::MAX).min(1000);
        // A refill after less than a millisecond adds nothing and keeps `since`, so that frequent small chunks lose no
        // allowance to rounding.
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

/// Accepts every chunk at once, so that a slow watcher never delays an agent.
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

/// The maximum size of an event line, in bytes. Our agent bounds a tool's arguments below this size.
const MAX_LINE_BYTES: usize = 256 << 10;

/// The maximum number of lines of a run that are parsed as JSON in a second. Our choice: more than models write.
const MAX_LINES_PER_SECOND: u64 = 2000;

/// The maximum number of bytes of a run that are parsed as JSON in a second: as many as a run's watchers receive in
/// all.
const MAX_BYTES_PER_SECOND: u64 = 1 << 20;

/// The first byte of an event's line.
const EVENT_LINE_START: u8 = b'{';

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Returns a parser whose allowance is not refilled during a test, however slow the machine is.
    fn parser(feed: &EventFeed) -> AgentEventParser {
        let mut parser = AgentEventParser::new(feed.clone(), AgentStreamFormat::Events);
        parser.share.since += Duration::from_hours(1);
        parser
    }

    /// G15: a line that cannot be an event is not parsed. Of the lines that can, the parser reads one second's allowance
    /// at a time and counts the rest.
    #[test]
    fn a_flood_of_lines_is_counted_and_not_read() {
        let feed = EventFeed::new("run-1", 0);
        let mut script = parser(&feed);
        script.feed_chunk(&b"\nsaid {\n".repeat(10_000));
        assert_eq!((script.share.lines, feed.dropped_count()), (MAX_LINES_PER_SECOND, 0));
        let line = b"{\"type\":\"text_delta\",\"text\":\"hello\"}\n";
        script.feed_chunk(&line.repeat(5000));
        assert_eq!(feed.dropped_count(), 5000 - MAX_LINES_PER_SECOND);
        assert!(feed.has_published(RunEventKind::TextDelta));
        let second = script.share.since + Duration::from_secs(1);
        script.share.refill(second);
        assert_eq!(
            (script.share.lines, script.share.bytes),
            (MAX_LINES_PER_SECOND, MAX_BYTES_PER_SECOND)
        );
    }

    /// The parser finds the same events among other lines, at whichever byte the chunks are cut.
    #[test]
    fn events_are_heard_however_they_are_cut() {
        let said = "x {\n\n{\"type\":\"tool_result\",\"id\":\"a\",\"exit_code\":0}\r\n{\n{}\n{\"type\":\"text_delta\",\"text\":\"b\"}\n\n";
        for size in 1..=said.len() {
            let feed = EventFeed::new("run-1", 0);
            let mut script = parser(&feed);
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
