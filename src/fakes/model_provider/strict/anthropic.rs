//! Anthropic's rules: the headers, the format of a body, and the order of a conversation.

use std::sync::LazyLock;

use http::{HeaderMap, StatusCode};
use serde_json::{Map, Value};

use super::anthropic_betas::KNOWN_BETAS;
use super::body_format::{BodyFormat, FormatFault, FormatProblem};
use super::{ANTHROPIC_VERSION, ProviderRefusal};

/// Returns Anthropic's refusal of the key, the version or a beta.
pub(super) fn check_headers(headers: &HeaderMap) -> Result<(), ProviderRefusal> {
    if header(headers, "x-api-key").is_empty() {
        let status = StatusCode::UNAUTHORIZED;
        let message = "x-api-key header is required";
        return Err(ProviderRefusal::anthropic(status, "authentication_error", message));
    }
    match header(headers, ANTHROPIC_VERSION) {
        "" => return Err(bad_request("anthropic-version: header is required")),
        version if !VERSIONS.contains(&version) => {
            let message = format!("anthropic-version: \"{version}\" is not a valid version");
            return Err(bad_request(&message));
        }
        _ => (),
    }
    let unknown: Vec<_> = betas(headers)
        .into_iter()
        .filter(|beta| !KNOWN_BETAS.contains(beta))
        .map(|beta| format!("`{beta}`"))
        .collect();
    if unknown.is_empty() {
        return Ok(());
    }
    let message = format!(
        "Unexpected value(s) {} for the `anthropic-beta` header. Consult the documentation or try \
         again without the header.",
        unknown.join(", "),
    );
    Err(bad_request(&message))
}

/// Returns Anthropic's refusal of a body.
pub(super) fn check_body(
    object: &str,
    body: &Map<String, Value>,
    headers: &HeaderMap,
) -> Result<(), ProviderRefusal> {
    FORMAT.check(object, body, &betas(headers)).map_err(|fault| format_refusal(&fault))?;
    check_thinking(body)?;
    check_tool_choice(body)?;
    check_messages(body["messages"].as_array().map(Vec::as_slice).unwrap_or_default())
}

pub(super) fn unreadable_body() -> ProviderRefusal {
    bad_request("The request body is not valid JSON")
}

fn bad_request(message: &str) -> ProviderRefusal {
    ProviderRefusal::anthropic(StatusCode::BAD_REQUEST, "invalid_request_error", message)
}

fn format_refusal(fault: &FormatFault) -> ProviderRefusal {
    let path = fault.path.dotted();
    bad_request(&match &fault.problem {
        FormatProblem::UnknownField => format!("{path}: Extra inputs are not permitted"),
        FormatProblem::MissingField => format!("{path}: Field required"),
        FormatProblem::WrongType { expected, .. } => {
            let name = match expected.first() {
                Some(&"object") => "object",
                Some(&"array") => "list",
                Some(name) => name,
                None => "value",
            };
            format!("{path}: Input should be a valid {name}")
        }
        FormatProblem::WrongText { tag: Some(tag), actual, allowed } => format!(
            "{path}: Input tag '{actual}' found using '{tag}' does not match any of the expected \
             tags: {}",
            quoted(allowed, ", "),
        ),
        FormatProblem::WrongText { tag: None, allowed, .. } => {
            format!("{path}: Input should be {}", quoted(allowed, " or "))
        }
    })
}

fn quoted(texts: &[&str], separator: &str) -> String {
    let texts: Vec<_> = texts.iter().map(|text| format!("'{text}'")).collect();
    texts.join(separator)
}

fn check_thinking(body: &Map<String, Value>) -> Result<(), ProviderRefusal> {
    let Some(thinking) = body.get("thinking").filter(|thinking| thinking["type"] == "enabled")
    else {
        return Ok(());
    };
    let budget = thinking["budget_tokens"].as_i64().unwrap_or_default();
    if budget < MIN_THINKING_TOKENS {
        return Err(bad_request(
            "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024",
        ));
    }
    if body.get("max_tokens").and_then(Value::as_i64).is_some_and(|limit| limit <= budget) {
        return Err(bad_request("`max_tokens` must be greater than `thinking.budget_tokens`."));
    }
    if body.get("temperature").and_then(Value::as_f64).is_some_and(|value| value < 1.0) {
        return Err(bad_request("`temperature` may only be set to 1 when thinking is enabled."));
    }
    Ok(())
}

fn check_tool_choice(body: &Map<String, Value>) -> Result<(), ProviderRefusal> {
    let has_tools = body.get("tools").and_then(Value::as_array).is_some_and(|all| !all.is_empty());
    let asks = body.get("tool_choice").is_some_and(|choice| choice["type"] != "none");
    if asks && !has_tools {
        let message = "tool_choice: `tool_choice` may only be specified while providing `tools`.";
        return Err(bad_request(message));
    }
    Ok(())
}

fn check_messages(messages: &[Value]) -> Result<(), ProviderRefusal> {
    let Some(first) = messages.first() else {
        return Err(bad_request("messages: at least one message is required"));
    };
    if first["role"] != "user" {
        return Err(bad_request("messages: first message must use the \"user\" role"));
    }
    // The calls of the message before.
    let mut open: Vec<&str> = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let is_last = index + 1 == messages.len();
        if is_empty_content(&message["content"]) && !(is_last && message["role"] == "assistant") {
            let message = "all messages must have non-empty content except for the optional final \
                           assistant message";
            return Err(bad_request(&format!("messages.{index}: {message}")));
        }
        let results = ids(&message["content"], "tool_result", "tool_use_id");
        if let Some(id) = results.iter().find(|id| !open.contains(id)) {
            return Err(bad_request(&format!(
                "messages.{index}.content: unexpected `tool_use_id` found in `tool_result` blocks: \
                 {id}. Each `tool_result` block must have a corresponding `tool_use` block in the \
                 previous message."
            )));
        }
        open.retain(|id| !results.contains(id));
        check_results(&open, index)?;
        open = ids(&message["content"], "tool_use", "id");
    }
    check_results(&open, messages.len())
}

fn check_results(open: &[&str], index: usize) -> Result<(), ProviderRefusal> {
    if open.is_empty() {
        return Ok(());
    }
    Err(bad_request(&format!(
        "messages.{}: `tool_use` ids were found without `tool_result` blocks immediately after: {}. \
         Each `tool_use` block must have a corresponding `tool_result` block in the next message.",
        index - 1,
        open.join(", "),
    )))
}

fn is_empty_content(content: &Value) -> bool {
    match content {
        Value::String(text) => text.is_empty(),
        Value::Array(blocks) => {
            let empty = |block: &Value| block["type"] == "text" && block["text"] == "";
            blocks.is_empty() || blocks.iter().any(empty)
        }
        _ => false,
    }
}

/// Returns the ids in the blocks of one type.
fn ids<'a>(content: &'a Value, kind: &str, field: &str) -> Vec<&'a str> {
    let blocks = content.as_array().into_iter().flatten();
    blocks.filter(|block| block["type"] == kind).filter_map(|block| block[field].as_str()).collect()
}

fn betas(headers: &HeaderMap) -> Vec<&str> {
    let lines = headers.get_all("anthropic-beta").iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).filter(|beta| !beta.is_empty()).collect()
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

static FORMAT: LazyLock<BodyFormat> =
    LazyLock::new(|| BodyFormat::parse(include_str!("anthropic.txt")));

/// The versions of the API. The last is the one that the anthropic SDK 2.12 names.
const VERSIONS: [&str; 3] = ["2023-01-01", "2023-06-01", "2026-10-21"];
/// The smallest budget for thinking.
const MIN_THINKING_TOKENS: i64 = 1024;
