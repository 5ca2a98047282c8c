//! What comes out of a sandbox, for whoever watches: of an agent of ours its text as text, and its uses of the tool as a
//! shell would show them; of every other program, and of lines that are none of the agent's, what it prints.
//!
//! **Invariant:** nothing that a sandbox prints, and nothing that a model says, reaches the terminal as a command to it.

use std::io;
use std::mem;
use std::pin::Pin;
use std::str;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use serde::Deserialize;
use tokio::io::AsyncWrite;

use crate::runner::AgentEnvelope;

/// Takes a program's output, and writes what there is to see of it.
#[derive(Debug)]
pub struct OutputRenderer<W> {
    out: W,
    what: RenderMode,
    /// A line, or of a program a character, that has not ended yet.
    line: Vec<u8>,
    /// Made, and not written yet.
    pending: Vec<u8>,
    written: usize,
    place: OpenLineFlag,
}

/// What it is that is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RenderMode {
    /// Lines that say what an agent does.
    Events,
    /// Text, as it comes.
    Text,
}

/// Whether the last thing shown has left a line open; known to all who write there.
#[derive(Clone, Debug, Default)]
pub struct OpenLineFlag(Arc<AtomicBool>);

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum AgentEventLine {
    TextDelta { text: String },
    ToolCall { argv: Vec<String> },
    ToolResult { exit_code: Option<i32> },
}

impl<W> OutputRenderer<W> {
    /// Of an agent of ours.
    pub fn for_events(out: W, place: OpenLineFlag) -> Self {
        Self { out, what: RenderMode::Events, line: vec![], pending: vec![], written: 0, place }
    }

    /// Of any program.
    pub fn for_text(out: W, place: OpenLineFlag) -> Self {
        Self { what: RenderMode::Text, ..Self::for_events(out, place) }
    }

    fn render_chunk(&mut self, chunk: &[u8]) {
        match self.what {
            RenderMode::Events => self.render_lines(chunk),
            RenderMode::Text => self.render_text(chunk),
        }
    }

    fn render_text(&mut self, chunk: &[u8]) {
        self.line.extend_from_slice(chunk);
        let rest = self.line.split_off(self.line.len() - incomplete_suffix_len(&self.line));
        let text = mem::replace(&mut self.line, rest);
        self.queue_text(&String::from_utf8_lossy(&text));
    }

    fn render_lines(&mut self, chunk: &[u8]) {
        for part in chunk.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") || self.line.len() > MAX_LINE_BYTES {
                let line = mem::take(&mut self.line);
                self.render_line(&String::from_utf8_lossy(&line));
            }
        }
    }

    fn render_line(&mut self, line: &str) {
        match serde_json::from_str(line) {
            Ok(AgentEventLine::TextDelta { text }) => self.queue_text(&text),
            Ok(AgentEventLine::ToolCall { argv }) => {
                let words: Vec<_> = argv.iter().map(|word| quote_word(word)).collect();
                self.queue_line(&format!("$ {}\n", words.join(" ")));
            }
            Ok(AgentEventLine::ToolResult { exit_code: Some(0) }) => {}
            Ok(AgentEventLine::ToolResult { exit_code: Some(code) }) => {
                self.queue_line(&format!("exit code {code}\n"));
            }
            Ok(AgentEventLine::ToolResult { exit_code: None }) => {
                self.queue_line("killed, or not started\n");
            }
            // The answer is in the result.
            Err(_) if AgentEnvelope::parse(line).is_ok() => self.queue_line(""),
            Err(_) => self.queue_line(line),
        }
    }

    fn queue_line(&mut self, text: &str) {
        self.pending.extend_from_slice(self.place.take_line_break().as_bytes());
        self.queue_text(text);
    }

    fn queue_text(&mut self, text: &str) {
        self.pending.extend_from_slice(escape_for_terminal(text).as_bytes());
        if let Some(last) = text.chars().last() {
            self.place.0.store(last != '\n', Ordering::Relaxed);
        }
    }
}

impl OpenLineFlag {
    /// What has to be written before a new line; it is taken as written.
    pub fn take_line_break(&self) -> &'static str {
        if self.0.swap(false, Ordering::Relaxed) { "\n" } else { "" }
    }
}

impl<W: AsyncWrite + Unpin> OutputRenderer<W> {
    fn poll_drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.pending.len() {
            let rest = &self.pending[self.written..];
            self.written += match ready!(Pin::new(&mut self.out).poll_write(context, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                length => length,
            };
        }
        self.pending.clear();
        self.written = 0;
        Poll::Ready(Ok(()))
    }
}

impl<W: AsyncWrite + Unpin> AsyncWrite for OutputRenderer<W> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        chunk: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_drain(context))?;
        self.render_chunk(chunk);
        Poll::Ready(Ok(chunk.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(context))?;
        Pin::new(&mut self.out).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(context))?;
        if !self.line.is_empty() {
            let line = mem::take(&mut self.line);
            match self.what {
                RenderMode::Events => self.render_line(&String::from_utf8_lossy(&line)),
                RenderMode::Text => self.queue_text(&String::from_utf8_lossy(&line)),
            }
            ready!(self.poll_drain(context))?;
        }
        Pin::new(&mut self.out).poll_shutdown(context)
    }
}

/// As it may be written to a terminal: what would be a command to it is seen, and not obeyed.
pub fn escape_for_terminal(text: &str) -> String {
    let is_command = |c: char| c.is_control() && c != '\n' && c != '\t';
    text.replace("\r\n", "\n").replace(is_command, "\u{fffd}")
}

/// How many bytes at the end are the beginning of something: of a character, or of a line's end in two characters.
fn incomplete_suffix_len(bytes: &[u8]) -> usize {
    if bytes.ends_with(b"\r") {
        return 1;
    }
    let last = bytes.utf8_chunks().last().map(|chunk| chunk.invalid()).unwrap_or_default();
    let is_cut = str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
    if is_cut { last.len() } else { 0 }
}

/// As it could be typed.
pub fn quote_word(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./:=@%+,".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A line that does not end is shown in pieces.
const MAX_LINE_BYTES: usize = 1 << 20;
