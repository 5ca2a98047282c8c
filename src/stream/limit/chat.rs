//! Chat completions, and the older completions beside them.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{Effect, List, OUTPUT_LIMIT_REACHED, Reached, State, put};
use crate::budget::Usage;
use crate::protocol::Route;
use crate::stream::pattern::LoneText;
use crate::stream::tally::object;
use crate::stream::written::Written;

/// What is open in a stream of chunks.
#[derive(Debug)]
pub(super) struct Answer {
    route: Route,
    shows_usage: bool,
    /// Of the first chunk that has choices: Azure sends one without before it, with an empty id.
    envelope: Option<Envelope>,
    choices: Vec<Choice>,
    /// There are more choices than we follow.
    has_more: bool,
}

/// What all chunks of a stream have alike.
#[derive(Debug, Default, Deserialize)]
struct Envelope {
    #[serde(default)]
    id: Value,
    #[serde(default)]
    created: Value,
    #[serde(default)]
    model: Value,
}

#[derive(Debug)]
struct Choice {
    index: u64,
    part: Part,
}

/// What a chunk says of one choice.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(in crate::stream) struct Advance {
    index: u64,
    is_text: bool,
    is_call: bool,
    is_thinking: bool,
    is_finished: bool,
}

/// What a choice is in the midst of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Text,
    /// Reasoning that goes back signed, as LiteLLM has it of Claude.
    Thinking,
    /// One call or several: only the reason to finish tells that the last of them is whole.
    ToolCalls,
    Finished,
    /// Text came after the reason to finish: nobody can tell whether the choice ends at all.
    Resumed,
}

impl Answer {
    pub(super) fn new(route: Route, shows_usage: bool) -> Self {
        Self { route, shows_usage, envelope: None, choices: Vec::new(), has_more: false }
    }

    /// Follows a chunk; returns its text, if it is one, of one choice.
    pub(super) fn hear(&mut self, data: &[u8], written: &mut Written) -> Option<LoneText> {
        let choices = object::<Chunk<'_>>(data)?.choices?;
        let (before, mut last) = (written.pieces(), None);
        for update in choices.iter() {
            let advance = update.count(written);
            self.advance(advance);
            last = Some((update, advance));
        }
        if self.envelope.is_none() && !self.choices.is_empty() {
            self.envelope = object(data);
        }
        let is_lone = written.pieces() == before + 1 && choices.more.is_empty();
        let (update, advance) = last.filter(|_| is_lone && self.envelope.is_some())?;
        let text = update.texts().find(|text| text.get().len() > EMPTY)?;
        LoneText::of(text.get(), data, Effect::Choice(advance))
    }

    /// Takes a choice further.
    pub(super) fn advance(&mut self, advance: Advance) {
        let Advance { index, is_text, is_call, is_thinking, is_finished } = advance;
        let Some(part) = self.part(index) else { return };
        *part = match *part {
            Part::Resumed => Part::Resumed,
            Part::Finished if is_call || is_thinking || is_text => Part::Resumed,
            _ if is_finished => Part::Finished,
            Part::ToolCalls => Part::ToolCalls,
            _ if is_call => Part::ToolCalls,
            _ if is_thinking => Part::Thinking,
            _ if is_text => Part::Text,
            part => part,
        };
    }

    /// What the choice is in; one that is new is in nothing yet.
    fn part(&mut self, index: u64) -> Option<&mut Part> {
        let known = self.choices.iter().position(|choice| choice.index == index);
        let at = known.unwrap_or(self.choices.len());
        if at == MAX_CHOICES {
            self.has_more = true;
        } else if known.is_none() {
            self.choices.push(Choice { index, part: Part::Text });
        }
        self.choices.get_mut(at).map(|choice| &mut choice.part)
    }

    pub(super) fn state(&self) -> State {
        let is_in = |parts: &[Part]| self.choices.iter().any(|choice| parts.contains(&choice.part));
        if self.has_more || is_in(&[Part::Thinking, Part::ToolCalls, Part::Resumed]) {
            State::Halfway
        } else if is_in(&[Part::Text]) {
            State::Sound
        } else {
            State::Ended
        }
    }

    pub(super) fn finish(&self, usage: &Usage, end: &mut Vec<u8>) {
        for choice in self.choices.iter().filter(|choice| choice.part != Part::Finished) {
            let mut last =
                json!({ "index": choice.index, "logprobs": null, "finish_reason": "length" });
            if self.route == Route::Completions {
                last["text"] = json!("");
            } else {
                last["delta"] = json!({});
            }
            put(end, None, &self.chunk(&json!([last])));
        }
        if self.shows_usage {
            let mut chunk = self.chunk(&json!([]));
            chunk["usage"] = json!({
                "prompt_tokens": usage.input,
                "completion_tokens": usage.output,
                "total_tokens": usage.total(),
            });
            put(end, None, &chunk);
        }
        end.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn chunk(&self, choices: &Value) -> Value {
        let unknown = Envelope::default();
        let Envelope { id, created, model } = self.envelope.as_ref().unwrap_or(&unknown);
        let is_older = self.route == Route::Completions;
        json!({
            "id": id,
            "object": if is_older { "text_completion" } else { "chat.completion.chunk" },
            "created": created,
            "model": model,
            "choices": choices,
        })
    }
}

/// Some upstreams send an empty reason with every chunk.
fn is_reason(reason: &RawValue) -> bool {
    reason.get() != r#""""#
}

/// An error, and no `[DONE]` after it: that would look like success.
pub(super) fn fail(reached: Reached, end: &mut Vec<u8>) {
    let error = json!({
        "message": reached.to_string(),
        "type": "insufficient_quota",
        "param": null,
        "code": OUTPUT_LIMIT_REACHED,
    });
    put(end, None, &json!({ "error": error }));
}

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow)]
    choices: Option<List<Update<'a>>>,
}

/// One choice's part of a chunk.
#[derive(Deserialize)]
struct Update<'a> {
    index: Option<u64>,
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
    /// Of the older completions.
    #[serde(borrow)]
    text: Option<&'a RawValue>,
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow)]
    refusal: Option<&'a RawValue>,
    /// The name that vLLM and LiteLLM have for it.
    #[serde(borrow)]
    reasoning_content: Option<&'a RawValue>,
    /// Ollama's name.
    #[serde(borrow)]
    reasoning: Option<&'a RawValue>,
    /// LiteLLM's, beside `reasoning_content`: the same with its signature.
    thinking_blocks: Option<List<IgnoredAny>>,
    #[serde(borrow)]
    tool_calls: Option<List<ToolCall<'a>>>,
    #[serde(borrow)]
    function_call: Option<Called<'a>>,
}

#[derive(Deserialize)]
struct ToolCall<'a> {
    #[serde(borrow)]
    function: Option<Called<'a>>,
    #[serde(borrow)]
    custom: Option<Called<'a>>,
}

#[derive(Deserialize)]
struct Called<'a> {
    #[serde(borrow)]
    name: Option<&'a RawValue>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
}

impl<'a> Update<'a> {
    /// Counts what is written, and says what becomes of the choice.
    fn count(&self, written: &mut Written) -> Advance {
        let delta = self.delta.as_ref();
        let is_text = written.add(self.text)
            | delta.is_some_and(|delta| written.add(delta.content) | written.add(delta.refusal));
        Advance {
            index: self.index.unwrap_or(0),
            is_text,
            is_call: delta.is_some_and(|delta| delta.calls(written)),
            is_thinking: delta.is_some_and(|delta| delta.thinks(written)),
            is_finished: self.finish_reason.is_some_and(is_reason),
        }
    }

    /// The strings that are counted.
    fn texts(&self) -> impl Iterator<Item = &'a RawValue> {
        let delta = self.delta.iter().flat_map(|delta| {
            let reasoning = delta.reasoning_content.or(delta.reasoning);
            let called = delta.called().flat_map(Called::texts);
            [delta.content, delta.refusal, reasoning].into_iter().flatten().chain(called)
        });
        let texts = self.text.into_iter().chain(delta);
        texts.filter(|text| text.get().starts_with('"'))
    }
}

impl<'a> Called<'a> {
    fn texts(&self) -> impl Iterator<Item = &'a RawValue> + use<'a> {
        [self.name, self.arguments, self.input].into_iter().flatten()
    }
}

impl<'a> Delta<'a> {
    fn called(&self) -> impl Iterator<Item = &Called<'a>> {
        let calls = self.tool_calls.iter().flat_map(List::iter);
        let called = calls.flat_map(|call| [&call.function, &call.custom]);
        called.chain([&self.function_call]).flatten()
    }

    /// Counts the calls, and says whether there are any. Some upstreams send an empty list.
    fn calls(&self, written: &mut Written) -> bool {
        for text in self.called().flat_map(Called::texts) {
            written.add(Some(text));
        }
        self.function_call.is_some()
            || self.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty())
    }

    /// Counts the reasoning, and says whether it is of the kind that is signed.
    fn thinks(&self, written: &mut Written) -> bool {
        if written.add(self.reasoning_content.or(self.reasoning)) {
            written.hide();
        }
        let has_blocks = self.thinking_blocks.as_ref().is_some_and(|blocks| !blocks.is_empty());
        if has_blocks {
            written.hide();
        }
        has_blocks
    }
}

/// Length of a JSON string that is empty.
const EMPTY: usize = 2;

/// The most that OpenAI allows of `n`.
const MAX_CHOICES: usize = 128;
