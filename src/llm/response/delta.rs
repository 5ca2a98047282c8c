//! Counts the text in an event's deltas without parsing the event, for streams that nothing limits.
//!
//! Most of an event is the same in all events of its stream, so it is searched for the key of its
//! delta, and only the delta is read: its strings, by the keys that they stand under.

use memchr::memmem::Finder;

use super::output_estimate::OutputEstimate;
use crate::base::json::split_string;

/// Counts the text of every delta in the event `data`, which stands under `key`; in one that has a single
/// delta, of the first. Returns where the text begins if there is one.
pub(super) fn count_deltas(
    data: &[u8],
    key: &Finder<'_>,
    is_single: bool,
    written: &mut OutputEstimate,
) -> Option<usize> {
    let before = written.text_count();
    let mut found = None;
    let mut rest = data;
    while let Some(at) = key.find(rest) {
        rest = &rest[at + key.needle().len()..];
        let Some(value) = rest.trim_ascii_start().strip_prefix(b":") else { continue };
        rest = value.trim_ascii_start();
        if let Some(text) = rest.strip_prefix(b"\"") {
            let start = data.len() - text.len();
            let (text, after) = split_string(text);
            if written.add_text(text) {
                found = Some(start);
            }
            rest = after;
        } else if rest.starts_with(b"{") {
            let mut object = DeltaObject::default();
            let after = object.count_object(rest, written);
            if let Some(after) = object.left_at_text {
                found = Some(data.len() - after);
            }
            rest = after;
        }
        if is_single {
            break;
        }
    }
    found.filter(|_| written.text_count() == before + 1)
}

/// A delta that is being read.
#[derive(Default)]
struct DeltaObject {
    depth: usize,
    /// The depth of the array or object that is passed over, 0 outside of one.
    skipped: usize,
    /// The kind of the key that was read last.
    key: DeltaKeyKind,
    /// Whether no value has come since.
    is_after_key: bool,
    /// The reasoning has been counted: some upstreams repeat it under other keys.
    has_reasoning: bool,
    /// How much was left to read where the text began that was counted last.
    left_at_text: Option<usize>,
}

/// What a key in a delta has under it.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum DeltaKeyKind {
    Text,
    /// Text that may be a part of what is billed.
    Reasoning,
    /// Reasoning once more, with its signature.
    Blocks,
    /// An array or object with text in it.
    Nested,
    #[default]
    Other,
}

impl DeltaObject {
    /// Counts the object that `rest` begins with, and returns what follows it.
    fn count_object<'a>(&mut self, mut rest: &'a [u8], written: &mut OutputEstimate) -> &'a [u8] {
        while let Some((byte, after)) = rest.split_first() {
            rest = after;
            match byte {
                b'"' => {
                    let left = rest.len();
                    let (text, after) = split_string(rest);
                    rest = after;
                    if rest.trim_ascii_start().starts_with(b":") {
                        self.key = DeltaKeyKind::classify_key(text);
                        self.is_after_key = true;
                    } else {
                        self.count_text(text, left, written);
                    }
                }
                b'{' | b'[' => self.open_value(rest, written),
                b'}' | b']' => {
                    if self.skipped == self.depth {
                        self.skipped = 0;
                    }
                    self.depth -= 1;
                    if self.depth == 0 {
                        return rest;
                    }
                }
                _ => (),
            }
        }
        rest
    }

    fn open_value(&mut self, rest: &[u8], written: &mut OutputEstimate) {
        self.depth += 1;
        let is_member = std::mem::take(&mut self.is_after_key) && self.skipped == 0;
        if is_member
            && self.key == DeltaKeyKind::Blocks
            && !rest.trim_ascii_start().starts_with(b"]")
        {
            written.mark_partial();
        }
        if is_member && self.key != DeltaKeyKind::Nested {
            self.skipped = self.depth;
        }
    }

    fn count_text(&mut self, text: &[u8], left: usize, written: &mut OutputEstimate) {
        self.is_after_key = false;
        if self.skipped > 0 || text.is_empty() {
            return;
        }
        let counts = match self.key {
            DeltaKeyKind::Text => true,
            DeltaKeyKind::Reasoning => {
                written.mark_partial();
                !std::mem::replace(&mut self.has_reasoning, true)
            }
            DeltaKeyKind::Blocks | DeltaKeyKind::Nested | DeltaKeyKind::Other => false,
        };
        if counts {
            written.add_text(text);
            self.left_at_text = Some(left);
        }
    }
}

impl DeltaKeyKind {
    fn classify_key(name: &[u8]) -> Self {
        match name {
            b"content" | b"text" | b"refusal" | b"name" | b"arguments" | b"input"
            | b"partial_json" => Self::Text,
            b"reasoning_content" | b"reasoning" | b"thinking" => Self::Reasoning,
            b"thinking_blocks" => Self::Blocks,
            b"tool_calls" | b"function_call" | b"function" | b"custom" => Self::Nested,
            _ => Self::Other,
        }
    }
}
