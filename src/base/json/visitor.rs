//! The events of a document below its top level, which a visitor receives while the document is read.

use super::JsonType;
use super::keys::JsonKeyBuffer;

/// Receives the keys and values in the order of the document. The scanner calls the visitor for each of them, so each
/// call adds to the cost of a body.
pub trait JsonVisitor {
    /// Receives a key of an object at this depth. The depth of the top-level object is 1. `key` is empty if the key is
    /// longer than 64 bytes.
    fn on_key(&mut self, depth: usize, key: &[u8]);

    /// Receives the beginning of a value in an array or object at this depth, with the value's offset in the document.
    /// Returns true if the visitor wants the beginning of the value's text.
    fn on_value(&mut self, depth: usize, kind: JsonType, at: u64) -> bool;

    /// Receives a text that the visitor wanted, unescaped: all of the text, or its first 60 bytes. Blanks at the
    /// beginning of the text are left out; `had_blanks` says that there were some.
    fn on_string(&mut self, start: &[u8], had_blanks: bool);

    /// Receives the end of the innermost array or object.
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

/// A visitor that counts the values in the document's object, at every depth.
#[derive(Default)]
pub(super) struct ValueCounter(pub(super) u32);

impl JsonVisitor for ValueCounter {
    fn on_key(&mut self, _depth: usize, _key: &[u8]) {}

    fn on_value(&mut self, _depth: usize, _kind: JsonType, _at: u64) -> bool {
        self.0 = self.0.saturating_add(1);
        false
    }

    fn on_string(&mut self, _start: &[u8], _had_blanks: bool) {}

    fn on_close(&mut self) {}
}

/// Collects the beginning of a string. It uses the buffer of the key before the string, because that key has been read.
#[derive(Default)]
pub(super) struct JsonStringPrefix {
    is_wanted: bool,
    has_blanks: bool,
}

impl JsonStringPrefix {
    /// The largest length of a collected beginning, in bytes. Our choice: it is enough for the name of a tool type, for
    /// the scheme of any URL, and for the media type and the first bytes of an image.
    pub(super) const MAX_PREFIX_BYTES: usize = 60;

    pub(super) fn begin_string(&mut self, name: &mut JsonKeyBuffer) {
        name.clear_buffer();
        self.is_wanted = true;
        self.has_blanks = false;
    }

    /// Returns the number of document bytes that may be read into the buffer now. Their unescaped text has at most as
    /// many bytes, and three more if a character began before.
    pub(super) fn wanted_bytes(&self, name: &JsonKeyBuffer) -> usize {
        if self.is_wanted {
            Self::MAX_PREFIX_BYTES.saturating_sub(buffered_length(name)).max(1)
        } else {
            0
        }
    }

    /// Removes blanks at the beginning of the text, as programs that fetch an address do. The function runs after each
    /// read, so blanks do not use up the buffer.
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

    /// Returns the collected beginning, and ends the collection.
    pub(super) fn take_prefix<'a>(&mut self, name: &'a JsonKeyBuffer) -> &'a [u8] {
        self.is_wanted = false;
        let bytes = name.as_bytes().unwrap_or_default();
        &bytes[..bytes.len().min(Self::MAX_PREFIX_BYTES)]
    }
}

/// Returns true for characters that programs skip at the beginning of an address.
fn is_blank(character: char) -> bool {
    character.is_whitespace()
        || character.is_control()
        || matches!(character, '\u{feff}' | '\u{200b}'..='\u{200f}' | '\u{2060}')
}

fn buffered_length(name: &JsonKeyBuffer) -> usize {
    name.as_bytes().map_or(JsonStringPrefix::MAX_PREFIX_BYTES, <[u8]>::len)
}
