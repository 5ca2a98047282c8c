//! Text as people see it, and as file systems that ignore case see it.

use crate::base::hidden_characters::is_invisible;

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
