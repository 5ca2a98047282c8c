//! What a response says about itself: the tokens it used, what it cost, how it ended.
//!
//! Most events say none of that and are recognised by a look at their name, or by what they do not
//! contain; only the few that may are parsed. Counts are taken where the protocol puts them and
//! nowhere else: a tool's arguments may well hold a `usage` of their own.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::delta::Pattern;
use super::limit::{Allowance, Limit};
use super::sse::Event;
use super::tally::{Tally, object};
use super::written::Written;
use super::{Finish, delta};
use crate::budget::{Nanodollars, Usage};
use crate::protocol::{Protocol, Route};

/// What has been heard so far.
#[derive(Debug)]
pub(super) struct Report {
    route: Route,
    finish: Finish,
    tally: Tally,
    written: Written,
    pattern: Option<Box<Pattern>>,
    /// `None` where the output is not limited: then only few events are parsed.
    limit: Option<Box<Limit>>,
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
            route,
            finish: Finish::Unfinished,
            tally: Tally::default(),
            written: Written::default(),
            pattern: None,
            limit: None,
        }
    }

    /// See [`Limit::new`].
    pub(super) fn limit(&mut self, allowance: Allowance, shows_usage: bool) {
        self.limit = Some(Box::new(Limit::new(self.route, allowance, shows_usage)));
    }

    /// What ends the stream after the event that was heard last, if that was one too many.
    pub(super) fn cut(&mut self) -> Option<Vec<u8>> {
        let limit = self.limit.as_mut()?;
        limit.cut(self.written.at_least(), self.tally.usage(self.route.protocol()))
    }

    pub(super) fn is_cut(&self) -> bool {
        self.limit.as_ref().is_some_and(|limit| limit.is_cut())
    }

    pub(super) fn is_limited(&self) -> bool {
        self.limit.is_some()
    }

    /// The text that was seen.
    pub(super) fn written(&self) -> &Written {
        &self.written
    }

    /// Counts a text of a unary body by its length.
    pub(super) fn hear_text(&mut self, length: u64) {
        self.written.add_length(length);
    }

    pub(super) fn finish(&self) -> Finish {
        self.finish
    }

    pub(super) fn cost(&self) -> Option<Nanodollars> {
        self.tally.cost()
    }

    /// Whatever has been reported, with zeros for what has not; `None` where nothing has.
    pub(super) fn so_far(&self) -> Option<Usage> {
        self.tally.usage(self.route.protocol())
    }

    /// The report, if it is whole. A turn that read nothing is a placeholder, not a report.
    pub(super) fn usage(&self) -> Option<Usage> {
        let is_whole = self.tally.has_output() || !self.route.is_turn();
        self.so_far().filter(|usage| is_whole && !usage.input.is_zero())
    }

    pub(super) fn hear(&mut self, event: &Event<'_>) -> Heard {
        match self.route.protocol() {
            Protocol::Chat => {
                if self.hear_text_alone(event) {
                    return Heard::Other;
                }
                let text = self.count_chunk(&event.data);
                self.hear_chunk(event, text)
            }
            Protocol::Responses | Protocol::Messages => {
                if !self.hear_text_alone(event) {
                    self.hear_named(event);
                }
                Heard::Other
            }
        }
    }

    /// Reads the text of a usage object; says no to anything else.
    pub(super) fn hear_usage_text(&mut self, usage: &[u8]) -> bool {
        self.tally.read(self.route.protocol(), usage)
    }

    /// LiteLLM ends a failed chat stream with `[DONE]`: an error stays an error.
    pub(super) fn hear_end(&mut self, finish: Finish) {
        self.finish = self.finish.max(finish);
    }

    fn hear_usage(&mut self, usage: &RawValue) -> bool {
        self.hear_usage_text(usage.get().as_bytes())
    }

    /// Hears an event that differs in its text alone from one that said nothing else.
    fn hear_text_alone(&mut self, event: &Event<'_>) -> bool {
        let pattern = self.pattern.as_ref().filter(|_| self.limit.is_none());
        let text = pattern.and_then(|pattern| pattern.text(event.name, &event.data));
        text.is_some_and(|text| self.written.add_text(text))
    }

    /// Counts what a chunk writes; returns where its text begins, if it is one and nothing is limited.
    fn count_chunk(&mut self, data: &[u8]) -> Option<usize> {
        match &mut self.limit {
            Some(limit) => {
                limit.hear(b"", data, &mut self.written);
                None
            }
            None if self.route == Route::Completions => {
                delta::count(data, &TEXT, false, &mut self.written)
            }
            None => delta::count(data, &DELTA, false, &mut self.written),
        }
    }

    fn hear_chunk(&mut self, event: &Event<'_>, text: Option<usize>) -> Heard {
        let data = &*event.data;
        if data == b"[DONE]" {
            self.hear_end(Finish::Terminated);
        } else if event.name == b"error" {
            self.hear_end(Finish::Errored);
        } else if has_value(data, &USAGE) || has_value(data, &ERROR) {
            let Some(chunk) = object::<Payload<'_>>(data) else { return Heard::Other };
            if chunk.error.is_some() {
                self.hear_end(Finish::Errored);
            }
            let is_usage = chunk.usage.is_some_and(|usage| self.hear_usage(usage));
            if is_usage && chunk.choices.is_some_and(is_empty_array) {
                return Heard::UsageChunk;
            }
        } else if let Some(start) = text {
            self.pattern.get_or_insert_default().keep(event.name, data, start);
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
        match &mut self.limit {
            Some(limit) => limit.hear(name.unwrap_or_default(), data, &mut self.written),
            None => self.count_named(event.name, name.unwrap_or_default(), data),
        }
        match name {
            // Whatever its data.
            Some(b"error") => self.hear_end(Finish::Errored),
            Some(
                b"message_stop"
                | b"response.completed"
                | b"response.incomplete"
                | b"response.failed",
            ) => {
                self.hear_payload(data, Finish::Terminated);
            }
            Some(b"message_start" | b"message_delta") | None => {
                self.hear_payload(data, Finish::Unfinished);
            }
            Some(_) => (),
        }
    }

    /// Counts what an event of Responses or Messages writes.
    fn count_named(&mut self, event: &[u8], name: &[u8], data: &[u8]) {
        match name {
            // A summary is not what was written.
            b"response.reasoning_summary_text.delta" => self.written.hide(),
            b"content_block_start" => {
                if THINKING.find(data).is_some() {
                    self.written.hide();
                }
                delta::count(data, &BLOCK, true, &mut self.written);
            }
            b"response.output_item.added" if REASONING.find(data).is_some() => self.written.hide(),
            b"content_block_delta" => {
                if let Some(start) = delta::count(data, &DELTA, true, &mut self.written) {
                    self.pattern.get_or_insert_default().keep(event, data, start);
                }
            }
            // Their sequence numbers make each of them another.
            name if name.ends_with(b".delta") => {
                delta::count(data, &DELTA, true, &mut self.written);
            }
            _ => (),
        }
    }

    /// An event whose data is cut short says nothing, not even the end.
    fn hear_payload(&mut self, data: &[u8], finish: Finish) {
        let Some(payload) = object::<Payload<'_>>(data) else { return };
        self.hear_end(finish);
        if payload.error.is_some() {
            self.hear_end(Finish::Errored);
        }
        if inner_usage(payload.message).is_some_and(|usage| self.hear_usage(usage)) {
            // What had been generated when the message began; `message_delta` has the answer.
            self.tally.forget_output();
        }
        if let Some(usage) = inner_usage(payload.response).or(payload.usage) {
            self.hear_usage(usage);
        }
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
    /// Responses: of the last event.
    #[serde(borrow)]
    response: Option<&'a RawValue>,
}

/// A message or a response.
#[derive(Deserialize)]
struct Inner<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Typed<'a> {
    #[serde(borrow)]
    r#type: Option<&'a RawValue>,
}

fn inner_usage(outer: Option<&RawValue>) -> Option<&RawValue> {
    object::<Inner<'_>>(outer?.get().as_bytes())?.usage
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
    let name = object::<Typed<'_>>(json)?.r#type?.get();
    name.strip_prefix('"')?.strip_suffix('"').map(str::as_bytes)
}

/// Immutable, and costly enough to build that it pays to do so once.
static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));
static BLOCK: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"content_block\""));
static DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"delta\""));
static TEXT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"text\""));
/// The types of blocks and items with reasoning in them.
static THINKING: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("thinking\""));
static REASONING: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"reasoning\""));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"error\""));
