//! Finds the usage in a unary JSON body without storing the body.
//!
//! An embeddings response is megabytes long and has its usage last, so the body is scanned while it
//! streams. Strings and inner values are skipped, and only the top-level `usage` is copied. The
//! texts of an answer are counted by their length, as a lower bound for the reported usage. The
//! scanner is no validator: it finds nothing in a body that is not JSON, and its memory is bounded.
//! [`whole_body`](super::whole_body) reads a body that arrives in one frame.
//!
//! **Invariant:** the findings are the same however the body is split into frames.

use std::mem;

use memchr::memchr2;

use super::StreamEnd;
use super::answer_keys::{KEPT_NAME_BYTES, KEY_BYTES, MAX_USAGE_BYTES, is_text_key};
use super::report::ResponseReport;

/// A scanner that reads a body frame by frame.
#[derive(Debug, Default)]
pub(super) struct JsonUsageScanner {
    /// The number of open arrays and objects.
    depth: u64,
    state: UsageScanState,
    text: UsageStringState,
    /// The first bytes of the last top-level key.
    key: [u8; KEY_BYTES],
    /// The key's length, counted up to one byte more than the stored key.
    key_length: usize,
    /// The part of the value of `usage` that arrived with earlier frames.
    usage: Vec<u8>,
    answer: AnswerStringState,
}

/// The state of the strings in a value that holds an answer: `choices`, `content` or `output`.
#[derive(Debug, Default)]
struct AnswerStringState {
    /// True while such a value is being read.
    is_open: bool,
    /// The first bytes of the last string.
    start: [u8; KEPT_NAME_BYTES],
    length: u64,
    /// True if a string has ended and the next byte is unknown. A colon would make the string a
    /// key.
    is_undecided: bool,
    /// True if the last key has text under it.
    is_text: bool,
}

/// The position in the top-level object. Bytes inside a value do not change the position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum UsageScanState {
    #[default]
    Outside,
    /// Before the colon, in or around a key.
    Key,
    /// After the colon, before the value.
    Colon,
    /// Inside the value of `usage`.
    Usage,
    /// Inside the value of another key.
    Value,
}

/// The position relative to a string.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum UsageStringState {
    #[default]
    Outside,
    Inside,
    /// Directly after a backslash.
    Escaped,
}

impl JsonUsageScanner {
    /// Reads the next frame.
    pub(super) fn read_frame(&mut self, bytes: &[u8], report: &mut ResponseReport) {
        let mut at = 0;
        // The offset in this frame at which the value of `usage` begins or continues.
        let mut usage = 0;
        while at < bytes.len() {
            // Order of the steps: 1. skip the rest of a string; 2. decide whether the last string
            // was a key; 3. skip plain bytes inside values; 4. handle one structural byte.
            if self.text != UsageStringState::Outside {
                at += self.skip_string(&bytes[at..]);
                continue;
            }
            if self.answer.is_undecided {
                at += bytes[at..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
                let Some(&next) = bytes.get(at) else { break };
                self.answer.classify_string(next, report);
            }
            // At depth 1 every byte matters, because commas and colons separate the top-level members.
            if self.depth > 1 {
                at += skip_plain(&bytes[at..]);
            }
            let Some(&byte) = bytes.get(at) else { break };
            if self.depth == 1 {
                if self.state == UsageScanState::Colon && !byte.is_ascii_whitespace() {
                    self.begin_value(byte, report);
                    usage = at;
                } else if self.state == UsageScanState::Usage && matches!(byte, b',' | b'}' | b']')
                {
                    self.end_usage(&bytes[usage..at], report);
                }
            }
            self.scan_byte(byte, report);
            at += 1;
        }
        // The value continues in the next frame, so its part in this frame is copied now.
        if self.state == UsageScanState::Usage {
            self.keep_usage(&bytes[usage..]);
        }
    }

    fn scan_byte(&mut self, byte: u8, report: &mut ResponseReport) {
        match byte {
            b'"' => {
                self.text = UsageStringState::Inside;
                // A top-level key begins: its bytes are compared with the keys that matter.
                if self.depth == 1 && self.state == UsageScanState::Key {
                    self.key_length = 0;
                }
                self.answer.length = 0;
            }
            b'{' | b'[' => {
                // Only an object has members; a body of another type is never `Terminated`.
                if self.depth == 0 {
                    self.state =
                        if byte == b'{' { UsageScanState::Key } else { UsageScanState::Outside };
                }
                self.depth = self.depth.saturating_add(1);
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                // The body's object is closed. `take` also resets the position, so trailing bytes
                // report nothing.
                if self.depth == 0 && mem::take(&mut self.state) != UsageScanState::Outside {
                    self.answer = AnswerStringState::default();
                    report.on_end(StreamEnd::Terminated);
                }
            }
            b':' if self.depth == 1 && self.state == UsageScanState::Key => {
                self.state = UsageScanState::Colon;
            }
            b',' if self.depth == 1 && self.state != UsageScanState::Outside => {
                self.state = UsageScanState::Key;
            }
            _ => (),
        }
    }

    fn begin_value(&mut self, first: u8, report: &mut ResponseReport) {
        let key = (self.key_length == KEY_BYTES).then_some(&self.key);
        // `null` begins with `n`: providers send `"error": null` in successful bodies.
        if key == Some(b"error") && first != b'n' {
            report.on_end(StreamEnd::Errored);
        }
        // Longer keys such as `choices` are compared by their first five bytes.
        let is_long = self.key_length >= KEY_BYTES;
        self.answer.is_open = is_long && matches!(&self.key, b"choic" | b"conte" | b"outpu");
        self.state =
            if key == Some(b"usage") { UsageScanState::Usage } else { UsageScanState::Value };
    }

    /// Continues in a string: to its end, to the next backslash, or past the byte after a
    /// backslash. Returns the number of bytes read.
    fn skip_string(&mut self, bytes: &[u8]) -> usize {
        let end = match self.text {
            // An escaped byte is always content, even a quote.
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
        let is_key = self.depth == 1 && self.state == UsageScanState::Key;
        if is_key {
            let content = if self.text == UsageStringState::Outside { end } else { taken };
            self.keep_key(&bytes[..content]);
        } else if self.answer.is_open {
            // Only strings of an answer are measured; other strings are skipped.
            let has_ended = self.text == UsageStringState::Outside;
            self.answer.push_string_bytes(&bytes[..if has_ended { end } else { taken }], has_ended);
        }
        taken
    }

    fn keep_key(&mut self, bytes: &[u8]) {
        // One byte more than the longest key is counted, so that a longer key differs in length.
        for &byte in bytes.iter().take(KEY_BYTES + 1 - self.key_length) {
            if let Some(slot) = self.key.get_mut(self.key_length) {
                *slot = byte;
            }
            self.key_length += 1;
        }
    }

    fn keep_usage(&mut self, bytes: &[u8]) {
        // A value over the limit is discarded. Its usage counts as unreported, and the tokens are
        // estimated.
        if self.usage.len() + bytes.len() > MAX_USAGE_BYTES {
            self.usage = Vec::new();
            self.state = UsageScanState::Value;
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
        // Only the first bytes are stored; the length counts all of them.
        let from = usize::try_from(self.length)
            .map_or(KEPT_NAME_BYTES, |length| length.min(KEPT_NAME_BYTES));
        self.start[from..].iter_mut().zip(bytes).for_each(|(slot, byte)| *slot = *byte);
        self.length += bytes.len() as u64;
        self.is_undecided = has_ended;
    }

    /// Decides by the next byte whether the last string was a key or a value, and counts a value
    /// that is text.
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

/// Returns the number of bytes that can be skipped inside a value, mostly numbers. The loop checks
/// blocks of a fixed size without a branch inside, which the compiler turns into vector
/// instructions.
fn skip_plain(bytes: &[u8]) -> usize {
    let (pieces, _) = bytes.as_chunks::<SIMD_BLOCK_BYTES>();
    let is_plain = |piece: &&[u8; SIMD_BLOCK_BYTES]| {
        piece.iter().fold(0, |found, byte| found | u8::from(is_structural_byte(*byte))) == 0
    };
    let skipped = pieces.iter().take_while(is_plain).count() * SIMD_BLOCK_BYTES;
    let rest = &bytes[skipped..];
    skipped + rest.iter().position(|byte| is_structural_byte(*byte)).unwrap_or(rest.len())
}

/// Returns true for a quote, bracket or brace. Only bit 5 distinguishes a bracket from a brace.
fn is_structural_byte(byte: u8) -> bool {
    byte == b'"' || matches!(byte | 0x20, b'{' | b'}')
}

const SIMD_BLOCK_BYTES: usize = 32;
