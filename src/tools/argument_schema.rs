//! The schema of a tool's arguments: the part of JSON Schema whose check has an obvious cost.
//!
//! A schema has types, required names, fixed sets of words, and limits of length and size. A name that is not in the
//! schema is refused. There are no references, no patterns and no alternatives.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The schema of one value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct ArgumentSchema {
    #[serde(rename = "type")]
    pub kind: ArgumentType,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// The members of an object.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub properties: BTreeMap<String, Self>,
    /// The members that an object must have.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub required: Vec<String>,
    /// The words that a string may be.
    #[serde(rename = "enum", skip_serializing_if = "Vec::is_empty")]
    pub words: Vec<String>,
    /// The longest string, in characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minimum: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub maximum: Option<i64>,
    /// The schema of an array's items.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub items: Option<Box<Self>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_items: Option<u64>,
    /// True if an object may have other members, too. Only the tools of servers have such objects.
    #[serde(skip)]
    pub is_open: bool,
}

/// The type of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArgumentType {
    #[default]
    Object,
    String,
    Integer,
    Number,
    Boolean,
    Array,
    /// Any value: a server checks it by a schema of its own.
    #[serde(skip)]
    Any,
}

/// Arguments that do not fit their schema. The message names the place and never repeats a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{path}` {problem}")]
pub struct ArgumentError {
    /// The place, such as `arguments.owner`.
    pub path: String,
    pub problem: String,
}

impl ArgumentSchema {
    /// Checks the schema of all arguments of a tool.
    ///
    /// # Errors
    /// Returns the first mistake.
    pub fn check_schema(&self) -> Result<(), ArgumentError> {
        if self.kind != ArgumentType::Object {
            return Err(wrong("parameters", "must have the type `object`"));
        }
        self.check_part("parameters", 0)
    }

    fn check_part(&self, path: &str, depth: usize) -> Result<(), ArgumentError> {
        if depth > MAX_SCHEMA_DEPTH {
            return Err(wrong(path, format!("is nested deeper than {MAX_SCHEMA_DEPTH} levels")));
        }
        let is = |kind: ArgumentType| self.kind == kind;
        let is_number = is(ArgumentType::Integer) || is(ArgumentType::Number);
        let misplaced = [
            ("properties", !self.properties.is_empty() && !is(ArgumentType::Object)),
            ("required", !self.required.is_empty() && !is(ArgumentType::Object)),
            ("enum", !self.words.is_empty() && !is(ArgumentType::String)),
            ("maxLength", self.max_length.is_some() && !is(ArgumentType::String)),
            ("minimum", self.minimum.is_some() && !is_number),
            ("maximum", self.maximum.is_some() && !is_number),
            ("items", self.items.is_some() && !is(ArgumentType::Array)),
            ("maxItems", self.max_items.is_some() && !is(ArgumentType::Array)),
        ];
        if let Some((key, _)) = misplaced.into_iter().find(|(_, is_misplaced)| *is_misplaced) {
            return Err(wrong(path, format!("has `{key}`, which its type does not know")));
        }
        if is(ArgumentType::Array) && self.items.is_none() {
            return Err(wrong(path, "is an array without `items`; give their schema"));
        }
        if let Some(name) =
            self.required.iter().find(|name| !self.properties.contains_key(name.as_str()))
        {
            return Err(wrong(path, format!("requires `{name}`, which is not in `properties`")));
        }
        for (name, part) in &self.properties {
            if !is_property_name(name) {
                let rule = "1 to 64 letters, digits and `_`, and does not begin with a digit";
                return Err(wrong(path, format!("has a property whose name is not {rule}")));
            }
            part.check_part(&format!("{path}.{name}"), depth + 1)?;
        }
        self.items
            .as_ref()
            .map_or(Ok(()), |items| items.check_part(&format!("{path}[]"), depth + 1))
    }

    /// Checks the arguments of a call.
    ///
    /// # Errors
    /// Returns the first place that does not fit.
    pub fn check_arguments(&self, arguments: &Map<String, Value>) -> Result<(), ArgumentError> {
        self.check_object("arguments", arguments)
    }

    fn check_object(&self, path: &str, object: &Map<String, Value>) -> Result<(), ArgumentError> {
        if let Some(name) = self.required.iter().find(|name| !object.contains_key(name.as_str())) {
            return Err(wrong(path, format!("has no `{name}`; give it")));
        }
        let known = self.properties.keys().filter(|_| self.is_open);
        let folded: BTreeMap<_, _> = known.map(|name| (fold_name(name), name)).collect();
        for (name, value) in object {
            let Some(part) = self.properties.get(name) else {
                // Some programs take such a name for the known one, whose value a condition has read.
                if let Some(known) = folded.get(&fold_name(name)) {
                    return Err(wrong(
                        path,
                        format!("has another spelling of `{known}`; use this one"),
                    ));
                }
                if self.is_open {
                    continue;
                }
                let known: Vec<_> = self.properties.keys().map(String::as_str).collect();
                let known = known.join("`, `");
                return Err(if known.is_empty() {
                    wrong(path, "has a name, and the tool takes no arguments")
                } else {
                    wrong(path, format!("has a name that is not one of `{known}`"))
                });
            };
            part.check_value(&format!("{path}.{name}"), value)?;
        }
        Ok(())
    }

    fn check_value(&self, path: &str, value: &Value) -> Result<(), ArgumentError> {
        match (self.kind, value) {
            (ArgumentType::Object, Value::Object(object)) => self.check_object(path, object),
            (ArgumentType::String, Value::String(text)) => self.check_text(path, text),
            (ArgumentType::Any, _) | (ArgumentType::Boolean, Value::Bool(_)) => Ok(()),
            (ArgumentType::Integer, Value::Number(number)) => match number.as_i64() {
                Some(number) => self.check_range(path, number),
                None => Err(wrong(path, "is not a whole number of 64 bits")),
            },
            (ArgumentType::Number, Value::Number(number)) => match number.as_f64() {
                Some(number) if self.is_in_range(number) => Ok(()),
                _ => Err(wrong(path, "is outside of its range")),
            },
            (ArgumentType::Array, Value::Array(items)) => self.check_items(path, items),
            _ => Err(wrong(path, format!("is not of the type `{}`", self.kind.name()))),
        }
    }

    fn check_text(&self, path: &str, text: &str) -> Result<(), ArgumentError> {
        if !self.words.is_empty() && !self.words.iter().any(|word| word == text) {
            return Err(wrong(path, format!("is not one of `{}`", self.words.join("`, `"))));
        }
        match self.max_length {
            Some(limit) if text.chars().count() as u64 > limit => {
                Err(wrong(path, format!("has more than {limit} characters")))
            }
            _ => Ok(()),
        }
    }

    fn check_range(&self, path: &str, number: i64) -> Result<(), ArgumentError> {
        let is_low = self.minimum.is_some_and(|minimum| number < minimum);
        let is_high = self.maximum.is_some_and(|maximum| number > maximum);
        if is_low || is_high { Err(wrong(path, "is outside of its range")) } else { Ok(()) }
    }

    #[expect(clippy::cast_precision_loss, reason = "JSON's own numbers have this precision")]
    fn is_in_range(&self, number: f64) -> bool {
        self.minimum.is_none_or(|minimum| number >= minimum as f64)
            && self.maximum.is_none_or(|maximum| number <= maximum as f64)
    }

    fn check_items(&self, path: &str, items: &[Value]) -> Result<(), ArgumentError> {
        if let Some(limit) = self.max_items.filter(|limit| items.len() as u64 > *limit) {
            return Err(wrong(path, format!("has more than {limit} items")));
        }
        let Some(schema) = &self.items else { return Ok(()) };
        items
            .iter()
            .enumerate()
            .try_for_each(|(number, item)| schema.check_value(&format!("{path}[{number}]"), item))
    }
}

impl ArgumentType {
    fn name(self) -> &'static str {
        match self {
            Self::Object => "object",
            Self::String => "string",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
            Self::Array => "array",
            Self::Any => "any",
        }
    }
}

/// Returns true if a condition can name the property.
pub fn is_property_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    (1..=64).contains(&name.len())
        && name.bytes().all(is_plain)
        && !name.starts_with(|first: char| first.is_ascii_digit())
}

/// Returns a name without what many programs ignore in it: case, and the characters between its words. Two characters
/// that share a capital letter are the same, such as `s` and `ſ`.
fn fold_name(name: &str) -> String {
    let letters = name.chars().filter(|letter| !matches!(letter, '_' | '-' | '.' | ' '));
    letters.flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect()
}

fn wrong(path: &str, problem: impl Into<String>) -> ArgumentError {
    ArgumentError { path: path.to_owned(), problem: problem.into() }
}

/// The deepest nesting of a schema. Our choice: the tools of known servers reach 5.
const MAX_SCHEMA_DEPTH: usize = 8;
