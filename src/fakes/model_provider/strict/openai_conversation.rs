//! OpenAI's rules for the order of a conversation: each call of a tool has its answer.

use http::StatusCode;
use serde_json::Value;

use super::ProviderRefusal;

/// Checks the messages of a chat. The format is already checked.
pub(super) fn check_chat_messages(messages: &Value) -> Result<(), ProviderRefusal> {
    let messages = messages.as_array().map(Vec::as_slice).unwrap_or_default();
    if messages.is_empty() {
        let message = "Invalid 'messages': empty array. Expected an array with minimum length 1, but \
                       got an empty array instead.";
        return Err(bad_request(message, "messages", Some("empty_array")));
    }
    // The calls of the last assistant message that have no answer yet.
    let mut open: Vec<&str> = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        if message["role"] == "tool" {
            let id = message["tool_call_id"].as_str().unwrap_or_default();
            let Some(at) = open.iter().position(|call| *call == id) else {
                let message = "Invalid parameter: messages with role 'tool' must be a response to a \
                               preceding message with 'tool_calls'.";
                let param = format!("messages.[{index}].role");
                return Err(bad_request(message, &param, None));
            };
            open.swap_remove(at);
            continue;
        }
        check_answered(&open, index)?;
        open = call_ids(&message["tool_calls"]);
        check_has_content(message, index)?;
    }
    check_answered(&open, messages.len())
}

/// Checks the items of a response's input. The format is already checked.
pub(super) fn check_response_input(input: &Value) -> Result<(), ProviderRefusal> {
    let items = input.as_array().map(Vec::as_slice).unwrap_or_default();
    let ids = |kind: &str| -> Vec<&str> {
        let items = items.iter().filter(|item| item["type"] == kind);
        items.filter_map(|item| item["call_id"].as_str()).collect()
    };
    if let Some(item) = items.iter().find(|item| is_item_reference(item)) {
        // This provider stores nothing, as with `store: false`.
        let id = item["id"].as_str().unwrap_or_default();
        let message = format!(
            "Item with id '{id}' not found. Items are not persisted when `store` is set to false. Try \
             again with `store` set to true, or remove this item from your input."
        );
        return Err(ProviderRefusal::openai(StatusCode::NOT_FOUND, &message, Some("input"), None));
    }
    for (call, answer) in
        [("function_call", "function_call_output"), ("custom_tool_call", "custom_tool_call_output")]
    {
        let (calls, answers) = (ids(call), ids(answer));
        if let Some(id) = calls.iter().find(|id| !answers.contains(id)) {
            let message = format!("No tool output found for function call {id}.");
            return Err(bad_request(&message, "input", None));
        }
        if let Some(id) = answers.iter().find(|id| !calls.contains(id)) {
            let message = format!("No tool call found for function call output with call_id {id}.");
            return Err(bad_request(&message, "input", None));
        }
    }
    Ok(())
}

fn is_item_reference(item: &Value) -> bool {
    item["type"] == "item_reference" || item.get("type").is_none() && item.get("role").is_none()
}

fn call_ids(calls: &Value) -> Vec<&str> {
    let calls = calls.as_array().into_iter().flatten();
    calls.filter_map(|call| call["id"].as_str()).collect()
}

fn check_answered(open: &[&str], index: usize) -> Result<(), ProviderRefusal> {
    if open.is_empty() {
        return Ok(());
    }
    let message = format!(
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each \
         'tool_call_id'. The following tool_call_ids did not have response messages: {}",
        open.join(", "),
    );
    Err(bad_request(&message, &format!("messages.[{index}].role"), None))
}

/// Checks that an assistant's message has a content or calls.
fn check_has_content(message: &Value, index: usize) -> Result<(), ProviderRefusal> {
    let has = |field: &str| message.get(field).is_some_and(|value| !value.is_null());
    let is_empty = message["role"] == "assistant"
        && !["content", "tool_calls", "function_call", "refusal", "audio"].into_iter().any(has);
    if is_empty {
        let param = format!("messages[{index}].content");
        let message =
            format!("Invalid value for 'content': expected a string, got null. ({param})");
        return Err(bad_request(&message, &param, None));
    }
    Ok(())
}

/// Makes a refusal with status 400.
pub(super) fn bad_request(message: &str, param: &str, code: Option<&str>) -> ProviderRefusal {
    ProviderRefusal::openai(StatusCode::BAD_REQUEST, message, Some(param), code)
}
