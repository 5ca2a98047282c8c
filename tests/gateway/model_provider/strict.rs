//! Tests of a strict provider: it refuses what OpenAI and Anthropic refuse, with their status and error, and nothing
//! else.

use serde_json::{Value, json};

use super::raw_client::{RawReply, read_reply, send_bytes};
use crate::support::model_provider::start_strict;

async fn post_body(
    addr: std::net::SocketAddr,
    path: &str,
    headers: &str,
    body: &Value,
) -> RawReply {
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n",
        body.len()
    );
    read_reply(&mut send_bytes(addr, &(head + &body)).await).await
}

/// Adds fields to a body, and removes those that are null.
fn change_fields(mut body: Value, more: &Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        match value {
            Value::Null => drop(body.as_object_mut().unwrap().remove(name)),
            value => body[name] = value.clone(),
        }
    }
    body
}

fn chat_body() -> Value {
    json!({ "model": "m", "messages": [{ "role": "user", "content": "hello" }] })
}

fn messages_body() -> Value {
    change_fields(chat_body(), &json!({ "max_tokens": 64 }))
}

/// The parts of a refusal's error, without a missing one.
fn error_text(reply: &RawReply) -> String {
    let error = &reply.json()["error"];
    let parts = ["type", "code", "param", "message"].map(|part| error[part].as_str());
    format!("{} {}", reply.status(), parts.into_iter().flatten().collect::<Vec<_>>().join(" | "))
}

/// Chat completions refuse what OpenAI refuses.
#[tokio::test]
async fn chat_completions_refuse_what_openai_refuses() {
    let provider = start_strict().await;
    let function = json!({ "name": "f", "arguments": "{}" });
    let call = json!({ "id": "c1", "type": "function", "function": function });
    let asked = json!({ "role": "assistant", "tool_calls": [call] });
    let hello = json!({ "role": "user", "content": "hello" });
    let answered = json!({ "role": "tool", "tool_call_id": "c2", "content": "x" });
    let mut told = vec![];
    for more in [
        json!({ "wibble": 1 }),
        json!({ "model": null }),
        json!({ "max_completion_tokens": "9" }),
        json!({ "reasoning_effort": "huge" }),
        json!({ "messages": [] }),
        json!({ "messages": [{ "role": "robot", "content": "x" }] }),
        json!({ "messages": [{ "role": "user", "content": [{ "type": "text" }] }] }),
        json!({ "messages": [{ "role": "user", "content": "x", "id": 1 }] }),
        json!({ "messages": [{ "role": "assistant" }] }),
        json!({ "messages": [hello, asked] }),
        json!({ "messages": [hello, asked, answered] }),
        json!({ "messages": [answered] }),
        json!({ "stream_options": { "include_usage": true } }),
        json!({ "max_tokens": 9, "max_completion_tokens": 9 }),
        json!({ "model": "gpt-5", "max_tokens": 9 }),
        json!({ "tools": [] }),
        json!({ "tool_choice": "auto" }),
        json!({ "tools": [{ "type": "web_search" }] }),
    ] {
        let body = change_fields(chat_body(), &more);
        told.push(error_text(&post_body(provider.addr, CHAT, KEY, &body).await));
    }
    insta::assert_snapshot!(told.join("\n"), @r#"
    400 invalid_request_error | Unrecognized request argument supplied: wibble
    400 invalid_request_error | missing_required_parameter | model | Missing required parameter: 'model'.
    400 invalid_request_error | invalid_type | max_completion_tokens | Invalid type for 'max_completion_tokens': expected an integer, but got a string instead.
    400 invalid_request_error | invalid_value | reasoning_effort | Invalid value: 'huge'. Supported values are: 'none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'.
    400 invalid_request_error | empty_array | messages | Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty array instead.
    400 invalid_request_error | invalid_value | messages[0].role | Invalid value: 'robot'. Supported values are: 'developer', 'system', 'user', 'assistant', 'tool', 'function'.
    400 invalid_request_error | missing_required_parameter | messages[0].content[0].text | Missing required parameter: 'messages[0].content[0].text'.
    400 invalid_request_error | unknown_parameter | messages[0].id | Unknown parameter: 'messages[0].id'.
    400 invalid_request_error | messages[0].content | Invalid value for 'content': expected a string, got null. (messages[0].content)
    400 invalid_request_error | messages.[2].role | An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. The following tool_call_ids did not have response messages: c1
    400 invalid_request_error | messages.[2].role | Invalid parameter: messages with role 'tool' must be a response to a preceding message with 'tool_calls'.
    400 invalid_request_error | messages.[0].role | Invalid parameter: messages with role 'tool' must be a response to a preceding message with 'tool_calls'.
    400 invalid_request_error | stream_options | The 'stream_options' parameter is only allowed when 'stream' is enabled.
    400 invalid_request_error | invalid_parameter_combination | max_tokens | Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.
    400 invalid_request_error | unsupported_parameter | max_tokens | Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.
    400 invalid_request_error | empty_array | tools | Invalid 'tools': empty array. Expected an array with minimum length 1, but got an empty array instead.
    400 invalid_request_error | tool_choice | Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified.
    400 invalid_request_error | invalid_value | tools[0].type | Invalid value: 'web_search'. Supported values are: 'function', 'custom'.
    "#);
}

/// Responses and embeddings refuse what OpenAI refuses.
#[tokio::test]
async fn responses_and_embeddings_refuse_what_openai_refuses() {
    let provider = start_strict().await;
    let item = json!({ "type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}" });
    let output = json!({ "type": "function_call_output", "call_id": "c2", "output": "x" });
    let mut told = vec![];
    for more in [
        json!({ "wibble": 1 }),
        json!({ "input": null }),
        json!({ "max_tokens": 9 }),
        json!({ "input": [item] }),
        json!({ "input": [output] }),
        json!({ "input": [{ "type": "item_reference", "id": "rs_1" }] }),
        json!({ "previous_response_id": "resp_1" }),
        json!({ "tools": [{ "type": "function", "function": { "name": "f" } }] }),
        json!({ "stream_options": { "include_usage": true }, "stream": true }),
    ] {
        let body = change_fields(json!({ "model": "m", "input": "hello" }), &more);
        told.push(error_text(&post_body(provider.addr, "/v1/responses", KEY, &body).await));
    }
    let empty = json!({ "model": "m", "input": [] });
    told.push(error_text(&post_body(provider.addr, "/v1/embeddings", KEY, &empty).await));
    told.push(error_text(&post_body(provider.addr, CHAT, "x-api-key: k\r\n", &chat_body()).await));
    insta::assert_snapshot!(told.join("\n"), @r#"
    400 invalid_request_error | unknown_parameter | wibble | Unknown parameter: 'wibble'.
    400 invalid_request_error | missing_required_parameter | input | One of "input" or "previous_response_id" or 'prompt' or 'conversation_id' must be provided.
    400 invalid_request_error | unknown_parameter | max_tokens | Unknown parameter: 'max_tokens'.
    400 invalid_request_error | input | No tool output found for function call c1.
    400 invalid_request_error | input | No tool call found for function call output with call_id c2.
    404 invalid_request_error | input | Item with id 'rs_1' not found. Items are not persisted when `store` is set to false. Try again with `store` set to true, or remove this item from your input.
    400 invalid_request_error | previous_response_not_found | previous_response_id | Previous response with id 'resp_1' not found.
    400 invalid_request_error | missing_required_parameter | tools[0].name | Missing required parameter: 'tools[0].name'.
    400 invalid_request_error | unknown_parameter | stream_options.include_usage | Unknown parameter: 'stream_options.include_usage'.
    400 invalid_request_error | input | '$.input' is invalid.
    401 invalid_request_error | You didn't provide an API key. Provide it in an Authorization header using Bearer auth.
    "#);
}

/// Anthropic's routes refuse what Anthropic refuses.
#[tokio::test]
async fn anthropic_refuses_what_its_api_does_not_describe() {
    let provider = start_strict().await;
    let asked = json!({ "role": "assistant", "content": [{ "type": "tool_use", "id": "t1", "name": "f", "input": {} }] });
    let result = json!({ "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "t2", "content": "x" }] });
    let hello = json!({ "role": "user", "content": "hello" });
    let edits = json!({ "edits": [{ "type": "clear_tool_uses_20250919" }] });
    let computer = json!({ "type": "computer_20250124", "name": "computer", "display_width_px": 9, "display_height_px": 9 });
    let mut told = vec![];
    for more in [
        json!({ "wibble": 1 }),
        json!({ "max_tokens": null }),
        json!({ "max_tokens": "9" }),
        json!({ "messages": [] }),
        json!({ "messages": [asked] }),
        json!({ "messages": [hello, asked] }),
        json!({ "messages": [hello, asked, result] }),
        json!({ "messages": [result] }),
        json!({ "messages": [{ "role": "user", "content": "" }] }),
        json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] }),
        json!({ "context_management": edits }),
        json!({ "tools": [computer] }),
        json!({ "tools": [{ "type": "function", "function": { "name": "f" } }] }),
        json!({ "tool_choice": { "type": "auto" } }),
        json!({ "thinking": { "type": "enabled", "budget_tokens": 9 } }),
        json!({ "thinking": { "type": "enabled", "budget_tokens": 2048 } }),
    ] {
        let body = change_fields(messages_body(), &more);
        told.push(error_text(&post_body(provider.addr, MESSAGES, ANTHROPIC, &body).await));
    }
    told.push(error_text(&post_body(provider.addr, COUNT, ANTHROPIC, &messages_body()).await));
    for headers in [
        "authorization: Bearer k\r\nanthropic-version: 2023-06-01\r\n",
        "x-api-key: k\r\n",
        "x-api-key: k\r\nanthropic-version: 2033-06-01\r\n",
        "x-api-key: k\r\nanthropic-version: 2023-06-01\r\nanthropic-beta: no-such-beta\r\n",
    ] {
        told.push(error_text(&post_body(provider.addr, MESSAGES, headers, &messages_body()).await));
    }
    insta::assert_snapshot!(told.join("\n"), @r#"
    400 invalid_request_error | wibble: Extra inputs are not permitted
    400 invalid_request_error | max_tokens: Field required
    400 invalid_request_error | max_tokens: Input should be a valid integer
    400 invalid_request_error | messages: at least one message is required
    400 invalid_request_error | messages: first message must use the "user" role
    400 invalid_request_error | messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: t1. Each `tool_use` block must have a corresponding `tool_result` block in the next message.
    400 invalid_request_error | messages.2.content: unexpected `tool_use_id` found in `tool_result` blocks: t2. Each `tool_result` block must have a corresponding `tool_use` block in the previous message.
    400 invalid_request_error | messages.0.content: unexpected `tool_use_id` found in `tool_result` blocks: t2. Each `tool_result` block must have a corresponding `tool_use` block in the previous message.
    400 invalid_request_error | messages.0: all messages must have non-empty content except for the optional final assistant message
    400 invalid_request_error | messages.0.content.0: Input tag 'image_url' found using 'type' does not match any of the expected tags: 'text', 'image', 'document', 'search_result', 'thinking', 'redacted_thinking', 'tool_use', 'tool_result', 'server_tool_use', 'web_search_tool_result', 'web_fetch_tool_result', 'code_execution_tool_result', 'bash_code_execution_tool_result', 'text_editor_code_execution_tool_result', 'tool_search_tool_result', 'container_upload'
    400 invalid_request_error | context_management: Extra inputs are not permitted
    400 invalid_request_error | tools.0: Input tag 'computer_20250124' found using 'type' does not match any of the expected tags: 'custom', 'bash_20250124', 'code_execution_20250522', 'code_execution_20250825', 'code_execution_20260120', 'code_execution_20260521', 'browser_toolset_20260801', 'memory_20250818', 'computer_toolset_20260801', 'text_editor_20250124', 'text_editor_20250429', 'text_editor_20250728', 'web_search_20250305', 'web_fetch_20250910', 'web_search_20260209', 'web_fetch_20260209', 'web_fetch_20260309', 'web_search_20260318', 'web_fetch_20260318', 'tool_search_tool_bm25_20251119', 'tool_search_tool_bm25', 'tool_search_tool_regex_20251119', 'tool_search_tool_regex'
    400 invalid_request_error | tools.0: Input tag 'function' found using 'type' does not match any of the expected tags: 'custom', 'bash_20250124', 'code_execution_20250522', 'code_execution_20250825', 'code_execution_20260120', 'code_execution_20260521', 'browser_toolset_20260801', 'memory_20250818', 'computer_toolset_20260801', 'text_editor_20250124', 'text_editor_20250429', 'text_editor_20250728', 'web_search_20250305', 'web_fetch_20250910', 'web_search_20260209', 'web_fetch_20260209', 'web_fetch_20260309', 'web_search_20260318', 'web_fetch_20260318', 'tool_search_tool_bm25_20251119', 'tool_search_tool_bm25', 'tool_search_tool_regex_20251119', 'tool_search_tool_regex'
    400 invalid_request_error | tool_choice: `tool_choice` may only be specified while providing `tools`.
    400 invalid_request_error | thinking.enabled.budget_tokens: Input should be greater than or equal to 1024
    400 invalid_request_error | `max_tokens` must be greater than `thinking.budget_tokens`.
    400 invalid_request_error | max_tokens: Extra inputs are not permitted
    401 authentication_error | x-api-key header is required
    400 invalid_request_error | anthropic-version: header is required
    400 invalid_request_error | anthropic-version: "2033-06-01" is not a valid version
    400 invalid_request_error | Unexpected value(s) `no-such-beta` for the `anthropic-beta` header. Consult the documentation or try again without the header.
    "#);
}

/// A strict provider serves what the APIs describe, a beta's fields with their beta included.
#[tokio::test]
async fn what_the_apis_describe_is_served() {
    let provider = start_strict().await;
    let edits = json!({ "edits": [{ "type": "clear_tool_uses_20250919" }] });
    let beta = format!("{ANTHROPIC}anthropic-beta: context-management-2025-06-27\r\n");
    let count = change_fields(messages_body(), &json!({ "max_tokens": null }));
    for (path, headers, body) in [
        (
            CHAT,
            KEY,
            change_fields(
                chat_body(),
                &json!({ "stream": true, "stream_options": { "include_usage": true } }),
            ),
        ),
        (
            CHAT,
            KEY,
            change_fields(
                chat_body(),
                &json!({ "tools": [{ "type": "function", "function": { "name": "f" } }], "tool_choice": "auto" }),
            ),
        ),
        ("/v1/completions", KEY, json!({ "model": "m", "prompt": ["a", "b"] })),
        (
            "/v1/responses",
            KEY,
            json!({ "model": "m", "input": [{ "role": "user", "content": [{ "type": "input_text", "text": "hello" }] }] }),
        ),
        ("/v1/embeddings", KEY, json!({ "model": "m", "input": [1, 2] })),
        (MESSAGES, &*beta, change_fields(messages_body(), &json!({ "context_management": edits }))),
        (COUNT, ANTHROPIC, count),
    ] {
        let reply = post_body(provider.addr, path, headers, &body).await;
        assert_eq!(reply.status(), 200, "{path} {body}: {}", reply.text());
    }
}

/// The model of a strict provider calls only a tool that the request offers.
#[tokio::test]
async fn a_tool_that_is_not_offered_is_not_called() {
    let provider = start_strict().await;
    let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
    for (more, finish) in [(json!({ "tools": tools }), "tool_calls"), (json!({}), "stop")] {
        let body =
            change_fields(change_fields(chat_body(), &more), &json!({ "model": "fake/tool=f" }));
        let reply = post_body(provider.addr, CHAT, KEY, &body).await;
        assert_eq!(reply.json()["choices"][0]["finish_reason"], finish);
    }
}

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
const KEY: &str = "authorization: Bearer k\r\n";
const ANTHROPIC: &str = "x-api-key: k\r\nanthropic-version: 2023-06-01\r\n";
