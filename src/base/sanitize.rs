//! Converts text from a client or an upstream to a form that is safe in a log line or a label.
//!
//! All characters except plain ones are percent-encoded, so no value can end its field, forge another field or move a
//! terminal's cursor. Long values are cut, so no value can fill a disk.

use std::borrow::Cow;

/// A text that is shown as at most [`SanitizedText::MAX_BYTES`] bytes out of `[A-Za-z0-9._:/@+,-]` and `%XX`.
#[derive(Clone, Copy, Debug)]
pub struct SanitizedText<'a>(pub &'a str);

impl<'a> SanitizedText<'a> {
    /// The largest length of a shown value, in bytes. Our choice: model names and call ids have fewer than 100.
    pub const MAX_BYTES: usize = 128;

    /// Returns the safe form of the text, and `-` for an empty text. The result is borrowed if the text is safe
    /// already.
    pub fn to_text(self) -> Cow<'a, str> {
        if self.0.is_empty() {
            return Cow::Borrowed("-");
        }
        if self.is_safe_text() {
            return Cow::Borrowed(self.0);
        }
        let mut text = Vec::with_capacity(Self::MAX_BYTES);
        self.append_to(&mut text);
        Cow::Owned(String::from_utf8(text).expect("plain bytes and percent signs are ASCII"))
    }

    /// Returns true in the usual case of a short text of safe bytes.
    fn is_safe_text(self) -> bool {
        // The fold has no branch for each byte, so the compiler can compare many bytes at a time.
        let are_safe =
            |bytes: &[u8]| bytes.iter().fold(true, |all, byte| all & is_safe_byte(*byte));
        self.0.len() <= Self::MAX_BYTES && are_safe(self.0.as_bytes())
    }

    /// Appends the result of [`SanitizedText::to_text`] to `line`, without an allocation of its own.
    pub fn append_to(self, line: &mut Vec<u8>) {
        let bytes = if self.0.is_empty() { b"-" } else { self.0.as_bytes() };
        if self.is_safe_text() {
            return line.extend_from_slice(bytes);
        }
        let mut room = Self::MAX_BYTES;
        for &byte in bytes {
            let [high, low] = HEX_DIGIT_PAIRS[usize::from(byte)];
            let encoded: &[u8] = if is_safe_byte(byte) { &[byte] } else { &[b'%', high, low] };
            if encoded.len() > room {
                break;
            }
            line.extend_from_slice(encoded);
            room -= encoded.len();
        }
    }
}

/// Returns true for a byte that passes unchanged. In ASCII the characters `+,-./`, the digits and `:` are adjacent, as
/// are `@` and the capitals.
fn is_safe_byte(byte: u8) -> bool {
    matches!(byte, b'+'..=b':' | b'@'..=b'Z' | b'_' | b'a'..=b'z')
}

/// The two upper-case hexadecimal digits of every byte.
const HEX_DIGIT_PAIRS: [[u8; 2]; 256] = {
    let digits = b"0123456789ABCDEF";
    let mut table = [[0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = [digits[byte >> 4], digits[byte & 15]];
        byte += 1;
    }
    table
};
