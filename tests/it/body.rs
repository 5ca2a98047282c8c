//! Request bodies: the scanner against a strict reference, the rope against plain bytes, and what
//! admission makes of each protocol's fields.

mod admission;
mod generate;
mod rope;
mod scanner;
mod strict;

use std::ops::Range;

use bytes::Bytes;
use cogni_gateway::gateway::json::{Document, Invalid, Limits, Scanner};
use cogni_gateway::gateway::rope::Rope;

/// The outcome for a body that arrives in these frames.
fn scan<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> Result<Document, Invalid> {
    let mut scanner = Scanner::new(Limits::default());
    for frame in frames {
        scanner.feed(frame)?;
    }
    scanner.finish()
}

/// A body in frames of this size, each with memory of its own.
fn frames(body: &[u8], size: usize) -> Rope {
    body.chunks(size).map(Bytes::copy_from_slice).collect()
}

fn concat(rope: &Rope) -> Vec<u8> {
    rope.iter().flatten().copied().collect()
}

/// Offsets as a slice takes them.
fn indices(range: &Range<u64>) -> Range<usize> {
    usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()
}
