//! Anthropic Messages.

use http::StatusCode;
use serde_json::{Value, json};

use super::{FAILURE, named};
use crate::provider::answer::{Answer, Finish};
use crate::provider::script::Report;

pub(super) fn unary(answer: &Answer) -> Value {
    let mut message = message(answer, answer.output);
    message["content"] = json!([block(answer, &answer.whole())]);
    message["stop_reason"] = json!(stop_reason(answer));
    message
}

pub(super) fn opening(answer: &Answer) -> Vec<String> {
    vec![
        // One output token at the start, as the real ones send.
        named(&json!({ "type": "message_start", "message": message(answer, 1) })),
        named(&json!({
            "type": "content_block_start",
            "index": 0,
            "content_block": block(answer, ""),
        })),
        named(&json!({ "type": "ping" })),
    ]
}

pub(super) fn chunk(answer: &Answer, content: &str) -> String {
    let delta = if answer.tool.is_some() {
        json!({ "type": "input_json_delta", "partial_json": content })
    } else {
        json!({ "type": "text_delta", "text": content })
    };
    named(&json!({ "type": "content_block_delta", "index": 0, "delta": delta }))
}

pub(super) fn closing(answer: &Answer) -> Vec<String> {
    let mut events = vec![named(&json!({ "type": "content_block_stop", "index": 0 }))];
    let mut delta = json!({
        "type": "message_delta",
        "delta": { "stop_reason": stop_reason(answer), "stop_sequence": null },
    });
    match answer.script.usage {
        Report::None => (),
        Report::Yes | Report::Finish => delta["usage"] = json!({ "output_tokens": answer.output }),
        Report::Every => {
            // Cumulative, input repeated: who adds it up counts twice.
            delta["usage"] = usage(answer, 1);
            events.push(named(&delta));
            delta["usage"] = usage(answer, answer.output);
        }
    }
    events.push(named(&delta));
    if answer.script.done {
        events.push(named(&json!({ "type": "message_stop" })));
    }
    events
}

pub(super) fn failure() -> Vec<String> {
    vec![named(&json!({
        "type": "error",
        "error": {
            "type": "api_error",
            "message": FAILURE,
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

fn message(answer: &Answer, output: u64) -> Value {
    let mut message = json!({
        "id": format!("msg_{}", answer.id),
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
    });
    if answer.script.usage != Report::None {
        message["usage"] = usage(answer, output);
    }
    message
}

fn block(answer: &Answer, whole: &str) -> Value {
    match &answer.tool {
        None => json!({ "type": "text", "text": whole }),
        Some(tool) => json!({
            "type": "tool_use",
            "id": format!("toolu_{}", answer.id),
            "name": tool,
            // Arguments that were cut short are no JSON; a block begins with none.
            "input": serde_json::from_str(whole).unwrap_or_else(|_| json!({})),
        }),
    }
}

fn usage(answer: &Answer, output: u64) -> Value {
    json!({
        "input_tokens": answer.uncached(),
        "cache_creation_input_tokens": answer.script.cache_write,
        "cache_read_input_tokens": answer.script.cached,
        "output_tokens": output,
    })
}

fn stop_reason(answer: &Answer) -> &'static str {
    match answer.finish {
        Finish::Stop => "end_turn",
        Finish::Length => "max_tokens",
        Finish::Tool => "tool_use",
    }
}
