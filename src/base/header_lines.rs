//! Header fields in the form of HTTP/1.1, for heads that are built once and sent once. All fields are in one buffer,
//! without a table.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

/// Lines of `name: value`, each with its line end. Names are lower-case, and no value has a line end.
#[derive(Clone, Debug, Default)]
pub struct HeaderLines(Vec<u8>);

impl HeaderLines {
    pub fn with_capacity(bytes: usize) -> Self {
        Self(Vec::with_capacity(bytes))
    }

    /// Adds a field. The value must come from an HTTP parser or from this program, because it is not checked.
    pub fn push(&mut self, name: &str, value: &[u8]) {
        push_line(&mut self.0, name, value);
    }

    pub fn push_number(&mut self, name: &str, number: u64) {
        self.push(name, itoa::Buffer::new().format(number).as_bytes());
    }

    /// Adds a field whose value is written by `write`.
    pub fn push_with(&mut self, name: &str, write: impl FnOnce(&mut Vec<u8>)) {
        self.0.extend_from_slice(name.as_bytes());
        self.0.extend_from_slice(b": ");
        write(&mut self.0);
        self.0.extend_from_slice(b"\r\n");
    }

    /// Returns the first value of a field.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.iter().find(|line| line.0 == name.as_bytes()).map(|line| line.1)
    }

    /// Returns the names and values of the fields in their order.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        lines(&self.0).map(|line| (line.name, line.value))
    }

    /// Keeps only the fields for whose name and value `keeps` returns true.
    pub fn retain(&mut self, keeps: impl Fn(&[u8], &[u8]) -> bool) {
        if lines(&self.0).all(|line| keeps(line.name, line.value)) {
            return;
        }
        let mut kept = Vec::with_capacity(self.0.len());
        for line in lines(&self.0).filter(|line| keeps(line.name, line.value)) {
            for part in [line.name, b": ", line.value, b"\r\n"] {
                kept.extend_from_slice(part);
            }
        }
        self.0 = kept;
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Converts the fields to hyper's header map.
    pub fn into_headers(self) -> HeaderMap {
        let text = Bytes::from(self.0);
        let mut headers = HeaderMap::with_capacity(8);
        for line in lines(&text) {
            let value = HeaderValue::from_maybe_shared(text.slice_ref(line.value));
            if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(line.name), value) {
                headers.append(name, value);
            }
        }
        headers
    }
}

impl From<&HeaderMap> for HeaderLines {
    fn from(headers: &HeaderMap) -> Self {
        let mut lines = Self::with_capacity(256);
        for (name, value) in headers {
            lines.push(name.as_str(), value.as_bytes());
        }
        lines
    }
}

/// Appends a line with a field to a head.
pub fn push_line(text: &mut Vec<u8>, name: &str, value: &[u8]) {
    for part in [name.as_bytes(), b": ", value, b"\r\n"] {
        text.extend_from_slice(part);
    }
}

/// Returns true if a field has a name, which is given in lower case. `field` must be a token, as an HTTP parser returns
/// it, and `name` must consist of letters, digits and hyphens.
///
/// The comparison has no branch for each byte, so it is faster than one for any two texts.
#[inline]
pub fn is_field_name(field: &str, name: &str) -> bool {
    // The bit makes a small letter of a capital, and changes no digit and no hyphen. It makes a character of `name` of
    // no other character of a token.
    let differs = |(field, name): (u8, u8)| (field | SMALL_LETTER_BIT) ^ name;
    field.len() == name.len()
        && field.bytes().zip(name.bytes()).fold(0, |found, pair| found | differs(pair)) == 0
}

/// The bit by which a small letter differs from its capital.
const SMALL_LETTER_BIT: u8 = b'a' ^ b'A';

struct HeaderLine<'a> {
    name: &'a [u8],
    value: &'a [u8],
}

/// Splits a text of [`HeaderLines`] into its fields. A name has no colon, and a value has no carriage return.
fn lines(text: &[u8]) -> impl Iterator<Item = HeaderLine<'_>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let name = memchr::memchr(b':', rest)?;
        let end = name + memchr::memchr(b'\r', &rest[name..])?;
        let line = HeaderLine { name: &rest[..name], value: &rest[name + 2..end] };
        rest = &rest[end + 2..];
        Some(line)
    })
}

#[cfg(test)]
mod tests {
    use super::{HeaderLines, is_field_name};

    /// All characters of tokens (RFC 9110, section 5.6.2), and all that a name may have.
    #[test]
    fn a_name_is_compared_in_any_case() {
        let is_token =
            |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
        for byte in (0..=0x7f).filter(is_token) {
            for known in (b'a'..=b'z').chain(b'0'..=b'9').chain([b'-']) {
                let [field, name] = [byte, known].map(|byte| format!("x-{}", char::from(byte)));
                assert_eq!(is_field_name(&field, &name), field.eq_ignore_ascii_case(&name));
            }
        }
        assert!(is_field_name("Transfer-ENCODING", "transfer-encoding"));
        assert!(!is_field_name("transfer-encodin", "transfer-encoding"));
        assert!(!is_field_name("", "te"));
    }

    #[test]
    fn lines_are_found_taken_out_and_made_a_table() {
        let mut lines = HeaderLines::default();
        lines.push("retry-after", b"a: b");
        lines.push("x-empty", b"");
        lines.push_number("x-left", 18);
        lines.push("retry-after", b"caf\xe9");
        assert_eq!(lines.get("x-left"), Some(&b"18"[..]));
        assert_eq!(lines.get("x-empty"), Some(&b""[..]));
        assert_eq!(lines.get("left"), None);
        assert_eq!(lines.iter().filter(|(name, _)| name == b"retry-after").count(), 2);
        let headers = lines.clone().into_headers();
        let again = HeaderLines::from(&headers);
        let last = again.iter().filter(|(name, _)| name == b"retry-after").last();
        assert_eq!(last.map(|(_, value)| value), Some(&b"caf\xe9"[..]));
        lines.retain(|_, value| value != b"18");
        assert_eq!(lines.as_bytes(), b"retry-after: a: b\r\nx-empty: \r\nretry-after: caf\xe9\r\n");
    }
}
