//! Events that are rendered in advance, so that a chunk of a fast stream costs only a reference count.

use bytes::{Bytes, BytesMut};
use memchr::memmem;

/// The mark for the send time in a rendered event: `t=` and 19 digits, padded with zeros.
pub(super) const STAMP_MARK: &str = "\u{e000}";
/// The mark for the event's number in its stream, as a JSON string.
pub(super) const SEQUENCE_MARK: &str = "\u{e001}";
/// The mark for the filler of a [`RenderedEvent`].
pub(super) const FILLER_MARK: &str = "\u{e002}";
/// The maximum length of filler that is rendered in advance. Longer filler is sent in pieces of this length, so that an
/// event of a gigabyte needs no memory.
pub(super) const FILLER_CHUNK_BYTES: usize = 64 * 1024;

/// An event that is complete except for values that are known only when it is sent.
#[derive(Clone, Debug)]
pub(super) struct RenderedEvent {
    pub(super) parts: Vec<EventPart>,
}

#[derive(Clone, Debug)]
pub(super) enum EventPart {
    Bytes(Bytes),
    Stamp,
    Sequence,
    /// The letter `x`, repeated this many times.
    Filler(u64),
}

impl RenderedEvent {
    /// Splits a rendered event at its marks. `filler` is the length of each [`FILLER_MARK`].
    pub(super) fn new(rendered: &str, filler: u64) -> Self {
        // The mark is replaced together with its quotes, so that the result is a JSON number.
        let sequence = format!("\"{SEQUENCE_MARK}\"");
        let marks = [
            (STAMP_MARK, EventPart::Stamp),
            (sequence.as_str(), EventPart::Sequence),
            (FILLER_MARK, EventPart::Filler(filler)),
        ];
        let mut event = Self { parts: Vec::new() };
        let mut rest = rendered;
        // Finds the leftmost mark, of whichever kind.
        let first = |text: &str| {
            marks
                .iter()
                .filter_map(|(mark, part)| {
                    Some((memmem::find(text.as_bytes(), mark.as_bytes())?, mark.len(), part))
                })
                .min_by_key(|(at, ..)| *at)
                .map(|(at, length, part)| (at, length, part.clone()))
        };
        // The marks are private-use characters, which ordinary text does not contain.
        while let Some((at, length, part)) = first(rest) {
            event.push_bytes(&rest.as_bytes()[..at]);
            match part {
                // Short filler becomes part of the bytes.
                EventPart::Filler(n) if n <= FILLER_CHUNK_BYTES as u64 => {
                    event.push_bytes(&filler_bytes(n));
                }
                part => event.parts.push(part),
            }
            rest = &rest[at + length..];
        }
        event.push_bytes(rest.as_bytes());
        event
    }

    /// Appends the bytes, to the last part if that part has bytes too.
    fn push_bytes(&mut self, bytes: &[u8]) {
        if let Some(EventPart::Bytes(last)) = self.parts.last_mut() {
            let mut joined = BytesMut::with_capacity(last.len() + bytes.len());
            joined.extend_from_slice(last);
            joined.extend_from_slice(bytes);
            *last = joined.freeze();
        } else if !bytes.is_empty() {
            self.parts.push(EventPart::Bytes(Bytes::copy_from_slice(bytes)));
        }
    }
}

/// Returns `length` bytes of filler, at most [`FILLER_CHUNK_BYTES`].
pub(super) fn filler_bytes(length: u64) -> Bytes {
    static FILLER_CHUNK: [u8; FILLER_CHUNK_BYTES] = [b'x'; FILLER_CHUNK_BYTES];
    let length =
        usize::try_from(length).map_or(FILLER_CHUNK_BYTES, |length| length.min(FILLER_CHUNK_BYTES));
    Bytes::from_static(&FILLER_CHUNK[..length])
}
