//! The path of a request over a connection, which every program must read alike.
//!
//! A rule compares the very bytes that are sent. So a path is refused if the server could read it as another path: it has
//! dot segments, empty segments, path parameters, backslashes, escapes of characters that need none, or escapes that
//! decode into a part of the path's structure. An escaped slash is the one exception, because npm's clients send it: a
//! rule must spell it out.

/// A path that can be read in one way only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestPath<'a>(&'a str);

impl<'a> RequestPath<'a> {
    /// Checks the raw path of a request, which begins with a slash.
    ///
    /// # Errors
    /// Returns the reason why the path could be read in two ways.
    pub fn parse(raw: &'a str) -> Result<Self, &'static str> {
        if raw.len() > MAX_PATH_BYTES {
            return Err("is longer than 4096 bytes");
        }
        let Some(rest) = raw.strip_prefix('/') else { return Err("does not begin with `/`") };
        check_characters(raw.as_bytes())?;
        // Both readings of an escaped slash must have whole segments.
        let decoded = rest.replace("%2F", "/").replace("%2f", "/");
        check_segments(rest)?;
        check_segments(&decoded)?;
        Ok(Self(raw))
    }

    pub fn as_str(self) -> &'a str {
        self.0
    }

    /// Returns the segments between the slashes. The last one is empty if the path ends with a slash.
    pub(super) fn segments(self) -> impl Iterator<Item = &'a str> {
        self.0.strip_prefix('/').unwrap_or(self.0).split('/')
    }
}

/// Returns true if a segment has an escaped slash.
pub(super) fn has_escaped_slash(segment: &str) -> bool {
    segment.contains("%2F") || segment.contains("%2f")
}

fn check_segments(path: &str) -> Result<(), &'static str> {
    let last = path.split('/').count() - 1;
    for (number, segment) in path.split('/').enumerate() {
        if segment.is_empty() && number < last {
            return Err("has an empty segment");
        }
        if matches!(segment, "." | "..") {
            return Err("has a segment of dots");
        }
    }
    Ok(())
}

fn check_characters(path: &[u8]) -> Result<(), &'static str> {
    let mut at = 0;
    while let Some(byte) = path.get(at) {
        at += 1;
        match byte {
            b'%' => {
                let digits = path.get(at..at + 2).and_then(|digits| str::from_utf8(digits).ok());
                let digits = digits.filter(|text| text.bytes().all(|b| b.is_ascii_hexdigit()));
                let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
                check_escaped(escaped.ok_or("has a `%` that begins no escape")?)?;
                at += 2;
            }
            b';' => return Err("has a path parameter"),
            b'\\' => return Err("has a backslash"),
            b'/' | b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+' | b',' | b'=' | b':'
            | b'@' => {}
            byte if is_unreserved(*byte) => {}
            _ => return Err("has a character that a path must escape"),
        }
    }
    Ok(())
}

fn check_escaped(byte: u8) -> Result<(), &'static str> {
    match byte {
        b'/' => Ok(()),
        b'%' => Err("has an escape within an escape"),
        b'\\' | b';' | b'?' | b'#' => Err("has an escaped delimiter"),
        0..0x20 | 0x7f => Err("has an escaped control character"),
        byte if is_unreserved(byte) => Err("has an escape of a character that needs none"),
        _ => Ok(()),
    }
}

/// Returns true for a character that means the same with and without an escape (RFC 3986, section 2.3).
fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

/// The longest path. Our choice: servers have limits of 4 to 8 KiB.
const MAX_PATH_BYTES: usize = 4096;
