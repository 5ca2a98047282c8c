//! Events rendered ahead of time, so that a fast stream costs a reference count per chunk.

use bytes::{Bytes, BytesMut};
use memchr::memmem;

/// Stands in a rendered event for the time it is sent, zero-padded: `t=` and 19 digits.
pub(super) const STAMP: &str = "\u{e000}";
/// Stands, as a JSON string, for the event's number in its stream.
pub(super) const SEQUENCE: &str = "\u{e001}";
/// Stands for [`Event`]'s filler.
pub(super) const FILLER: &str = "\u{e002}";
/// Filler up to this length is rendered ahead; a longer one is sent in pieces of it, so that an
/// event of a gigabyte takes no memory.
pub(super) const PIECE: usize = 64 * 1024;

/// One event, ready but for what is known only when it is sent.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) parts: Vec<Part>,
}

#[derive(Clone, Debug)]
pub(super) enum Part {
    Bytes(Bytes),
    Stamp,
    Sequence,
    /// So many times the letter `x`.
    Filler(u64),
}

impl Event {
    /// Splits a rendered event at its marks; `filler` is the length of each [`FILLER`].
    pub(super) fn new(rendered: &str, filler: u64) -> Self {
        let sequence = format!("\"{SEQUENCE}\"");
        let marks = [
            (STAMP, Part::Stamp),
            (sequence.as_str(), Part::Sequence),
            (FILLER, Part::Filler(filler)),
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
            event.push(&rest.as_bytes()[..at]);
            match part {
                Part::Filler(n) if n <= PIECE as u64 => event.push(&filler_bytes(n)),
                part => event.parts.push(part),
            }
            rest = &rest[at + length..];
        }
        event.push(rest.as_bytes());
        event
    }

    /// Appends to the last part where that is bytes too.
    fn push(&mut self, bytes: &[u8]) {
        if let Some(Part::Bytes(last)) = self.parts.last_mut() {
            let mut joined = BytesMut::with_capacity(last.len() + bytes.len());
            joined.extend_from_slice(last);
            joined.extend_from_slice(bytes);
            *last = joined.freeze();
        } else if !bytes.is_empty() {
            self.parts.push(Part::Bytes(Bytes::copy_from_slice(bytes)));
        }
    }
}

/// At most one [`PIECE`] of filler.
pub(super) fn filler_bytes(length: u64) -> Bytes {
    static FILL: [u8; PIECE] = [b'x'; PIECE];
    let length = usize::try_from(length).map_or(PIECE, |length| length.min(PIECE));
    Bytes::from_static(&FILL[..length])
}
