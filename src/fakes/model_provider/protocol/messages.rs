//! Anthropic Messages.

use http::StatusCode;
use serde_json::{Value, json};

use super::{FAILURE_MESSAGE, named_event};
use crate::fakes::model_provider::answer::{FinishReason, ScriptedAnswer};
use crate::fakes::model_provider::script::UsageReporting;

pub(super) fn unary_body(answer: &ScriptedAnswer) -> Value {
    let mut message = message_json(answer, answer.output);
    message["content"] = json!([content_block_json(answer, &answer.full_content())]);
    message["stop_reason"] = json!(stop_reason(answer));
    message
}

pub(super) fn opening_events(answer: &ScriptedAnswer) -> Vec<String> {
    vec![
        // The start reports one output token, as the real provider does.
        named_event(&json!({ "type": "message_start", "message": message_json(answer, 1) })),
        named_event(&json!({
            "type": "content_block_start",
            "index": 0,
            "content_block": content_block_json(answer, ""),
        })),
        named_event(&json!({ "type": "ping" })),
    ]
}

pub(super) fn chunk_event(answer: &ScriptedAnswer, content: &str) -> String {
    let delta = if answer.tool.is_some() {
        json!({ "type": "input_json_delta", "partial_json": content })
    } else {
        json!({ "type": "text_delta", "text": content })
    };
    named_event(&json!({ "type": "content_block_delta", "index": 0, "delta": delta }))
}

pub(super) fn closing_events(answer: &ScriptedAnswer) -> Vec<String> {
    let mut events = vec![named_event(&json!({ "type": "content_block_stop", "index": 0 }))];
    let mut delta = json!({
        "type": "message_delta",
        "delta": { "stop_reason": stop_reason(answer), "stop_sequence": null },
    });
    match answer.script.usage {
        UsageReporting::None => (),
        // The end reports only the output; the input was reported at the start.
        UsageReporting::Yes | UsageReporting::Finish => {
            delta["usage"] = json!({ "output_tokens": answer.output });
        }
        UsageReporting::Every => {
            // The counts are cumulative and the input is repeated: a client that adds the events up counts twice.
            delta["usage"] = usage_json(answer, 1);
            events.push(named_event(&delta));
            delta["usage"] = usage_json(answer, answer.output);
        }
    }
    events.push(named_event(&delta));
    if answer.script.done {
        events.push(named_event(&json!({ "type": "message_stop" })));
    }
    events
}

pub(super) fn failure_events() -> Vec<String> {
    vec![named_event(&json!({
        "type": "error",
        "error": {
            "type": "api_error",
            "message": FAILURE_MESSAGE,
        },
    }))]
}

pub(super) fn error_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        529 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

fn message_json(answer: &ScriptedAnswer, output: u64) -> Value {
    let mut message = json!({
        "id": format!("msg_{}", answer.id),
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
    });
    if answer.script.usage != UsageReporting::None {
        message["usage"] = usage_json(answer, output);
    }
    message
}

fn content_block_json(answer: &ScriptedAnswer, whole: &str) -> Value {
    match &answer.tool {
        None => json!({ "type": "text", "text": whole }),
        Some(tool) => json!({
            "type": "tool_use",
            "id": format!("toolu_{}", answer.id),
            "name": tool,
            // Truncated arguments are not JSON, and a block begins without arguments.
            "input": serde_json::from_str(whole).unwrap_or_else(|_| json!({})),
        }),
    }
}

fn usage_json(answer: &ScriptedAnswer, output: u64) -> Value {
    json!({
        "input_tokens": answer.uncached_input(),
        "cache_creation_input_tokens": answer.script.cache_write,
        "cache_read_input_tokens": answer.script.cached,
        "output_tokens": output,
    })
}

fn stop_reason(answer: &ScriptedAnswer) -> &'static str {
    match answer.finish {
        FinishReason::Stop => "end_turn",
        FinishReason::Length => "max_tokens",
        FinishReason::Tool => "tool_use",
    }
}
