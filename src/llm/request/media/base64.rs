//! Decodes the bytes of a medium from the JSON text that carries them in base64.
//!
//! Readers of base64 differ in the characters that they skip. Text that readers could decode
//! differently ends the decoding, and the medium counts as unreadable.

use crate::base::rope::ByteRope;

/// An iterator over the decoded bytes. It stops at the end of the text, at the limit, or at a
/// character that is not base64.
pub(super) struct Base64Decoder<I> {
    text: JsonAsciiChars<I>,
    /// The first character, which the constructor read in order to recognize a `data:` address.
    first: Option<u8>,
    bits: u32,
    /// The number of low bits in `bits` that do not yet form a whole byte.
    count: u8,
    /// True after the first padding character; only padding and blanks may follow.
    is_padded: bool,
    is_odd: bool,
}

/// An iterator over the characters of a JSON text. A character outside ASCII appears as bytes that
/// are no base64 digits.
struct JsonAsciiChars<I> {
    body: I,
    /// The number of bytes read from the body.
    read: usize,
    /// The maximum number of bytes to read.
    max: usize,
    is_ended: bool,
}

/// Decodes the text that begins at offset `at`, behind its quote. At most `most` bytes of the text
/// are read.
pub(super) fn decode_string(
    body: &ByteRope,
    at: u64,
    max: usize,
) -> Base64Decoder<impl Iterator<Item = u8>> {
    let mut text = JsonAsciiChars { body: body.bytes_from(at), read: 0, max, is_ended: false };
    let mut first = text.find(|byte| !is_blank(*byte));
    // A `data:` address states its type first, up to a comma. No medium's base64 begins with the
    // letter `d`.
    if matches!(first, Some(b'd' | b'D')) {
        let comma = text.by_ref().take(MAX_MEDIA_TYPE_BYTES).find(|byte| *byte == b',');
        // Without a comma there is no data, so the text counts as ended.
        text.is_ended |= comma.is_none();
        first = None;
    }
    Base64Decoder { text, first, bits: 0, count: 0, is_padded: false, is_odd: false }
}

impl<I: Iterator<Item = u8>> Base64Decoder<I> {
    /// Returns the number of bytes read from the body.
    pub(super) fn bytes_read(&self) -> usize {
        self.text.read
    }

    /// Reads the remaining bytes. Returns true if the text ended normally, so that the decoded
    /// bytes are all of the medium.
    pub(super) fn is_complete(&mut self) -> bool {
        self.by_ref().for_each(drop);
        self.text.is_ended && !self.is_odd
    }
}

impl<I: Iterator<Item = u8>> Iterator for Base64Decoder<I> {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        while !self.is_odd {
            let digit = match self.first.take() {
                Some(first) => first,
                None => self.text.next()?,
            };
            let sextet = match digit {
                b'A'..=b'Z' => digit - b'A',
                b'a'..=b'z' => digit - b'a' + 26,
                b'0'..=b'9' => digit - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                // Padding is only valid at the end; a digit behind it is checked below.
                b'=' => {
                    self.is_padded = true;
                    continue;
                }
                blank if is_blank(blank) => continue,
                _ => {
                    self.is_odd = true;
                    break;
                }
            };
            // Some readers stop at padding, others continue. Data behind padding is ambiguous.
            if self.is_padded {
                self.is_odd = true;
                break;
            }
            // Each digit adds 6 bits. High bits that were already returned shift out of the 32-bit
            // window.
            self.bits = self.bits << 6 | u32::from(sextet);
            self.count += 6;
            if self.count >= 8 {
                self.count -= 8;
                return Some(u8::try_from(self.bits >> self.count & 0xff).unwrap_or_default());
            }
        }
        None
    }
}

impl<I: Iterator<Item = u8>> JsonAsciiChars<I> {
    fn next_byte(&mut self) -> Option<u8> {
        if self.read == self.max {
            return None;
        }
        self.read += 1;
        self.body.next()
    }

    fn decode_escape(&mut self) -> Option<u8> {
        match self.next_byte()? {
            b'/' => Some(b'/'),
            b'n' | b'r' | b't' => Some(b'\n'),
            b'u' => {
                let digits =
                    [self.next_byte()?, self.next_byte()?, self.next_byte()?, self.next_byte()?];
                let code = u8::from_str_radix(str::from_utf8(&digits).ok()?, 16).ok();
                // A character outside ASCII is no base64 digit; `u8::MAX` makes the decoder stop.
                Some(code.unwrap_or(u8::MAX))
            }
            _ => Some(u8::MAX),
        }
    }
}

impl<I: Iterator<Item = u8>> Iterator for JsonAsciiChars<I> {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        if self.is_ended {
            return None;
        }
        match self.next_byte()? {
            b'"' => {
                self.is_ended = true;
                None
            }
            b'\\' => self.decode_escape(),
            byte => Some(byte),
        }
    }
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

/// The maximum length of a media type with its parameters, in bytes. No type in use is longer.
const MAX_MEDIA_TYPE_BYTES: usize = 256;

#[cfg(test)]
mod tests {
    use super::decode_string;
    use crate::base::rope::ByteRope;

    fn decoded(text: &str, most: usize) -> (Vec<u8>, bool) {
        let rope: ByteRope =
            [format!("{text}\", \"next\": 1}}").into_bytes().into()].into_iter().collect();
        let mut bytes = decode_string(&rope, 0, most);
        let read: Vec<u8> = bytes.by_ref().collect();
        (read, bytes.is_complete())
    }

    #[test]
    fn a_text_is_read_to_its_end_or_to_what_is_no_base64() {
        let hello = |is_complete| (b"hello".to_vec(), is_complete);
        for whole in [
            "aGVsbG8=",
            "aGVsbG8",
            " aGVs\\nbG8=",
            "data:text/plain;base64,aGVsbG8=",
            "DATA:,aGVsbG8==",
            "\\u0061GVsbG8\\u003d",
        ] {
            assert_eq!(decoded(whole, 100), hello(true), "{whole}");
        }
        for odd in ["aGVsbG8=aGVs", "aGVsbG8-", "aGVsbG8\\u00e4", "aGVsbG8\\\\x", "aGVsbG8=="] {
            assert_eq!(decoded(odd, 100), hello(odd.ends_with("==")), "{odd}");
        }
        assert_eq!(decoded("\\/9j\\/", 100).0, [0xff, 0xd8, 0xff]);
        assert_eq!(decoded("aGVsbG8=", 7), hello(false), "it is cut");
        assert_eq!(decoded("data:image/png;base64", 100), (vec![], true));
    }
}
