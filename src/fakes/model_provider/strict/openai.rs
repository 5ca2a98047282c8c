//! OpenAI's rules: the key, the format of a body, and the fields that depend on each other.

use std::sync::LazyLock;

use http::header::AUTHORIZATION;
use http::{HeaderMap, StatusCode};
use serde_json::{Map, Value};

use super::ProviderRefusal;
use super::body_format::{BodyFormat, FormatFault, FormatProblem};
use super::openai_conversation::{bad_request, check_chat_messages, check_response_input};

/// Returns OpenAI's refusal if the key is missing or in another provider's header.
pub(super) fn check_headers(headers: &HeaderMap) -> Result<(), ProviderRefusal> {
    let value = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let key = value.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
    if key.is_empty() {
        let message = "You didn't provide an API key. Provide it in an Authorization header using Bearer auth.";
        let status = StatusCode::UNAUTHORIZED;
        return Err(ProviderRefusal::openai(status, message, None, None));
    }
    Ok(())
}

/// Returns OpenAI's refusal of a body.
pub(super) fn check_body(object: &str, body: &Map<String, Value>) -> Result<(), ProviderRefusal> {
    FORMAT.check(object, body, &[]).map_err(|fault| format_refusal(object, &fault))?;
    match object {
        "chat" => {
            check_stream_options(body)?;
            check_output_limits(body)?;
            check_tool_fields(body)?;
            check_chat_messages(&body["messages"])
        }
        "completions" => check_stream_options(body),
        "responses" => {
            check_stream_options(body)?;
            check_response_fields(body)?;
            body.get("input").map_or(Ok(()), check_response_input)
        }
        _ => check_embedding_input(&body["input"]),
    }
}

pub(super) fn unreadable_body() -> ProviderRefusal {
    let message =
        "We could not parse the JSON body of your request. The OpenAI API expects a JSON payload.";
    ProviderRefusal::openai(StatusCode::BAD_REQUEST, message, None, None)
}

fn format_refusal(object: &str, fault: &FormatFault) -> ProviderRefusal {
    let path = fault.path.bracketed();
    match &fault.problem {
        // Chat completions name an unknown field at the top of the body in another way.
        FormatProblem::UnknownField if object != "responses" && !path.contains(['.', '[']) => {
            let message = format!("Unrecognized request argument supplied: {path}");
            ProviderRefusal::openai(StatusCode::BAD_REQUEST, &message, None, None)
        }
        FormatProblem::UnknownField => {
            bad_request(&format!("Unknown parameter: '{path}'."), &path, Some("unknown_parameter"))
        }
        FormatProblem::MissingField => {
            let message = format!("Missing required parameter: '{path}'.");
            bad_request(&message, &path, Some("missing_required_parameter"))
        }
        FormatProblem::WrongType { expected, actual } => {
            let expected = expected.iter().map(|name| with_article(name)).collect::<Vec<_>>();
            let message = format!(
                "Invalid type for '{path}': expected {}, but got {} instead.",
                expected.join(" or "),
                with_article(actual),
            );
            bad_request(&message, &path, Some("invalid_type"))
        }
        FormatProblem::WrongText { tag, actual, allowed } => {
            let path = tag.map_or(path.clone(), |tag| format!("{path}.{tag}"));
            let allowed: Vec<_> = allowed.iter().map(|text| format!("'{text}'")).collect();
            let message = format!(
                "Invalid value: '{actual}'. Supported values are: {}.",
                allowed.join(", "),
            );
            bad_request(&message, &path, Some("invalid_value"))
        }
    }
}

fn with_article(name: &str) -> String {
    match name {
        "null" => name.to_owned(),
        _ if name.starts_with(['a', 'i', 'o']) => format!("an {name}"),
        _ => format!("a {name}"),
    }
}

fn check_stream_options(body: &Map<String, Value>) -> Result<(), ProviderRefusal> {
    if is_set(body, "stream_options") && body.get("stream") != Some(&Value::Bool(true)) {
        let message = "The 'stream_options' parameter is only allowed when 'stream' is enabled.";
        return Err(bad_request(message, "stream_options", None));
    }
    Ok(())
}

fn check_output_limits(body: &Map<String, Value>) -> Result<(), ProviderRefusal> {
    if !is_set(body, "max_tokens") {
        return Ok(());
    }
    if is_set(body, "max_completion_tokens") {
        let message =
            "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.";
        let code = Some("invalid_parameter_combination");
        return Err(bad_request(message, "max_tokens", code));
    }
    let model = body["model"].as_str().unwrap_or_default();
    if REASONING_MODELS.iter().any(|family| model.starts_with(family)) {
        let message = "Unsupported parameter: 'max_tokens' is not supported with this model. \
                       Use 'max_completion_tokens' instead.";
        return Err(bad_request(message, "max_tokens", Some("unsupported_parameter")));
    }
    Ok(())
}

fn check_tool_fields(body: &Map<String, Value>) -> Result<(), ProviderRefusal> {
    let tools = body.get("tools").and_then(Value::as_array);
    if tools.is_some_and(Vec::is_empty) {
        let message = "Invalid 'tools': empty array. Expected an array with minimum length 1, but got \
                       an empty array instead.";
        return Err(bad_request(message, "tools", Some("empty_array")));
    }
    if tools.is_some() {
        return Ok(());
    }
    for field in ["tool_choice", "parallel_tool_calls"] {
        // A choice of no tool needs none.
        let asks = is_set(body, field) && body.get(field) != Some(&Value::from("none"));
        if asks {
            let message = format!(
                "Invalid value for '{field}': '{field}' is only allowed when 'tools' are specified."
            );
            return Err(bad_request(&message, field, None));
        }
    }
    Ok(())
}

fn check_response_fields(body: &Map<String, Value>) -> Result<(), ProviderRefusal> {
    if let Some(id) = body.get("previous_response_id").and_then(Value::as_str) {
        // This provider stores nothing.
        let message = format!("Previous response with id '{id}' not found.");
        let code = Some("previous_response_not_found");
        return Err(bad_request(&message, "previous_response_id", code));
    }
    if !["input", "prompt", "conversation"].iter().any(|field| is_set(body, field)) {
        let message = "One of \"input\" or \"previous_response_id\" or 'prompt' or 'conversation_id' \
                       must be provided.";
        return Err(bad_request(message, "input", Some("missing_required_parameter")));
    }
    Ok(())
}

fn check_embedding_input(input: &Value) -> Result<(), ProviderRefusal> {
    let is_empty = match input {
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty() || items.contains(&Value::from("")),
        _ => false,
    };
    if is_empty {
        return Err(bad_request("'$.input' is invalid.", "input", None));
    }
    Ok(())
}

fn is_set(body: &Map<String, Value>, field: &str) -> bool {
    body.get(field).is_some_and(|value| !value.is_null())
}

static FORMAT: LazyLock<BodyFormat> =
    LazyLock::new(|| BodyFormat::parse(include_str!("openai.txt")));

/// The beginnings of the names of models that refuse `max_tokens`.
const REASONING_MODELS: [&str; 4] = ["gpt-5", "o1", "o3", "o4"];
