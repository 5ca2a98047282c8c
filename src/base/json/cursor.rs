//! A cursor that walks through a JSON text that is complete in memory.
//!
//! Callers use it for texts that they read often and that nearly always have one form. Each step returns `None` for
//! invalid JSON, and also for valid JSON that is unusual, above all for a key with an escape. The caller then reads the
//! text with another reader, so a step has no side effect before it succeeds. A text that the cursor has walked through
//! to its end is valid JSON.

use super::number::JsonNumberState;
use super::vector::{MASKED, find_near_quote, find_near_stop, find_quote, find_stop, quote_mask};
use super::{is_space, string};

/// A position in a JSON text.
#[derive(Clone, Debug)]
pub struct JsonCursor<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> JsonCursor<'a> {
    pub fn new(data: &'a [u8]) -> Self {
        Self { data, at: 0 }
    }

    /// Returns the number of bytes that the cursor has passed.
    pub fn offset(&self) -> usize {
        self.at
    }

    /// Passes an object. Calls `each` with every key; `each` must pass the value of the key.
    pub fn read_members(
        &mut self,
        mut each: impl FnMut(&'a [u8], &mut Self) -> Option<()>,
    ) -> Option<()> {
        self.skip_byte(b'{')?;
        if self.skip_byte(b'}').is_some() {
            return Some(());
        }
        loop {
            self.skip_byte(b'"')?;
            let rest = &self.data[self.at..];
            // Most keys are short: search the first bytes alone.
            let key = &rest[..find_near_stop(rest).or_else(|| find_stop(rest))?];
            self.at += key.len();
            self.skip_byte_here(b'"')?;
            self.skip_byte(b':')?;
            self.skip_space();
            each(key, self)?;
            if self.skip_byte(b',').is_none() {
                return self.skip_byte(b'}');
            }
            self.skip_space();
        }
    }

    /// Passes a whole number of at most 18 digits without a sign, and returns it.
    pub fn read_count(&mut self) -> Option<u64> {
        let start = self.at;
        let mut number = 0_u64;
        while let Some(digit @ b'0'..=b'9') = self.data.get(self.at) {
            number = number.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'));
            self.at += 1;
        }
        let digits = self.at - start;
        let is_number =
            digits == 1 || (1..MAX_DIGITS).contains(&digits) && self.data[start] != b'0';
        (is_number && !matches!(self.peek_byte(), Some(b'.' | b'e' | b'E'))).then_some(number)
    }

    /// Passes a string, and returns the bytes between its quotes as they are written, with their escapes.
    pub fn read_string(&mut self) -> Option<&'a [u8]> {
        self.skip_byte_here(b'"')?;
        let rest = &self.data[self.at..];
        let inside = &rest[..string::string_length(rest)?];
        self.at += inside.len() + 1;
        Some(inside)
    }

    /// Passes `null` if it is the next value. Returns true if it was.
    pub fn read_null(&mut self) -> bool {
        let is_null = self.data[self.at..].starts_with(b"null");
        self.at += if is_null { 4 } else { 0 };
        is_null
    }

    /// Passes a value that is neither an array nor an object.
    pub fn skip_scalar(&mut self) -> Option<()> {
        let byte = self.peek_byte()?;
        if byte == b'"' {
            return self.read_string().map(drop);
        }
        if let Some(mut number) = JsonNumberState::start_number(byte) {
            self.at += 1;
            while let Some(next) = self.peek_byte().and_then(|byte| number.next_state(byte)) {
                number = next;
                self.at += 1;
            }
            return number.is_complete().then_some(());
        }
        let rest = &self.data[self.at..];
        let word =
            [&b"true"[..], b"false", b"null"].into_iter().find(|word| rest.starts_with(word));
        self.at += word?.len();
        Some(())
    }

    /// Passes a value of any type that is nested no deeper than [`MAX_DEPTH`].
    pub fn skip_value(&mut self) -> Option<()> {
        self.skip_value_within(MAX_DEPTH)
    }

    /// Returns `Some` if only white space is left.
    pub fn expect_end(mut self) -> Option<()> {
        self.skip_space();
        (self.at == self.data.len()).then_some(())
    }

    /// Returns the next byte, and does not pass it.
    pub fn peek_byte(&self) -> Option<u8> {
        self.data.get(self.at).copied()
    }

    fn skip_value_within(&mut self, depth: usize) -> Option<()> {
        let inner = depth.checked_sub(1)?;
        match self.peek_byte()? {
            b'{' => self.read_members(|_, value| value.skip_value_within(inner)),
            b'[' => {
                self.at += 1;
                if self.skip_byte(b']').is_some() {
                    return Some(());
                }
                loop {
                    self.skip_space();
                    self.skip_value_within(inner)?;
                    if self.skip_byte(b',').is_none() {
                        return self.skip_byte(b']');
                    }
                }
            }
            _ => self.skip_scalar(),
        }
    }

    /// Passes white space and then `byte`. If another byte follows the white space, the cursor stays before that byte.
    fn skip_byte(&mut self, byte: u8) -> Option<()> {
        self.skip_space();
        self.skip_byte_here(byte)
    }

    fn skip_byte_here(&mut self, byte: u8) -> Option<()> {
        if self.peek_byte() != Some(byte) {
            return None;
        }
        self.at += 1;
        Some(())
    }

    fn skip_space(&mut self) {
        while self.peek_byte().is_some_and(is_space) {
            self.at += 1;
        }
    }
}

/// Splits `data` behind the first string. `data` begins after the opening quote. Returns the bytes before the closing
/// quote and the bytes after it. If `data` has no closing quote, the first part is all of `data`. The function does not
/// check that the string is valid.
#[inline]
pub fn split_string(data: &[u8]) -> (&[u8], &[u8]) {
    // 1. Most strings are short: search the first bytes alone.
    let near = find_near_quote(data);
    if let Some(end) = near.filter(|end| data[*end] == b'"') {
        return (&data[..end], &data[end + 1..]);
    }
    let mut end = 0;
    // 2. Search block by block. Each set bit of `found` is a quote or a backslash.
    while let Some(block) = data.get(end..).and_then(<[u8]>::first_chunk) {
        let (mut found, mut passed) = (quote_mask(block), MASKED);
        while found != 0 {
            let at = found.trailing_zeros() as usize;
            if block[at] == b'"' {
                return (&data[..end + at], &data[end + at + 1..]);
            }
            // The byte after a backslash is escaped, so its bit is cleared. It may be the first byte of the next block.
            passed = passed.max(at + 2);
            found &= u64::MAX << at << 1 << 1;
        }
        end += passed;
    }
    // 3. Search the rest, which is shorter than a block.
    end = end.min(data.len());
    while let Some(at) = find_quote(&data[end..]) {
        end += at;
        if data[end] == b'"' {
            return (&data[..end], &data[end + 1..]);
        }
        end = data.len().min(end + 2);
    }
    (data, &[])
}

/// A number with fewer digits than this limit fits in 64 bits.
const MAX_DIGITS: usize = 19;

/// The largest number of arrays and objects inside one another that [`JsonCursor::skip_value`] passes. Our choice:
/// usual texts have three.
const MAX_DEPTH: usize = 16;

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::JsonCursor;

    /// A complete parser accepts every text that the cursor walks through to its end.
    #[test]
    fn what_a_walk_passes_is_json() {
        let passes = |json: &str| {
            let mut cursor = JsonCursor::new(json.as_bytes());
            cursor.skip_value().and_then(|()| cursor.expect_end()).is_some()
        };
        for json in
            ["{}", "{ }", r#"{"a":[1,{"b":[]}, "c" ] }"#, "7", "-1.5e3", "[true,null]", r#""\n""#]
        {
            assert!(passes(json), "{json}");
        }
        let pieces = ["{", "}", "[", "]", ",", ":", " ", "\"a\"", "1", "-", "null", "\"\\x\"", "0"];
        for a in pieces {
            for b in pieces {
                for c in pieces {
                    for d in pieces {
                        let json = [a, b, c, d].concat();
                        let is_json = serde_json::from_str::<&RawValue>(&json).is_ok();
                        assert!(!passes(&json) || is_json, "{json}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_count_is_a_whole_number_of_at_most_18_digits() {
        for (json, count) in [
            ("0", Some(0)),
            ("10", Some(10)),
            ("999999999999999999", Some(999_999_999_999_999_999)),
            ("1000000000000000000", None),
            ("007", None),
            ("-1", None),
            ("1.0", None),
            ("1e3", None),
            ("\"1\"", None),
            ("", None),
        ] {
            assert_eq!(JsonCursor::new(json.as_bytes()).read_count(), count, "{json}");
        }
    }
}
