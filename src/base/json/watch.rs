//! Being told what a document holds below its top level, while it is read.

use super::Kind;
use super::keys::Name;

/// Is told of keys and values in the order they stand. It is called for each of them, so what it does
/// per call is part of what a body costs.
pub trait Watch {
    /// A key of an object at this depth; the top-level object's is 1. Empty if it is over 64 bytes.
    fn key(&mut self, depth: usize, key: &[u8]);

    /// A value begins, in an array or object at this depth. Whether the beginning of its text is wanted.
    fn value(&mut self, depth: usize, kind: Kind) -> bool;

    /// The text that was wanted, unescaped: all of it, or its first 32 bytes.
    fn text(&mut self, start: &[u8]);

    /// The innermost array or object ends.
    fn close(&mut self);
}

/// Nobody watches.
impl Watch for () {
    fn key(&mut self, _depth: usize, _key: &[u8]) {}

    fn value(&mut self, _depth: usize, _kind: Kind) -> bool {
        false
    }

    fn text(&mut self, _start: &[u8]) {}

    fn close(&mut self) {}
}

/// The beginning of a string, as it arrives. It takes the room of the key before it, which has been read.
#[derive(Default)]
pub(super) struct Start {
    is_wanted: bool,
}

impl Start {
    /// Bytes that are kept. Ours: names of tool types are shorter, and any URL's scheme.
    const WANTED: usize = 32;

    pub(super) fn begin(&mut self, name: &mut Name) {
        name.clear();
        self.is_wanted = true;
    }

    /// How many bytes of the document may be read for it now: unescaped they are no more than these
    /// and the three that a character begun before may bring.
    pub(super) fn wanted(&self, name: &Name) -> usize {
        if self.is_wanted { Self::WANTED.saturating_sub(length(name)).max(1) } else { 0 }
    }

    pub(super) fn is_complete(&self, name: &Name, ended: bool) -> bool {
        self.is_wanted && (ended || length(name) >= Self::WANTED)
    }

    /// What was wanted; nothing more is.
    pub(super) fn take<'a>(&mut self, name: &'a Name) -> &'a [u8] {
        self.is_wanted = false;
        let bytes = name.as_bytes().unwrap_or_default();
        &bytes[..bytes.len().min(Self::WANTED)]
    }
}

fn length(name: &Name) -> usize {
    name.as_bytes().map_or(Start::WANTED, <[u8]>::len)
}
