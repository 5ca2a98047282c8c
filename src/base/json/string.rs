//! The content of strings: checks escapes and UTF-8, and passes over all other text at the speed of memory.
//!
//! A prompt is one long string, so the work of this file per byte is most of the cost of an admission. There are two
//! readers. [`scan_valid_prefix`] passes over text that is valid and complete within one frame; it is fast and reports
//! no error. [`JsonStringState::read_byte`] reads one byte at a time and keeps its state between frames; it finds every
//! error, reads sequences that a frame has cut in two, and unescapes keys.

use super::JsonError;
use super::keys::JsonKeyBuffer;
#[cfg(target_arch = "x86_64")]
use super::vector::stop_mask_avx2;
use super::vector::{MASKED, find_near_stop, find_stop, stop_mask};

/// The state of a string that is being read.
#[derive(Default)]
pub(super) struct JsonStringState {
    position: JsonStringPosition,
    /// The offset of the escape or UTF-8 sequence that is being read. An error in the sequence is reported there.
    error_offset: u64,
    /// The first half of a surrogate pair, as long as the second half has not been read.
    high_surrogate: Option<u16>,
}

/// The state between two bytes of a string.
#[derive(Clone, Copy, Default)]
enum JsonStringPosition {
    #[default]
    Plain,
    /// After the `\` of an escape.
    Escape,
    /// Inside the digits of a `\u` escape.
    Hex { read: u8, unit: u16 },
    /// Before the `\` of the second half of a surrogate pair.
    LowSurrogate,
    /// Before the `u` of the second half of a surrogate pair.
    LowSurrogateEscape,
    /// Inside a UTF-8 sequence.
    Utf8 { read: usize, bytes: [u8; 4] },
}

impl JsonStringState {
    /// Reads `data`, whose offset in the document is `base`, up to the closing quote or up to its end. Returns the
    /// number of bytes read, and true if the closing quote is among them. Appends the unescaped bytes of a key to
    /// `name`.
    pub(super) fn read_string(
        &mut self,
        data: &[u8],
        base: u64,
        mut name: Option<&mut JsonKeyBuffer>,
    ) -> Result<(usize, bool), JsonError> {
        let mut read = 0;
        loop {
            // The fast reader passes plain text and complete sequences. Only what it leaves is read byte by byte, so a frame
            // may end anywhere, also inside an escape or a character.
            if let JsonStringPosition::Plain = self.position {
                let rest = &data[read..];
                read += match &mut name {
                    None => scan_valid_prefix(rest),
                    Some(name) => {
                        let run = plain_run(rest);
                        name.push(run);
                        run.len()
                    }
                };
            }
            match (self.position, data.get(read)) {
                (_, None) => return Ok((read, false)),
                (JsonStringPosition::Plain, Some(b'"')) => return Ok((read + 1, true)),
                (_, Some(&byte)) => {
                    self.position = self.read_byte(byte, base + read as u64, &mut name)?;
                    read += 1;
                }
            }
        }
    }

    /// Reads one byte that the fast reader did not pass, and returns the next position.
    #[cold]
    fn read_byte(
        &mut self,
        byte: u8,
        at: u64,
        name: &mut Option<&mut JsonKeyBuffer>,
    ) -> Result<JsonStringPosition, JsonError> {
        match self.position {
            JsonStringPosition::Plain => {
                // The fast reader passes plain text, so this byte begins an escape or a UTF-8 sequence, or is an error.
                self.error_offset = at;
                match byte {
                    b'\\' => Ok(JsonStringPosition::Escape),
                    0x80.. => Ok(JsonStringPosition::Utf8 { read: 1, bytes: [byte, 0, 0, 0] }),
                    _ => Err(JsonError::ControlCharacter { at }),
                }
            }
            JsonStringPosition::Escape | JsonStringPosition::LowSurrogateEscape if byte == b'u' => {
                Ok(JsonStringPosition::Hex { read: 0, unit: 0 })
            }
            JsonStringPosition::Escape => {
                let character = unescape_byte(byte).ok_or(JsonError::Syntax { at })?;
                Ok(append_char(name, &[character]))
            }
            JsonStringPosition::Hex { read, unit } => {
                let digit =
                    char::from(byte).to_digit(16).and_then(|digit| u16::try_from(digit).ok());
                let unit = unit << 4 | digit.ok_or(JsonError::Syntax { at })?;
                if read < 3 {
                    Ok(JsonStringPosition::Hex { read: read + 1, unit })
                } else {
                    self.push_utf16_unit(unit, name)
                }
            }
            JsonStringPosition::LowSurrogate if byte == b'\\' => {
                Ok(JsonStringPosition::LowSurrogateEscape)
            }
            // The first half of a pair is not followed by a `\u` escape.
            JsonStringPosition::LowSurrogate | JsonStringPosition::LowSurrogateEscape => {
                Err(JsonError::LoneSurrogate { at: self.error_offset })
            }
            JsonStringPosition::Utf8 { read, mut bytes } => {
                // `from_utf8` knows whether the sequence is complete, valid so far, or invalid.
                bytes[read] = byte;
                match str::from_utf8(&bytes[..=read]) {
                    Ok(_) => Ok(append_char(name, &bytes[..=read])),
                    Err(error) if error.error_len().is_none() => {
                        Ok(JsonStringPosition::Utf8 { read: read + 1, bytes })
                    }
                    Err(_) => Err(JsonError::NotUtf8 { at: self.error_offset }),
                }
            }
        }
    }

    /// Takes the UTF-16 unit of a complete `\u` escape: a character, the first half of a surrogate pair, or the second
    /// half.
    fn push_utf16_unit(
        &mut self,
        unit: u16,
        name: &mut Option<&mut JsonKeyBuffer>,
    ) -> Result<JsonStringPosition, JsonError> {
        if self.high_surrogate.is_none() && matches!(unit, 0xd800..0xdc00) {
            self.high_surrogate = Some(unit);
            return Ok(JsonStringPosition::LowSurrogate);
        }
        match char::decode_utf16(self.high_surrogate.take().into_iter().chain([unit])).next() {
            Some(Ok(character)) => {
                Ok(append_char(name, character.encode_utf8(&mut [0; 4]).as_bytes()))
            }
            _ => Err(JsonError::LoneSurrogate { at: self.error_offset }),
        }
    }
}

/// Ends a character, and appends it to the key if the string is a key.
fn append_char(name: &mut Option<&mut JsonKeyBuffer>, character: &[u8]) -> JsonStringPosition {
    if let Some(name) = name {
        name.push(character);
    }
    JsonStringPosition::Plain
}

/// Returns the length of the valid and complete text at the start of `data`. The text ends at a quote, at an error, at
/// a sequence that the frame cuts in two, and sometimes at a valid sequence that is rare.
fn scan_valid_prefix(data: &[u8]) -> usize {
    let mut at = match skim_blocks(data) {
        Ok(passed) => passed,
        Err(end) => return end,
    };
    loop {
        let rest = &data[at..];
        let passed = match rest.first() {
            None | Some(b'"') => 0,
            Some(b'\\') => escape_length(rest),
            Some(0x80..) => utf8_sequence_length(rest),
            Some(_) => plain_run(rest).len(),
        };
        if passed == 0 {
            return at;
        }
        at += passed;
    }
}

/// Scans whole blocks like [`scan_valid_prefix`]. Returns the number of bytes that were passed. The error is the offset
/// at which the text ends.
fn skim_blocks(data: &[u8]) -> Result<usize, usize> {
    if let Some(end) = find_near_stop(data).filter(|end| data[*end] == b'"') {
        return Err(end);
    }
    #[cfg(target_arch = "x86_64")]
    if data.len() >= WIDE_BYTES && is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        #[expect(
            unsafe_code,
            reason = "the compiler asks for it wherever a processor's extension is used"
        )]
        return unsafe { skim_blocks_avx2(data) };
    }
    skim_blocks_with(stop_mask, data)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn skim_blocks_avx2(data: &[u8]) -> Result<usize, usize> {
    skim_blocks_with(|block| stop_mask_avx2(block), data)
}

/// Scans whole blocks, each with a mask of its bytes that are not plain text. The function is a part of each of its
/// callers, so that it uses the caller's vectors.
#[expect(
    clippy::inline_always,
    reason = "a function of its own would not use its caller's vectors"
)]
#[inline(always)]
fn skim_blocks_with(stop_mask: impl Fn(&[u8; MASKED]) -> u64, data: &[u8]) -> Result<usize, usize> {
    let mut at = 0;
    while let Some(block) = data[at..].first_chunk() {
        let (mut stops, mut passed) = (stop_mask(block), MASKED);
        // Each set bit of `stops` is a byte that is not plain ASCII text. An escape or a UTF-8 sequence is passed as a
        // whole.
        while stops != 0 {
            let stop = stops.trailing_zeros() as usize;
            let rest = &data[at + stop..];
            let length = match *rest {
                // Nearly all escapes are line ends and quotes.
                [b'\\', b'n' | b'"' | b'\\' | b't', ..] => 2,
                [b'\\', ..] => escape_length(rest),
                [0x80..=0xff, ..] => utf8_sequence_length(rest),
                _ => 0,
            };
            if length == 0 {
                return Err(at + stop);
            }
            // The sequence may end in the next block. The bits of all its bytes are cleared. Two shifts, because one
            // by the width of the number would be none.
            passed = passed.max(stop + length);
            stops &= u64::MAX << stop << length;
        }
        at += passed;
    }
    Ok(at)
}

/// Returns the length of the escape at the start of `data`; 0 if the byte-by-byte reader must decide.
fn escape_length(data: &[u8]) -> usize {
    match *data {
        // The unit may be half of a surrogate pair, which only the byte-by-byte reader puts together.
        [_, b'u', b'd' | b'D', b'8'..=0xff, ..] => 0,
        [_, b'u', a, b, c, d, ..] if [a, b, c, d].iter().all(u8::is_ascii_hexdigit) => 6,
        [_, byte, ..] if unescape_byte(byte).is_some() => 2,
        _ => 0,
    }
}

/// Returns the length of the UTF-8 sequence at the start of `data` (RFC 3629, section 4); 0 if the byte-by-byte reader
/// must decide.
fn utf8_sequence_length(data: &[u8]) -> usize {
    match *data {
        // 0xc0 and 0xc1 would write an ASCII character with two bytes.
        [0xc2..=0xdf, 0x80..=0xbf, ..] => 2,
        // The narrow second bytes keep out longer forms of shorter characters (0xe0) and surrogates (0xed).
        [0xe0, 0xa0..=0xbf, 0x80..=0xbf, ..]
        | [0xe1..=0xec | 0xee..=0xef, 0x80..=0xbf, 0x80..=0xbf, ..]
        | [0xed, 0x80..=0x9f, 0x80..=0xbf, ..] => 3,
        // Again longer forms (0xf0), and characters above U+10FFFF (0xf4).
        [0xf0, 0x90..=0xbf, 0x80..=0xbf, 0x80..=0xbf, ..]
        | [0xf1..=0xf3, 0x80..=0xbf, 0x80..=0xbf, 0x80..=0xbf, ..]
        | [0xf4, 0x80..=0x8f, 0x80..=0xbf, 0x80..=0xbf, ..] => 4,
        _ => 0,
    }
}

/// Returns the character that an escape of `\` and this byte means. The escape `\u` is not among them.
fn unescape_byte(byte: u8) -> Option<u8> {
    match byte {
        b'"' | b'\\' | b'/' => Some(byte),
        b'b' => Some(0x08),
        b'f' => Some(0x0c),
        b'n' => Some(b'\n'),
        b'r' => Some(b'\r'),
        b't' => Some(b'\t'),
        _ => None,
    }
}

/// Returns the plain text at the start of `data`: ASCII without `"`, `\` and control characters.
#[inline]
fn plain_run(data: &[u8]) -> &[u8] {
    &data[..find_stop(data).unwrap_or(data.len())]
}

/// Returns true if a text stands in a JSON string as it is. Returns false for a text with bytes outside ASCII, which
/// may stand there, too.
pub fn is_plain_text(text: &[u8]) -> bool {
    find_stop(text).is_none()
}

/// Returns the length of the string at the start of `data`, which begins after the opening quote. Returns `None` if the
/// string does not end in `data`, or if the byte-by-byte reader must decide.
pub fn string_length(data: &[u8]) -> Option<usize> {
    let length = scan_valid_prefix(data);
    (data.get(length) == Some(&b'"')).then_some(length)
}

/// The least length of a text that is searched by AVX2. Our choice: for shorter texts the choice of vectors costs more
/// than it brings.
#[cfg(target_arch = "x86_64")]
const WIDE_BYTES: usize = 4 * MASKED;
