//! `OpenAI` chat completions, and the older completions beside them.

use http::StatusCode;
use serde_json::{Value, json};

use super::{FAILURE, data};
use crate::provider::answer::{Answer, Finish};
use crate::provider::script::Report;

pub(super) fn unary(answer: &Answer, older: bool) -> Value {
    let mut choice = json!({ "index": 0, "logprobs": null, "finish_reason": finish(answer) });
    if older {
        choice["text"] = json!(answer.whole());
    } else {
        choice["message"] = message(answer);
    }
    let mut body = json!({
        "id": id(answer, older),
        "object": if older { "text_completion" } else { "chat.completion" },
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
    });
    if answer.script.usage != Report::None {
        body["usage"] = usage(answer, answer.output);
    }
    body
}

pub(super) fn opening(answer: &Answer) -> Vec<String> {
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
    vec![data(&event(answer, &role, None))]
}

pub(super) fn chunk(answer: &Answer, content: &str) -> String {
    let delta = if answer.tool.is_some() {
        json!({ "tool_calls": [{ "index": 0, "function": { "arguments": content } }] })
    } else {
        json!({ "content": content })
    };
    let mut event = event(answer, &delta, None);
    if answer.reports && answer.script.usage == Report::Every {
        event["usage"] = usage(answer, 1);
    }
    data(&event)
}

pub(super) fn text_chunk(answer: &Answer, content: &str) -> String {
    data(&text_event(answer, content, None))
}

pub(super) fn closing(answer: &Answer, older: bool) -> Vec<String> {
    let mut last = if older {
        text_event(answer, "", Some(finish(answer)))
    } else {
        event(answer, &json!({}), Some(finish(answer)))
    };
    let mut events = Vec::with_capacity(3);
    if answer.reports {
        let mut usage = usage(answer, answer.output);
        usage["cost"] = json!(answer.cost());
        if answer.script.usage == Report::Finish {
            last["usage"] = usage;
            events.push(data(&last));
        } else {
            events.push(data(&last));
            last["choices"] = json!([]);
            last["usage"] = usage;
            events.push(data(&last));
        }
    } else {
        events.push(data(&last));
    }
    if answer.script.done {
        events.push(DONE.to_owned());
    }
    events
}

/// An error and then `[DONE]`: `LiteLLM` ends a broken chat stream so, and it looks like success to
/// whoever reads the last event only.
pub(super) fn failure(answer: &Answer) -> Vec<String> {
    let error = json!({ "error": {
        "message": FAILURE,
        "type": "server_error",
        "param": null,
        "code": "500",
    }});
    let mut events = vec![data(&error)];
    if answer.script.done {
        events.push(DONE.to_owned());
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

fn message(answer: &Answer) -> Value {
    match &answer.tool {
        None => json!({ "role": "assistant", "content": answer.whole(), "refusal": null }),
        Some(tool) => json!({
            "role": "assistant",
            "content": null,
            "tool_calls": [{
                "id": call_id(answer),
                "type": "function",
                "function": { "name": tool, "arguments": answer.whole() },
            }],
        }),
    }
}

fn event(answer: &Answer, delta: &Value, finish: Option<&str>) -> Value {
    let choice = json!({ "index": 0, "delta": delta, "logprobs": null, "finish_reason": finish });
    envelope(answer, &choice, false)
}

fn text_event(answer: &Answer, text: &str, finish: Option<&str>) -> Value {
    let choice = json!({ "index": 0, "text": text, "logprobs": null, "finish_reason": finish });
    envelope(answer, &choice, true)
}

fn envelope(answer: &Answer, choice: &Value, older: bool) -> Value {
    let mut event = json!({
        "id": id(answer, older),
        "object": if older { "text_completion" } else { "chat.completion.chunk" },
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
    });
    if answer.reports {
        event["usage"] = Value::Null;
    }
    event
}

fn usage(answer: &Answer, output: u64) -> Value {
    let script = &answer.script;
    let mut usage = json!({
        "prompt_tokens": answer.input,
        "completion_tokens": output,
        "total_tokens": answer.input.saturating_add(output),
        "prompt_tokens_details": { "cached_tokens": script.cached },
        "completion_tokens_details": { "reasoning_tokens": script.reasoning },
    });
    if script.cache_write > 0 {
        // As LiteLLM does for Claude models; `prompt_tokens` includes them already.
        usage["cache_creation_input_tokens"] = json!(script.cache_write);
        usage["cache_read_input_tokens"] = json!(script.cached);
    }
    usage
}

fn finish(answer: &Answer) -> &'static str {
    match answer.finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Tool => "tool_calls",
    }
}

fn id(answer: &Answer, older: bool) -> String {
    format!("{}-{}", if older { "cmpl" } else { "chatcmpl" }, answer.id)
}

fn call_id(answer: &Answer) -> String {
    format!("call_{}", answer.id)
}

const DONE: &str = "data: [DONE]\n\n";
