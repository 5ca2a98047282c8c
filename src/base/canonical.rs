//! Digests of values that stay the same when code is renamed or moved.

use serde::Serialize;

use super::digest::sha256_hex;

/// Returns the SHA-256 of a value's canonical form: the name of the form, a newline, and the value as JSON without
/// blanks and with the members of each object in the order of their names.
///
/// The name of the form says what is digested and by which version, such as `agent 1`. It changes when the same content
/// is written in another way.
///
/// ```
/// use cogni_gateway::base::canonical::digest;
/// # use std::collections::HashMap;
/// let one = HashMap::from([("a", 1), ("b", 2)]);
/// let other = HashMap::from([("b", 2), ("a", 1)]);
/// assert_eq!(digest("example 1", &one).unwrap(), digest("example 1", &other).unwrap());
/// ```
///
/// # Errors
/// Returns an error if JSON cannot express the value: a path that is not UTF-8, or a map with keys that are not text.
pub fn digest(form: &str, value: &impl Serialize) -> serde_json::Result<String> {
    let mut value = serde_json::to_value(value)?;
    value.sort_all_objects();
    Ok(sha256_hex(format!("{form}\n{value}").as_bytes()))
}

#[cfg(test)]
mod tests {
    use serde::Serialize;

    use super::*;

    #[test]
    fn names_in_the_code_are_not_part_of_a_digest() {
        #[derive(Serialize)]
        struct Before {
            first: u8,
            second: Option<u8>,
        }
        #[derive(Serialize)]
        struct After {
            second: Option<u8>,
            #[serde(rename = "first")]
            renamed: u8,
        }
        let before = digest("test 1", &Before { first: 1, second: None }).unwrap();
        assert_eq!(before, digest("test 1", &After { second: None, renamed: 1 }).unwrap());
        assert_eq!(before, sha256_hex(b"test 1\n{\"first\":1,\"second\":null}"));
        assert_ne!(before, digest("test 2", &After { second: None, renamed: 1 }).unwrap());
    }
}
