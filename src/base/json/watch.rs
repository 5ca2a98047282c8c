//! Being told what a document holds below its top level, while it is read.

use super::Kind;
use super::keys::Name;

/// Is told of keys and values in the order they stand. It is called for each of them, so what it does
/// per call is part of what a body costs.
pub trait Watch {
    /// A key of an object at this depth; the top-level object's is 1. Empty if it is over 64 bytes.
    fn key(&mut self, depth: usize, key: &[u8]);

    /// A value begins, in an array or object at this depth and at this offset of the document. Whether the beginning of its
    /// text is wanted.
    fn value(&mut self, depth: usize, kind: Kind, at: u64) -> bool;

    /// The text that was wanted, unescaped and without the blanks before it, if it `had_blanks`: all
    /// of it, or its first 60 bytes.
    fn text(&mut self, start: &[u8], had_blanks: bool);

    /// The innermost array or object ends.
    fn close(&mut self);
}

/// Nobody watches.
impl Watch for () {
    fn key(&mut self, _depth: usize, _key: &[u8]) {}

    fn value(&mut self, _depth: usize, _kind: Kind, _at: u64) -> bool {
        false
    }

    fn text(&mut self, _start: &[u8], _had_blanks: bool) {}

    fn close(&mut self) {}
}

/// The beginning of a string, as it arrives. It takes the room of the key before it, which has been read.
#[derive(Default)]
pub(super) struct Start {
    is_wanted: bool,
    has_blanks: bool,
}

impl Start {
    /// Bytes that are kept. Ours: names of tool types are shorter, any URL's scheme, and the first bytes of an image behind
    /// its media type.
    pub(super) const WANTED: usize = 60;

    pub(super) fn begin(&mut self, name: &mut Name) {
        name.clear();
        self.is_wanted = true;
        self.has_blanks = false;
    }

    /// How many bytes of the document may be read for it now: unescaped they are no more than these
    /// and the three that a character begun before may bring.
    pub(super) fn wanted(&self, name: &Name) -> usize {
        if self.is_wanted { Self::WANTED.saturating_sub(length(name)).max(1) } else { 0 }
    }

    /// Forgets blanks before the text, as those who fetch an address do. What has been read is looked at
    /// once: blanks go before more is read.
    pub(super) fn trim(&mut self, name: &mut Name) {
        let Some(bytes) = name.as_bytes().filter(|_| self.is_wanted) else { return };
        let text = str::from_utf8(bytes).unwrap_or_default();
        let blanks = text.len() - text.trim_start_matches(is_blank).len();
        if blanks > 0 {
            name.cut_start(blanks);
            self.has_blanks = true;
        }
    }

    pub(super) fn is_complete(&self, name: &Name, ended: bool) -> bool {
        self.is_wanted && (ended || length(name) >= Self::WANTED)
    }

    pub(super) fn has_blanks(&self) -> bool {
        self.has_blanks
    }

    /// What was wanted; nothing more is.
    pub(super) fn take<'a>(&mut self, name: &'a Name) -> &'a [u8] {
        self.is_wanted = false;
        let bytes = name.as_bytes().unwrap_or_default();
        &bytes[..bytes.len().min(Self::WANTED)]
    }
}

/// What readers of addresses pass over.
fn is_blank(character: char) -> bool {
    character.is_whitespace()
        || character.is_control()
        || matches!(character, '\u{feff}' | '\u{200b}'..='\u{200f}' | '\u{2060}')
}

fn length(name: &Name) -> usize {
    name.as_bytes().map_or(Start::WANTED, <[u8]>::len)
}
