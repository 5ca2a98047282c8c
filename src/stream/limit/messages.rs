//! Anthropic Messages.

use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::{Effect, OUTPUT_LIMIT_REACHED, Reached, State, put};
use crate::budget::Usage;
use crate::stream::pattern::LoneText;
use crate::stream::tally::object;
use crate::stream::written::Written;

/// What is open in a stream of one message.
#[derive(Debug, Default)]
pub(super) struct Message {
    is_started: bool,
    /// The reason to stop has been told.
    is_stopped: bool,
    block: Option<Block>,
}

/// The open content block. There is one at a time.
#[derive(Clone, Copy, Debug)]
struct Block {
    index: u64,
    is_text: bool,
}

impl Message {
    /// Follows an event; returns its text, if it is one.
    pub(super) fn hear(
        &mut self,
        name: &[u8],
        data: &[u8],
        written: &mut Written,
    ) -> Option<LoneText> {
        match name {
            b"message_start" => self.is_started = true,
            b"content_block_start" => self.start(data, written),
            b"content_block_delta" => {
                let delta = object::<Event<'_>>(data)?.delta?;
                let texts = [delta.text, delta.partial_json, delta.thinking];
                let mut counted = texts.into_iter().filter(|text| written.add(*text));
                let (first, more) = (counted.next(), counted.count());
                self.go_on();
                let lone = first.flatten().filter(|_| more == 0)?;
                return LoneText::of(lone.get(), data, Effect::None);
            }
            b"content_block_stop" => self.block = None,
            b"message_delta" => {
                let delta = object::<Event<'_>>(data).and_then(|event| event.delta);
                self.is_stopped |= delta
                    .and_then(|delta| delta.stop_reason)
                    .is_some_and(|reason| reason.get() != r#""""#);
            }
            b"message_stop" | b"error" => self.is_stopped = true,
            _ => (),
        }
        None
    }

    /// A delta has come.
    pub(super) fn go_on(&mut self) {
        self.is_stopped = false;
    }

    fn start(&mut self, data: &[u8], written: &mut Written) {
        let Some(event) = object::<Event<'_>>(data) else { return };
        let Some(content) = event.content_block else { return };
        let is =
            |kind: &str| content.r#type.is_some_and(|name| name.get().trim_matches('"') == kind);
        if is("thinking") || is("redacted_thinking") {
            written.hide();
        }
        written.add(content.text);
        written.add(content.name);
        self.is_stopped = false;
        self.block = Some(Block { index: event.index.unwrap_or(0), is_text: is("text") });
    }

    /// Of all kinds of blocks only text may be cut short: a tool must not be called with half of its
    /// input, and the API takes no thinking back without the signature at its end.
    pub(super) fn state(&self) -> State {
        if self.is_stopped {
            State::Ended
        } else if self.is_started && self.block.is_none_or(|block| block.is_text) {
            State::Sound
        } else {
            State::Halfway
        }
    }

    pub(super) fn finish(&self, usage: &Usage, end: &mut Vec<u8>) {
        if let Some(block) = self.block {
            let stop = json!({ "type": "content_block_stop", "index": block.index });
            put(end, Some("content_block_stop"), &stop);
        }
        let delta = json!({
            "type": "message_delta",
            "delta": { "stop_reason": "max_tokens", "stop_sequence": null },
            "usage": { "output_tokens": usage.output },
        });
        put(end, Some("message_delta"), &delta);
        put(end, Some("message_stop"), &json!({ "type": "message_stop" }));
    }
}

pub(super) fn fail(reached: Reached, end: &mut Vec<u8>) {
    let error = json!({
        "type": "billing_error",
        "message": reached.to_string(),
        "code": OUTPUT_LIMIT_REACHED,
    });
    put(end, Some("error"), &json!({ "type": "error", "error": error }));
}

#[derive(Deserialize)]
struct Event<'a> {
    index: Option<u64>,
    #[serde(borrow)]
    content_block: Option<Content<'a>>,
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
}

#[derive(Deserialize)]
struct Content<'a> {
    #[serde(borrow)]
    r#type: Option<&'a RawValue>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    /// Of a tool.
    #[serde(borrow)]
    name: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    partial_json: Option<&'a RawValue>,
    #[serde(borrow)]
    thinking: Option<&'a RawValue>,
    #[serde(borrow)]
    stop_reason: Option<&'a RawValue>,
}
