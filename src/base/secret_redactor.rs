//! Masks or finds a credential of this program in a body that passes frame by frame, and finds the credential in a
//! header.
//!
//! An upstream that repeats the credential may spell it in another way: LiteLLM puts the text of one error into the
//! JSON of another, and a server for debugging shows a request's headers in its URL. So the secrets are found as they
//! are, in base64 at any offset, and with any of their bytes as a JSON escape or a percent escape. Other spellings are
//! not found: hexadecimal, compressed or reversed bytes, percent escapes that are escaped again, or a secret in pieces.

use base64::prelude::*;
use bytes::{Bytes, BytesMut};
use memchr::memchr3_iter;

use crate::base::digest::sha256_hex;
use crate::base::secret::SecretString;

/// A filter that replaces each byte of the secrets by an asterisk, so that the announced length of the body stays true.
#[derive(Clone, Debug)]
pub struct SecretRedactor {
    secrets: Vec<SecretString>,
    starts: SpellingStarts,
    /// The end of the body so far, if a secret may begin there. These bytes wait for the next frame.
    tail: BytesMut,
}

/// The bytes with which a spelling of one of the secrets can begin: a set with a bit for each byte.
#[derive(Clone, Copy, Debug, Default)]
struct SpellingStarts([u64; 4]);

/// The comparison of a text with a secret or with one byte of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpellingMatch {
    /// The first bytes are the secret, in so many bytes.
    Whole(usize),
    /// The text ends too early to decide.
    Begun,
    Different,
}

impl SecretRedactor {
    /// Creates a redactor for a key, for its digest, by which LiteLLM names keys, and for the key in base64.
    pub fn new(key: &SecretString) -> Self {
        Self::for_keys(std::slice::from_ref(key))
    }

    /// Creates a redactor for several keys, each like [`new`](Self::new).
    pub fn for_keys(keys: &[SecretString]) -> Self {
        let bytes = |key: &SecretString| key.expose_secret().len();
        let long = keys.iter().filter(|key| bytes(key) >= MIN_SECRET_BYTES);
        let secrets: Vec<_> = long
            .flat_map(|key| {
                let bytes = key.expose_secret().as_bytes();
                let digest = SecretString::new(sha256_hex(bytes));
                [key.clone(), digest].into_iter().chain(base64_spellings(bytes))
            })
            .collect();
        let mut starts = SpellingStarts::default();
        for secret in &secrets {
            let first = secret.expose_secret().as_bytes()[0];
            for byte in [first, b'%', b'\\'] {
                starts.insert(byte);
            }
        }
        Self { secrets, starts, tail: BytesMut::new() }
    }

    /// Returns true if a text contains a secret, in any spelling. The text is searched once for all secrets.
    pub fn contains_secret(&self, text: &[u8]) -> bool {
        let is_start = |(_, byte): &(usize, &u8)| self.starts.contains(**byte);
        text.iter().enumerate().filter(is_start).any(|(at, _)| {
            let is_whole =
                |secret: &[u8]| matches!(compare(&text[at..], secret), SpellingMatch::Whole(_));
            self.secrets().any(is_whole)
        })
    }

    /// Returns the part of the body so far that may pass, or `None` if the body contains a secret.
    pub fn pass_frame(&mut self, frame: &[u8]) -> Option<Bytes> {
        self.tail.extend_from_slice(frame);
        if self.contains_secret(&self.tail) { None } else { Some(self.release_safe_part()) }
    }

    /// Returns the part of the body so far that is free of secrets and may pass.
    pub fn redact_frame(&mut self, frame: &[u8]) -> Bytes {
        // The bytes that were held back come first, so a secret over two frames is found as a whole.
        self.tail.extend_from_slice(frame);
        for secret in &self.secrets {
            let (secret, mut from) = (secret.expose_secret().as_bytes(), 0);
            while let Some((at, length)) = find_spelling(&self.tail[from..], secret) {
                self.tail[from + at..from + at + length].fill(b'*');
                from += at + length;
            }
        }
        self.release_safe_part()
    }

    /// Returns the bytes before the longest end that may be the beginning of a secret.
    fn release_safe_part(&mut self) -> Bytes {
        // The end may be the beginning of several secrets. The longest one decides how much is held back.
        let begun_lengths = self.secrets().map(|secret| begun_length(&self.tail, secret));
        let held_back = begun_lengths.max().unwrap_or_default();
        self.tail.split_to(self.tail.len() - held_back).freeze()
    }

    /// Returns the bytes that were held back. The body has ended, so they cannot become a secret any more.
    pub fn redact_rest(self) -> Bytes {
        self.tail.freeze()
    }

    fn secrets(&self) -> impl Iterator<Item = &[u8]> {
        self.secrets.iter().map(|secret| secret.expose_secret().as_bytes())
    }
}

impl SpellingStarts {
    fn insert(&mut self, byte: u8) {
        self.0[usize::from(byte >> 6)] |= 1 << (byte & 63);
    }

    fn contains(self, byte: u8) -> bool {
        self.0[usize::from(byte >> 6)] >> (byte & 63) & 1 == 1
    }
}

/// Returns the digits that a secret has in base64, in both alphabets, wherever the secret begins in the encoded text.
/// The digits that depend on the bytes around the secret are left out; they hold a part of its first or last byte.
fn base64_spellings(secret: &[u8]) -> Vec<SecretString> {
    let mut spellings = vec![];
    for before in 0..3 {
        let digits = BASE64_URL_SAFE_NO_PAD.encode([&[0; 2][..before], secret].concat());
        // 8 bits a byte, 6 bits a digit: the first digit without a bit of the bytes before, and the last whole one.
        let digits = &digits[(before * 8).div_ceil(6)..(before + secret.len()) * 8 / 6];
        spellings.push(SecretString::new(digits));
        if digits.contains(['-', '_']) {
            spellings.push(SecretString::new(digits.replace('-', "+").replace('_', "/")));
        }
    }
    spellings
}

/// Returns the position and the length of the first spelling of a secret.
fn find_spelling(text: &[u8], secret: &[u8]) -> Option<(usize, usize)> {
    // Each byte of a secret takes at least one byte of a spelling, so a short text holds none.
    if text.len() < secret.len() {
        return None;
    }
    memchr3_iter(secret[0], b'%', b'\\', text).find_map(|at| match compare(&text[at..], secret) {
        SpellingMatch::Whole(length) => Some((at, length)),
        SpellingMatch::Begun | SpellingMatch::Different => None,
    })
}

/// Returns the number of bytes at the end that may be the beginning of a secret.
fn begun_length(text: &[u8], secret: &[u8]) -> usize {
    let start = text.len().saturating_sub(secret.len() * MAX_BYTE_SPELLING);
    let tail = &text[start..];
    let mut candidates = memchr3_iter(secret[0], b'%', b'\\', tail);
    // The first match is the longest one.
    let begun_at = candidates.find(|at| compare(&tail[*at..], secret) == SpellingMatch::Begun);
    begun_at.map_or(0, |at| tail.len() - at)
}

/// Compares the beginning of a text with a secret. The work is bounded by the secret's length.
fn compare(text: &[u8], secret: &[u8]) -> SpellingMatch {
    // As the secret is, its own `%` and `\` begin no escape.
    if text.starts_with(secret) {
        return SpellingMatch::Whole(secret.len());
    }
    if secret.starts_with(text) {
        return SpellingMatch::Begun;
    }
    let mut at = 0;
    for byte in secret {
        match compare_byte(&text[at..], *byte) {
            SpellingMatch::Whole(length) => at += length,
            other => return other,
        }
    }
    SpellingMatch::Whole(at)
}

fn compare_byte(text: &[u8], byte: u8) -> SpellingMatch {
    match text {
        [] => SpellingMatch::Begun,
        [b'%', digits @ ..] => match compare_digits(digits, 2, byte, 1) {
            SpellingMatch::Different if byte == b'%' => SpellingMatch::Whole(1),
            escaped => escaped,
        },
        [b'\\', ..] => {
            // JSON in a JSON string has its backslashes doubled.
            let slashes = text.iter().take(MAX_SLASHES).take_while(|byte| **byte == b'\\').count();
            match text[slashes..].split_first() {
                None => SpellingMatch::Begun,
                Some((b'u', digits)) => match compare_digits(digits, 4, byte, slashes + 1) {
                    SpellingMatch::Different if byte == b'\\' => SpellingMatch::Whole(slashes),
                    escaped => escaped,
                },
                Some(_) if byte == b'\\' => SpellingMatch::Whole(slashes),
                Some((escaped, _)) if *escaped == byte => SpellingMatch::Whole(slashes + 1),
                Some(_) => SpellingMatch::Different,
            }
        }
        [first, ..] if *first == byte => SpellingMatch::Whole(1),
        _ => SpellingMatch::Different,
    }
}

/// Compares a byte with the hexadecimal digits of its escape, `count` of them after `before` bytes.
fn compare_digits(text: &[u8], count: usize, byte: u8, before: usize) -> SpellingMatch {
    let digit = |value: u8| HEX_DIGITS[usize::from(value)];
    let expected = [b'0', b'0', digit(byte >> 4), digit(byte & 0xf)];
    let digits = &text[..text.len().min(count)];
    if !expected[4 - count..].iter().zip(digits).all(|(a, b)| a.eq_ignore_ascii_case(b)) {
        SpellingMatch::Different
    } else if digits.len() < count {
        SpellingMatch::Begun
    } else {
        SpellingMatch::Whole(before + count)
    }
}

const HEX_DIGITS: &[u8; 16] = b"0123456789abcdef";

/// The shortest key that is masked, in bytes. A shorter key is no secret and would occur in any text.
const MIN_SECRET_BYTES: usize = 6;

/// The largest number of backslashes before an escape. Our choice: JSON in JSON, five levels deep.
const MAX_SLASHES: usize = 32;

/// The longest spelling of one byte: the backslashes, `u` and four digits.
const MAX_BYTE_SPELLING: usize = MAX_SLASHES + 5;

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;

    fn masked(key: &str, body: &str, size: usize) -> String {
        let mut redactor = SecretRedactor::new(&SecretString::new(key));
        let mut passed = vec![];
        for frame in body.as_bytes().chunks(size) {
            passed.extend_from_slice(&redactor.redact_frame(frame));
        }
        passed.extend_from_slice(&redactor.redact_rest());
        String::from_utf8(passed).unwrap()
    }

    #[test]
    fn a_key_is_masked_however_the_body_is_cut() {
        let digest = sha256_hex(b"sk-abcabd");
        let body = format!("x sk-abcsk-abcabd and sk-abca {digest}; sk-ab");
        let expected = format!("x sk-abc********* and sk-abca {}; sk-ab", "*".repeat(64));
        for size in 1..body.len() {
            assert_eq!(masked("sk-abcabd", &body, size), expected, "frames of {size}");
        }
    }

    #[test]
    fn a_key_with_characters_of_escapes_is_masked() {
        for (key, spelling) in [
            ("ab%cd-efgh%12345", "ab%cd-efgh%12345"),
            ("ab%cd-efgh%12345", "ab%25cd-efgh%2512345"),
            ("ab%cd-efgh%12345", "ab%25cd%2Defgh%2512345"),
            (r"DOMAIN\user-pass", r"DOMAIN\user-pass"),
            (r"DOMAIN\user-pass", r"DOMAIN\user-pass"),
            (r"DOMAIN\user-pass", r"DOMAIN\\user-pass"),
            (r"DOMAIN\user-pass", r"DOMAIN\u005cuser-pass"),
            (r"DOMAIN\user-pass", "DOMAIN%5Cuser-pass"),
        ] {
            let (body, stars) = (format!("x {spelling} y"), "*".repeat(spelling.len()));
            for size in 1..body.len() {
                assert_eq!(masked(key, &body, size), format!("x {stars} y"), "{spelling}, {size}");
            }
        }
    }

    #[test]
    fn a_key_is_masked_however_it_is_spelled() {
        let key = "sk-a/b?c~\u{ff}>d";
        let json = serde_json::to_string(key).unwrap();
        let escaped = json[1..json.len() - 1].replace('k', "\\u006B").replace('/', "\\/");
        let mut all = String::new();
        key.bytes().for_each(|byte| write!(all, "%{byte:02X}").unwrap());
        let some = key.replace('/', "%2f").replace('~', "%7e");
        let mut spellings = vec![key.to_owned(), escaped.clone(), all, some];
        // The key may also stand in a JSON string within a JSON string.
        spellings.push(escaped.replace('\\', "\\\\"));
        spellings.push(escaped.replace('\\', "\\\\\\\\"));
        for spelling in spellings {
            let body = format!("{{\"a\":\"\\\\{spelling}\",\"b\":\"100% \\n\\u0073 sk-a\"}}");
            // The search in a header agrees with a search for each secret.
            let redactor = SecretRedactor::new(&SecretString::new(key));
            for at in 0..=body.len() {
                for text in [&body.as_bytes()[at..], &body.as_bytes()[..at]] {
                    let mut secrets = redactor.secrets();
                    let has_secret = secrets.any(|secret| find_spelling(text, secret).is_some());
                    assert_eq!(redactor.contains_secret(text), has_secret, "{at} of {body}");
                }
            }
            for size in 1..body.len() {
                let passed = masked(key, &body, size);
                let hidden = passed.bytes().filter(|byte| *byte == b'*').count();
                assert!(hidden >= spelling.len(), "{passed}");
                assert!(passed.ends_with("\"b\":\"100% \\n\\u0073 sk-a\"}"), "{passed}");
                assert_eq!(passed.len(), body.len());
            }
        }
    }

    #[test]
    fn a_key_is_masked_in_base64_wherever_it_begins() {
        let key = "sk-a/b?c~>>>???d";
        for before in ["", "u", "us", "use", "user:", "Bearer "] {
            let mut url = String::new();
            BASE64_URL_SAFE_NO_PAD.encode_string(format!("{before}{key}:x"), &mut url);
            let standard = url.replace('-', "+").replace('_', "/");
            for text in [standard.replace('/', "\\/"), standard, url] {
                for size in [1, 2, 7, 100] {
                    let passed = masked(key, &format!("Basic {text}=="), size);
                    let shown = passed.bytes().filter(|byte| *byte != b'*').count();
                    // What is around the key, and a digit at each of its ends.
                    assert!(shown <= 8 + before.len().div_ceil(3) * 4 + 4, "{passed}");
                }
            }
        }
    }

    /// The work is linear, also for texts that look like the beginning of a secret everywhere.
    #[test]
    fn a_body_that_begins_a_secret_everywhere_is_read_in_linear_time() {
        for unit in ["s", "\\", "%73", "\\u0073", "ss%7", "\\\\\\u007"] {
            let body = unit.repeat((1 << 18) / unit.len());
            let begun = std::time::Instant::now();
            let passed = masked(&format!("{}t", "s".repeat(40)), &body, 8192);
            assert_eq!(passed, body);
            assert!(begun.elapsed().as_secs() < 10, "{unit}: {:?}", begun.elapsed());
        }
    }
}
