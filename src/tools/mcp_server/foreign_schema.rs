//! The view of a server's JSON Schema that the policy has.
//!
//! A server checks the arguments of its tools itself, by any schema. The policy needs the types of single values, so that
//! a condition reads an argument by its type, and it needs the names, so that a server finds no argument that a condition
//! has not read. The view has those; it accepts everything else.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::tools::argument_schema::{ArgumentSchema, ArgumentType, is_property_name};

/// Returns the view of a schema.
pub fn argument_view(schema: &Value) -> ArgumentSchema {
    let properties = schema["properties"].as_object().into_iter().flatten();
    let properties: BTreeMap<_, _> = properties
        .map(|(name, part)| {
            let any = || ArgumentSchema { kind: ArgumentType::Any, ..ArgumentSchema::default() };
            (name.clone(), if is_property_name(name) { value_view(part) } else { any() })
        })
        .collect();
    let required = schema["required"].as_array().into_iter().flatten();
    let required = required.filter_map(Value::as_str).map(str::to_owned);
    let required = required.filter(|name| properties.contains_key(name)).collect();
    // Names that are given by patterns are known to the server only.
    let is_open =
        schema["additionalProperties"] != false || schema["patternProperties"].is_object();
    ArgumentSchema { properties, required, is_open, ..ArgumentSchema::default() }
}

fn value_view(schema: &Value) -> ArgumentSchema {
    let kind = match schema["type"].as_str() {
        Some("string") => ArgumentType::String,
        Some("integer") => ArgumentType::Integer,
        Some("number") => ArgumentType::Number,
        Some("boolean") => ArgumentType::Boolean,
        _ => ArgumentType::Any,
    };
    let description = schema["description"].as_str().unwrap_or_default().to_owned();
    ArgumentSchema { kind, description, ..ArgumentSchema::default() }
}
