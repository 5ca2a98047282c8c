//! Text from a client or an upstream, made safe for a log line or a label.
//!
//! What is not plain is percent-encoded, so no value can end its field, forge another or move a
//! terminal's cursor; and what is long is cut, so no value can fill a disk.

use std::borrow::Cow;

/// Shows at most [`SanitizedText::MAX_BYTES`] bytes out of `[A-Za-z0-9._:/@+,-]` and `%XX`.
#[derive(Clone, Copy, Debug)]
pub struct SanitizedText<'a>(pub &'a str);

impl<'a> SanitizedText<'a> {
    /// The longest a value gets, in bytes. Ours: model names and call ids are under 100.
    pub const MAX_BYTES: usize = 128;

    /// The text made safe, `-` for none; borrowed where it is safe already.
    pub fn to_text(self) -> Cow<'a, str> {
        if self.0.is_empty() {
            return Cow::Borrowed("-");
        }
        if self.0.len() <= Self::MAX_BYTES && self.0.bytes().all(is_safe_byte) {
            return Cow::Borrowed(self.0);
        }
        let mut text = Vec::with_capacity(Self::MAX_BYTES);
        self.append_to(&mut text);
        Cow::Owned(String::from_utf8(text).expect("plain bytes and percent signs are ASCII"))
    }

    /// Appends what [`SanitizedText::to_text`] says, without an allocation of its own.
    pub fn append_to(self, line: &mut Vec<u8>) {
        let bytes = if self.0.is_empty() { b"-" } else { self.0.as_bytes() };
        // Nearly always; and without a branch for each byte, so that many are looked at together.
        if bytes.len() <= Self::MAX_BYTES
            && bytes.iter().fold(true, |all, byte| all & is_safe_byte(*byte))
        {
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

/// Upper-case hexadecimal digits of every byte.
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
