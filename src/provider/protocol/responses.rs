//! `OpenAI` Responses.

use serde_json::{Value, json};

use super::{FAILURE, named};
use crate::provider::answer::{Answer, Finish};
use crate::provider::event::SEQUENCE;
use crate::provider::script::Report;

pub(super) fn unary(answer: &Answer) -> Value {
    finished(answer, &item(answer, &answer.whole(), "completed"))
}

pub(super) fn opening(answer: &Answer) -> Vec<String> {
    let mut response = response(answer, "in_progress");
    if answer.script.usage == Report::Every {
        response["usage"] = usage(answer, 1);
    }
    let mut started = item(answer, "", "in_progress");
    if answer.tool.is_none() {
        started["content"] = json!([]);
    }
    let mut events = vec![
        event("response.created", json!({ "response": response })),
        event("response.in_progress", json!({ "response": response })),
        event("response.output_item.added", json!({ "output_index": 0, "item": started })),
    ];
    if answer.tool.is_none() {
        events.push(within(answer, "response.content_part.added", json!({ "part": part("") })));
    }
    events
}

pub(super) fn chunk(answer: &Answer, content: &str) -> String {
    within(answer, &format!("response.{}.delta", kind(answer)), json!({ "delta": content }))
}

pub(super) fn closing(answer: &Answer) -> Vec<String> {
    let whole = answer.whole();
    let item = item(answer, &whole, "completed");
    let done = format!("response.{}.done", kind(answer));
    let mut events = Vec::with_capacity(4);
    if answer.tool.is_some() {
        events.push(within(answer, &done, json!({ "arguments": whole })));
    } else {
        events.push(within(answer, &done, json!({ "text": whole })));
        events.push(within(answer, "response.content_part.done", json!({ "part": part(&whole) })));
    }
    events.push(event("response.output_item.done", json!({ "output_index": 0, "item": item })));
    let last = if answer.finish == Finish::Length { "incomplete" } else { "completed" };
    events.push(event(&format!("response.{last}"), json!({ "response": finished(answer, &item) })));
    events
}

pub(super) fn failure(answer: &Answer) -> Vec<String> {
    let mut response = response(answer, "failed");
    response["error"] = json!({
        "code": "server_error",
        "message": FAILURE,
    });
    if answer.script.usage != Report::None {
        response["usage"] = usage(answer, answer.output);
    }
    vec![event("response.failed", json!({ "response": response }))]
}

fn finished(answer: &Answer, item: &Value) -> Value {
    let cut = answer.finish == Finish::Length;
    let mut response = response(answer, if cut { "incomplete" } else { "completed" });
    if cut {
        response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
    }
    response["output"] = json!([item]);
    if answer.script.usage != Report::None {
        response["usage"] = usage(answer, answer.output);
    }
    response
}

fn response(answer: &Answer, status: &str) -> Value {
    json!({
        "id": format!("resp_{}", answer.id),
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": null,
        "incomplete_details": null,
        "instructions": null,
        "metadata": {},
        "model": answer.model,
        "output": [],
        "parallel_tool_calls": true,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": null,
    })
}

fn item(answer: &Answer, whole: &str, status: &str) -> Value {
    match &answer.tool {
        None => json!({
            "id": item_id(answer),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part(whole)],
        }),
        Some(tool) => json!({
            "id": item_id(answer),
            "type": "function_call",
            "status": status,
            "call_id": format!("call_{}", answer.id),
            "name": tool,
            "arguments": whole,
        }),
    }
}

fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

/// An event about the content of the one output item.
fn within(answer: &Answer, name: &str, mut fields: Value) -> String {
    fields["item_id"] = json!(item_id(answer));
    fields["output_index"] = json!(0);
    if answer.tool.is_none() {
        fields["content_index"] = json!(0);
        if name.contains("output_text") {
            fields["logprobs"] = json!([]);
        }
    }
    event(name, fields)
}

fn event(name: &str, mut fields: Value) -> String {
    fields["type"] = json!(name);
    fields["sequence_number"] = json!(SEQUENCE);
    named(&fields)
}

fn usage(answer: &Answer, output: u64) -> Value {
    json!({
        "input_tokens": answer.input,
        "input_tokens_details": { "cached_tokens": answer.script.cached },
        "output_tokens": output,
        "output_tokens_details": { "reasoning_tokens": answer.script.reasoning },
        "total_tokens": answer.input.saturating_add(output),
    })
}

/// What the deltas are called.
fn kind(answer: &Answer) -> &'static str {
    if answer.tool.is_some() { "function_call_arguments" } else { "output_text" }
}

fn item_id(answer: &Answer) -> String {
    let prefix = if answer.tool.is_some() { "fc" } else { "msg" };
    format!("{prefix}_{}", answer.id)
}
