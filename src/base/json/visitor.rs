//! Being told what a document holds below its top level, while it is read.

use super::JsonType;
use super::keys::JsonKeyBuffer;

/// Is told of keys and values in the order they stand. It is called for each of them, so what it does
/// per call is part of what a body costs.
pub trait JsonVisitor {
    /// A key of an object at this depth; the top-level object's is 1. Empty if it is over 64 bytes.
    fn on_key(&mut self, depth: usize, key: &[u8]);

    /// A value begins, in an array or object at this depth and at this offset of the document. Whether the beginning of its
    /// text is wanted.
    fn on_value(&mut self, depth: usize, kind: JsonType, at: u64) -> bool;

    /// The text that was wanted, unescaped and without the blanks before it, if it `had_blanks`: all
    /// of it, or its first 60 bytes.
    fn on_string(&mut self, start: &[u8], had_blanks: bool);

    /// The innermost array or object ends.
    fn on_close(&mut self);
}

/// A visitor that ignores every event.
impl JsonVisitor for () {
    fn on_key(&mut self, _depth: usize, _key: &[u8]) {}

    fn on_value(&mut self, _depth: usize, _kind: JsonType, _at: u64) -> bool {
        false
    }

    fn on_string(&mut self, _start: &[u8], _had_blanks: bool) {}

    fn on_close(&mut self) {}
}

/// The beginning of a string, as it arrives. It takes the room of the key before it, which has been read.
#[derive(Default)]
pub(super) struct JsonStringPrefix {
    is_wanted: bool,
    has_blanks: bool,
}

impl JsonStringPrefix {
    /// Bytes that are kept. Ours: names of tool types are shorter, any URL's scheme, and the first bytes of an image behind
    /// its media type.
    pub(super) const MAX_PREFIX_BYTES: usize = 60;

    pub(super) fn begin_string(&mut self, name: &mut JsonKeyBuffer) {
        name.clear_buffer();
        self.is_wanted = true;
        self.has_blanks = false;
    }

    /// Returns the number of document bytes that may be read for the name now. Unescaped they are at most that many
    /// bytes, and three more for a character that began before.
    pub(super) fn wanted_bytes(&self, name: &JsonKeyBuffer) -> usize {
        if self.is_wanted {
            Self::MAX_PREFIX_BYTES.saturating_sub(buffered_length(name)).max(1)
        } else {
            0
        }
    }

    /// Forgets blanks before the text, as those who fetch an address do. What has been read is looked at
    /// once: blanks go before more is read.
    pub(super) fn trim_blanks(&mut self, name: &mut JsonKeyBuffer) {
        let Some(bytes) = name.as_bytes().filter(|_| self.is_wanted) else { return };
        let text = str::from_utf8(bytes).unwrap_or_default();
        let blanks = text.len() - text.trim_start_matches(is_blank).len();
        if blanks > 0 {
            name.drop_prefix(blanks);
            self.has_blanks = true;
        }
    }

    pub(super) fn is_prefix_complete(&self, name: &JsonKeyBuffer, ended: bool) -> bool {
        self.is_wanted && (ended || buffered_length(name) >= Self::MAX_PREFIX_BYTES)
    }

    pub(super) fn has_blanks(&self) -> bool {
        self.has_blanks
    }

    /// Returns the wanted prefix of the name and wants nothing more.
    pub(super) fn take_prefix<'a>(&mut self, name: &'a JsonKeyBuffer) -> &'a [u8] {
        self.is_wanted = false;
        let bytes = name.as_bytes().unwrap_or_default();
        &bytes[..bytes.len().min(Self::MAX_PREFIX_BYTES)]
    }
}

/// Returns true for characters that readers of addresses skip.
fn is_blank(character: char) -> bool {
    character.is_whitespace()
        || character.is_control()
        || matches!(character, '\u{feff}' | '\u{200b}'..='\u{200f}' | '\u{2060}')
}

fn buffered_length(name: &JsonKeyBuffer) -> usize {
    name.as_bytes().map_or(JsonStringPrefix::MAX_PREFIX_BYTES, <[u8]>::len)
}
