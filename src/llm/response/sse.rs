//! Splits a stream of server-sent events into blocks, by the WHATWG rules, wherever it was cut.
//!
//! A block is what goes on or is withheld as one: the lines of an event with the empty line that
//! ends them, or what stands between events (a comment, an empty line, a byte order mark).
//!
//! **Invariant:** the blocks are the same however the stream is split into frames, and all that is
//! kept between frames is an event that has begun and not ended, at most [`MAX_EVENT_BYTES`] bytes of it.

use std::borrow::Cow;
use std::mem;

use memchr::memchr2;

use super::{EventTooLargeError, MAX_EVENT_BYTES};

/// A stream that is read frame by frame.
#[derive(Debug, Default)]
pub(super) struct SseParser {
    splitter: SseBlockSplitter,
    /// The begun event, or the one that was read last if `is_spent`.
    carry: Vec<u8>,
    is_spent: bool,
}

/// A whole block.
#[derive(Clone, Copy, Debug)]
pub(super) struct SseBlock<'a> {
    pub(super) kind: SseBlockKind,
    /// All of it for an event, the last part of it for anything else.
    bytes: &'a [u8],
    /// How many of its bytes came with this frame.
    pub(super) taken: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SseBlockKind {
    /// So many lines, the empty one left out.
    Event { lines: u32 },
    /// A byte order mark, a comment or an empty line between events.
    Filler,
    /// The line feed of the CR LF whose carriage return ended the block before: part of that.
    LineFeed,
}

/// What an event says. Other fields (`id`, `retry`) do not matter to us.
#[derive(Debug)]
pub(super) struct SseEvent<'a> {
    /// The last `event` field, empty where there is none.
    pub(super) name: &'a [u8],
    pub(super) data: Cow<'a, [u8]>,
}

impl SseParser {
    /// The next block that ends in `rest`, the part of the frame that has not been read. `None`
    /// after the last: what follows it has been kept for the next frame.
    pub(super) fn next_block<'a>(
        &'a mut self,
        rest: &'a [u8],
    ) -> Result<Option<SseBlock<'a>>, EventTooLargeError> {
        if mem::take(&mut self.is_spent) {
            self.clear_carry();
        }
        let Some((kind, taken)) = self.splitter.find_block_end(rest) else {
            self.carry_bytes(rest)?;
            return Ok(None);
        };
        let bytes = &rest[..taken];
        if self.carry.is_empty() {
            let is_event = matches!(kind, SseBlockKind::Event { .. });
            return if is_event && taken > MAX_EVENT_BYTES {
                Err(EventTooLargeError)
            } else {
                Ok(Some(SseBlock { kind, bytes, taken }))
            };
        }
        self.carry_bytes(bytes)?;
        self.is_spent = true;
        Ok(Some(SseBlock { kind, bytes: &self.carry, taken }))
    }

    /// Whether nothing has begun and not ended: the next byte begins a block.
    pub(super) fn is_between_blocks(&mut self) -> bool {
        if mem::take(&mut self.is_spent) {
            self.clear_carry();
        }
        self.splitter.place == SseSplitterState::Between && !self.splitter.after_return
    }

    /// The bytes of the event that has begun and not ended; `None` in a comment, which nobody needs.
    pub(super) fn partial_event(&self) -> Option<&[u8]> {
        (self.splitter.place != SseSplitterState::Comment).then_some(&self.carry)
    }

    /// Whether an event has begun and not ended.
    pub(super) fn is_in_event(&self) -> bool {
        !self.is_spent && !self.carry.is_empty()
    }

    fn carry_bytes(&mut self, bytes: &[u8]) -> Result<(), EventTooLargeError> {
        if self.splitter.place == SseSplitterState::Comment {
            return Ok(());
        }
        let length = self.carry.len() + bytes.len();
        if length > MAX_EVENT_BYTES {
            self.carry = Vec::new();
            return Err(EventTooLargeError);
        }
        if length > self.carry.capacity() {
            // Doubled like any vector, but never past the bound.
            let capacity = length.max(2 * self.carry.capacity()).min(MAX_EVENT_BYTES);
            self.carry.reserve_exact(capacity - self.carry.len());
        }
        self.carry.extend_from_slice(bytes);
        Ok(())
    }

    /// Keeps the space for the next cut event, unless one large event left a lot of it.
    fn clear_carry(&mut self) {
        if self.carry.capacity() > RETAINED_CARRY_BYTES {
            self.carry = Vec::new();
        }
        self.carry.clear();
    }
}

impl<'a> SseBlock<'a> {
    /// The bytes that came with earlier frames.
    pub(super) fn carried_bytes(&self) -> &'a [u8] {
        &self.bytes[..self.bytes.len() - self.taken]
    }

    pub(super) fn parse_event(&self) -> Option<SseEvent<'a>> {
        match self.kind {
            SseBlockKind::Event { lines: 1 } => SseEvent::from_line(self.bytes),
            SseBlockKind::Event { .. } => SseEvent::from_lines(self.bytes),
            SseBlockKind::Filler | SseBlockKind::LineFeed => None,
        }
    }

    pub(super) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<'a> SseEvent<'a> {
    /// The usual event: one line, so its end is found without looking for it.
    fn from_line(block: &'a [u8]) -> Option<Self> {
        let last = block.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r'))?;
        let data = Cow::Borrowed(field_value(&block[..=last], b"data")?);
        Some(Self { name: b"", data }).filter(Self::has_data)
    }

    /// Reads all fields. A block without data is no event, whatever its name.
    pub(super) fn from_lines(mut block: &'a [u8]) -> Option<Self> {
        let mut name: &[u8] = b"";
        let mut data: Option<Cow<'a, [u8]>> = None;
        while !block.is_empty() {
            let end = memchr2(b'\n', b'\r', block).unwrap_or(block.len());
            let line = &block[..end];
            block = block.get(end + 1..).unwrap_or_default();
            if let Some(value) = field_value(line, b"data") {
                match &mut data {
                    None => data = Some(Cow::Borrowed(value)),
                    Some(lines) => {
                        let lines = lines.to_mut();
                        lines.push(b'\n');
                        lines.extend_from_slice(value);
                    }
                }
            } else if let Some(value) = field_value(line, b"event") {
                name = value;
            }
        }
        Some(Self { name, data: data? }).filter(Self::has_data)
    }

    fn has_data(&self) -> bool {
        !self.data.is_empty()
    }
}

/// The value of the line's field, if that is its name. One space after the colon does not count.
fn field_value<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let rest = line.strip_prefix(name)?;
    match rest.split_first() {
        None => Some(rest),
        Some((b':', value)) => Some(value.strip_prefix(b" ").unwrap_or(value)),
        Some(_) => None,
    }
}

/// Finds where blocks end; remembers where it is, so that a byte is looked at once.
#[derive(Debug, Default)]
struct SseBlockSplitter {
    place: SseSplitterState,
    /// The last byte was the carriage return of a line's end: a line feed now belongs to it.
    after_return: bool,
    /// Lines of the present event that have ended.
    lines: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SseSplitterState {
    /// So far into a byte order mark, which only a stream's very start can have.
    Mark(u8),
    /// Between blocks.
    Between,
    Comment,
    /// In a line of an event.
    Line,
    /// At the start of a line of an event, not the first.
    Margin,
}

impl Default for SseSplitterState {
    fn default() -> Self {
        Self::Mark(0)
    }
}

impl SseBlockSplitter {
    /// The kind of the block that ends in `bytes`, and how many of them belong to it.
    fn find_block_end(&mut self, bytes: &[u8]) -> Option<(SseBlockKind, usize)> {
        let mut at = 0;
        loop {
            let byte = *bytes.get(at)?;
            let is_pair = mem::take(&mut self.after_return) && byte == b'\n';
            let is_empty_line = matches!(byte, b'\n' | b'\r');
            match self.place {
                SseSplitterState::Between if is_pair => return Some((SseBlockKind::LineFeed, 1)),
                SseSplitterState::Margin if is_pair => at += 1,
                SseSplitterState::Between | SseSplitterState::Margin if is_empty_line => {
                    return Some((self.finish_block(byte), at + 1));
                }
                SseSplitterState::Between if byte == b':' => self.place = SseSplitterState::Comment,
                SseSplitterState::Between | SseSplitterState::Margin => {
                    self.place = SseSplitterState::Line;
                }
                SseSplitterState::Comment | SseSplitterState::Line => {
                    at += memchr2(b'\n', b'\r', &bytes[at..])?;
                    if self.place == SseSplitterState::Comment {
                        return Some((self.finish_block(bytes[at]), at + 1));
                    }
                    self.after_return = bytes[at] == b'\r';
                    self.lines = self.lines.saturating_add(1);
                    self.place = SseSplitterState::Margin;
                    at += 1;
                }
                SseSplitterState::Mark(matched) => {
                    match BYTE_ORDER_MARK.split_at(usize::from(matched)).1 {
                        [last] if *last == byte => return Some((self.finish_block(byte), at + 1)),
                        [next, ..] if *next == byte => {
                            self.place = SseSplitterState::Mark(matched + 1);
                            at += 1;
                        }
                        _ if matched == 0 => self.place = SseSplitterState::Between,
                        _ => self.place = SseSplitterState::Line,
                    }
                }
            }
        }
    }

    fn finish_block(&mut self, last: u8) -> SseBlockKind {
        self.place = SseSplitterState::Between;
        self.after_return = last == b'\r';
        match mem::take(&mut self.lines) {
            0 => SseBlockKind::Filler,
            lines => SseBlockKind::Event { lines },
        }
    }
}

const BYTE_ORDER_MARK: [u8; 3] = [0xEF, 0xBB, 0xBF];

/// What an open stream may keep for the next cut event: a delta is a few hundred bytes.
const RETAINED_CARRY_BYTES: usize = 2048;
