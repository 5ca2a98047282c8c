//! What a response says about itself: the tokens it used, what it cost, how it ended.
//!
//! Most events say none of that and are recognised by a look at their name, or by what they do not
//! contain; only the few that may are parsed. Counts are taken where the protocol puts them and
//! nowhere else: a tool's arguments may well hold a `usage` of their own.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::Finish;
use super::sse::Event;
use crate::budget::{Nanodollars, Source, Tokens, Usage};
use crate::gateway::protocol::{Protocol, Route};

/// What has been heard so far. A value that is given again replaces the one before: all three
/// protocols report running totals, never differences.
#[derive(Debug)]
pub(super) struct Report {
    protocol: Protocol,
    is_turn: bool,
    finish: Finish,
    /// As the protocol counts it: Anthropic leaves the cache out.
    input: Option<u64>,
    output: Option<u64>,
    cache_read: Option<u64>,
    cache_write: Option<u64>,
    reasoning: Option<u64>,
    cost: Option<Nanodollars>,
}

/// What an event turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// Of a chat stream: usage and no choices, the chunk that `include_usage` asks for.
    UsageChunk,
    Other,
}

impl Report {
    pub(super) fn new(route: Route) -> Self {
        Self {
            protocol: route.protocol(),
            is_turn: route.is_turn(),
            finish: Finish::Unfinished,
            input: None,
            output: None,
            cache_read: None,
            cache_write: None,
            reasoning: None,
            cost: None,
        }
    }

    pub(super) fn finish(&self) -> Finish {
        self.finish
    }

    pub(super) fn cost(&self) -> Option<Nanodollars> {
        self.cost
    }

    /// Whatever has been reported, with zeros for what has not; `None` where nothing has.
    pub(super) fn so_far(&self) -> Option<Usage> {
        let input = self.input.unwrap_or(0);
        let (read, write) = (self.cache_read.unwrap_or(0), self.cache_write.unwrap_or(0));
        let input = match self.protocol {
            Protocol::Messages => input.saturating_add(read).saturating_add(write),
            Protocol::Chat | Protocol::Responses => input,
        };
        let output = self.output.unwrap_or(0);
        let is_known = input > 0 || self.output.is_some();
        // A part is at most the whole, whatever the provider says.
        let read = read.min(input);
        is_known.then_some(Usage {
            input: Tokens(input),
            output: Tokens(output),
            cache_read: Tokens(read),
            cache_write: Tokens(write.min(input - read)),
            reasoning: Tokens(self.reasoning.unwrap_or(0).min(output)),
            source: Source::Provider,
        })
    }

    /// The report, if it is whole. A turn that read nothing is a placeholder, not a report.
    pub(super) fn usage(&self) -> Option<Usage> {
        let is_whole = self.output.is_some() || !self.is_turn;
        self.so_far().filter(|usage| is_whole && !usage.input.is_zero())
    }

    pub(super) fn hear(&mut self, event: &Event<'_>) -> Heard {
        match self.protocol {
            Protocol::Chat => self.hear_chunk(event),
            Protocol::Responses | Protocol::Messages => {
                self.hear_named(event);
                Heard::Other
            }
        }
    }

    fn hear_chunk(&mut self, event: &Event<'_>) -> Heard {
        let data = &*event.data;
        if data == b"[DONE]" {
            self.ended(Finish::Terminated);
        } else if event.name == b"error" {
            self.ended(Finish::Errored);
        } else if (has_value(data, &USAGE) || has_value(data, &ERROR))
            && let Ok(chunk) = serde_json::from_slice::<Payload<'_>>(data)
        {
            if chunk.error.is_some() {
                self.ended(Finish::Errored);
            }
            if let Some(usage) = chunk.usage {
                self.hear_usage(usage.get());
                if chunk.choices.is_some_and(is_empty_array) {
                    return Heard::UsageChunk;
                }
            }
        }
        Heard::Other
    }

    /// Responses and Messages name their events, on a line of their own and in the data.
    fn hear_named(&mut self, event: &Event<'_>) {
        let data = &*event.data;
        let name = match event.name {
            b"" | b"message" => leading_type(data).or_else(|| any_type(data)),
            name => Some(name),
        };
        match name {
            Some(b"error") => self.ended(Finish::Errored),
            Some(b"message_stop") => self.ended(Finish::Terminated),
            Some(b"response.completed" | b"response.incomplete" | b"response.failed") => {
                self.ended(Finish::Terminated);
                self.hear_payload(data);
            }
            Some(b"message_start" | b"message_delta") | None => self.hear_payload(data),
            Some(_) => (),
        }
    }

    fn hear_payload(&mut self, data: &[u8]) {
        let Ok(payload) = serde_json::from_slice::<Payload<'_>>(data) else { return };
        if payload.error.is_some() {
            self.ended(Finish::Errored);
        }
        let (start, end) = match self.protocol {
            Protocol::Messages => (payload.message, payload.usage),
            Protocol::Chat | Protocol::Responses => (None, inner_usage(payload.response)),
        };
        if let Some(usage) = inner_usage(start) {
            self.hear_usage(usage.get());
            // What had been generated when the message began; `message_delta` has the answer.
            self.output = None;
        }
        if let Some(usage) = end {
            self.hear_usage(usage.get());
        }
    }

    /// Reads a usage object. What is not a whole number of at least zero is passed over.
    pub(super) fn hear_usage(&mut self, usage: &str) {
        let Ok(counts) = serde_json::from_str::<Counts<'_>>(usage) else { return };
        let (input, output, input_details, output_details) = match self.protocol {
            Protocol::Chat => (
                counts.prompt_tokens,
                counts.completion_tokens,
                counts.prompt_tokens_details,
                counts.completion_tokens_details,
            ),
            Protocol::Responses | Protocol::Messages => (
                counts.input_tokens,
                counts.output_tokens,
                counts.input_tokens_details,
                counts.output_tokens_details,
            ),
        };
        let cached = details(input_details).cached_tokens;
        replace(&mut self.input, count(input));
        replace(&mut self.output, count(output));
        replace(&mut self.cache_read, count(counts.cache_read_input_tokens).or(count(cached)));
        replace(&mut self.cache_write, count(counts.cache_creation_input_tokens));
        replace(&mut self.reasoning, count(details(output_details).reasoning_tokens));
        // In a Messages stream LiteLLM's figure leaves the input out.
        if self.protocol != Protocol::Messages {
            replace(&mut self.cost, counts.cost.and_then(|cost| Nanodollars::parse(cost.get())));
        }
    }

    /// LiteLLM ends a failed chat stream with `[DONE]`: an error stays an error.
    pub(super) fn ended(&mut self, finish: Finish) {
        self.finish = self.finish.max(finish);
    }
}

impl Heard {
    pub(super) fn is_usage_chunk(self) -> bool {
        self == Self::UsageChunk
    }
}

/// The members that matter, of whichever event has them.
#[derive(Deserialize)]
struct Payload<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    /// Chat.
    #[serde(borrow)]
    choices: Option<&'a RawValue>,
    /// Messages: of `message_start`.
    #[serde(borrow)]
    message: Option<&'a RawValue>,
    /// Responses.
    #[serde(borrow)]
    response: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Typed<'a> {
    #[serde(borrow)]
    r#type: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Inner<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
}

/// A usage object of any protocol; each member's text, because one that is wrong spoils no other.
#[derive(Deserialize)]
struct Counts<'a> {
    #[serde(borrow)]
    prompt_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    completion_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    completion_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    input_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    output_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    output_tokens_details: Option<&'a RawValue>,
    /// Anthropic; LiteLLM has it in chat too, where `prompt_tokens` includes it.
    #[serde(borrow)]
    cache_read_input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_creation_input_tokens: Option<&'a RawValue>,
    /// LiteLLM, in dollars.
    #[serde(borrow)]
    cost: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct Details<'a> {
    #[serde(borrow)]
    cached_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning_tokens: Option<&'a RawValue>,
}

fn inner_usage(outer: Option<&RawValue>) -> Option<&RawValue> {
    serde_json::from_str::<Inner<'_>>(outer?.get()).ok()?.usage
}

fn details(details: Option<&RawValue>) -> Details<'_> {
    details.and_then(|details| serde_json::from_str(details.get()).ok()).unwrap_or_default()
}

fn count(number: Option<&RawValue>) -> Option<u64> {
    number?.get().parse().ok()
}

fn replace<T>(old: &mut Option<T>, new: Option<T>) {
    if new.is_some() {
        *old = new;
    }
}

fn is_empty_array(value: &RawValue) -> bool {
    value.get().strip_prefix('[').is_some_and(|rest| rest.trim_start() == "]")
}

/// Whether the JSON text seems to have the key with a value other than null. It may be the key of
/// an inner object, but not a piece of a string: there its quotes would be escaped.
fn has_value(mut json: &[u8], key: &Finder<'_>) -> bool {
    while let Some(at) = key.find(json) {
        json = &json[at + key.needle().len()..];
        if let Some(value) = json.trim_ascii_start().strip_prefix(b":")
            && !value.trim_ascii_start().starts_with(b"null")
        {
            return true;
        }
    }
    false
}

/// The value of `type` if that is the first key, as it nearly always is.
fn leading_type(json: &[u8]) -> Option<&[u8]> {
    let mut rest = json;
    for expected in [&b"{"[..], b"\"type\"", b":", b"\""] {
        rest = rest.trim_ascii_start().strip_prefix(expected)?;
    }
    rest.split(|byte| *byte == b'"').next()
}

/// The value of `type` wherever it stands.
fn any_type(json: &[u8]) -> Option<&[u8]> {
    let name = serde_json::from_slice::<Typed<'_>>(json).ok()?.r#type?.get();
    name.strip_prefix('"')?.strip_suffix('"').map(str::as_bytes)
}

/// Immutable, and costly enough to build that it pays to do so once.
static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"error\""));
