//! Masks or finds a credential of this program in a body that passes frame by frame, and finds the credential in a
//! header.
//!
//! An upstream that repeats the credential may spell it in another way: LiteLLM puts the text of one error into the
//! JSON of another, and a server for debugging shows a request's headers in its URL. So the secrets are found as they
//! are, in base64 at any offset, and with any of their bytes as a JSON escape or a percent escape. Other spellings are
//! not found: hexadecimal, compressed or reversed bytes, percent escapes that are escaped again, or a secret in pieces.
//!
//! **Invariant:** where a body is held back depends on its lines and on the length of the longest secret, never on a
//! secret's bytes. A client that chooses what a server repeats would otherwise see how much of its guess is right.

mod spelling_search;

use std::ops::Range;
use std::sync::Arc;

use base64::prelude::*;
use bytes::{Bytes, BytesMut};

use self::spelling_search::{SecretTable, SpellingSearch};
use crate::base::digest::sha256_hex;
use crate::base::secret::SecretString;

/// A filter that replaces each byte of the secrets by an asterisk, so that the announced length of the body stays true.
#[derive(Clone, Debug)]
pub struct SecretRedactor {
    table: Arc<SecretTable>,
    /// The state of the body; `None` before its first frame, because a run keeps a redactor for all its bodies.
    body: Option<Box<SearchedBody>>,
}

/// The state of a body between two frames.
#[derive(Clone, Debug, Default)]
struct SearchedBody {
    search: SpellingSearch,
    /// The end of the body so far, where a secret may begin. These bytes wait for the next frame.
    tail: BytesMut,
    /// True if a body that may not contain a secret contains one.
    has_found: bool,
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
        let secrets = long.flat_map(|key| {
            let bytes = key.expose_secret().as_bytes();
            let digest = SecretString::new(sha256_hex(bytes));
            let own = [key.clone(), digest].into_iter().chain(base64_spellings(bytes));
            own.chain(unicode_spellings(key.expose_secret()))
        });
        Self { table: Arc::new(SecretTable::new(secrets.collect())), body: None }
    }

    /// Returns true if a text contains a secret, in any spelling. The text is searched once for all secrets.
    pub fn contains_secret(&self, text: &[u8]) -> bool {
        if self.table.is_too_short(text) {
            return false;
        }
        let mut has_found = false;
        SpellingSearch::default().search_piece(&self.table, text, |_| {
            has_found = true;
            false
        });
        has_found
    }

    /// Returns the part of the body so far that may pass, or `None` if the body contains a secret.
    pub fn pass_frame(&mut self, frame: Bytes) -> Option<Bytes> {
        let body = self.body.get_or_insert_default();
        body.note_secrets(&self.table, &frame);
        if body.has_found { None } else { Some(body.release_safe_part(&self.table, frame)) }
    }

    /// Searches the rest of the body for the secrets of another redactor instead.
    pub fn replace_secrets(&mut self, other: &Self) {
        self.table = Arc::clone(&other.table);
        let body = self.body.get_or_insert_default();
        // A secret that is new here may begin in the bytes that were held back, so they are searched again.
        body.search = SpellingSearch::default();
        let held = std::mem::take(&mut body.tail);
        body.note_secrets(&self.table, &held);
        body.tail = held;
    }

    /// Returns the part of the body so far that is free of secrets and may pass.
    pub fn redact_frame(&mut self, frame: Bytes) -> Bytes {
        let mut found = vec![];
        let body = self.body.get_or_insert_default();
        let before = body.search.position() - body.tail.len();
        body.search.search_piece(&self.table, &frame, |place| {
            found.push(place);
            true
        });
        if found.is_empty() {
            return body.release_safe_part(&self.table, frame);
        }
        // The bytes that were held back come first, so a secret over two frames is masked as a whole.
        let free = self.table.count_free(body.tail.len(), &frame);
        body.hold_frame(&frame);
        for place in found {
            body.tail[place.start - before..place.end - before].fill(b'*');
        }
        body.tail.split_to(free).freeze()
    }

    /// Returns true if a body has begun, whose next frame continues it.
    pub fn has_begun(&self) -> bool {
        self.body.is_some()
    }

    /// Redacts a frame except for the range `passed`: the bytes before the range end the body that has begun, and the bytes
    /// behind the range begin another body.
    pub fn redact_ends(&mut self, frame: &Bytes, passed: Range<usize>) -> Bytes {
        let first = if passed.start > 0 {
            self.redact_frame(frame.slice(..passed.start))
        } else {
            Bytes::new()
        };
        let rest = self.take_rest();
        let last = if passed.end < frame.len() {
            self.redact_frame(frame.slice(passed.end..))
        } else {
            Bytes::new()
        };
        // Usual ends contain no secret and no beginning of one. They are still parts of the frame, which needs no copy.
        let is_part =
            |part: &Bytes, from: usize| part.is_empty() || part.as_ptr() == frame[from..].as_ptr();
        if first.len() == passed.start && is_part(&first, 0) && is_part(&last, passed.end) {
            return frame.slice(..passed.end + last.len());
        }
        [&first[..], &rest, &frame[passed], &last].concat().into()
    }

    /// Returns the bytes that were held back, and ends the body, so that they cannot become a secret any more.
    pub fn take_rest(&mut self) -> Bytes {
        self.body.take().map(|body| body.tail.freeze()).unwrap_or_default()
    }
}

impl SearchedBody {
    fn note_secrets(&mut self, table: &SecretTable, piece: &[u8]) {
        let Self { search, has_found, .. } = self;
        search.search_piece(table, piece, |_| {
            *has_found = true;
            false
        });
    }

    /// Returns the bytes before the end in which a secret may begin.
    fn release_safe_part(&mut self, table: &SecretTable, mut frame: Bytes) -> Bytes {
        let free = table.count_free(self.tail.len(), &frame);
        debug_assert!(
            self.search.position() - self.tail.len() - frame.len() + free
                <= self.search.first_begun()
        );
        if self.tail.is_empty() {
            // A frame of whole lines passes without a copy.
            let waiting = frame.split_off(free);
            self.hold_frame(&waiting);
            return frame;
        }
        self.hold_frame(&frame);
        self.tail.split_to(free).freeze()
    }

    fn hold_frame(&mut self, frame: &[u8]) {
        // The space grows with the bytes that it holds, so that small frames do not move them again and again.
        if self.tail.capacity() - self.tail.len() < frame.len() {
            self.tail.reserve(frame.len().max(self.tail.len()));
        }
        self.tail.extend_from_slice(frame);
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

/// Returns the secret as JSON of ASCII characters has it, with large and with small digits; none for an ASCII secret.
fn unicode_spellings(secret: &str) -> Vec<SecretString> {
    if secret.is_ascii() {
        return vec![];
    }
    let spell = |escape: fn(u16) -> String| {
        let letter = |letter: char| {
            let mut units = [0; 2];
            let units: &[u16] = letter.encode_utf16(&mut units);
            units.iter().copied().map(escape).collect::<String>()
        };
        let spell = |own: char| if own.is_ascii() { own.to_string() } else { letter(own) };
        SecretString::new(secret.chars().map(spell).collect::<String>())
    };
    vec![spell(|unit| format!("\\u{unit:04x}")), spell(|unit| format!("\\u{unit:04X}"))]
}

/// The shortest key that is masked, in bytes. A shorter key is no secret and would occur in any text.
const MIN_SECRET_BYTES: usize = 6;

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;

    fn masked(key: &str, body: &str, size: usize) -> String {
        let mut redactor = SecretRedactor::new(&SecretString::new(key));
        let mut passed = vec![];
        for frame in body.as_bytes().chunks(size) {
            passed.extend_from_slice(&redactor.redact_frame(Bytes::copy_from_slice(frame)));
        }
        passed.extend_from_slice(&redactor.take_rest());
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
            let redactor = SecretRedactor::new(&SecretString::new(key));
            assert!(redactor.contains_secret(body.as_bytes()), "{body}");
            for size in 1..body.len() {
                let mut guard = redactor.clone();
                let mut frames = body.as_bytes().chunks(size).map(Bytes::copy_from_slice);
                assert!(frames.any(|frame| guard.pass_frame(frame).is_none()), "{body}");
                assert!(
                    guard.pass_frame(Bytes::from_static(b"x")).is_none(),
                    "nothing passes behind it"
                );
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

    /// G10, T6: a client sees the same pieces whether a server repeats the beginning of a secret or another text. So no
    /// guess is told apart from a wrong one before the whole secret is there.
    #[test]
    fn the_pieces_of_a_body_do_not_tell_how_much_of_a_guess_is_right() {
        let key = "sk-abc\u{fc}bd";
        let right =
            ["sk-abc", "s", "%73k", "\\u0073k-", "\\\\\\sk", "c2stYWJ", "sk-abc\\u00", "sk-abc%c3"];
        let redactor = SecretRedactor::new(&SecretString::new(key));
        for guess in right {
            let wrong = "#".repeat(guess.len());
            for around in ["", "data: ", "\n", "x\r", &"long ".repeat(800), &"line\n".repeat(800)] {
                let pieces = |guess: &str, is_masked: bool| {
                    let mut guard = redactor.clone();
                    let frames =
                        [format!("{around}{guess}"), format!("{guess}{around}"), "y\n".into()];
                    let pass = |frame: String| {
                        let frame = Bytes::from(frame);
                        if is_masked {
                            guard.redact_frame(frame).len()
                        } else {
                            guard.pass_frame(frame).unwrap().len()
                        }
                    };
                    frames.map(pass)
                };
                for is_masked in [true, false] {
                    assert_eq!(pieces(guess, is_masked), pieces(&wrong, is_masked), "{guess}");
                }
            }
        }
    }

    /// A secret with letters beyond ASCII is found as the usual JSON writers of Python and others spell it.
    #[test]
    fn a_secret_beyond_ascii_is_found_in_json_of_ascii() {
        let redactor = SecretRedactor::new(&SecretString::new("schl\u{fc}ssel-\u{1f511}"));
        for text in [
            r"schl\u00fcssel-\ud83d\udd11",
            r"schl\u00FCssel-\uD83D\uDD11",
            r"schl\\u00fcssel-\\ud83d\\udd11",
        ] {
            assert!(redactor.contains_secret(text.as_bytes()), "{text}");
        }
    }

    /// A frame of whole lines without a secret passes as it is, without a copy.
    #[test]
    fn a_usual_frame_is_not_copied() {
        let mut redactor = SecretRedactor::new(&SecretString::new("sk-abcabd"));
        for text in ["data: {\"content\":\"some words, sk-a ...\"}\n\n", "", "sk-abc\r"] {
            let frame = Bytes::from(text);
            let passed = redactor.redact_frame(frame.clone());
            assert_eq!((passed.as_ptr(), passed.len()), (frame.as_ptr(), frame.len()));
        }
        assert_eq!(redactor.body.unwrap().tail.capacity(), 0);
    }

    /// Only the ends of a frame are searched: a key over two frames is masked, a key between the ends passes.
    #[test]
    fn the_ends_of_frames_are_redacted() {
        let key = "sk-abcabd";
        let mut redactor = SecretRedactor::new(&SecretString::new(key));
        let mut redact = |frame: &str, passed: Range<usize>| {
            let frame = Bytes::copy_from_slice(frame.as_bytes());
            let redacted = redactor.redact_ends(&frame, passed);
            (redacted.as_ptr() == frame.as_ptr(), String::from_utf8(redacted.to_vec()).unwrap())
        };
        // The line at the frame's end has not ended, so it waits; the rest passes without a copy.
        assert_eq!(redact("sk-abcabd x sk-abc", 0..11), (true, "sk-abcabd x".into()));
        assert_eq!(
            redact("abd\n\nsk-abcabd|sk", 5..15),
            (false, " *********\n\nsk-abcabd|".into())
        );
        assert_eq!(redact("-abca \n\n", 8..8), (false, "sk-abca \n\n".into()));
        assert!(!redactor.has_begun());
    }

    /// Frames of one byte that spell nearly a whole secret pass at last, and no byte is held longer than it must be.
    #[test]
    fn a_body_that_begins_a_secret_everywhere_passes() {
        for unit in ["s", "\\", "%73", "\\u0073", "ss%7", "\\\\\\u007"] {
            let body = unit.repeat((1 << 18) / unit.len());
            for size in [1, 8192] {
                assert_eq!(masked(&format!("{}t", "s".repeat(40)), &body, size), body, "{unit}");
            }
        }
    }
}
