//! Knows an event again that differs in its text alone from one that was read.
//!
//! Of a stream nearly all events are one event with another text in it, and in Responses with another number and
//! another filler. So the first of them is read with care and kept, with the places in which the next may differ.
//! An event that is the same everywhere else says the same of itself, and is not parsed.
//!
//! **Invariant:** what stands in those places is proven to be a string's inside or a number, so the event is JSON if
//! the one kept was. Whatever is not proven is read with care.

use std::ops::Range;

use super::MAX_EVENT_BYTES;
use super::output_limiter::TextEventEffect;
use crate::base::json::{JsonCursor, string_length};

/// An event that brought one text and said nothing else of interest.
#[derive(Debug, Default)]
pub(super) struct EventPattern {
    /// All of the event but what is in its holes, with the empty line that ends it. Empty where none is kept.
    literal: Vec<u8>,
    holes: [PatternHole; MAX_HOLES],
    effect: TextEventEffect,
}

/// A place in which the next event may differ.
#[derive(Clone, Copy, Debug, Default)]
struct PatternHole {
    kind: PatternHoleKind,
    /// Where in the literal.
    at: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PatternHoleKind {
    #[default]
    None,
    /// The inside of the string that counts.
    Text,
    /// The inside of a string that means nothing: padding.
    Filler,
    /// The number of the event.
    Sequence,
}

/// The one text of an event.
#[derive(Clone, Debug)]
pub(super) struct LoneText {
    /// Where its inside stands in the event's data.
    pub(super) place: Range<usize>,
    /// What such an event does to a limited stream.
    pub(super) effect: TextEventEffect,
}

/// An event that was known again.
#[derive(Clone, Copy, Debug)]
pub(super) struct RepeatedEvent<'a> {
    /// The inside of the string, not empty.
    pub(super) text: &'a [u8],
    pub(super) sequence: Option<u64>,
    pub(super) effect: TextEventEffect,
    /// Bytes of the event.
    pub(super) taken: usize,
}

impl LoneText {
    /// `start` is where the text begins in `data`, behind its quote.
    pub(super) fn from_offset(start: usize, data: &[u8], effect: TextEventEffect) -> Option<Self> {
        let length = string_length(data.get(start..)?)?;
        Some(Self { place: start..start + length, effect })
    }

    /// The same of a JSON string that is a part of `data`.
    pub(super) fn from_json_text(text: &str, data: &[u8], effect: TextEventEffect) -> Option<Self> {
        let start = text.as_ptr().addr().checked_sub(data.as_ptr().addr())?;
        Self::from_offset(start + 1, data, effect)
    }
}

impl EventPattern {
    /// Keeps the event that `block` is, with its empty line. `data` is its data. The one before stays where this one
    /// is out of the ordinary.
    pub(super) fn keep_event(
        &mut self,
        block: &[u8],
        data: &[u8],
        lone: &LoneText,
        is_numbered: bool,
    ) {
        let Some(start) = data_start(block, data) else { return };
        if block.len() > MAX_PATTERN_BYTES || self.match_repeated(block).is_some() {
            return;
        }
        let text = Some((PatternHoleKind::Text, lone.place.clone()));
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

    /// The event that `rest` begins with, if it is the one kept with another text.
    pub(super) fn match_repeated<'a>(&self, rest: &'a [u8]) -> Option<RepeatedEvent<'a>> {
        let (mut text, mut sequence): (&[u8], _) = (b"", None);
        let (mut left, mut from) = (rest, 0);
        for PatternHole { kind, at } in self.holes {
            if kind == PatternHoleKind::None {
                break;
            }
            left = left.strip_prefix(&self.literal[from..at])?;
            from = at;
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
        let taken = rest.len() - left.len();
        let is_event = !text.is_empty() && taken <= MAX_EVENT_BYTES;
        is_event.then_some(RepeatedEvent { text, sequence, effect: self.effect, taken })
    }
}

/// Where the data of an event begins in its block, if it is on the last line and all lines end in a line feed.
fn data_start(block: &[u8], data: &[u8]) -> Option<usize> {
    let lines = block.strip_suffix(b"\n\n")?.strip_suffix(data)?;
    let field = lines.strip_suffix(b" ").unwrap_or(lines);
    let before = field.strip_suffix(b"data:")?;
    let is_plain = before.last().is_none_or(|last| *last == b'\n') && !before.contains(&b'\r');
    is_plain.then_some(lines.len())
}

/// In Responses each event has a number, and some have a string that hides their length.
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
            b"sequence_number" | b"obfuscation" => return None,
            _ => value.skip_value()?,
        }
        Some(())
    });
    if walked.is_some() { [number, filler] } else { [const { None }; 2] }
}

const MAX_HOLES: usize = 3;

/// Real ones are under 1 KiB.
const MAX_PATTERN_BYTES: usize = 4096;
