//! Text as it is seen: by people, and by file systems that know no case.

/// Letters that differ in case alone, or in what cannot be seen, are the same here. What is no text looks like nothing.
///
/// Upwards and then downwards: the Kelvin sign is a `k`, and the long s an `s`, but neither in one step.
pub(super) fn fold_case_and_invisible(text: &[u8]) -> String {
    if text.is_ascii() {
        let text = text.to_ascii_lowercase();
        return String::from_utf8(text).expect("ASCII is UTF-8");
    }
    let shown = String::from_utf8_lossy(text);
    let shown = shown.chars().filter(|letter| !is_invisible(*letter));
    shown.flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect()
}

/// Whether a letter shows nothing, or turns around what stands beside it.
pub(super) fn is_invisible_or_bidi(letter: char) -> bool {
    letter.is_control() || is_invisible(letter)
}

fn is_invisible(letter: char) -> bool {
    matches!(letter,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}'
        | '\u{feff}' | '\u{ffa0}' | '\u{e0000}'..='\u{e0fff}')
}
