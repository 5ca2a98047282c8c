//! Splits a stream of server-sent events into blocks, by the WHATWG rules, at any frame boundaries.
//!
//! A block is the unit that is forwarded or withheld: the lines of an event with the empty line
//! that ends them, or the bytes between events (a comment, an empty line, a byte order mark).
//!
//! **Invariant:** the blocks are the same however the stream is split into frames. Between frames,
//! the parser stores only an event that has begun and not ended, at most [`MAX_EVENT_BYTES`] bytes
//! of it.

use std::borrow::Cow;
use std::mem;

use memchr::{memchr2, memchr2_iter};

use super::{EventTooLargeError, MAX_EVENT_BYTES};

/// A parser that reads a stream frame by frame.
#[derive(Debug, Default)]
pub(super) struct SseParser {
    splitter: SseBlockSplitter,
    /// The bytes of the begun event, or of the last event if `is_spent` is set.
    carry: Vec<u8>,
    is_spent: bool,
}

/// A complete block.
#[derive(Clone, Copy, Debug)]
pub(super) struct SseBlock<'a> {
    pub(super) kind: SseBlockKind,
    /// The whole event, or only the last part of any other block.
    bytes: &'a [u8],
    /// The number of the block's bytes that arrived in the current frame.
    pub(super) consumed: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SseBlockKind {
    /// An event with this number of lines, without the empty line.
    Event { lines: u32 },
    /// A byte order mark, a comment or an empty line between events.
    Filler,
    /// The line feed of a CR LF whose carriage return ended the previous block. The line feed
    /// belongs to that block.
    LineFeed,
}

/// The fields of an event. The fields `id` and `retry` have no meaning for the gateway.
#[derive(Debug)]
pub(super) struct SseEvent<'a> {
    /// The last `event` field, or empty if there is none.
    pub(super) name: &'a [u8],
    pub(super) data: Cow<'a, [u8]>,
}

impl SseParser {
    /// Returns the next block that ends in `rest`, the unread part of the frame. Returns `None`
    /// after the last block, and stores the bytes behind it for the next frame.
    ///
    /// # Errors
    /// Returns [`EventTooLargeError`] if an event exceeds [`MAX_EVENT_BYTES`].
    pub(super) fn next_block<'a>(
        &'a mut self,
        rest: &'a [u8],
    ) -> Result<Option<SseBlock<'a>>, EventTooLargeError> {
        // The previous block was returned as a borrow of `carry`, so `carry` can only be cleared
        // here.
        if mem::take(&mut self.is_spent) {
            self.clear_carry();
        }
        let Some((kind, consumed)) = self.splitter.find_block_end(rest) else {
            self.carry_bytes(rest)?;
            return Ok(None);
        };
        let bytes = &rest[..consumed];
        // The usual case: the block began in this frame, so no byte is copied.
        if self.carry.is_empty() {
            let is_event = matches!(kind, SseBlockKind::Event { .. });
            return if is_event && consumed > MAX_EVENT_BYTES {
                Err(EventTooLargeError)
            } else {
                Ok(Some(SseBlock { kind, bytes, consumed }))
            };
        }
        // The block began in an earlier frame: its last part is joined to the stored bytes.
        self.carry_bytes(bytes)?;
        self.is_spent = true;
        Ok(Some(SseBlock { kind, bytes: &self.carry, consumed }))
    }

    /// Returns true if no block is open, so that the next byte begins a block.
    pub(super) fn is_between_blocks(&mut self) -> bool {
        if mem::take(&mut self.is_spent) {
            self.clear_carry();
        }
        // After a carriage return, a line feed may still belong to the previous block.
        self.splitter.state == SseSplitterState::BetweenBlocks && !self.splitter.after_return
    }

    /// Returns the bytes of the event that has begun and not ended. Returns `None` inside a
    /// comment, whose bytes are not stored.
    pub(super) fn partial_event(&self) -> Option<&[u8]> {
        (self.splitter.state != SseSplitterState::Comment).then_some(&self.carry)
    }

    /// Returns the number of bytes of the event that has begun and not ended, or 0.
    pub(super) fn open_event_bytes(&self) -> usize {
        if self.is_spent { 0 } else { self.carry.len() }
    }

    /// Returns the size of the buffer for an event that is not complete, in bytes.
    pub(super) fn buffer_bytes(&self) -> usize {
        self.carry.capacity()
    }

    fn carry_bytes(&mut self, bytes: &[u8]) -> Result<(), EventTooLargeError> {
        if self.splitter.state == SseSplitterState::Comment {
            return Ok(());
        }
        let length = self.carry.len() + bytes.len();
        if length > MAX_EVENT_BYTES {
            self.carry = Vec::new();
            return Err(EventTooLargeError);
        }
        if length > self.carry.capacity() {
            // The capacity doubles like that of any vector, but never beyond the limit.
            let capacity = length.max(2 * self.carry.capacity()).min(MAX_EVENT_BYTES);
            self.carry.reserve_exact(capacity - self.carry.len());
        }
        self.carry.extend_from_slice(bytes);
        Ok(())
    }

    /// Clears the stored bytes. The allocation is kept for the next split event, unless a large
    /// event made it too big.
    fn clear_carry(&mut self) {
        if self.carry.capacity() > RETAINED_CARRY_BYTES {
            self.carry = Vec::new();
        }
        self.carry.clear();
    }
}

impl<'a> SseBlock<'a> {
    /// Returns the bytes that arrived in earlier frames.
    pub(super) fn carried_bytes(&self) -> &'a [u8] {
        &self.bytes[..self.bytes.len() - self.consumed]
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
    /// Parses an event of one line, the usual form. The line's end is found from the back.
    fn from_line(block: &'a [u8]) -> Option<Self> {
        let last = block.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r'))?;
        let data = Cow::Borrowed(field_value(&block[..=last], b"data")?);
        Some(Self { name: b"", data }).filter(Self::has_data)
    }

    /// Parses all fields. A block without data is no event, whatever its name.
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
                    // Several data lines are joined with line feeds, as the WHATWG rules require.
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

/// Returns the place behind the first empty line of a text, or behind a part of that line. An event that began before the
/// text ends there at the latest.
pub fn first_event_end(text: &[u8]) -> Option<usize> {
    let is_end = |at: &usize| {
        // A carriage return and a line feed end one line, any other two line ends enclose an empty line.
        matches!(text.get(*at..at + 2), Some(b"\n\n" | b"\n\r" | b"\r\r"))
    };
    memchr2_iter(b'\n', b'\r', text).find(is_end).map(|at| at + 2)
}

/// Returns the value of the line's field, if the field has this name. One space after the colon
/// does not count.
fn field_value<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let rest = line.strip_prefix(name)?;
    match rest.split_first() {
        // A line without a colon is a field with an empty value.
        None => Some(rest),
        Some((b':', value)) => Some(value.strip_prefix(b" ").unwrap_or(value)),
        Some(_) => None,
    }
}

/// A state machine that finds the ends of blocks. It keeps its state between frames, so each byte
/// is read once.
#[derive(Debug, Default)]
struct SseBlockSplitter {
    state: SseSplitterState,
    /// True if the last byte was the carriage return of a line's end. A following line feed belongs
    /// to that line end.
    after_return: bool,
    /// The number of finished lines of the current event.
    lines: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SseSplitterState {
    /// The number of matched bytes of a byte order mark. Only the very start of a stream can have
    /// one.
    ByteOrderMark(u8),
    /// The gap between two blocks.
    BetweenBlocks,
    Comment,
    /// The inside of a line of an event.
    Line,
    /// The start of a later line of an event.
    LineStart,
}

impl Default for SseSplitterState {
    fn default() -> Self {
        Self::ByteOrderMark(0)
    }
}

impl SseBlockSplitter {
    /// Returns the kind of the block that ends in `bytes`, and the number of its bytes in `bytes`.
    /// Returns `None` if no block ends there.
    fn find_block_end(&mut self, bytes: &[u8]) -> Option<(SseBlockKind, usize)> {
        // States: Mark → Between at the stream's start; Between → Comment or Line by the first
        // byte; Line → Margin at a line end; Margin → Line, or an empty line that ends the event.
        let mut at = 0;
        loop {
            let byte = *bytes.get(at)?;
            // True for the line feed of a CR LF pair whose carriage return already ended a line.
            let is_pair = mem::take(&mut self.after_return) && byte == b'\n';
            let is_empty_line = matches!(byte, b'\n' | b'\r');
            match self.state {
                SseSplitterState::BetweenBlocks if is_pair => {
                    return Some((SseBlockKind::LineFeed, 1));
                }
                SseSplitterState::LineStart if is_pair => at += 1,
                SseSplitterState::BetweenBlocks | SseSplitterState::LineStart if is_empty_line => {
                    return Some((self.finish_block(byte), at + 1));
                }
                SseSplitterState::BetweenBlocks if byte == b':' => {
                    self.state = SseSplitterState::Comment;
                }
                // The byte belongs to a line; the next iteration searches for the line's end.
                SseSplitterState::BetweenBlocks | SseSplitterState::LineStart => {
                    self.state = SseSplitterState::Line;
                }
                SseSplitterState::Comment | SseSplitterState::Line => {
                    at += memchr2(b'\n', b'\r', &bytes[at..])?;
                    // A comment ends with its line; an event's line only leads to the margin.
                    if self.state == SseSplitterState::Comment {
                        return Some((self.finish_block(bytes[at]), at + 1));
                    }
                    self.after_return = bytes[at] == b'\r';
                    self.lines = self.lines.saturating_add(1);
                    self.state = SseSplitterState::LineStart;
                    at += 1;
                }
                SseSplitterState::ByteOrderMark(matched) => {
                    match BYTE_ORDER_MARK.split_at(usize::from(matched)).1 {
                        [last] if *last == byte => return Some((self.finish_block(byte), at + 1)),
                        [next, ..] if *next == byte => {
                            self.state = SseSplitterState::ByteOrderMark(matched + 1);
                            at += 1;
                        }
                        // No byte order mark: the same byte is read again as ordinary text.
                        _ if matched == 0 => self.state = SseSplitterState::BetweenBlocks,
                        // A partial mark is not a mark: its bytes are the start of an event's line.
                        _ => self.state = SseSplitterState::Line,
                    }
                }
            }
        }
    }

    fn finish_block(&mut self, last: u8) -> SseBlockKind {
        self.state = SseSplitterState::BetweenBlocks;
        self.after_return = last == b'\r';
        match mem::take(&mut self.lines) {
            0 => SseBlockKind::Filler,
            lines => SseBlockKind::Event { lines },
        }
    }
}

const BYTE_ORDER_MARK: [u8; 3] = [0xEF, 0xBB, 0xBF];

/// The maximum capacity that an open stream keeps for the next split event, in bytes. A delta is a
/// few hundred bytes long.
const RETAINED_CARRY_BYTES: usize = 2048;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{SseBlockKind, SseParser, first_event_end};

    proptest! {
        /// An event that began in an earlier frame has ended where the function says, whatever the event's last byte was.
        #[test]
        fn an_event_ends_at_its_first_empty_line(
            begun in prop::sample::select(vec!["data", "data\n", "data\r", "data\r\n"]),
            text in prop::collection::vec(prop::sample::select(b"\n\r:a".to_vec()), 0..12),
        ) {
            let mut parser = SseParser::default();
            prop_assert!(parser.next_block(begun.as_bytes()).unwrap().is_none());
            let block = parser.next_block(&text).unwrap();
            let ended = block.filter(|block| matches!(block.kind, SseBlockKind::Event { .. }));
            if let Some(end) = first_event_end(&text) {
                prop_assert!(ended.is_some_and(|block| block.consumed <= end), "{end}");
            }
        }
    }
}
