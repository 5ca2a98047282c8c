//! Text from a client or an upstream, made safe for a log line or a label.
//!
//! What is not plain is percent-encoded, so no value can end its field, forge another or move a
//! terminal's cursor; and what is long is cut, so no value can fill a disk.

use std::borrow::Cow;

/// Shows at most [`Printable::LIMIT`] bytes out of `[A-Za-z0-9._:/@+,-]` and `%XX`.
#[derive(Clone, Copy, Debug)]
pub struct Printable<'a>(pub &'a str);

impl<'a> Printable<'a> {
    /// The longest a value gets, in bytes. Ours: model names and call ids are under 100.
    pub const LIMIT: usize = 128;

    /// The text made safe, `-` for none; borrowed where it is safe already.
    pub fn text(self) -> Cow<'a, str> {
        if self.0.is_empty() {
            return Cow::Borrowed("-");
        }
        if self.0.len() <= Self::LIMIT && self.0.bytes().all(is_plain) {
            return Cow::Borrowed(self.0);
        }
        let mut text = Vec::with_capacity(Self::LIMIT);
        self.append_to(&mut text);
        Cow::Owned(String::from_utf8(text).expect("plain bytes and percent signs are ASCII"))
    }

    /// Appends what [`Printable::text`] says, without an allocation of its own.
    pub fn append_to(self, line: &mut Vec<u8>) {
        let bytes = if self.0.is_empty() { b"-" } else { self.0.as_bytes() };
        // Nearly always; and without a branch for each byte, so that many are looked at together.
        if bytes.len() <= Self::LIMIT && bytes.iter().fold(true, |all, byte| all & is_plain(*byte))
        {
            return line.extend_from_slice(bytes);
        }
        let mut room = Self::LIMIT;
        for &byte in bytes {
            let [high, low] = HEX[usize::from(byte)];
            let encoded: &[u8] = if is_plain(byte) { &[byte] } else { &[b'%', high, low] };
            if encoded.len() > room {
                break;
            }
            line.extend_from_slice(encoded);
            room -= encoded.len();
        }
    }
}

/// Whether a byte goes as it is. In ASCII `+,-./`, the digits and `:` follow one another, as do `@` and the capitals.
fn is_plain(byte: u8) -> bool {
    matches!(byte, b'+'..=b':' | b'@'..=b'Z' | b'_' | b'a'..=b'z')
}

/// Upper-case hexadecimal digits of every byte.
const HEX: [[u8; 2]; 256] = {
    let digits = b"0123456789ABCDEF";
    let mut table = [[0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = [digits[byte >> 4], digits[byte & 15]];
        byte += 1;
    }
    table
};
