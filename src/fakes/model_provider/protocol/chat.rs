//! `OpenAI` chat completions, and the older completions beside them.

use http::StatusCode;
use serde_json::{Value, json};

use super::{FAILURE_MESSAGE, data_event};
use crate::fakes::model_provider::answer::{FinishReason, ScriptedAnswer};
use crate::fakes::model_provider::script::UsageReporting;

pub(super) fn unary_body(answer: &ScriptedAnswer, older: bool) -> Value {
    let mut choice =
        json!({ "index": 0, "logprobs": null, "finish_reason": finish_reason(answer) });
    if older {
        choice["text"] = json!(answer.full_content());
    } else {
        choice["message"] = message_json(answer);
    }
    let mut body = json!({
        "id": completion_id(answer, older),
        "object": if older { "text_completion" } else { "chat.completion" },
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
    });
    if answer.script.usage != UsageReporting::None {
        body["usage"] = usage_json(answer, answer.output);
    }
    body
}

pub(super) fn opening_events(answer: &ScriptedAnswer) -> Vec<String> {
    // The first chunk has the role, and of a tool call the id and the name.
    let role = match &answer.tool {
        None => json!({ "role": "assistant", "content": "", "refusal": null }),
        Some(tool) => json!({
            "role": "assistant",
            "content": null,
            "tool_calls": [{
                "index": 0,
                "id": call_id(answer),
                "type": "function",
                "function": { "name": tool, "arguments": "" },
            }],
        }),
    };
    vec![data_event(&chunk_json(answer, &role, None))]
}

pub(super) fn chunk_event(answer: &ScriptedAnswer, content: &str) -> String {
    let delta = if answer.tool.is_some() {
        json!({ "tool_calls": [{ "index": 0, "function": { "arguments": content } }] })
    } else {
        json!({ "content": content })
    };
    let mut event = chunk_json(answer, &delta, None);
    // A running count of one token on every chunk; a client must not add these up.
    if answer.reports && answer.script.usage == UsageReporting::Every {
        event["usage"] = usage_json(answer, 1);
    }
    data_event(&event)
}

pub(super) fn text_chunk_event(answer: &ScriptedAnswer, content: &str) -> String {
    data_event(&text_chunk_json(answer, content, None))
}

pub(super) fn closing_events(answer: &ScriptedAnswer, older: bool) -> Vec<String> {
    let mut last = if older {
        text_chunk_json(answer, "", Some(finish_reason(answer)))
    } else {
        chunk_json(answer, &json!({}), Some(finish_reason(answer)))
    };
    // At most three events: the finish reason, the usage and `[DONE]`.
    let mut events = Vec::with_capacity(3);
    if answer.reports {
        let mut usage = usage_json(answer, answer.output);
        usage["cost"] = json!(answer.cost_dollars());
        // Some upstreams report usage on the chunk with the finish reason; OpenAI sends an extra chunk without choices.
        if answer.script.usage == UsageReporting::Finish {
            last["usage"] = usage;
            events.push(data_event(&last));
        } else {
            events.push(data_event(&last));
            last["choices"] = json!([]);
            last["usage"] = usage;
            events.push(data_event(&last));
        }
    } else {
        events.push(data_event(&last));
    }
    if answer.script.done {
        events.push(DONE_EVENT.to_owned());
    }
    events
}

/// Returns an error and then `[DONE]`, as `LiteLLM` ends a broken chat stream. A client that reads only the last event
/// takes the stream for a success.
pub(super) fn failure_events(answer: &ScriptedAnswer) -> Vec<String> {
    let error = json!({ "error": {
        "message": FAILURE_MESSAGE,
        "type": "server_error",
        "param": null,
        "code": "500",
    }});
    let mut events = vec![data_event(&error)];
    if answer.script.done {
        events.push(DONE_EVENT.to_owned());
    }
    events
}

pub(super) fn error_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        402 => "insufficient_quota",
        403 => "permission_error",
        404 => "not_found_error",
        429 => "rate_limit_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    }
}

fn message_json(answer: &ScriptedAnswer) -> Value {
    match &answer.tool {
        None => json!({ "role": "assistant", "content": answer.full_content(), "refusal": null }),
        Some(tool) => json!({
            "role": "assistant",
            "content": null,
            "tool_calls": [{
                "id": call_id(answer),
                "type": "function",
                "function": { "name": tool, "arguments": answer.full_content() },
            }],
        }),
    }
}

fn chunk_json(answer: &ScriptedAnswer, delta: &Value, finish: Option<&str>) -> Value {
    let choice = json!({ "index": 0, "delta": delta, "logprobs": null, "finish_reason": finish });
    envelope_json(answer, &choice, false)
}

fn text_chunk_json(answer: &ScriptedAnswer, text: &str, finish: Option<&str>) -> Value {
    let choice = json!({ "index": 0, "text": text, "logprobs": null, "finish_reason": finish });
    envelope_json(answer, &choice, true)
}

fn envelope_json(answer: &ScriptedAnswer, choice: &Value, older: bool) -> Value {
    let mut event = json!({
        "id": completion_id(answer, older),
        "object": if older { "text_completion" } else { "chat.completion.chunk" },
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
    });
    // OpenAI sends `"usage": null` on every chunk of a stream that reports usage.
    if answer.reports {
        event["usage"] = Value::Null;
    }
    event
}

fn usage_json(answer: &ScriptedAnswer, output: u64) -> Value {
    let script = &answer.script;
    let mut usage = json!({
        "prompt_tokens": answer.input,
        "completion_tokens": output,
        "total_tokens": answer.input.saturating_add(output),
        "prompt_tokens_details": { "cached_tokens": script.cached },
        "completion_tokens_details": { "reasoning_tokens": script.reasoning },
    });
    if script.cache_write > 0 {
        // LiteLLM adds these counts for Claude models; `prompt_tokens` includes them already.
        usage["cache_creation_input_tokens"] = json!(script.cache_write);
        usage["cache_read_input_tokens"] = json!(script.cached);
    }
    usage
}

fn finish_reason(answer: &ScriptedAnswer) -> &'static str {
    match answer.finish {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Tool => "tool_calls",
    }
}

fn completion_id(answer: &ScriptedAnswer, older: bool) -> String {
    format!("{}-{}", if older { "cmpl" } else { "chatcmpl" }, answer.id)
}

fn call_id(answer: &ScriptedAnswer) -> String {
    format!("call_{}", answer.id)
}

const DONE_EVENT: &str = "data: [DONE]\n\n";
