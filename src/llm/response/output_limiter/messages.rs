//! The state and the endings of an Anthropic Messages stream.

use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::event_pattern::LoneText;
use super::{CutSafety, LimitReachedError, OUTPUT_LIMIT_REACHED_CODE, TextEventEffect, push_event};
use crate::llm::budget::TokenUsage;
use crate::llm::response::output_estimate::OutputEstimate;
use crate::llm::response::usage_counts::parse_object;

/// The open parts in a stream of one message.
#[derive(Debug, Default)]
pub(super) struct MessagesStreamState {
    is_started: bool,
    /// True if the stream has stated its stop reason, its end or an error.
    is_stopped: bool,
    block: Option<OpenContentBlock>,
}

/// The open content block. Only one block is open at a time.
#[derive(Clone, Copy, Debug)]
struct OpenContentBlock {
    index: u64,
    is_text: bool,
}

impl MessagesStreamState {
    /// Updates the state by an event. Returns the event's text if it contains exactly one.
    pub(super) fn on_event(
        &mut self,
        name: &[u8],
        data: &[u8],
        written: &mut OutputEstimate,
    ) -> Option<LoneText> {
        match name {
            // Before `message_start` no ending other than an error is valid.
            b"message_start" => self.is_started = true,
            b"content_block_start" => self.start_block(data, written),
            b"content_block_delta" => {
                let delta = parse_object::<MessageStreamEvent<'_>>(data)?.delta?;
                let texts = [delta.text, delta.partial_json, delta.thinking];
                // `filter` counts each text as a side effect, so the iterator must run to its end.
                let mut counted = texts.into_iter().filter(|text| written.add_string(*text));
                let (first, more) = (counted.next(), counted.count());
                self.on_repeated_delta();
                let lone = first.flatten().filter(|_| more == 0)?;
                return LoneText::from_json_text(lone.get(), data, TextEventEffect::None);
            }
            b"content_block_stop" => self.block = None,
            b"message_delta" => {
                let delta =
                    parse_object::<MessageStreamEvent<'_>>(data).and_then(|event| event.delta);
                // Some upstreams send an empty stop reason, which is none.
                self.is_stopped |= delta
                    .and_then(|delta| delta.stop_reason)
                    .is_some_and(|reason| reason.get() != r#""""#);
            }
            b"message_stop" | b"error" => self.is_stopped = true,
            _ => (),
        }
        None
    }

    /// Records a delta: the message continues, whatever was stated before.
    pub(super) fn on_repeated_delta(&mut self) {
        self.is_stopped = false;
    }

    fn start_block(&mut self, data: &[u8], written: &mut OutputEstimate) {
        let Some(event) = parse_object::<MessageStreamEvent<'_>>(data) else { return };
        let Some(content) = event.content_block else { return };
        let is =
            |kind: &str| content.r#type.is_some_and(|name| name.get().trim_matches('"') == kind);
        // Anthropic sends thinking as a summary or encrypted, and charges it in full.
        if is("thinking") || is("redacted_thinking") {
            written.mark_partial();
        }
        written.add_string(content.text);
        written.add_string(content.name);
        // A new block after a stop reason shows that the message goes on.
        self.is_stopped = false;
        self.block =
            Some(OpenContentBlock { index: event.index.unwrap_or(0), is_text: is("text") });
    }

    /// Returns the safety of a truncation here. Only text may be truncated. A tool must not be
    /// called with half of its input, and the API accepts no thinking without the signature at its
    /// end.
    pub(super) fn cut_safety(&self) -> CutSafety {
        if self.is_stopped {
            CutSafety::Ended
        } else if self.is_started && self.block.is_none_or(|block| block.is_text) {
            CutSafety::Safe
        } else {
            CutSafety::Unsafe
        }
    }

    pub(super) fn write_graceful_ending(&self, usage: &TokenUsage, end: &mut Vec<u8>) {
        // The protocol requires this order: close the block, state the reason, stop the message.
        if let Some(block) = self.block {
            let stop = json!({ "type": "content_block_stop", "index": block.index });
            push_event(end, Some("content_block_stop"), &stop);
        }
        let delta = json!({
            "type": "message_delta",
            "delta": { "stop_reason": "max_tokens", "stop_sequence": null },
            "usage": { "output_tokens": usage.output },
        });
        push_event(end, Some("message_delta"), &delta);
        push_event(end, Some("message_stop"), &json!({ "type": "message_stop" }));
    }
}

pub(super) fn write_error_ending(reached: LimitReachedError, end: &mut Vec<u8>) {
    let error = json!({
        "type": "billing_error",
        "message": reached.to_string(),
        "code": OUTPUT_LIMIT_REACHED_CODE,
    });
    push_event(end, Some("error"), &json!({ "type": "error", "error": error }));
}

#[derive(Deserialize)]
struct MessageStreamEvent<'a> {
    index: Option<u64>,
    #[serde(borrow)]
    content_block: Option<ContentBlockStart<'a>>,
    #[serde(borrow)]
    delta: Option<ContentBlockDelta<'a>>,
}

#[derive(Deserialize)]
struct ContentBlockStart<'a> {
    #[serde(borrow)]
    r#type: Option<&'a RawValue>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    /// The name of the tool in a tool block.
    #[serde(borrow)]
    name: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ContentBlockDelta<'a> {
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    partial_json: Option<&'a RawValue>,
    #[serde(borrow)]
    thinking: Option<&'a RawValue>,
    #[serde(borrow)]
    stop_reason: Option<&'a RawValue>,
}
