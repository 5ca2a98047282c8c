//! What an agent says while it works, as its watchers are told it.
//!
//! The words are the agent's: they are passed on as far as they are understood, and believed in nothing.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncWrite;

use crate::catalog::Stream;
use crate::journal::{Feed, Kind};

/// Listens to an agent's standard error.
pub(super) struct Script {
    feed: Feed,
    stream: Stream,
    /// The beginning of a line.
    line: Vec<u8>,
    /// It was too long to be one of ours.
    is_skipped: bool,
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
        Self { feed, stream, line: vec![], is_skipped: false }
    }

    fn hear(&mut self, mut chunk: &[u8]) {
        while let Some(end) = memchr::memchr(b'\n', chunk) {
            self.extend(&chunk[..end]);
            if !self.is_skipped {
                self.tell();
            }
            self.line.clear();
            self.is_skipped = false;
            chunk = &chunk[end + 1..];
        }
        self.extend(chunk);
    }

    fn extend(&mut self, part: &[u8]) {
        self.is_skipped |= self.line.len() + part.len() > MAX_LINE;
        if !self.is_skipped {
            self.line.extend_from_slice(part);
        }
    }

    /// A line that is none of these is somebody else's, and is in the output.
    fn tell(&self) {
        let Ok(said) = serde_json::from_slice::<Said>(&self.line) else { return };
        let (kind, data) = said.into_event();
        self.feed.tell(kind, &data);
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
