//! Characters that a reader of a text does not see, or that change the order of the characters around them. Two names
//! that differ only in such characters look the same.

use std::borrow::Cow;

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

/// Returns a text with each hidden character replaced by its number, such as `\\u{202e}`. Line ends and tabs stay.
///
/// ```
/// use cogni_gateway::base::hidden_characters::escape_hidden;
/// assert_eq!(escape_hidden("no agent `a\u{202e}b`\n"), "no agent `a\\u{202e}b`\n");
/// ```
pub fn escape_hidden(text: &str) -> Cow<'_, str> {
    let is_escaped = |letter: char| is_hidden(letter) && !matches!(letter, '\n' | '\t');
    if !text.contains(is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_escaped(letter) { shown.extend(letter.escape_unicode()) } else { shown.push(letter) }
    }
    Cow::Owned(shown)
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
