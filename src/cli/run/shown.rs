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

use crate::runner::Envelope;

/// Takes a program's output, and writes what there is to see of it.
#[derive(Debug)]
pub struct Shown<W> {
    out: W,
    what: What,
    /// A line, or of a program a character, that has not ended yet.
    line: Vec<u8>,
    /// Made, and not written yet.
    pending: Vec<u8>,
    written: usize,
    place: Place,
}

/// What it is that is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Lines that say what an agent does.
    Events,
    /// Text, as it comes.
    Text,
}

/// Whether the last thing shown has left a line open; known to all who write there.
#[derive(Clone, Debug, Default)]
pub struct Place(Arc<AtomicBool>);

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line {
    TextDelta { text: String },
    ToolCall { argv: Vec<String> },
    ToolResult { exit_code: Option<i32> },
}

impl<W> Shown<W> {
    /// Of an agent of ours.
    pub fn events(out: W, place: Place) -> Self {
        Self { out, what: What::Events, line: vec![], pending: vec![], written: 0, place }
    }

    /// Of any program.
    pub fn text(out: W, place: Place) -> Self {
        Self { what: What::Text, ..Self::events(out, place) }
    }

    fn take(&mut self, chunk: &[u8]) {
        match self.what {
            What::Events => self.take_lines(chunk),
            What::Text => self.take_text(chunk),
        }
    }

    fn take_text(&mut self, chunk: &[u8]) {
        self.line.extend_from_slice(chunk);
        let rest = self.line.split_off(self.line.len() - unfinished(&self.line));
        let text = mem::replace(&mut self.line, rest);
        self.say(&String::from_utf8_lossy(&text));
    }

    fn take_lines(&mut self, chunk: &[u8]) {
        for part in chunk.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") || self.line.len() > LONGEST {
                let line = mem::take(&mut self.line);
                self.show(&String::from_utf8_lossy(&line));
            }
        }
    }

    fn show(&mut self, line: &str) {
        match serde_json::from_str(line) {
            Ok(Line::TextDelta { text }) => self.say(&text),
            Ok(Line::ToolCall { argv }) => {
                let words: Vec<_> = argv.iter().map(|word| quoted(word)).collect();
                self.say_line(&format!("$ {}\n", words.join(" ")));
            }
            Ok(Line::ToolResult { exit_code: Some(0) }) => {}
            Ok(Line::ToolResult { exit_code: Some(code) }) => {
                self.say_line(&format!("exit code {code}\n"));
            }
            Ok(Line::ToolResult { exit_code: None }) => self.say_line("killed, or not started\n"),
            // The answer is in the result.
            Err(_) if Envelope::parse(line).is_ok() => self.say_line(""),
            Err(_) => self.say_line(line),
        }
    }

    fn say_line(&mut self, text: &str) {
        self.pending.extend_from_slice(self.place.new_line().as_bytes());
        self.say(text);
    }

    fn say(&mut self, text: &str) {
        self.pending.extend_from_slice(harmless(text).as_bytes());
        if let Some(last) = text.chars().last() {
            self.place.0.store(last != '\n', Ordering::Relaxed);
        }
    }
}

impl Place {
    /// What has to be written before a new line; it is taken as written.
    pub fn new_line(&self) -> &'static str {
        if self.0.swap(false, Ordering::Relaxed) { "\n" } else { "" }
    }
}

impl<W: AsyncWrite + Unpin> Shown<W> {
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

impl<W: AsyncWrite + Unpin> AsyncWrite for Shown<W> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        chunk: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_drain(context))?;
        self.take(chunk);
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
                What::Events => self.show(&String::from_utf8_lossy(&line)),
                What::Text => self.say(&String::from_utf8_lossy(&line)),
            }
            ready!(self.poll_drain(context))?;
        }
        Pin::new(&mut self.out).poll_shutdown(context)
    }
}

/// As it may be written to a terminal: what would be a command to it is seen, and not obeyed.
pub fn harmless(text: &str) -> String {
    let is_command = |c: char| c.is_control() && c != '\n' && c != '\t';
    text.replace("\r\n", "\n").replace(is_command, "\u{fffd}")
}

/// How many bytes at the end are the beginning of something: of a character, or of a line's end in two characters.
fn unfinished(bytes: &[u8]) -> usize {
    if bytes.ends_with(b"\r") {
        return 1;
    }
    let last = bytes.utf8_chunks().last().map(|chunk| chunk.invalid()).unwrap_or_default();
    let is_cut = str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
    if is_cut { last.len() } else { 0 }
}

/// As it could be typed.
pub fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./:=@%+,".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A line that does not end is shown in pieces.
const LONGEST: usize = 1 << 20;
