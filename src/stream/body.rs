//! Finds the usage in a unary JSON body without keeping the body.
//!
//! An embeddings response is megabytes long and has its usage last, so the body is scanned as it
//! passes: strings and inner values are skipped, the top-level `usage` is copied out, all else is
//! forgotten. The texts of an answer are counted by their length, to hold a report against. It is no
//! validator: of what is not JSON it makes nothing, in bounded memory. A body in one frame is read at once,
//! by [`whole`].
//!
//! **Invariant:** what is found is the same however the body is split into frames.

use std::mem;

use memchr::memchr2;

use super::report::Report;
use super::{Finish, whole};

/// A body that is read frame by frame.
#[derive(Debug, Default)]
pub(super) struct Body {
    /// A frame has been read.
    has_begun: bool,
    /// Open arrays and objects.
    depth: u64,
    place: Place,
    text: Text,
    /// The first bytes of the top-level key that was read last.
    key: [u8; KEY],
    /// Its length, counted as far as it matters.
    key_length: usize,
    /// What came with earlier frames of the value of `usage`.
    usage: Vec<u8>,
    answer: Answer,
}

/// The strings of a value that holds an answer: `choices`, `content` or `output`.
#[derive(Debug, Default)]
struct Answer {
    /// Whether such a value is being read.
    is_open: bool,
    /// The first bytes of the string that was read last.
    start: [u8; NAME],
    length: u64,
    /// A string has ended, and what follows it has not been seen: a colon makes it a key.
    is_undecided: bool,
    /// Whether the key that was read last has text under it.
    is_text: bool,
}

/// Where in the top-level object the next byte is; nothing inside a value changes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Outside,
    /// Before a colon.
    Key,
    /// After the colon, where the value has not begun.
    Colon,
    /// In the value of `usage`.
    Usage,
    /// In the value of another key.
    Value,
}

/// Where in a string.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Text {
    #[default]
    Outside,
    Inside,
    /// After a backslash.
    Escaped,
}

impl Body {
    /// Reads one more frame. The first is nearly always the whole body.
    pub(super) fn read(&mut self, bytes: &[u8], report: &mut Report) {
        if mem::replace(&mut self.has_begun, true) || !whole::read(bytes, report) {
            self.read_on(bytes, report);
        }
    }

    fn read_on(&mut self, bytes: &[u8], report: &mut Report) {
        let mut at = 0;
        // Where in these bytes the value of `usage` begins or goes on.
        let mut usage = 0;
        while at < bytes.len() {
            if self.text != Text::Outside {
                at += self.skip_text(&bytes[at..]);
                continue;
            }
            if self.answer.is_undecided {
                at += bytes[at..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
                let Some(&next) = bytes.get(at) else { break };
                self.answer.decide(next, report);
            }
            if self.depth > 1 {
                at += plain(&bytes[at..]);
            }
            let Some(&byte) = bytes.get(at) else { break };
            if self.depth == 1 {
                if self.place == Place::Colon && !byte.is_ascii_whitespace() {
                    self.begin_value(byte, report);
                    usage = at;
                } else if self.place == Place::Usage && matches!(byte, b',' | b'}' | b']') {
                    self.end_usage(&bytes[usage..at], report);
                }
            }
            self.step(byte, report);
            at += 1;
        }
        if self.place == Place::Usage {
            self.keep_usage(&bytes[usage..]);
        }
    }

    fn step(&mut self, byte: u8, report: &mut Report) {
        match byte {
            b'"' => {
                self.text = Text::Inside;
                if self.depth == 1 && self.place == Place::Key {
                    self.key_length = 0;
                }
                self.answer.length = 0;
            }
            b'{' | b'[' => {
                if self.depth == 0 {
                    self.place = if byte == b'{' { Place::Key } else { Place::Outside };
                }
                self.depth = self.depth.saturating_add(1);
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 && mem::take(&mut self.place) != Place::Outside {
                    self.answer = Answer::default();
                    report.hear_end(Finish::Terminated);
                }
            }
            b':' if self.depth == 1 && self.place == Place::Key => self.place = Place::Colon,
            b',' if self.depth == 1 && self.place != Place::Outside => self.place = Place::Key,
            _ => (),
        }
    }

    fn begin_value(&mut self, first: u8, report: &mut Report) {
        let key = (self.key_length == KEY).then_some(&self.key);
        if key == Some(b"error") && first != b'n' {
            report.hear_end(Finish::Errored);
        }
        let is_long = self.key_length >= KEY;
        self.answer.is_open = is_long && matches!(&self.key, b"choic" | b"conte" | b"outpu");
        self.place = if key == Some(b"usage") { Place::Usage } else { Place::Value };
    }

    /// Goes on in a string: to its end, to the next backslash or past the byte after one.
    fn skip_text(&mut self, bytes: &[u8]) -> usize {
        let end = match self.text {
            Text::Escaped => 0,
            Text::Outside | Text::Inside => memchr2(b'"', b'\\', bytes).unwrap_or(bytes.len()),
        };
        let taken = bytes.len().min(end + 1);
        self.text = match (self.text, bytes.get(end)) {
            (Text::Inside, Some(b'"')) => Text::Outside,
            (Text::Inside, Some(_)) => Text::Escaped,
            _ => Text::Inside,
        };
        let is_key = self.depth == 1 && self.place == Place::Key;
        if is_key {
            let content = if self.text == Text::Outside { end } else { taken };
            self.keep_key(&bytes[..content]);
        } else if self.answer.is_open {
            let has_ended = self.text == Text::Outside;
            self.answer.take(&bytes[..if has_ended { end } else { taken }], has_ended);
        }
        taken
    }

    fn keep_key(&mut self, bytes: &[u8]) {
        for &byte in bytes.iter().take(KEY + 1 - self.key_length) {
            if let Some(slot) = self.key.get_mut(self.key_length) {
                *slot = byte;
            }
            self.key_length += 1;
        }
    }

    fn keep_usage(&mut self, bytes: &[u8]) {
        if self.usage.len() + bytes.len() > MAX_USAGE {
            self.usage = Vec::new();
            self.place = Place::Value;
        } else {
            self.usage.extend_from_slice(bytes);
        }
    }

    fn end_usage(&mut self, rest: &[u8], report: &mut Report) {
        self.keep_usage(rest);
        report.hear_usage_text(&mem::take(&mut self.usage));
    }
}

impl Answer {
    fn take(&mut self, bytes: &[u8], has_ended: bool) {
        let from = usize::try_from(self.length).map_or(NAME, |length| length.min(NAME));
        self.start[from..].iter_mut().zip(bytes).for_each(|(slot, byte)| *slot = *byte);
        self.length += bytes.len() as u64;
        self.is_undecided = has_ended;
    }

    /// Tells a key from a value by what follows it, and counts a value that is text.
    fn decide(&mut self, next: u8, report: &mut Report) {
        self.is_undecided = false;
        if next != b':' {
            if self.is_text {
                report.hear_text(self.length);
            }
            return;
        }
        let length = usize::try_from(self.length).unwrap_or(usize::MAX);
        self.is_text = is_text_key(&self.start[..length.min(NAME)], length);
    }
}

/// Whether a key in an answer has text under it.
pub(super) fn has_text(key: &[u8]) -> bool {
    is_text_key(&key[..key.len().min(NAME)], key.len())
}

/// The same by the beginning of a key and its length.
fn is_text_key(start: &[u8], length: usize) -> bool {
    matches!(
        (start, length),
        (b"content" | b"text" | b"refusal" | b"input" | b"thinking", _)
            | (b"argument", 9)
            | (b"reasonin", 9 | 17)
    )
}

/// The length of what can be skipped inside a value: numbers above all. Looked at in pieces of a
/// fixed size without a branch inside, which the compiler turns into vector instructions.
fn plain(bytes: &[u8]) -> usize {
    let (pieces, _) = bytes.as_chunks::<PIECE>();
    let is_plain = |piece: &&[u8; PIECE]| {
        piece.iter().fold(0, |found, byte| found | u8::from(is_structure(*byte))) == 0
    };
    let skipped = pieces.iter().take_while(is_plain).count() * PIECE;
    let rest = &bytes[skipped..];
    skipped + rest.iter().position(|byte| is_structure(*byte)).unwrap_or(rest.len())
}

/// A quote, bracket or brace. Bit 5 is all that tells a bracket from a brace.
fn is_structure(byte: u8) -> bool {
    byte == b'"' || matches!(byte | 0x20, b'{' | b'}')
}

/// How much of a key in an answer is kept to know it by.
const NAME: usize = 8;

/// The length of both keys that matter.
pub(super) const KEY: usize = 5;

const PIECE: usize = 32;

/// Real ones are under 1 KiB. A larger one is not read: the tokens are estimated.
pub(super) const MAX_USAGE: usize = 16 * 1024;
