//! Finds the usage in a unary JSON body without keeping the body.
//!
//! An embeddings response is megabytes long and has its usage last, so the body is scanned as it
//! passes: strings and inner values are skipped, the top-level `usage` is copied out, all else is
//! forgotten. The texts of an answer are counted by their length, to hold a report against. It is no
//! validator: of what is not JSON it makes nothing, in bounded memory. A body in one frame is read at once,
//! by [`whole_body`].
//!
//! **Invariant:** what is found is the same however the body is split into frames.

use std::mem;

use memchr::memchr2;

use super::report::ResponseReport;
use super::{StreamEnd, whole_body};

/// A body that is read frame by frame.
#[derive(Debug, Default)]
pub(super) struct JsonUsageScanner {
    /// A frame has been read.
    has_begun: bool,
    /// Open arrays and objects.
    depth: u64,
    place: UsageScanState,
    text: UsageStringState,
    /// The first bytes of the top-level key that was read last.
    key: [u8; KEY_BYTES],
    /// Its length, counted as far as it matters.
    key_length: usize,
    /// What came with earlier frames of the value of `usage`.
    usage: Vec<u8>,
    answer: AnswerStringState,
}

/// The strings of a value that holds an answer: `choices`, `content` or `output`.
#[derive(Debug, Default)]
struct AnswerStringState {
    /// Whether such a value is being read.
    is_open: bool,
    /// The first bytes of the string that was read last.
    start: [u8; KEPT_NAME_BYTES],
    length: u64,
    /// A string has ended, and what follows it has not been seen: a colon makes it a key.
    is_undecided: bool,
    /// Whether the key that was read last has text under it.
    is_text: bool,
}

/// Where in the top-level object the next byte is; nothing inside a value changes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum UsageScanState {
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
enum UsageStringState {
    #[default]
    Outside,
    Inside,
    /// After a backslash.
    Escaped,
}

impl JsonUsageScanner {
    /// Reads one more frame. The first is nearly always the whole body.
    pub(super) fn read_frame(&mut self, bytes: &[u8], report: &mut ResponseReport) {
        if mem::replace(&mut self.has_begun, true) || !whole_body::read_whole_body(bytes, report) {
            self.scan_bytes(bytes, report);
        }
    }

    fn scan_bytes(&mut self, bytes: &[u8], report: &mut ResponseReport) {
        let mut at = 0;
        // Where in these bytes the value of `usage` begins or goes on.
        let mut usage = 0;
        while at < bytes.len() {
            if self.text != UsageStringState::Outside {
                at += self.skip_string(&bytes[at..]);
                continue;
            }
            if self.answer.is_undecided {
                at += bytes[at..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
                let Some(&next) = bytes.get(at) else { break };
                self.answer.classify_string(next, report);
            }
            if self.depth > 1 {
                at += skip_plain(&bytes[at..]);
            }
            let Some(&byte) = bytes.get(at) else { break };
            if self.depth == 1 {
                if self.place == UsageScanState::Colon && !byte.is_ascii_whitespace() {
                    self.begin_value(byte, report);
                    usage = at;
                } else if self.place == UsageScanState::Usage && matches!(byte, b',' | b'}' | b']')
                {
                    self.end_usage(&bytes[usage..at], report);
                }
            }
            self.scan_byte(byte, report);
            at += 1;
        }
        if self.place == UsageScanState::Usage {
            self.keep_usage(&bytes[usage..]);
        }
    }

    fn scan_byte(&mut self, byte: u8, report: &mut ResponseReport) {
        match byte {
            b'"' => {
                self.text = UsageStringState::Inside;
                if self.depth == 1 && self.place == UsageScanState::Key {
                    self.key_length = 0;
                }
                self.answer.length = 0;
            }
            b'{' | b'[' => {
                if self.depth == 0 {
                    self.place =
                        if byte == b'{' { UsageScanState::Key } else { UsageScanState::Outside };
                }
                self.depth = self.depth.saturating_add(1);
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 && mem::take(&mut self.place) != UsageScanState::Outside {
                    self.answer = AnswerStringState::default();
                    report.on_end(StreamEnd::Terminated);
                }
            }
            b':' if self.depth == 1 && self.place == UsageScanState::Key => {
                self.place = UsageScanState::Colon;
            }
            b',' if self.depth == 1 && self.place != UsageScanState::Outside => {
                self.place = UsageScanState::Key;
            }
            _ => (),
        }
    }

    fn begin_value(&mut self, first: u8, report: &mut ResponseReport) {
        let key = (self.key_length == KEY_BYTES).then_some(&self.key);
        if key == Some(b"error") && first != b'n' {
            report.on_end(StreamEnd::Errored);
        }
        let is_long = self.key_length >= KEY_BYTES;
        self.answer.is_open = is_long && matches!(&self.key, b"choic" | b"conte" | b"outpu");
        self.place =
            if key == Some(b"usage") { UsageScanState::Usage } else { UsageScanState::Value };
    }

    /// Goes on in a string: to its end, to the next backslash or past the byte after one.
    fn skip_string(&mut self, bytes: &[u8]) -> usize {
        let end = match self.text {
            UsageStringState::Escaped => 0,
            UsageStringState::Outside | UsageStringState::Inside => {
                memchr2(b'"', b'\\', bytes).unwrap_or(bytes.len())
            }
        };
        let taken = bytes.len().min(end + 1);
        self.text = match (self.text, bytes.get(end)) {
            (UsageStringState::Inside, Some(b'"')) => UsageStringState::Outside,
            (UsageStringState::Inside, Some(_)) => UsageStringState::Escaped,
            _ => UsageStringState::Inside,
        };
        let is_key = self.depth == 1 && self.place == UsageScanState::Key;
        if is_key {
            let content = if self.text == UsageStringState::Outside { end } else { taken };
            self.keep_key(&bytes[..content]);
        } else if self.answer.is_open {
            let has_ended = self.text == UsageStringState::Outside;
            self.answer.push_string_bytes(&bytes[..if has_ended { end } else { taken }], has_ended);
        }
        taken
    }

    fn keep_key(&mut self, bytes: &[u8]) {
        for &byte in bytes.iter().take(KEY_BYTES + 1 - self.key_length) {
            if let Some(slot) = self.key.get_mut(self.key_length) {
                *slot = byte;
            }
            self.key_length += 1;
        }
    }

    fn keep_usage(&mut self, bytes: &[u8]) {
        if self.usage.len() + bytes.len() > MAX_USAGE_BYTES {
            self.usage = Vec::new();
            self.place = UsageScanState::Value;
        } else {
            self.usage.extend_from_slice(bytes);
        }
    }

    fn end_usage(&mut self, rest: &[u8], report: &mut ResponseReport) {
        self.keep_usage(rest);
        report.parse_usage(&mem::take(&mut self.usage));
    }
}

impl AnswerStringState {
    fn push_string_bytes(&mut self, bytes: &[u8], has_ended: bool) {
        let from = usize::try_from(self.length)
            .map_or(KEPT_NAME_BYTES, |length| length.min(KEPT_NAME_BYTES));
        self.start[from..].iter_mut().zip(bytes).for_each(|(slot, byte)| *slot = *byte);
        self.length += bytes.len() as u64;
        self.is_undecided = has_ended;
    }

    /// Tells a key from a value by what follows it, and counts a value that is text.
    fn classify_string(&mut self, next: u8, report: &mut ResponseReport) {
        self.is_undecided = false;
        if next != b':' {
            if self.is_text {
                report.count_text(self.length);
            }
            return;
        }
        let length = usize::try_from(self.length).unwrap_or(usize::MAX);
        self.is_text = is_text_key(&self.start[..length.min(KEPT_NAME_BYTES)], length);
    }
}

/// Whether a key in an answer has text under it.
pub(super) fn has_text_under(key: &[u8]) -> bool {
    is_text_key(&key[..key.len().min(KEPT_NAME_BYTES)], key.len())
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
fn skip_plain(bytes: &[u8]) -> usize {
    let (pieces, _) = bytes.as_chunks::<SIMD_BLOCK_BYTES>();
    let is_plain = |piece: &&[u8; SIMD_BLOCK_BYTES]| {
        piece.iter().fold(0, |found, byte| found | u8::from(is_structural_byte(*byte))) == 0
    };
    let skipped = pieces.iter().take_while(is_plain).count() * SIMD_BLOCK_BYTES;
    let rest = &bytes[skipped..];
    skipped + rest.iter().position(|byte| is_structural_byte(*byte)).unwrap_or(rest.len())
}

/// A quote, bracket or brace. Bit 5 is all that tells a bracket from a brace.
fn is_structural_byte(byte: u8) -> bool {
    byte == b'"' || matches!(byte | 0x20, b'{' | b'}')
}

/// How much of a key in an answer is kept to know it by.
const KEPT_NAME_BYTES: usize = 8;

/// The length of both keys that matter.
pub(super) const KEY_BYTES: usize = 5;

const SIMD_BLOCK_BYTES: usize = 32;

/// Real ones are under 1 KiB. A larger one is not read: the tokens are estimated.
pub(super) const MAX_USAGE_BYTES: usize = 16 * 1024;
