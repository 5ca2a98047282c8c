//! The view of a server's JSON Schema that the policy has.
//!
//! A server checks the arguments of its tools itself, by any schema. The policy needs the types of single values, so that
//! a condition reads an argument by its type. The view has those; it accepts everything else.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::tools::argument_schema::{ArgumentSchema, ArgumentType, is_property_name};

/// Returns the view of a schema.
pub fn argument_view(schema: &Value) -> ArgumentSchema {
    let properties = schema["properties"].as_object().into_iter().flatten();
    let properties: BTreeMap<_, _> = properties
        .filter(|(name, _)| is_property_name(name))
        .map(|(name, part)| (name.clone(), value_view(part)))
        .collect();
    let required = schema["required"].as_array().into_iter().flatten();
    let required = required.filter_map(Value::as_str).map(str::to_owned);
    let required = required.filter(|name| properties.contains_key(name)).collect();
    ArgumentSchema { properties, required, is_open: true, ..ArgumentSchema::default() }
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
