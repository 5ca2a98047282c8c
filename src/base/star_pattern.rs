//! Patterns of names, in which a `*` stands for any text.

use std::collections::BTreeSet;

/// Returns true if a name fits a pattern, in which a `*` stands for any text, also for none.
pub fn matches_star_pattern(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    // The parts in the middle are found as early as possible, so that the most is left for the last one.
    for part in parts {
        match rest.split_once(part) {
            Some((_, behind)) => rest = behind,
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Returns the names that fit one of the patterns.
///
/// # Errors
/// Returns the first pattern that adds no name to those of the patterns before.
pub fn select_names<'a, N: AsRef<str> + Clone + Ord>(
    patterns: &'a [String],
    names: &[N],
) -> Result<BTreeSet<N>, &'a str> {
    let mut selected = BTreeSet::new();
    for pattern in patterns {
        let before = selected.len();
        let fitting = names.iter().filter(|name| matches_star_pattern(pattern, name.as_ref()));
        selected.extend(fitting.cloned());
        if selected.len() == before {
            return Err(pattern);
        }
    }
    Ok(selected)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// T9: a `*` stands for any text, also for none.
    #[test]
    fn a_star_stands_for_any_text() {
        for (pattern, name, expected) in [
            ("a__b", "a__b", true),
            ("a__b", "a__bc", false),
            ("a__*", "a__b", true),
            ("a__*", "b__b", false),
            ("*__send_*", "mail__send_all", true),
            ("*__send_*", "mail__send", false),
            ("*__b", "a__b", true),
            ("*", "a__b", true),
            ("a*a", "a", false),
            ("a*b*b", "axb", false),
            ("a*b*b", "axbyb", true),
        ] {
            assert_eq!(matches_star_pattern(pattern, name), expected, "{pattern} {name}");
        }
    }
}
