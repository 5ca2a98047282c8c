//! Finds environment variables that are nearly a setting. A limit under a misspelt name is no limit, and no other check
//! would notice.

use anyhow::bail;

use super::setting::SETTINGS;

/// Checks the names of all environment variables.
///
/// # Errors
/// Returns an error if a name differs from a setting's name in a single letter, or has two neighbouring letters
/// swapped.
pub fn check_variable_names<'a>(given: impl Iterator<Item = &'a str>) -> anyhow::Result<()> {
    let ours = || {
        SETTINGS.iter().flat_map(|setting| {
            let file = setting.is_secret.then(|| format!("{}_FILE", setting.name));
            std::iter::once(setting.name.to_owned()).chain(file)
        })
    };
    // A name that is a setting itself is fine, even if it is nearly another setting.
    for name in given.filter(|name| ours().all(|own| own != *name)) {
        if let Some(own) = ours().find(|own| is_nearly(own, name)) {
            bail!(
                "`{name}` is not a variable of this program; did you mean `{own}`? if not, unset it"
            );
        }
    }
    Ok(())
}

/// Returns true if two names differ in one letter: replaced, added, removed, or swapped with its neighbour.
fn is_nearly(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    if one.len().abs_diff(other.len()) > 1 {
        return false;
    }
    // The names are compared from their first difference on, so one edit must explain the whole rest.
    let same = one.iter().zip(other).take_while(|(a, b)| a == b).count();
    let (one, other) = (&one[same..], &other[same..]);
    match (one, other) {
        // The cases: swapped letters, one letter replaced, one more in `other`, one more in `one`.
        ([a, b, one @ ..], [c, d, other @ ..]) if (a, b) == (d, c) && one == other => true,
        ([_, rest @ ..], [_, others @ ..]) if rest == others => true,
        ([_, rest @ ..], longer) if rest == longer => true,
        (longer, [_, rest @ ..]) => rest == longer,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::check_variable_names;

    #[test]
    fn a_variable_that_is_nearly_ours_is_asked_about() {
        for (given, meant) in [
            ("MAX_TURN", "MAX_TURNS"),
            ("MAX_TRUNS", "MAX_TURNS"),
            ("MAX_COST_USDT", "MAX_COST_USD"),
            ("MODEL", "MODELS"),
            ("LITELLM_MASTER_KEY_FIL", "LITELLM_MASTER_KEY_FILE"),
            ("max_turns", ""),
            ("MAX_TURNS", ""),
            ("LITELLM_PORT", ""),
            ("LITELLM_SERVICE_HOST", ""),
            ("PATH", ""),
            ("", ""),
        ] {
            let said = check_variable_names([given].into_iter()).map_err(|error| error.to_string());
            match meant {
                "" => assert_eq!(said, Ok(()), "{given}"),
                meant => assert!(
                    said.unwrap_err().contains(&format!("did you mean `{meant}`")),
                    "{given}"
                ),
            }
        }
    }
}
