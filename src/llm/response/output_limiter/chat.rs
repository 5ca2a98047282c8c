//! The state and the endings of a chat completions stream, and of the older completions.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::event_pattern::LoneText;
use super::{
    CutSafety, LimitReachedError, OUTPUT_LIMIT_REACHED_CODE, OneOrMany, TextEventEffect, push_event,
};
use crate::llm::budget::TokenUsage;
use crate::llm::protocol::GatewayRoute;
use crate::llm::response::output_estimate::OutputEstimate;
use crate::llm::response::usage_counts::parse_object;

/// The open parts in a stream of chunks.
#[derive(Debug)]
pub(super) struct ChatStreamState {
    route: GatewayRoute,
    shows_usage: bool,
    /// The common members, from the first chunk that has choices. Azure sends an earlier chunk
    /// without choices and with an empty id.
    envelope: Option<ChunkEnvelope>,
    choices: Vec<ChoiceState>,
    /// True if the stream has more than [`MAX_CHOICES`] choices.
    has_more: bool,
}

/// The members that all chunks of a stream have in common.
#[derive(Debug, Default, Deserialize)]
struct ChunkEnvelope {
    #[serde(default)]
    id: Value,
    #[serde(default)]
    created: Value,
    #[serde(default)]
    model: Value,
}

#[derive(Debug)]
struct ChoiceState {
    index: u64,
    part: ChoicePart,
}

/// The facts that a chunk states about one choice.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(in crate::llm::response) struct ChoiceAdvance {
    index: u64,
    is_text: bool,
    is_call: bool,
    is_thinking: bool,
    is_finished: bool,
}

/// The part of the answer that a choice is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChoicePart {
    Text,
    /// Reasoning that the client sends back with a signature, as LiteLLM does for Claude.
    Thinking,
    /// One tool call or several. Only the finish reason shows that the last call is complete.
    ToolCalls,
    Finished,
    /// Text came after the finish reason, so the end of the choice is unknown.
    Resumed,
}

impl ChatStreamState {
    pub(super) fn new(route: GatewayRoute, shows_usage: bool) -> Self {
        Self { route, shows_usage, envelope: None, choices: Vec::new(), has_more: false }
    }

    /// Updates the state by a chunk. Returns the chunk's text if it is the only text and belongs to
    /// one choice.
    pub(super) fn on_chunk(
        &mut self,
        data: &[u8],
        written: &mut OutputEstimate,
    ) -> Option<LoneText> {
        let choices = parse_object::<ChatStreamChunk<'_>>(data)?.choices?;
        let (before, mut last) = (written.text_count(), None);
        for update in choices.iter() {
            let advance = update.count_update(written);
            self.advance_choice(advance);
            last = Some((update, advance));
        }
        // The data is parsed a second time for the envelope, but only once per stream.
        if self.envelope.is_none() && !self.choices.is_empty() {
            self.envelope = parse_object(data);
        }
        // An event can become a pattern only after the envelope is known: repeated events are not
        // parsed again.
        let is_lone = written.text_count() == before + 1 && choices.more.is_empty();
        let (update, advance) = last.filter(|_| is_lone && self.envelope.is_some())?;
        // Exactly one text was counted, so the first string that is not empty is that text.
        let text = update.counted_texts().find(|text| text.get().len() > EMPTY_STRING_BYTES)?;
        LoneText::from_json_text(text.get(), data, TextEventEffect::Choice(advance))
    }

    /// Updates the state of a choice.
    pub(super) fn advance_choice(&mut self, advance: ChoiceAdvance) {
        let ChoiceAdvance { index, is_text, is_call, is_thinking, is_finished } = advance;
        let Some(part) = self.choice_part(index) else { return };
        // Order of the arms: 1. a resumed choice stays resumed; 2. content after the finish reason
        // resumes the choice; 3. a finish reason ends it; 4. tool calls last until the finish; 5.
        // thinking and text replace each other.
        *part = match *part {
            ChoicePart::Resumed => ChoicePart::Resumed,
            ChoicePart::Finished if is_call || is_thinking || is_text => ChoicePart::Resumed,
            _ if is_finished => ChoicePart::Finished,
            ChoicePart::ToolCalls => ChoicePart::ToolCalls,
            _ if is_call => ChoicePart::ToolCalls,
            _ if is_thinking => ChoicePart::Thinking,
            _ if is_text => ChoicePart::Text,
            part => part,
        };
    }

    /// Returns the part that the choice is in. A new choice starts as text. Returns `None` past
    /// [`MAX_CHOICES`].
    fn choice_part(&mut self, index: u64) -> Option<&mut ChoicePart> {
        let known = self.choices.iter().position(|choice| choice.index == index);
        let at = known.unwrap_or(self.choices.len());
        // A choice past the limit is not followed. The flag makes every later truncation an error.
        if at == MAX_CHOICES {
            self.has_more = true;
        } else if known.is_none() {
            self.choices.push(ChoiceState { index, part: ChoicePart::Text });
        }
        self.choices.get_mut(at).map(|choice| &mut choice.part)
    }

    /// Returns the safety of a truncation here. One unsafe choice makes the whole stream unsafe.
    pub(super) fn cut_safety(&self) -> CutSafety {
        let is_in =
            |parts: &[ChoicePart]| self.choices.iter().any(|choice| parts.contains(&choice.part));
        if self.has_more
            || is_in(&[ChoicePart::Thinking, ChoicePart::ToolCalls, ChoicePart::Resumed])
        {
            CutSafety::Unsafe
        } else if is_in(&[ChoicePart::Text]) {
            CutSafety::Safe
        } else {
            CutSafety::Ended
        }
    }

    /// Appends the ending of a model at its limit: a finish reason for each open choice, the usage
    /// if requested, and `[DONE]`.
    pub(super) fn write_graceful_ending(&self, usage: &TokenUsage, end: &mut Vec<u8>) {
        // A finished choice already has its reason; a second one would contradict it.
        for choice in self.choices.iter().filter(|choice| choice.part != ChoicePart::Finished) {
            let mut last =
                json!({ "index": choice.index, "logprobs": null, "finish_reason": "length" });
            if self.route == GatewayRoute::Completions {
                last["text"] = json!("");
            } else {
                last["delta"] = json!({});
            }
            push_event(end, None, &self.chunk_json(&json!([last])));
        }
        if self.shows_usage {
            let mut chunk = self.chunk_json(&json!([]));
            chunk["usage"] = json!({
                "prompt_tokens": usage.input,
                "completion_tokens": usage.output,
                "total_tokens": usage.total_tokens(),
            });
            push_event(end, None, &chunk);
        }
        end.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn chunk_json(&self, choices: &Value) -> Value {
        // Clients group chunks by these members, so the ending repeats them from the stream.
        let unknown = ChunkEnvelope::default();
        let ChunkEnvelope { id, created, model } = self.envelope.as_ref().unwrap_or(&unknown);
        let is_older = self.route == GatewayRoute::Completions;
        json!({
            "id": id,
            "object": if is_older { "text_completion" } else { "chat.completion.chunk" },
            "created": created,
            "model": model,
            "choices": choices,
        })
    }
}

/// Returns true if a finish reason is not empty. Some upstreams send an empty reason with every
/// chunk.
fn is_finish_reason(reason: &RawValue) -> bool {
    reason.get() != r#""""#
}

/// Appends an error without `[DONE]`, because `[DONE]` would look like success.
pub(super) fn write_error_ending(reached: LimitReachedError, end: &mut Vec<u8>) {
    let error = json!({
        "message": reached.to_string(),
        "type": "insufficient_quota",
        "param": null,
        "code": OUTPUT_LIMIT_REACHED_CODE,
    });
    push_event(end, None, &json!({ "error": error }));
}

#[derive(Deserialize)]
struct ChatStreamChunk<'a> {
    #[serde(borrow)]
    choices: Option<OneOrMany<ChoiceUpdate<'a>>>,
}

/// The part of a chunk that belongs to one choice.
#[derive(Deserialize)]
struct ChoiceUpdate<'a> {
    index: Option<u64>,
    #[serde(borrow)]
    delta: Option<ChoiceDelta<'a>>,
    /// The text of the older completions.
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ChoiceDelta<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    refusal: Option<&'a RawValue>,
    /// The reasoning, by the name that vLLM and LiteLLM use.
    #[serde(borrow)]
    reasoning_content: Option<&'a RawValue>,
    /// The reasoning, by the name that Ollama uses.
    #[serde(borrow)]
    reasoning: Option<&'a RawValue>,
    /// LiteLLM's copy of `reasoning_content` with its signature.
    thinking_blocks: Option<OneOrMany<IgnoredAny>>,
    #[serde(borrow)]
    tool_calls: Option<OneOrMany<ToolCallDelta<'a>>>,
    #[serde(borrow)]
    function_call: Option<ToolCallTarget<'a>>,
}

#[derive(Deserialize)]
struct ToolCallDelta<'a> {
    #[serde(borrow)]
    function: Option<ToolCallTarget<'a>>,
    #[serde(borrow)]
    custom: Option<ToolCallTarget<'a>>,
}

#[derive(Deserialize)]
struct ToolCallTarget<'a> {
    #[serde(borrow)]
    name: Option<&'a RawValue>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
}

impl<'a> ChoiceUpdate<'a> {
    /// Counts the text of the update, and returns its effect on the choice.
    fn count_update(&self, written: &mut OutputEstimate) -> ChoiceAdvance {
        let delta = self.delta.as_ref();
        // `|` instead of `||`: every text must be counted, even after the first.
        let is_text = written.add_string(self.text)
            | delta.is_some_and(|delta| {
                written.add_string(delta.content) | written.add_string(delta.refusal)
            });
        ChoiceAdvance {
            index: self.index.unwrap_or(0),
            is_text,
            is_call: delta.is_some_and(|delta| delta.count_calls(written)),
            is_thinking: delta.is_some_and(|delta| delta.count_reasoning(written)),
            is_finished: self.finish_reason.is_some_and(is_finish_reason),
        }
    }

    /// Returns the strings that are counted.
    fn counted_texts(&self) -> impl Iterator<Item = &'a RawValue> {
        let delta = self.delta.iter().flat_map(|delta| {
            let reasoning = delta.reasoning_content.or(delta.reasoning);
            let called = delta.called_functions().flat_map(ToolCallTarget::argument_texts);
            [delta.content, delta.refusal, reasoning].into_iter().flatten().chain(called)
        });
        let texts = self.text.into_iter().chain(delta);
        texts.filter(|text| text.get().starts_with('"'))
    }
}

impl<'a> ToolCallTarget<'a> {
    fn argument_texts(&self) -> impl Iterator<Item = &'a RawValue> + use<'a> {
        [self.name, self.arguments, self.input].into_iter().flatten()
    }
}

impl<'a> ChoiceDelta<'a> {
    fn called_functions(&self) -> impl Iterator<Item = &ToolCallTarget<'a>> {
        let calls = self.tool_calls.iter().flat_map(OneOrMany::iter);
        let called = calls.flat_map(|call| [&call.function, &call.custom]);
        called.chain([&self.function_call]).flatten()
    }

    /// Counts the tool calls. Returns true if there are any; some upstreams send an empty list.
    fn count_calls(&self, written: &mut OutputEstimate) -> bool {
        for text in self.called_functions().flat_map(ToolCallTarget::argument_texts) {
            written.add_string(Some(text));
        }
        self.function_call.is_some()
            || self.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty())
    }

    /// Counts the reasoning. Returns true if it is of the signed kind.
    fn count_reasoning(&self, written: &mut OutputEstimate) -> bool {
        // Upstreams that send both names repeat the same reasoning, so only one is counted.
        if written.add_string(self.reasoning_content.or(self.reasoning)) {
            written.mark_partial();
        }
        let has_blocks = self.thinking_blocks.as_ref().is_some_and(|blocks| !blocks.is_empty());
        if has_blocks {
            written.mark_partial();
        }
        has_blocks
    }
}

/// The length of an empty JSON string, in bytes.
const EMPTY_STRING_BYTES: usize = 2;

/// The maximum number of choices. OpenAI allows the same number for `n`.
const MAX_CHOICES: usize = 128;
