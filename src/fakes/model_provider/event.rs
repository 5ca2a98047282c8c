//! Events rendered ahead of time, so that a fast stream costs a reference count per chunk.

use bytes::{Bytes, BytesMut};
use memchr::memmem;

/// Stands in a rendered event for the time it is sent, zero-padded: `t=` and 19 digits.
pub(super) const STAMP_MARK: &str = "\u{e000}";
/// Stands, as a JSON string, for the event's number in its stream.
pub(super) const SEQUENCE_MARK: &str = "\u{e001}";
/// Stands for [`RenderedEvent`]'s filler.
pub(super) const FILLER_MARK: &str = "\u{e002}";
/// Filler up to this length is rendered ahead; a longer one is sent in pieces of it, so that an
/// event of a gigabyte takes no memory.
pub(super) const FILLER_CHUNK_BYTES: usize = 64 * 1024;

/// One event, ready but for what is known only when it is sent.
#[derive(Clone, Debug)]
pub(super) struct RenderedEvent {
    pub(super) parts: Vec<EventPart>,
}

#[derive(Clone, Debug)]
pub(super) enum EventPart {
    Bytes(Bytes),
    Stamp,
    Sequence,
    /// So many times the letter `x`.
    Filler(u64),
}

impl RenderedEvent {
    /// Splits a rendered event at its marks; `filler` is the length of each [`FILLER_MARK`].
    pub(super) fn new(rendered: &str, filler: u64) -> Self {
        let sequence = format!("\"{SEQUENCE_MARK}\"");
        let marks = [
            (STAMP_MARK, EventPart::Stamp),
            (sequence.as_str(), EventPart::Sequence),
            (FILLER_MARK, EventPart::Filler(filler)),
        ];
        let mut event = Self { parts: Vec::new() };
        let mut rest = rendered;
        let first = |text: &str| {
            marks
                .iter()
                .filter_map(|(mark, part)| {
                    Some((memmem::find(text.as_bytes(), mark.as_bytes())?, mark.len(), part))
                })
                .min_by_key(|(at, ..)| *at)
                .map(|(at, length, part)| (at, length, part.clone()))
        };
        while let Some((at, length, part)) = first(rest) {
            event.push_bytes(&rest.as_bytes()[..at]);
            match part {
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

    /// Appends to the last part where that is bytes too.
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

/// At most one [`FILLER_CHUNK_BYTES`] of filler.
pub(super) fn filler_bytes(length: u64) -> Bytes {
    static FILLER_CHUNK: [u8; FILLER_CHUNK_BYTES] = [b'x'; FILLER_CHUNK_BYTES];
    let length =
        usize::try_from(length).map_or(FILLER_CHUNK_BYTES, |length| length.min(FILLER_CHUNK_BYTES));
    Bytes::from_static(&FILLER_CHUNK[..length])
}
