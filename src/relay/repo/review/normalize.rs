//! Text as people see it, and as file systems that ignore case see it.

/// Folds a text, so that texts are equal if they differ only in case or in invisible characters. Bytes that are not
/// UTF-8 become replacement characters.
///
/// Letters are converted to upper case and then to lower case: the Kelvin sign becomes `k` and the long s becomes `s`,
/// but neither does in one step.
pub(super) fn fold_case_and_invisible(text: &[u8]) -> String {
    if text.is_ascii() {
        let text = text.to_ascii_lowercase();
        return String::from_utf8(text).expect("ASCII is UTF-8");
    }
    let shown = String::from_utf8_lossy(text);
    let shown = shown.chars().filter(|letter| !is_invisible(*letter));
    shown.flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect()
}

/// Returns true if a character is invisible, or changes the direction of the text around it.
pub(super) fn is_invisible_or_bidi(letter: char) -> bool {
    letter.is_control() || is_invisible(letter)
}

/// Returns true if a character shows nothing: fillers, joiners, variation selectors, tags and marks of direction.
fn is_invisible(letter: char) -> bool {
    matches!(letter,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}'
        | '\u{feff}' | '\u{ffa0}' | '\u{e0000}'..='\u{e0fff}')
}
