//! Characters that a reader of a text does not see, or that change the order of the characters around them. Two names
//! that differ only in such characters look the same.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::{Captures, Regex};

/// Returns true if a character is a control character, separates lines, shows nothing, or changes the direction of the
/// text around it.
///
/// ```
/// use cogni_gateway::base::hidden_characters::is_hidden;
/// assert!(!"naïve 東京 model".chars().any(is_hidden));
/// for hidden in ['\n', '\u{85}', '\u{ad}', '\u{200b}', '\u{2028}', '\u{202e}', '\u{2066}', '\u{feff}', '\u{e0041}'] {
///     assert!(is_hidden(hidden), "{hidden:?}");
/// }
/// ```
pub fn is_hidden(letter: char) -> bool {
    letter.is_control() || matches!(letter, '\u{2028}' | '\u{2029}') || is_invisible(letter)
}

/// Returns a text with each character that a reader does not plainly see replaced by its number, such as `\\u{202e}`. These
/// are the hidden characters, all blanks but the space, and characters without a fixed shape. Line ends and tabs stay.
///
/// ```
/// use cogni_gateway::base::hidden_characters::escape_hidden;
/// assert_eq!(escape_hidden("no agent `a\u{202e}b`\n"), "no agent `a\\u{202e}b`\n");
/// assert_eq!(escape_hidden("rm\u{a0}x"), "rm\\u{a0}x");
/// ```
pub fn escape_hidden(text: &str) -> Cow<'_, str> {
    if text.is_ascii() && !text.bytes().any(|byte| byte.is_ascii_control()) {
        return Cow::Borrowed(text);
    }
    NOT_PLAIN.replace_all(text, |found: &Captures<'_>| {
        found[0].chars().flat_map(char::escape_unicode).collect::<String>()
    })
}

/// Returns true if a reader plainly sees a character: [`escape_hidden`] leaves it.
pub fn is_plain(letter: char) -> bool {
    letter == ' ' || letter.is_ascii_graphic() || {
        let mut bytes = [0; 4];
        !letter.is_ascii() && !NOT_PLAIN.is_match(letter.encode_utf8(&mut bytes))
    }
}

/// Returns true if a character changes the order in which a terminal or a page shows the characters around it.
pub fn reorders_text(letter: char) -> bool {
    matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns true if a character shows nothing: fillers, joiners, variation selectors, tags and marks of direction.
pub fn is_invisible(letter: char) -> bool {
    matches!(letter,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}'
        | '\u{feff}' | '\u{ffa0}' | '\u{e0000}'..='\u{e0fff}')
}

/// The characters that a reader does not plainly see, by the tables of `regex`. A character that is newer than the tables is
/// unassigned for them, and so is no plain one.
static NOT_PLAIN: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(NOT_PLAIN_CLASS).expect("the class is constant and valid"));

/// 1. All blanks and separators (Z), and all controls, format characters, private and unassigned numbers (C).
/// 2. All characters that a program without a shape for them leaves out, such as the Hangul fillers.
/// 3. The letters and signs that are drawn as nothing: the blank Braille pattern, the object replacement, the null notehead,
///    and the joiners of Tifinagh, Brahmi and Khitan.
const NOT_PLAIN_CLASS: &str = r"[[\p{Z}\p{C}\p{Default_Ignorable_Code_Point}\x{2800}\x{FFFC}\x{1D159}\x{2D7F}\x{1107F}\x{16FE4}]--[ \n\t]]";

#[cfg(test)]
mod tests {
    use super::*;

    /// Every character that is refused elsewhere is shown as its number, and so are those that look like a space or nothing.
    #[test]
    fn what_is_not_plainly_visible_is_shown_as_its_number() {
        for letter in ('\0'..='\u{1ffff}').chain('\u{e0000}'..='\u{e1000}') {
            let is_kept = escape_hidden(letter.encode_utf8(&mut [0; 4])).starts_with(letter);
            assert_eq!(is_kept, is_plain(letter) || matches!(letter, '\n' | '\t'), "{letter:?}");
            assert!(!is_hidden(letter) || !is_plain(letter), "{letter:?}");
        }
        let blanks = (0x2000..=0x200a).chain([0xa0, 0x1680, 0x202f, 0x205f, 0x3000]);
        let formats = (0xfff9..=0xfffb).chain(0x1d173..=0x1d17a).chain(0x1bca0..=0x1bca3);
        let signs = [0x2800, 0x3164, 0xffa0, 0xfffc, 0x13430, 0x16fe4, 0x1d159, 0x1107f, 0x2d7f];
        let unknown = [0xe000, 0xf8ff, 0xf_0000, 0x10_ffff, 0xffff, 0x378, 0xe0080];
        for number in blanks.chain(formats).chain(signs).chain(unknown) {
            let letter = char::from_u32(number).unwrap();
            assert_eq!(escape_hidden(&format!("a{letter}b")), format!("a\\u{{{number:x}}}b"));
        }
        let text = "na\u{ef}ve \u{6771}\u{4eac} e\u{301} \u{1f600} \u{5d0} \u{fffd}";
        assert_eq!(escape_hidden(text), text);
    }
}
