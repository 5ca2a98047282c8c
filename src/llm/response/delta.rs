//! Counts the text in an event's deltas without parsing the event, for streams without an output
//! limit.
//!
//! Most of an event is the same in all events of its stream. So the event is searched for the key
//! of its delta, and only the delta is read: its strings, by the keys that they stand under.

use memchr::memmem::Finder;

use super::output_estimate::OutputEstimate;
use crate::base::json::split_string;

/// Counts the text of every delta in the event `data`. A delta stands under `key`. If `is_single`
/// is set, only the first delta counts. Returns the offset of the text if the event has exactly one
/// text.
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
        // The key's bytes may also occur inside a text. Only a key is followed by a colon.
        let Some(value) = rest.trim_ascii_start().strip_prefix(b":") else { continue };
        rest = value.trim_ascii_start();
        if let Some(text) = rest.strip_prefix(b"\"") {
            // Offsets are computed from the end: `rest` is always a suffix of `data`.
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
    // An event with several texts cannot serve as a pattern for later events.
    found.filter(|_| written.text_count() == before + 1)
}

/// The state of a delta that is being read.
#[derive(Default)]
struct DeltaObject {
    depth: usize,
    /// The depth of the array or object that is being skipped; 0 if none is.
    skipped: usize,
    /// The kind of the last key.
    key: DeltaKeyKind,
    /// True if no value has followed the last key.
    is_after_key: bool,
    /// True if the reasoning has been counted. Some upstreams repeat it under other keys.
    has_reasoning: bool,
    /// The number of unread bytes at the start of the last counted text.
    left_at_text: Option<usize>,
}

/// The kind of value that stands under a key in a delta.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum DeltaKeyKind {
    Text,
    /// Text that may be only a part of the billed text.
    Reasoning,
    /// The reasoning a second time, with its signature.
    Blocks,
    /// An array or object that contains text.
    Nested,
    #[default]
    Other,
}

impl DeltaObject {
    /// Counts the text of the object at the start of `rest`, and returns the bytes after the
    /// object.
    fn count_object<'a>(&mut self, mut rest: &'a [u8], written: &mut OutputEstimate) -> &'a [u8] {
        while let Some((byte, after)) = rest.split_first() {
            rest = after;
            match byte {
                b'"' => {
                    let left = rest.len();
                    let (text, after) = split_string(rest);
                    rest = after;
                    // A colon after a string makes the string a key; otherwise it is a value.
                    if rest.trim_ascii_start().starts_with(b":") {
                        self.key = DeltaKeyKind::classify_key(text);
                        self.is_after_key = true;
                    } else {
                        self.count_text(text, left, written);
                    }
                }
                b'{' | b'[' => self.open_value(rest, written),
                b'}' | b']' => {
                    // The skipped container closes when the depth returns to its own.
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

    /// Enters an array or object, and decides whether its content is skipped.
    fn open_value(&mut self, rest: &[u8], written: &mut OutputEstimate) {
        self.depth += 1;
        // Elements of an array have no key of their own: they inherit the decision made for the
        // array.
        let is_member = std::mem::take(&mut self.is_after_key) && self.skipped == 0;
        if is_member
            && self.key == DeltaKeyKind::Blocks
            && !rest.trim_ascii_start().starts_with(b"]")
        {
            // Blocks with content mean that part of the reasoning is hidden behind a signature.
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
            // The same reasoning may stand under two keys of one delta; the first one counts.
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
