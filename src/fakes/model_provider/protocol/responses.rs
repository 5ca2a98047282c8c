//! `OpenAI` Responses.

use serde_json::{Value, json};

use super::{FAILURE_MESSAGE, named_event};
use crate::fakes::model_provider::answer::{FinishReason, ScriptedAnswer};
use crate::fakes::model_provider::event::SEQUENCE_MARK;
use crate::fakes::model_provider::provider_request::split_namespace;
use crate::fakes::model_provider::script::UsageReporting;

pub(super) fn unary_body(answer: &ScriptedAnswer) -> Value {
    completed_response(answer, &output_item_json(answer, &answer.full_content(), "completed"))
}

pub(super) fn opening_events(answer: &ScriptedAnswer) -> Vec<String> {
    let mut response = response_json(answer, "in_progress");
    // A running count before the end is wrong on purpose: only the last event's count is true.
    if answer.script.usage == UsageReporting::Every {
        response["usage"] = usage_json(answer, 1);
    }
    let mut started = output_item_json(answer, "", "in_progress");
    if answer.tool.is_none() {
        started["content"] = json!([]);
    }
    let mut events = vec![
        typed_event("response.created", json!({ "response": response })),
        typed_event("response.in_progress", json!({ "response": response })),
        typed_event("response.output_item.added", json!({ "output_index": 0, "item": started })),
    ];
    if answer.tool.is_none() {
        events.push(item_event(
            answer,
            "response.content_part.added",
            json!({ "part": text_part_json("") }),
        ));
    }
    events
}

pub(super) fn chunk_event(answer: &ScriptedAnswer, content: &str) -> String {
    item_event(
        answer,
        &format!("response.{}.delta", delta_kind(answer)),
        json!({ "delta": content }),
    )
}

pub(super) fn closing_events(answer: &ScriptedAnswer) -> Vec<String> {
    // The closing events repeat the whole content, as the real provider does.
    let whole = answer.full_content();
    let item = output_item_json(answer, &whole, "completed");
    let done = format!("response.{}.done", delta_kind(answer));
    let mut events = Vec::with_capacity(4);
    if answer.tool.is_some() {
        events.push(item_event(answer, &done, json!({ "arguments": whole })));
    } else {
        events.push(item_event(answer, &done, json!({ "text": whole })));
        events.push(item_event(
            answer,
            "response.content_part.done",
            json!({ "part": text_part_json(&whole) }),
        ));
    }
    events
        .push(typed_event("response.output_item.done", json!({ "output_index": 0, "item": item })));
    // The name of the last event states whether the answer was cut.
    let last = if answer.finish == FinishReason::Length { "incomplete" } else { "completed" };
    events.push(typed_event(
        &format!("response.{last}"),
        json!({ "response": completed_response(answer, &item) }),
    ));
    events
}

pub(super) fn failure_events(answer: &ScriptedAnswer) -> Vec<String> {
    let mut response = response_json(answer, "failed");
    response["error"] = json!({
        "code": "server_error",
        "message": FAILURE_MESSAGE,
    });
    if answer.script.usage != UsageReporting::None {
        response["usage"] = usage_json(answer, answer.output);
    }
    vec![typed_event("response.failed", json!({ "response": response }))]
}

fn completed_response(answer: &ScriptedAnswer, item: &Value) -> Value {
    let cut = answer.finish == FinishReason::Length;
    let mut response = response_json(answer, if cut { "incomplete" } else { "completed" });
    if cut {
        response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
    }
    response["output"] = json!([item]);
    if answer.script.usage != UsageReporting::None {
        response["usage"] = usage_json(answer, answer.output);
    }
    response
}

fn response_json(answer: &ScriptedAnswer, status: &str) -> Value {
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

fn output_item_json(answer: &ScriptedAnswer, whole: &str, status: &str) -> Value {
    match &answer.tool {
        None => json!({
            "id": item_id(answer),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [text_part_json(whole)],
        }),
        Some(tool) => {
            let (namespace, name) = split_namespace(tool);
            let mut call = json!({
                "id": item_id(answer),
                "type": "function_call",
                "status": status,
                "call_id": format!("call_{}", answer.id),
                "name": name,
                "arguments": whole,
            });
            if let Some(namespace) = namespace {
                call["namespace"] = namespace.into();
            }
            call
        }
    }
}

fn text_part_json(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

/// Formats an event about the content of the only output item.
fn item_event(answer: &ScriptedAnswer, name: &str, mut fields: Value) -> String {
    fields["item_id"] = json!(item_id(answer));
    fields["output_index"] = json!(0);
    if answer.tool.is_none() {
        fields["content_index"] = json!(0);
        if name.contains("output_text") {
            fields["logprobs"] = json!([]);
        }
    }
    typed_event(name, fields)
}

fn typed_event(name: &str, mut fields: Value) -> String {
    fields["type"] = json!(name);
    // The number is filled in when the event is sent.
    fields["sequence_number"] = json!(SEQUENCE_MARK);
    named_event(&fields)
}

fn usage_json(answer: &ScriptedAnswer, output: u64) -> Value {
    json!({
        "input_tokens": answer.input,
        "input_tokens_details": { "cached_tokens": answer.script.cached },
        "output_tokens": output,
        "output_tokens_details": { "reasoning_tokens": answer.script.reasoning },
        "total_tokens": answer.input.saturating_add(output),
    })
}

/// Returns the name of the delta events.
fn delta_kind(answer: &ScriptedAnswer) -> &'static str {
    if answer.tool.is_some() { "function_call_arguments" } else { "output_text" }
}

fn item_id(answer: &ScriptedAnswer) -> String {
    let prefix = if answer.tool.is_some() { "fc" } else { "msg" };
    format!("{prefix}_{}", answer.id)
}
