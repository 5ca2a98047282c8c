//! Turns serde's errors into messages for people: the place of the value, the problem, and the expected value.
//!
//! serde's own texts name Rust types, which mean nothing to a client, and omit the place of a value with the wrong
//! type.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::error::Category;

/// An error for bytes that are not the expected JSON.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonInputError {
    /// The bytes are not JSON.
    #[error("{0}")]
    Syntax(String),
    /// The JSON does not have the expected form. The message is for people.
    #[error("{0}")]
    Data(String),
}

/// Parses JSON. The whole input must be one document.
///
/// # Errors
/// Returns an error if the bytes are not JSON, or do not have the form of `T`.
pub fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, JsonInputError> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let read = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let (path, inner) = (error.path().to_string(), error.into_inner());
        match inner.classify() {
            Category::Data => JsonInputError::Data(in_words(&path, &inner.to_string())),
            _ => JsonInputError::Syntax(inner.to_string()),
        }
    })?;
    reader.end().map_err(|error| JsonInputError::Syntax(error.to_string()))?;
    Ok(read)
}

/// Converts a JSON value to `T`.
///
/// # Errors
/// Returns an error that names the part of the value that does not have the form of `T`.
pub fn from_value<T: DeserializeOwned>(value: Value) -> Result<T, JsonInputError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        JsonInputError::Data(in_words(&path, &error.into_inner().to_string()))
    })
}

/// Parses TOML. The error shows the line, and describes the problem in words for people.
///
/// # Errors
/// Returns an error if the text is not TOML, or does not have the form of `T`.
pub fn from_toml<'t, T: Deserialize<'t>>(text: &'t str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| of_toml(&error))
}

/// Returns the message of a TOML error, with the line and with serde's words replaced by words for people.
pub fn of_toml(error: &toml::de::Error) -> String {
    let message = error.message();
    error.to_string().trim_end().replacen(message, &in_words("", message), 1)
}

/// Returns the line of a text at which a TOML error begins, counted from 1.
pub fn toml_line(text: &str, error: &toml::de::Error) -> usize {
    error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1)
}

/// Turns serde's message about the value at `path` into a message for people. Other messages stay as they are.
pub fn in_words(path: &str, message: &str) -> String {
    let message = message.split(" at line ").next().unwrap_or(message);
    let path = if path == "." { "" } else { path };
    let subject = if path.is_empty() { "this".to_owned() } else { format!("`{path}`") };
    if let Some(field) = message.strip_prefix("missing field ") {
        let above = path.rsplit_once('.').map_or("", |(above, _)| above);
        let of = if above.is_empty() { String::new() } else { format!(" of `{above}`") };
        return format!("field {field}{of} is missing; give it");
    }
    if let Some(field) = message.strip_prefix("duplicate field ") {
        return format!("field {field} is there twice; give it once");
    }
    if message.starts_with("unknown field ") {
        return message.to_owned();
    }
    let found =
        ["invalid type: ", "invalid value: "].iter().find_map(|kind| message.strip_prefix(kind));
    if let Some((actual, expected)) = found.and_then(|found| found.rsplit_once(", expected ")) {
        return format!("{subject} is {}; give {}", shown(actual), wanted(expected));
    }
    if let Some((_, expected)) =
        message.strip_prefix("invalid length ").and_then(|rest| rest.split_once(", expected "))
    {
        return format!("{subject} is an array; give {}", wanted(expected));
    }
    if let Some((variant, known)) =
        message.strip_prefix("unknown variant ").and_then(|rest| rest.split_once(", expected "))
    {
        return format!("{subject} is {variant}; give {}", known.trim_start_matches("one of "));
    }
    if path.is_empty() { message.to_owned() } else { format!("`{path}`: {message}") }
}

/// Returns a value as serde shows it, without the name of its Rust type.
fn shown(actual: &str) -> String {
    let short = |text: &str| -> String { text.chars().take(MAX_SHOWN).collect() };
    match actual.split_once(' ') {
        Some(("string", text)) => short(text),
        Some(("integer" | "boolean" | "character", value)) => short(value.trim_matches('`')),
        _ if actual.starts_with("floating point ") => {
            short(actual.trim_start_matches("floating point ").trim_matches('`'))
        }
        _ => match actual {
            "sequence" => "an array".to_owned(),
            "map" => "an object".to_owned(),
            "null" | "unit value" | "Option value" => "null".to_owned(),
            other => short(other),
        },
    }
}

/// Returns the words for a type that serde names.
fn wanted(expected: &str) -> String {
    let is_integer = |name: &str| {
        name.strip_prefix(['u', 'i'])
            .is_some_and(|bits| bits == "size" || bits.parse::<u8>().is_ok())
    };
    match expected {
        name if is_integer(name) => "a whole number".to_owned(),
        name if name.starts_with("a nonzero ") => "a whole number from 1".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "a string" | "string" | "str" | "a borrowed string" | "path string" => "a text".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "an array".to_owned(),
        "a map" | "map" => "an object".to_owned(),
        name if name.starts_with("struct ") || name.starts_with("internally tagged ") => {
            "an object".to_owned()
        }
        name if name.starts_with("a tuple") || name.starts_with("tuple") => "an array".to_owned(),
        name if name.starts_with("enum") => "a text".to_owned(),
        other => other.to_owned(),
    }
}

/// The largest number of characters of a value that a message repeats. Our choice.
const MAX_SHOWN: usize = 80;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::num::NonZeroU32;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "it is only read")]
    struct Order {
        agent: String,
        #[serde(default)]
        budget: BTreeMap<String, u64>,
        #[serde(default)]
        list: Vec<Item>,
        size: Option<NonZeroU32>,
        is_new: Option<bool>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Item {
        One,
        Two,
    }

    #[test]
    fn what_does_not_fit_is_told_by_its_place_and_value() {
        let cases = [
            ("[]", "this is an array; give an object"),
            ("7", "this is 7; give an object"),
            ("{}", "field `agent` is missing; give it"),
            (r#"{"agent":5}"#, "`agent` is 5; give a text"),
            (r#"{"agent":null}"#, "`agent` is null; give a text"),
            (r#"{"agent":"a","agent":"b"}"#, "field `agent` is there twice; give it once"),
            (
                r#"{"agent":"a","budget":{"turns":"5"}}"#,
                "`budget.turns` is \"5\"; give a whole number",
            ),
            (r#"{"agent":"a","budget":{"turns":-5}}"#, "`budget.turns` is -5; give a whole number"),
            (
                r#"{"agent":"a","budget":{"turns":1.5}}"#,
                "`budget.turns` is 1.5; give a whole number",
            ),
            (r#"{"agent":"a","budget":[]}"#, "`budget` is an array; give an object"),
            (r#"{"agent":"a","list":{}}"#, "`list` is an object; give an array"),
            (
                r#"{"agent":"a","list":["one","three"]}"#,
                "`list[1]` is `three`; give `one` or `two`",
            ),
            (r#"{"agent":"a","size":0}"#, "`size` is 0; give a whole number from 1"),
            (r#"{"agent":"a","is_new":"yes"}"#, "`is_new` is \"yes\"; give true or false"),
        ];
        for (json, wanted) in cases {
            let error = from_slice::<Order>(json.as_bytes()).expect_err(json);
            assert_eq!(error, JsonInputError::Data(wanted.to_owned()), "{json}");
        }
        let unknown = from_slice::<Order>(br#"{"agent":"a","agnet":"b"}"#).expect_err("unknown");
        assert!(
            unknown.to_string().starts_with("unknown field `agnet`, expected one of"),
            "{unknown}"
        );
        for text in ["", "{", r#"{"agent":"a"} x"#] {
            let error = from_slice::<Order>(text.as_bytes()).expect_err(text);
            assert!(matches!(error, JsonInputError::Syntax(_)), "{text}: {error}");
        }
    }

    #[test]
    fn a_long_value_is_repeated_in_part() {
        let json = format!(r#"{{"agent":"a","budget":"{}"}}"#, "x".repeat(10_000));
        let error = from_slice::<Order>(json.as_bytes()).expect_err("it is a text");
        assert!(error.to_string().len() < 150, "{error}");
    }
}
