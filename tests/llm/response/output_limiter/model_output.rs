//! Whole streams of all protocols, built from a model's output.

use cogni_gateway::llm::protocol::GatewayRoute;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

/// The content of one event.
#[derive(Clone, Debug)]
pub(in crate::response) struct OutputPiece {
    pub(in crate::response) part: OutputPart,
    /// The choice, in a chat stream.
    pub(in crate::response) choice: u64,
    pub(in crate::response) text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::response) enum OutputPart {
    Text,
    Refusal,
    Tool,
    Thinking,
}

impl OutputPiece {
    pub(in crate::response) fn text(text: &str) -> Self {
        Self { part: OutputPart::Text, choice: 0, text: text.to_owned() }
    }
}

pub(in crate::response) fn any_pieces() -> impl Strategy<Value = Vec<OutputPiece>> {
    let part = select(vec![
        OutputPart::Text,
        OutputPart::Text,
        OutputPart::Text,
        OutputPart::Refusal,
        OutputPart::Tool,
        OutputPart::Thinking,
    ]);
    let text = select(vec![
        "",
        "a",
        " word",
        "\"quoted\"\n",
        "漢字",
        "{\"usage\":{\"output_tokens\":9}}",
        "data: [DONE]\n\n",
        "sixteen bytes and some more than that, to be cut by their length alone",
    ]);
    // Runs of one part, as models write them.
    let run = (part, 0_u64..2, vec(text, 1..8)).prop_map(|(part, choice, texts)| {
        let piece = |text: &str| OutputPiece { part, choice, text: text.to_owned() };
        texts.into_iter().map(piece).collect::<Vec<_>>()
    });
    vec(run, 1..5).prop_map(|runs| runs.concat())
}

/// Returns the events of a whole stream, including its end.
pub(in crate::response) fn stream_events(
    route: GatewayRoute,
    pieces: &[OutputPiece],
) -> Vec<String> {
    match route {
        GatewayRoute::Messages => messages_events(pieces),
        GatewayRoute::Responses => responses_events(pieces),
        _ => chat_events(pieces, route == GatewayRoute::Completions),
    }
}

fn chat_events(pieces: &[OutputPiece], is_older: bool) -> Vec<String> {
    let mut choices: Vec<_> = pieces.iter().map(|piece| piece.choice).collect();
    choices.sort_unstable();
    choices.dedup();
    let chunk = |choices: Value| {
        let object = if is_older { "text_completion" } else { "chat.completion.chunk" };
        json!({ "id": "c-1", "object": object, "created": 17, "model": "m", "choices": choices })
    };
    let choice = |index: u64, delta: Value, text: &str, finish: Option<&str>| {
        let mut choice = json!({ "index": index, "finish_reason": finish });
        if is_older {
            choice["text"] = json!(text);
        } else {
            choice["delta"] = delta;
        }
        chunk(json!([choice]))
    };
    let mut events: Vec<Value> = choices
        .iter()
        .map(|index| choice(*index, json!({ "role": "assistant", "content": "" }), "", None))
        .collect();
    for piece in pieces {
        let text = piece.text.as_str();
        let delta = match piece.part {
            OutputPart::Text => json!({ "content": text, "tool_calls": [] }),
            OutputPart::Refusal => json!({ "refusal": text }),
            OutputPart::Tool => {
                json!({ "tool_calls": [{ "index": 0, "function": { "arguments": text } }] })
            }
            OutputPart::Thinking => json!({
                "reasoning_content": text,
                "thinking_blocks": [{ "type": "thinking", "thinking": text, "signature": "" }],
            }),
        };
        events.push(choice(piece.choice, delta, text, None));
    }
    events.extend(choices.iter().map(|index| choice(*index, json!({}), "", Some("stop"))));
    let mut last = chunk(json!([]));
    last["usage"] = json!({ "prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10 });
    events.push(last);
    let mut events: Vec<_> = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    events.push("data: [DONE]\n\n".to_owned());
    events
}

/// Groups the pieces into runs of one part.
fn group_pieces(pieces: &[OutputPiece]) -> impl Iterator<Item = (usize, &[OutputPiece])> {
    pieces.chunk_by(|one, other| one.part == other.part).enumerate()
}

fn messages_events(pieces: &[OutputPiece]) -> Vec<String> {
    let mut events = vec![json!({
        "type": "message_start",
        "message": {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [],
            "usage": { "input_tokens": 3, "output_tokens": 1 },
        },
    })];
    for (index, run) in group_pieces(pieces) {
        let (block, kind, member) = match run[0].part {
            OutputPart::Text | OutputPart::Refusal => {
                (json!({ "type": "text", "text": "" }), "text_delta", "text")
            }
            OutputPart::Tool => (
                json!({ "type": "tool_use", "id": "t", "name": "f", "input": {} }),
                "input_json_delta",
                "partial_json",
            ),
            OutputPart::Thinking => {
                (json!({ "type": "thinking", "thinking": "" }), "thinking_delta", "thinking")
            }
        };
        events
            .push(json!({ "type": "content_block_start", "index": index, "content_block": block }));
        for piece in run {
            let delta = json!({ "type": kind, member: piece.text });
            events.push(json!({ "type": "content_block_delta", "index": index, "delta": delta }));
            events.push(json!({ "type": "ping" }));
        }
        events.push(json!({ "type": "content_block_stop", "index": index }));
    }
    events.push(json!({
        "type": "message_delta",
        "delta": { "stop_reason": "end_turn", "stop_sequence": null },
        "usage": { "output_tokens": 7 },
    }));
    events.push(json!({ "type": "message_stop" }));
    named_events(&events)
}

fn responses_events(pieces: &[OutputPiece]) -> Vec<String> {
    let response = |status: &str| {
        json!({
            "id": "resp_1", "object": "response", "created_at": 17, "model": "m", "status": status,
            "output": [], "usage": null,
        })
    };
    let mut events =
        vec![json!({ "type": "response.created", "response": response("in_progress") })];
    let mut output = vec![];
    for (index, run) in group_pieces(pieces) {
        let id = format!("item_{index}");
        let whole: String = run.iter().map(|piece| piece.text.as_str()).collect();
        let place = |kind: &str, more: Value| {
            let mut event = json!({
                "type": kind, "item_id": id, "output_index": index, "content_index": 0,
            });
            event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            event
        };
        let (kind, deltas) = match run[0].part {
            OutputPart::Text => ("message", "output_text"),
            OutputPart::Refusal => ("message", "refusal"),
            OutputPart::Tool => ("function_call", "function_call_arguments"),
            OutputPart::Thinking => ("reasoning", "reasoning_summary_text"),
        };
        let mut item = json!({ "id": id, "type": kind, "status": "in_progress" });
        match kind {
            "message" => item["content"] = json!([]),
            "function_call" => item["arguments"] = json!(""),
            _ => (),
        }
        events.push(place("response.output_item.added", json!({ "item": item })));
        let part = |text: &str| match deltas {
            "refusal" => json!({ "type": "refusal", "refusal": text }),
            _ => json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] }),
        };
        if kind == "message" {
            events.push(place("response.content_part.added", json!({ "part": part("") })));
        }
        for piece in run {
            let kind = format!("response.{deltas}.delta");
            events.push(place(&kind, json!({ "delta": piece.text })));
        }
        if kind == "message" {
            let member = if deltas == "refusal" { "refusal" } else { "text" };
            let done = format!("response.{deltas}.done");
            events.push(place(&done, json!({ member: whole })));
            events.push(place("response.content_part.done", json!({ "part": part(&whole) })));
            item["content"] = json!([part(&whole)]);
        } else if kind == "function_call" {
            item["arguments"] = json!(whole);
        }
        item["status"] = json!("completed");
        events.push(place("response.output_item.done", json!({ "item": item })));
        output.push(item);
    }
    let mut last = response("completed");
    last["output"] = json!(output);
    last["usage"] = json!({ "input_tokens": 3, "output_tokens": 7, "total_tokens": 10 });
    events.push(json!({ "type": "response.completed", "response": last }));
    for (number, event) in events.iter_mut().enumerate() {
        event["sequence_number"] = json!(number);
    }
    named_events(&events)
}

fn named_events(events: &[Value]) -> Vec<String> {
    let name = |event: &Value| event["type"].as_str().unwrap().to_owned();
    events.iter().map(|event| format!("event: {}\ndata: {event}\n\n", name(event))).collect()
}
