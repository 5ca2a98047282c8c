//! Patterns of names, in which a `*` stands for any text.

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
