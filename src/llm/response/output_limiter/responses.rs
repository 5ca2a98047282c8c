//! The state and the endings of an OpenAI Responses stream.
//!
//! The last event repeats the whole output, and the end of each item repeats the item. The ending
//! of a truncated stream must contain these repetitions, so the content of the items is stored, up
//! to [`MAX_KEPT_BYTES`].

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::event_pattern::LoneText;
use super::{CutSafety, LimitReachedError, TextEventEffect, push_event};
use crate::llm::budget::TokenUsage;
use crate::llm::response::output_estimate::OutputEstimate;
use crate::llm::response::usage_counts::parse_object;

/// The open parts in a stream of one response.
#[derive(Debug, Default)]
pub(super) struct ResponsesStreamState {
    head: Option<ResponseIdentity>,
    /// The sequence number of the next event.
    sequence: u64,
    items: Vec<OutputItem>,
    /// The number of bytes stored in `items`.
    kept: usize,
    /// True if the items exceeded the storage limit and were discarded.
    is_lost: bool,
    is_ended: bool,
}

/// The members that identify the response.
#[derive(Clone, Debug, Deserialize)]
struct ResponseIdentity {
    id: Value,
    #[serde(default)]
    created_at: Value,
    #[serde(default)]
    model: Value,
}

/// One item of the output: a message, reasoning or a tool call.
#[derive(Debug)]
struct OutputItem {
    index: u64,
    kind: OutputItemKind,
    is_done: bool,
    /// The item as it was added or, after its end, as it was finished.
    json: Box<str>,
    parts: Vec<OutputItemPart>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OutputItemKind {
    Message,
    Reasoning,
    /// A tool call of any kind.
    Other,
}

/// The position of a text in the output.
#[derive(Clone, Copy, Debug)]
pub(in crate::llm::response) struct OutputPartPosition {
    item: u64,
    part: u64,
    /// True if the end of the stream repeats the text.
    is_repeated: bool,
}

/// A content part of a message.
#[derive(Debug)]
struct OutputItemPart {
    index: u64,
    is_refusal: bool,
    is_done: bool,
    text: String,
}

impl ResponsesStreamState {
    /// Updates the state by an event. Returns the event's text if it contains exactly one.
    pub(super) fn on_event(
        &mut self,
        name: &[u8],
        data: &[u8],
        written: &mut OutputEstimate,
    ) -> Option<LoneText> {
        let event = parse_object::<ResponseStreamEvent<'_>>(data)?;
        // The ending continues the upstream's numbering without a gap.
        if let Some(sequence) = event.sequence_number {
            self.sequence = sequence.saturating_add(1);
        }
        match name {
            b"response.created" | b"response.in_progress" | b"response.queued"
                if self.head.is_none() =>
            {
                self.head = event.response.and_then(|head| parse_object(head.get().as_bytes()));
            }
            b"response.completed" | b"response.incomplete" | b"response.failed" | b"error" => {
                // The stream has its own end, which must not be followed by another.
                self.is_ended = true;
            }
            b"response.output_item.added" => self.add_item(&event, written),
            b"response.output_item.done" => self.end_item(&event),
            b"response.content_part.added" => self.add_part(&event),
            b"response.content_part.done" => {
                let item = event.output_index.unwrap_or(0);
                let part = event.content_index.unwrap_or(0);
                if let Some(part) =
                    self.find_part(OutputPartPosition { item, part, is_repeated: true })
                {
                    part.is_done = true;
                }
            }
            // A summary is shorter than the billed reasoning, which stays hidden.
            b"response.reasoning_summary_text.delta" => written.mark_partial(),
            name if name.ends_with(b".delta") && written.add_string(event.delta) => {
                let place = OutputPartPosition {
                    item: event.output_index.unwrap_or(0),
                    part: event.content_index.unwrap_or(0),
                    is_repeated: matches!(
                        name,
                        b"response.output_text.delta" | b"response.refusal.delta"
                    ),
                };
                let text = event.delta?.get();
                self.extend_text(place, text);
                return LoneText::from_json_text(text, data, TextEventEffect::Part(place));
            }
            _ => (),
        }
        None
    }

    /// Updates the state by an event that repeats an earlier one with another text. `text` is the
    /// inside of a JSON string.
    pub(super) fn on_repeated_delta(
        &mut self,
        sequence: Option<u64>,
        place: OutputPartPosition,
        text: &[u8],
    ) {
        if let Some(sequence) = sequence {
            self.sequence = sequence.saturating_add(1);
        }
        let Ok(text) = str::from_utf8(text) else { return };
        // Only a text with escapes needs the JSON decoder.
        if text.contains('\\') {
            self.extend_text(place, &format!("\"{text}\""));
        } else {
            self.is_ended = false;
            // Without escapes, the inside of the JSON string is the text itself.
            self.push_item(place, text);
        }
    }

    fn add_item(&mut self, event: &ResponseStreamEvent<'_>, written: &mut OutputEstimate) {
        let Some(item) = event.item else { return };
        let typed = parse_object::<OutputItemType<'_>>(item.get().as_bytes());
        let kind = match typed.and_then(|typed| typed.r#type).map(RawValue::get) {
            Some("\"message\"") => OutputItemKind::Message,
            Some("\"reasoning\"") => OutputItemKind::Reasoning,
            _ => OutputItemKind::Other,
        };
        if kind == OutputItemKind::Reasoning {
            written.mark_partial();
        }
        let (index, json) = (event.output_index.unwrap_or(0), item.get().into());
        // The limit is checked before the item is stored, so the memory is bounded.
        if self.reserve_kept_bytes(item.get().len()) {
            self.items.push(OutputItem { index, kind, is_done: false, json, parts: Vec::new() });
        }
    }

    fn end_item(&mut self, event: &ResponseStreamEvent<'_>) {
        let Some(item) = event.item else { return };
        let Some(open) = self.find_item(event.output_index.unwrap_or(0)) else { return };
        let texts: usize = open.parts.iter().map(|part| part.text.len()).sum();
        // The finished item replaces its first form and its parts; their bytes are given back.
        let freed = texts + open.json.len();
        open.is_done = true;
        open.json = item.get().into();
        open.parts = Vec::new();
        self.kept = self.kept.saturating_sub(freed);
        self.reserve_kept_bytes(item.get().len());
    }

    fn add_part(&mut self, event: &ResponseStreamEvent<'_>) {
        let typed =
            event.part.and_then(|part| parse_object::<OutputItemType<'_>>(part.get().as_bytes()));
        let is_refusal =
            typed.and_then(|typed| typed.r#type).is_some_and(|kind| kind.get() == "\"refusal\"");
        let index = event.content_index.unwrap_or(0);
        // Empty parts count by the size of their record, so many parts cannot evade the limit.
        if self.reserve_kept_bytes(size_of::<OutputItemPart>())
            && let Some(item) = self.find_item(event.output_index.unwrap_or(0))
        {
            item.parts.push(OutputItemPart {
                index,
                is_refusal,
                is_done: false,
                text: String::new(),
            });
        }
    }

    /// Appends a text, given as a JSON string, to its part.
    fn extend_text(&mut self, place: OutputPartPosition, text: &str) {
        // Text after an end event: the stream goes on in spite of the event.
        self.is_ended = false;
        if place.is_repeated
            && let Ok(BorrowedJsonText(text)) = serde_json::from_str::<BorrowedJsonText<'_>>(text)
        {
            self.push_item(place, &text);
        }
    }

    /// Stores the text of a message. The text of a tool call or of reasoning is never repeated, so
    /// it is not stored.
    fn push_item(&mut self, place: OutputPartPosition, text: &str) {
        if place.is_repeated
            && self.reserve_kept_bytes(text.len())
            && let Some(part) = self.find_part(place)
        {
            part.text.push_str(text);
        }
    }

    /// Reserves storage for `bytes` more bytes. Returns false if the limit is exceeded, now or
    /// before.
    fn reserve_kept_bytes(&mut self, bytes: usize) -> bool {
        self.kept = self.kept.saturating_add(bytes);
        // Past the limit the items are useless, because the ending would be incomplete. `is_lost`
        // makes every ending an error.
        if self.kept > MAX_KEPT_BYTES {
            self.is_lost = true;
            self.items = Vec::new();
        }
        !self.is_lost
    }

    fn find_item(&mut self, index: u64) -> Option<&mut OutputItem> {
        self.items.iter_mut().rev().find(|item| item.index == index)
    }

    fn find_part(&mut self, place: OutputPartPosition) -> Option<&mut OutputItemPart> {
        let parts = &mut self.find_item(place.item)?.parts;
        parts.iter_mut().rev().find(|part| part.index == place.part)
    }

    /// Returns the safety of a truncation here. Without the identity or the items no graceful
    /// ending can be written.
    pub(super) fn cut_safety(&self) -> CutSafety {
        let is_call = |item: &OutputItem| !item.is_done && item.kind == OutputItemKind::Other;
        if self.is_ended {
            CutSafety::Ended
        } else if self.head.is_none() || self.is_lost || self.items.iter().any(is_call) {
            CutSafety::Unsafe
        } else {
            CutSafety::Safe
        }
    }

    /// Appends the ending of a model at its limit. Open messages are closed and become part of the
    /// output. Open reasoning is left out, because clients accept an item only after it is
    /// finished.
    pub(super) fn write_graceful_ending(&self, usage: &TokenUsage, end: &mut Vec<u8>) {
        let mut events = ClosingEventWriter { end, sequence: self.sequence };
        let mut output = Vec::with_capacity(self.items.len());
        for item in &self.items {
            let json = serde_json::from_str(&item.json).unwrap_or_default();
            if item.is_done {
                output.push(json);
            } else if item.kind == OutputItemKind::Message {
                output.push(item.close_item(json, &mut events));
            }
        }
        let mut response = self.response_json("incomplete", &output, usage);
        response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        events.push_event("response.incomplete", json!({ "response": response }));
    }

    /// Appends an error ending. Codex stops at this code; after other codes it repeats the call.
    pub(super) fn write_error_ending(
        &self,
        reached: LimitReachedError,
        usage: &TokenUsage,
        end: &mut Vec<u8>,
    ) {
        let mut events = ClosingEventWriter { end, sequence: self.sequence };
        let error = json!({ "code": "insufficient_quota", "message": reached.to_string() });
        // Without the response's identity, only a bare error event can be written.
        if self.head.is_none() {
            events.push_event("error", error);
            return;
        }
        // Open items are left out: the client must not act on a part of a tool call.
        let done = self.items.iter().filter(|item| item.is_done);
        let output: Vec<_> =
            done.filter_map(|item| serde_json::from_str(&item.json).ok()).collect();
        let mut response = self.response_json("failed", &output, usage);
        response["error"] = error;
        events.push_event("response.failed", json!({ "response": response }));
    }

    fn response_json(&self, status: &str, output: &[Value], usage: &TokenUsage) -> Value {
        let unknown =
            ResponseIdentity { id: Value::Null, created_at: Value::Null, model: Value::Null };
        let ResponseIdentity { id, created_at, model } = self.head.as_ref().unwrap_or(&unknown);
        json!({
            "id": id,
            "object": "response",
            "created_at": created_at,
            "status": status,
            "error": null,
            "incomplete_details": null,
            "instructions": null,
            "metadata": {},
            "model": model,
            "output": output,
            "parallel_tool_calls": true,
            "temperature": null,
            "tool_choice": "auto",
            "tools": [],
            "top_p": null,
            "usage": {
                "input_tokens": usage.input,
                "input_tokens_details": { "cached_tokens": usage.cache_read },
                "output_tokens": usage.output,
                "output_tokens_details": { "reasoning_tokens": usage.reasoning },
                "total_tokens": usage.total_tokens(),
            },
        })
    }
}

impl OutputItem {
    /// Appends the events that end a message and its open parts, and returns the finished message.
    fn close_item(&self, mut item: Value, events: &mut ClosingEventWriter<'_>) -> Value {
        for part in self.parts.iter().filter(|part| !part.is_done) {
            let name = if part.is_refusal { "refusal" } else { "output_text" };
            let place = |event: Value| {
                let place = json!({
                    "item_id": item["id"],
                    "output_index": self.index,
                    "content_index": part.index,
                });
                merge_objects(event, place)
            };
            let mut text = json!({ part.text_member(): part.text });
            if !part.is_refusal {
                text["logprobs"] = json!([]);
            }
            events.push_event(&format!("response.{name}.done"), place(text));
            events
                .push_event("response.content_part.done", place(json!({ "part": part.to_json() })));
        }
        // The item states that it is incomplete, and contains the text that the client has
        // received.
        item["status"] = json!("incomplete");
        item["content"] = self.parts.iter().map(OutputItemPart::to_json).collect();
        let done = json!({ "output_index": self.index, "item": item });
        events.push_event("response.output_item.done", done);
        item
    }
}

impl OutputItemPart {
    fn text_member(&self) -> &'static str {
        if self.is_refusal { "refusal" } else { "text" }
    }

    fn to_json(&self) -> Value {
        if self.is_refusal {
            return json!({ "type": "refusal", "refusal": self.text });
        }
        json!({ "type": "output_text", "text": self.text, "annotations": [], "logprobs": [] })
    }
}

/// A writer of closing events that numbers them in order.
struct ClosingEventWriter<'a> {
    end: &'a mut Vec<u8>,
    sequence: u64,
}

impl ClosingEventWriter<'_> {
    fn push_event(&mut self, name: &str, event: Value) {
        let more = json!({ "type": name, "sequence_number": self.sequence });
        self.sequence += 1;
        push_event(self.end, Some(name), &merge_objects(event, more));
    }
}

/// Returns one object with the members of both.
fn merge_objects(mut object: Value, more: Value) -> Value {
    if let (Some(object), Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
    object
}

#[derive(Deserialize)]
struct ResponseStreamEvent<'a> {
    sequence_number: Option<u64>,
    output_index: Option<u64>,
    content_index: Option<u64>,
    #[serde(borrow)]
    response: Option<&'a RawValue>,
    #[serde(borrow)]
    item: Option<&'a RawValue>,
    #[serde(borrow)]
    part: Option<&'a RawValue>,
    #[serde(borrow)]
    delta: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct OutputItemType<'a> {
    #[serde(borrow)]
    r#type: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct BorrowedJsonText<'a>(#[serde(borrow)] Cow<'a, str>);

/// The maximum number of bytes stored for one stream. The longest answers of today's models need
/// half of it. Past the limit, a truncation writes an error, which repeats nothing.
const MAX_KEPT_BYTES: usize = 1024 * 1024;
