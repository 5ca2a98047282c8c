//! Rendering of a sandbox's output for a person who watches. Of an agent's events it shows the text, and each tool call
//! like a shell would show it. Output of other programs, and lines that are not events, are shown as they are.
//!
//! **Invariant:** no output of a sandbox, and no text of a model, reaches the terminal as a command to the terminal.

use std::io;
use std::mem;
use std::pin::Pin;
use std::str;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use serde::Deserialize;
use tokio::io::AsyncWrite;

use crate::base::hidden_characters::reorders_text;
use crate::base::shell::quote_word;
use crate::runner::AgentEnvelope;

/// A writer that receives a program's output and writes what a person should see of it.
#[derive(Debug)]
pub struct OutputRenderer<W> {
    out: W,
    mode: RenderMode,
    /// The incomplete end of the input: a line of events, or a character of text.
    line: Vec<u8>,
    /// Rendered bytes that are not written yet.
    pending: Vec<u8>,
    written: usize,
    open_line: OpenLineFlag,
}

/// The format of the rendered output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RenderMode {
    /// Lines of JSON that describe an agent's actions.
    Events,
    /// Text, shown as it arrives.
    Text,
}

/// A flag that is true if the last output has left a line open. All writers to the terminal share it.
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
    /// Renders the events of an agent.
    pub fn for_events(out: W, open_line: OpenLineFlag) -> Self {
        Self { out, mode: RenderMode::Events, line: vec![], pending: vec![], written: 0, open_line }
    }

    /// Renders the text of any program.
    pub fn for_text(out: W, open_line: OpenLineFlag) -> Self {
        Self { mode: RenderMode::Text, ..Self::for_events(out, open_line) }
    }

    fn render_chunk(&mut self, chunk: &[u8]) {
        match self.mode {
            RenderMode::Events => self.render_lines(chunk),
            RenderMode::Text => self.render_text(chunk),
        }
    }

    fn render_text(&mut self, chunk: &[u8]) {
        // An incomplete character at the end waits for its remaining bytes.
        self.line.extend_from_slice(chunk);
        let rest = self.line.split_off(self.line.len() - incomplete_suffix_len(&self.line));
        let text = mem::replace(&mut self.line, rest);
        self.queue_text(&String::from_utf8_lossy(&text));
    }

    fn render_lines(&mut self, chunk: &[u8]) {
        for part in chunk.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            // A line without an end is rendered in pieces, so that memory stays bounded.
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
            // A success is not worth a line.
            Ok(AgentEventLine::ToolResult { exit_code: Some(0) }) => {}
            Ok(AgentEventLine::ToolResult { exit_code: Some(code) }) => {
                self.queue_line(&format!("exit code {code}\n"));
            }
            Ok(AgentEventLine::ToolResult { exit_code: None }) => {
                self.queue_line("killed, or not started\n");
            }
            // The answer is in the run's result, and is not shown twice.
            Err(_) if AgentEnvelope::parse(line).is_ok() => self.queue_line(""),
            Err(_) => self.queue_line(line),
        }
    }

    fn queue_line(&mut self, text: &str) {
        self.pending.extend_from_slice(self.open_line.take_line_break().as_bytes());
        self.queue_text(text);
    }

    fn queue_text(&mut self, text: &str) {
        self.pending.extend_from_slice(escape_for_terminal(text).as_bytes());
        if let Some(last) = text.chars().last() {
            // Only the last character decides whether the next line needs a break first.
            self.open_line.0.store(last != '\n', Ordering::Relaxed);
        }
    }
}

impl OpenLineFlag {
    /// Returns the line break that is needed before a new line, and takes it as written.
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
        // Earlier output is written before more is accepted: this is the back pressure for the program.
        ready!(self.poll_drain(context))?;
        self.render_chunk(chunk);
        Poll::Ready(Ok(chunk.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(context))?;
        Pin::new(&mut self.out).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // 1. Write what is rendered. 2. Render the incomplete rest, which never gets an end. 3. Shut the output down.
        ready!(self.poll_drain(context))?;
        if !self.line.is_empty() {
            let line = mem::take(&mut self.line);
            match self.mode {
                RenderMode::Events => self.render_line(&String::from_utf8_lossy(&line)),
                RenderMode::Text => self.queue_text(&String::from_utf8_lossy(&line)),
            }
            ready!(self.poll_drain(context))?;
        }
        Pin::new(&mut self.out).poll_shutdown(context)
    }
}

/// Replaces control characters and characters that reorder text, so that a terminal shows them and does not obey them.
pub fn escape_for_terminal(text: &str) -> String {
    let is_command = |c: char| (c.is_control() && c != '\n' && c != '\t') || reorders_text(c);
    text.replace("\r\n", "\n").replace(is_command, "\u{fffd}")
}

/// Returns the number of bytes at the end that may be incomplete: the start of a character, or the first half of a
/// two-character line end.
fn incomplete_suffix_len(bytes: &[u8]) -> usize {
    if bytes.ends_with(b"\r") {
        return 1;
    }
    // `error_len` is `None` only if more bytes could complete the character.
    let last = bytes.utf8_chunks().last().map(|chunk| chunk.invalid()).unwrap_or_default();
    let is_cut = str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
    if is_cut { last.len() } else { 0 }
}

/// The maximum length of a line. A longer line is shown in pieces. Our choice.
const MAX_LINE_BYTES: usize = 1 << 20;
