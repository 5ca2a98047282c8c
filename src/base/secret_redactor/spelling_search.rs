//! The search for the spellings of secrets in a text that comes in pieces.
//!
//! Each byte is looked at once. The search remembers the spellings that have begun: at each place, a spelling goes on with
//! the byte as it is, and with the byte that an escape spells. An escape ends well at one place only, so one escape waits
//! at a time, and with it the spellings that its end continues.
//!
//! **Invariant:** the work for a byte depends on the number of begun spellings, never on the bytes that were searched
//! before.

use std::fmt;
use std::ops::Range;

use smallvec::SmallVec;

use crate::base::secret::SecretString;

/// The secrets of a search, in the order of their bytes: those with the same beginning are neighbours.
pub(super) struct SecretTable {
    /// The bytes of all secrets.
    bytes: Box<[u8]>,
    /// The end of each secret in these bytes.
    ends: Box<[u32]>,
    /// The first byte of each secret.
    firsts: Box<[u8]>,
    /// The bytes with which a spelling can begin: a set with a bit for each byte.
    starts: [u64; 4],
    /// The pairs of bytes with which a spelling can begin: a set of hashes, so that few other pairs are in it.
    pairs: Box<[u64]>,
    /// The length of the shortest secret, in bytes.
    shortest: u32,
    /// The length of the longest secret, in bytes.
    longest: u32,
    /// True if a secret has a line end. Otherwise a line end ends every spelling.
    has_line_ends: bool,
}

/// The state of a search between two bytes of its text.
#[derive(Clone, Debug, Default)]
pub(super) struct SpellingSearch {
    /// The number of bytes that were searched.
    position: usize,
    /// The spellings that the next byte may continue.
    begun: SmallVec<[BegunSpelling; 2]>,
    escape: EscapePart,
    /// The first byte of the escape.
    escape_start: usize,
    /// The spellings that the end of the escape may continue, and the places where they met the escape.
    waiting: SmallVec<[(BegunSpelling, usize); 1]>,
}

/// A beginning that some secrets share, and that the text has spelled.
#[derive(Clone, Copy, Debug)]
struct BegunSpelling {
    /// The secrets, as a range of the table.
    from: u32,
    to: u32,
    /// The length of the beginning.
    bytes: usize,
    /// The place of the spelling's first byte in the text.
    start: usize,
}

/// The part of an escape that the text has shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum EscapePart {
    #[default]
    None,
    /// A percent sign.
    Percent,
    /// A percent sign and the first digit.
    PercentDigit(u8),
    /// Backslashes. JSON in a JSON string has them doubled.
    Slashes,
    /// Backslashes, `u` and some of the four digits. All secrets are ASCII or bytes, so the first two are zeros.
    Unicode { count: u8, digit: u8 },
}

impl SecretTable {
    /// Creates a table. No secret may be empty.
    pub(super) fn new(mut secrets: Vec<SecretString>) -> Self {
        secrets.retain(|secret| !secret.is_empty());
        secrets.sort_unstable_by(|one, other| one.expose_secret().cmp(other.expose_secret()));
        secrets.dedup();
        let each = || secrets.iter().map(|secret| secret.expose_secret().as_bytes());
        let mut end = 0;
        let ends = each().map(|secret| {
            end += u32::try_from(secret.len()).unwrap_or(u32::MAX);
            end
        });
        let ends = ends.collect();
        let (bytes, firsts): (_, Box<[u8]>) =
            (each().flatten().copied().collect(), each().map(|secret| secret[0]).collect());
        let words = (secrets.len().next_power_of_two()).clamp(MIN_PAIR_WORDS, MAX_PAIR_WORDS);
        let pairs = vec![0; words].into_boxed_slice();
        let lengths = || each().map(|secret| u32::try_from(secret.len()).unwrap_or(u32::MAX));
        let (shortest, longest) =
            (lengths().min().unwrap_or(u32::MAX), lengths().max().unwrap_or(0));
        let has_line_ends = each().flatten().any(|byte| matches!(byte, b'\n' | b'\r'));
        let mut table =
            Self { bytes, ends, firsts, starts: [0; 4], pairs, shortest, longest, has_line_ends };
        for secret in each() {
            table.add_starts(secret[0], secret.get(1).copied());
        }
        table
    }

    /// Returns true if a text is too short to contain a secret. No spelling of a secret is shorter than the secret.
    pub(super) fn is_too_short(&self, text: &[u8]) -> bool {
        text.len() < self.shortest as usize
    }

    /// Returns the number of bytes, of those that are held back and of a frame behind them, in which no secret begins whose
    /// end has not come. The number depends on the lines, and on no secret's bytes.
    pub(super) fn count_free(&self, held: usize, frame: &[u8]) -> usize {
        let line = if self.has_line_ends { None } else { memchr::memrchr2(b'\n', b'\r', frame) };
        let lines = line.map_or(0, |at| held + at + 1);
        let longest_spelling = self.longest as usize * MAX_ESCAPE_BYTES;
        lines.max((held + frame.len()).saturating_sub(longest_spelling))
    }

    fn secret(&self, number: u32) -> &[u8] {
        let number = number as usize;
        let from = number.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[from as usize..self.ends[number] as usize]
    }

    /// Adds the pairs of bytes with which the spellings of a secret begin.
    fn add_starts(&mut self, first: u8, second: Option<u8>) {
        for byte in [first, b'%', b'\\'] {
            self.starts[usize::from(byte >> 6)] |= 1 << (byte & 63);
        }
        let digit = b"0123456789abcdef"[usize::from(first >> 4)];
        // The first byte as it is, before the second one or an escape; then the first byte as an escape.
        for (one, two) in [
            (first, second.unwrap_or(b'%')),
            (first, b'%'),
            (first, b'\\'),
            (b'\\', first),
            (b'\\', b'u'),
            (b'\\', b'\\'),
            (b'%', digit),
            (b'%', digit.to_ascii_uppercase()),
        ] {
            let (word, bit) = self.pair_place(one, two);
            self.pairs[word] |= bit;
        }
    }

    /// Returns the number of bytes before the first one with which a spelling may begin.
    fn find_start(&self, text: &[u8]) -> Option<usize> {
        let can_start = |byte: u8| self.starts[usize::from(byte >> 6)] >> (byte & 63) & 1 == 1;
        let can_go_on = |byte: u8, next: u8| {
            let (word, bit) = self.pair_place(byte, next);
            self.pairs[word] & bit != 0
        };
        let starts = |pair: &[u8]| can_start(pair[0]) && can_go_on(pair[0], pair[1]);
        // The byte behind the last one is not known yet.
        let last = || text.last().filter(|last| can_start(**last)).map(|_| text.len() - 1);
        text.windows(2).position(starts).or_else(last)
    }

    fn pair_place(&self, byte: u8, next: u8) -> (usize, u64) {
        let hash = (u32::from(byte) << 8 | u32::from(next)).wrapping_mul(0x9e37_79b1) >> 16;
        (hash as usize >> 6 & (self.pairs.len() - 1), 1 << (hash & 63))
    }

    /// Returns the spelling that begins with a byte.
    fn begin_spelling(&self, byte: u8, start: usize) -> Option<BegunSpelling> {
        let from = self.firsts.partition_point(|first| *first < byte);
        let count = self.firsts[from..].partition_point(|first| *first == byte);
        let from = u32::try_from(from).ok()?;
        let to = from + u32::try_from(count).ok()?;
        (count > 0).then_some(BegunSpelling { from, to, bytes: 1, start })
    }

    /// Continues a spelling by a byte. Returns false if no secret goes on like that.
    fn continue_spelling(&self, own: &mut BegunSpelling, byte: u8) -> bool {
        // A shorter secret is before the longer ones that begin with it, and has no further byte.
        let next = |number: u32| self.secret(number).get(own.bytes).copied();
        while own.from < own.to && next(own.from) < Some(byte) {
            own.from += 1;
        }
        while own.from < own.to && next(own.to - 1) > Some(byte) {
            own.to -= 1;
        }
        own.bytes += 1;
        own.from < own.to
    }

    /// Returns true if a spelling is a whole secret.
    fn is_whole(&self, own: &BegunSpelling) -> bool {
        self.secret(own.from).len() == own.bytes
    }
}

impl SpellingSearch {
    /// Searches the next piece of the text. Gives the place of each secret that ends in it to `on_found`, and stops early
    /// if the function returns false.
    pub(super) fn search_piece(
        &mut self,
        table: &SecretTable,
        piece: &[u8],
        mut on_found: impl FnMut(Range<usize>) -> bool,
    ) {
        let before = self.position;
        let mut at = 0;
        while at < piece.len() {
            if self.is_idle() {
                match table.find_start(&piece[at..]) {
                    Some(count) => at += count,
                    None => break,
                }
            }
            self.position = before + at;
            let found = self.search_byte(table, piece[at]);
            at += 1;
            self.position = before + at;
            if found.is_some_and(|start| !on_found(start..self.position)) {
                return;
            }
        }
        self.position = before + piece.len();
    }

    /// Returns the number of bytes that were searched.
    pub(super) fn position(&self) -> usize {
        self.position
    }

    /// Returns the place of the first byte that may belong to a secret whose end has not come.
    pub(super) fn first_begun(&self) -> usize {
        let escape = match self.escape {
            EscapePart::None => self.position,
            EscapePart::Slashes => self.slashes_start(self.position),
            _ => self.escape_start,
        };
        let begun = self.begun.iter().map(|own| own.start);
        let waiting = self.waiting.iter().map(|(own, _)| own.start);
        begun.chain(waiting).fold(escape, usize::min)
    }

    fn is_idle(&self) -> bool {
        self.begun.is_empty() && self.escape == EscapePart::None
    }

    /// Returns the first of the backslashes before `end` that one escape can have.
    fn slashes_start(&self, end: usize) -> usize {
        self.escape_start.max(end.saturating_sub(MAX_SLASHES))
    }

    /// Searches one byte. Returns the start of the longest secret that ends with it.
    fn search_byte(&mut self, table: &SecretTable, byte: u8) -> Option<usize> {
        let at = self.position;
        if byte == b'\\' {
            self.add_slash();
        }
        // 1. An escape that begins here continues the spellings that have come as far as this byte.
        let met = (byte == b'%').then(|| self.begun.iter().map(|own| (*own, at)).collect());
        // 2. The byte as it is.
        self.begun.retain(|own| table.continue_spelling(own, byte));
        // 3. The byte that ends an escape.
        if let Some((spelled, start)) = self.read_escape(byte) {
            for number in 0..self.waiting.len() {
                let mut own = self.waiting[number].0;
                if table.continue_spelling(&mut own, spelled) {
                    self.add_begun(own);
                }
            }
            if let Some(own) = table.begin_spelling(spelled, start) {
                self.add_begun(own);
            }
        }
        if let Some(own) = table.begin_spelling(byte, at) {
            self.add_begun(own);
        }
        // 4. The escape that goes on behind this byte.
        self.escape = self.next_escape(byte);
        if let Some(met) = met {
            (self.waiting, self.escape_start) = (met, at);
        } else if self.escape == EscapePart::None {
            self.waiting.clear();
        }
        self.take_whole(table)
    }

    /// Adds a backslash to the escape, or begins the escape with it.
    fn add_slash(&mut self) {
        let at = self.position;
        if self.escape != EscapePart::Slashes {
            self.waiting.clear();
            (self.escape, self.escape_start) = (EscapePart::Slashes, at);
        }
        self.waiting.extend(self.begun.iter().map(|own| (*own, at)));
        // More backslashes belong to no escape, so these spellings have ended.
        self.waiting.retain(|(_, met)| at + 1 - *met <= MAX_SLASHES);
    }

    /// Returns the byte that the escape and this byte spell, and the place where a spelling with it begins.
    fn read_escape(&self, byte: u8) -> Option<(u8, usize)> {
        match self.escape {
            // Backslashes may be one backslash, and an escaped character stands for itself.
            EscapePart::Slashes if byte == b'\\' => {
                Some((byte, self.slashes_start(self.position + 1)))
            }
            EscapePart::Slashes => Some((byte, self.slashes_start(self.position))),
            EscapePart::PercentDigit(digit) | EscapePart::Unicode { count: 3, digit } => {
                Some((digit << 4 | hex_digit(byte)?, self.escape_start))
            }
            _ => None,
        }
    }

    fn next_escape(&mut self, byte: u8) -> EscapePart {
        match (self.escape, byte) {
            (_, b'\\') => EscapePart::Slashes,
            (_, b'%') => EscapePart::Percent,
            (EscapePart::Slashes, b'u') => {
                self.escape_start = self.slashes_start(self.position);
                EscapePart::Unicode { count: 0, digit: 0 }
            }
            (EscapePart::Percent, _) => {
                hex_digit(byte).map_or(EscapePart::None, EscapePart::PercentDigit)
            }
            (EscapePart::Unicode { count: count @ 0..2, .. }, b'0') => {
                EscapePart::Unicode { count: count + 1, digit: 0 }
            }
            (EscapePart::Unicode { count: 2, .. }, _) => hex_digit(byte)
                .map_or(EscapePart::None, |digit| EscapePart::Unicode { count: 3, digit }),
            _ => EscapePart::None,
        }
    }

    /// Adds a spelling. Of two that have come equally far, the one that began earlier hides more.
    fn add_begun(&mut self, own: BegunSpelling) {
        let same = |other: &&mut BegunSpelling| (other.from, other.bytes) == (own.from, own.bytes);
        match self.begun.iter_mut().find(same) {
            Some(other) => other.start = other.start.min(own.start),
            None => self.begun.push(own),
        }
    }

    /// Takes out the spellings that no longer secret continues. Returns the start of the longest whole one.
    fn take_whole(&mut self, table: &SecretTable) -> Option<usize> {
        let mut first: Option<usize> = None;
        self.begun.retain(|own| {
            let is_whole = table.is_whole(own);
            if is_whole {
                first = Some(first.map_or(own.start, |first| first.min(own.start)));
            }
            !is_whole || own.to - own.from > 1
        });
        first
    }
}

fn hex_digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

impl fmt::Debug for SecretTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretTable")
    }
}

/// The size of the set of pairs, in words of 64 bits. Our choice: a word for each secret, and at most 8 KiB.
const MIN_PAIR_WORDS: usize = 8;
const MAX_PAIR_WORDS: usize = 1024;

/// The longest escape of a byte: backslashes, `u` and four digits.
const MAX_ESCAPE_BYTES: usize = MAX_SLASHES + 5;

/// The largest number of backslashes before an escape. Our choice: JSON in JSON, five levels deep.
const MAX_SLASHES: usize = 32;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(secrets: &[&str]) -> SecretTable {
        SecretTable::new(secrets.iter().map(|secret| SecretString::new(*secret)).collect())
    }

    fn find_places(table: &SecretTable, text: &[u8], size: usize) -> Vec<Range<usize>> {
        let (mut search, mut places) = (SpellingSearch::default(), vec![]);
        for piece in text.chunks(size) {
            search.search_piece(table, piece, |place| {
                places.push(place);
                true
            });
        }
        places
    }

    /// Returns the length of a spelling at the beginning of a text, read from the left: the meaning of a spelling, without
    /// a thought about time.
    fn spelling_length(text: &[u8], secret: &[u8]) -> Option<usize> {
        if text.starts_with(secret) {
            return Some(secret.len());
        }
        let hex = |digits: &[u8]| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok();
        let mut at = 0;
        for byte in secret {
            let rest = &text[at..];
            let slashes = rest.iter().take_while(|byte| **byte == b'\\').count().min(MAX_SLASHES);
            at += match rest {
                [b'%', one, two, ..] if hex(&[*one, *two]) == Some(*byte) => 3,
                [b'\\', ..] => match &rest[slashes..] {
                    [b'u', b'0', b'0', one, two, ..] if hex(&[*one, *two]) == Some(*byte) => {
                        slashes + 5
                    }
                    _ if *byte == b'\\' => slashes,
                    [escaped, ..] if escaped == byte => slashes + 1,
                    _ => return None,
                },
                [first, ..] if first == byte => 1,
                _ => return None,
            };
        }
        Some(at)
    }

    const SECRETS: [&str; 5] = ["aba", "ab7", "%a7", "a\\u", "\\\\b"];

    proptest! {
        /// Whatever the pieces are, the same places are found, and no spelling is missed.
        #[test]
        fn spellings_are_found_at_every_split(text in "([ab7%\\\\u]|%61|%62|\\\\u0061|\\\\u0062|%5c|00){0,24}") {
            let (table, text) = (table(&SECRETS), text.as_bytes());
            let places = find_places(&table, text, text.len().max(1));
            for size in 1..text.len() {
                prop_assert_eq!(&find_places(&table, text, size), &places, "pieces of {}", size);
            }
            for at in 0..text.len() {
                for secret in SECRETS {
                    let Some(length) = spelling_length(&text[at..], secret.as_bytes()) else { continue };
                    let is_found = |place: &Range<usize>| place.start <= at && place.end == at + length;
                    prop_assert!(places.iter().any(is_found), "{} at {}", secret, at);
                }
            }
        }
    }

    /// The search looks at each byte of 8 MiB once, and few spellings are begun at each of them.
    #[test]
    fn the_work_for_a_byte_does_not_grow_with_the_text() {
        let table = table(&["ghs_Wx3/9+vQ~secret.77", &"s".repeat(40)]);
        let slashes = "\\".repeat(MAX_SLASHES);
        let spelled = "ghs_Wx3/9+vQ~secret.7".chars().map(|byte| format!("{slashes}{byte}"));
        let spelled: String = spelled.collect();
        for unit in [&*spelled, "\\", "s", "%73", "\\u0073", "ss%7", "\\\\\\u007", "\\s"] {
            let (mut search, mut work) = (SpellingSearch::default(), 0);
            let length = if unit == spelled { 8 << 20 } else { 1 << 17 };
            let text: Vec<u8> = unit.bytes().cycle().take(length).collect();
            for piece in text.chunks(1) {
                search.search_piece(&table, piece, |_| true);
                work += 1 + search.begun.len() + search.waiting.len();
            }
            assert_eq!(search.position, text.len());
            assert!(work < 84 * text.len(), "{work} steps for {unit}");
        }
    }
}
