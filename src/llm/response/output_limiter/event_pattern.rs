//! Recognizes an event that differs from an earlier one only in its text.
//!
//! Nearly all events of a stream are one event with different texts. In Responses they also differ
//! in a sequence number and a filler. So the first such event is parsed and stored, together with
//! the positions in which the next one may differ. An event that equals the stored one everywhere
//! else has the same meaning, and is not parsed.
//!
//! **Invariant:** the content of these positions is proven to be the inside of a string or a
//! number, so the event is valid JSON if the stored event was. An event without this proof is
//! parsed.

use std::ops::Range;

use super::TextEventEffect;
use crate::base::json::{JsonCursor, string_length};
use crate::llm::response::MAX_EVENT_BYTES;

/// A stored event that contained one text and no other information.
#[derive(Debug, Default)]
pub(in crate::llm::response) struct EventPattern {
    /// The whole event without the content of its holes, including the empty line that ends the
    /// event. Empty if no event is stored.
    literal: Vec<u8>,
    holes: [PatternHole; MAX_HOLES],
    effect: TextEventEffect,
}

/// A position in which the next event may differ.
#[derive(Clone, Copy, Debug, Default)]
struct PatternHole {
    kind: PatternHoleKind,
    /// The offset in the literal.
    at: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PatternHoleKind {
    #[default]
    None,
    /// The inside of the string whose text is counted.
    Text,
    /// The inside of a string without meaning: padding.
    Filler,
    /// The sequence number of the event.
    Sequence,
}

/// The only text of an event.
#[derive(Clone, Debug)]
pub(in crate::llm::response) struct LoneText {
    /// The range of the text's inside in the event's data.
    pub(in crate::llm::response) range: Range<usize>,
    /// The effect of such an event on a limited stream.
    pub(in crate::llm::response) effect: TextEventEffect,
}

/// An event that matched the pattern.
#[derive(Clone, Copy, Debug)]
pub(in crate::llm::response) struct RepeatedEvent<'a> {
    /// The inside of the string, never empty.
    pub(in crate::llm::response) text: &'a [u8],
    pub(in crate::llm::response) sequence: Option<u64>,
    pub(in crate::llm::response) effect: TextEventEffect,
    /// The length of the event in bytes.
    pub(in crate::llm::response) consumed: usize,
}

impl LoneText {
    /// Returns the text that begins at offset `start` in `data`, behind its quote.
    pub(in crate::llm::response) fn from_offset(
        start: usize,
        data: &[u8],
        effect: TextEventEffect,
    ) -> Option<Self> {
        let length = string_length(data.get(start..)?)?;
        Some(Self { range: start..start + length, effect })
    }

    /// Returns the text for a JSON string that is a slice of `data`.
    pub(in crate::llm::response) fn from_json_text(
        text: &str,
        data: &[u8],
        effect: TextEventEffect,
    ) -> Option<Self> {
        // Pointer arithmetic gives the offset: `text` must lie inside `data`, otherwise the range
        // checks fail.
        let start = text.as_ptr().addr().checked_sub(data.as_ptr().addr())?;
        Self::from_offset(start + 1, data, effect)
    }
}

impl EventPattern {
    /// Stores the event in `block`, including its empty line, as the new pattern. `data` is the
    /// event's data. The previous pattern stays if the event's form is unusual.
    pub(in crate::llm::response) fn keep_event(
        &mut self,
        block: &[u8],
        data: &[u8],
        lone: &LoneText,
        is_numbered: bool,
    ) {
        let Some(start) = data_start(block, data) else { return };
        // An event that already matches the pattern needs no new one.
        if block.len() > MAX_PATTERN_BYTES || self.match_repeated(block).is_some() {
            return;
        }
        let text = Some((PatternHoleKind::Text, lone.range.clone()));
        // 1. Collect the ranges that may differ. 2. Sort them by position. 3. Copy the bytes
        //    between them into the literal, and record each gap as a hole.
        let [number, filler] = if is_numbered { other_holes(data) } else { [const { None }; 2] };
        let mut places = [text, number, filler];
        places.sort_by_key(|place| place.as_ref().map_or(usize::MAX, |(_, place)| place.start));
        self.literal.clear();
        self.holes = [PatternHole::default(); MAX_HOLES];
        let mut from = 0;
        for (hole, (kind, place)) in self.holes.iter_mut().zip(places.into_iter().flatten()) {
            self.literal.extend_from_slice(&block[from..start + place.start]);
            *hole = PatternHole { kind, at: self.literal.len() };
            from = start + place.end;
        }
        self.literal.extend_from_slice(&block[from..]);
        self.effect = lone.effect;
    }

    /// Returns the event at the start of `rest`, if it equals the stored event except for the
    /// holes.
    pub(in crate::llm::response) fn match_repeated<'a>(
        &self,
        rest: &'a [u8],
    ) -> Option<RepeatedEvent<'a>> {
        let (mut text, mut sequence): (&[u8], _) = (b"", None);
        let (mut left, mut from) = (rest, 0);
        for PatternHole { kind, at } in self.holes {
            // Holes fill the array from the front, so the first empty entry ends the list.
            if kind == PatternHoleKind::None {
                break;
            }
            left = left.strip_prefix(&self.literal[from..at])?;
            from = at;
            // The content of a hole must prove its form: a string without an unescaped quote, or a
            // plain number.
            let length = match kind {
                PatternHoleKind::Text | PatternHoleKind::Filler => string_length(left)?,
                PatternHoleKind::None | PatternHoleKind::Sequence => {
                    let mut cursor = JsonCursor::new(left);
                    sequence = Some(cursor.read_count()?);
                    cursor.offset()
                }
            };
            let (inside, after) = left.split_at(length);
            left = after;
            if kind == PatternHoleKind::Text {
                text = inside;
            }
        }
        left = left.strip_prefix(&self.literal[from..])?;
        let consumed = rest.len() - left.len();
        // An empty text is counted differently from a text, so such an event is parsed. An empty
        // pattern also ends here.
        let is_event = !text.is_empty() && consumed <= MAX_EVENT_BYTES;
        is_event.then_some(RepeatedEvent { text, sequence, effect: self.effect, consumed })
    }
}

/// Returns the offset of an event's data in its block. Requires that the data is on the last line
/// and that all lines end in a line feed.
fn data_start(block: &[u8], data: &[u8]) -> Option<usize> {
    let lines = block.strip_suffix(b"\n\n")?.strip_suffix(data)?;
    let field = lines.strip_suffix(b" ").unwrap_or(lines);
    let before = field.strip_suffix(b"data:")?;
    let is_plain = before.last().is_none_or(|last| *last == b'\n') && !before.contains(&b'\r');
    is_plain.then_some(lines.len())
}

/// Returns the ranges of the sequence number and of the filler. In Responses each event has a
/// number, and some events have a string that hides their length.
fn other_holes(data: &[u8]) -> [Option<(PatternHoleKind, Range<usize>)>; 2] {
    let [mut number, mut filler] = [const { None }; 2];
    let mut cursor = JsonCursor::new(data);
    let walked = cursor.read_members(|key, value| {
        let start = value.offset();
        match key {
            b"sequence_number" if number.is_none() => {
                value.read_count()?;
                number = Some((PatternHoleKind::Sequence, start..value.offset()));
            }
            b"obfuscation" if filler.is_none() => {
                value.read_string()?;
                filler = Some((PatternHoleKind::Filler, start + 1..value.offset() - 1));
            }
            // A repeated key is ambiguous, so such an event has no further holes.
            b"sequence_number" | b"obfuscation" => return None,
            _ => value.skip_value()?,
        }
        Some(())
    });
    if walked.is_some() { [number, filler] } else { [const { None }; 2] }
}

const MAX_HOLES: usize = 3;

/// The maximum length of a stored event, in bytes. Real events of this kind are under 1 KiB.
const MAX_PATTERN_BYTES: usize = 4096;
