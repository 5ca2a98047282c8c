//! What a response says about itself: the tokens it used, what it cost, how it ended.
//!
//! Most events say none of that and are recognised by a look at their name, or by what they do not
//! contain; only the few that may are parsed. Counts are taken where the protocol puts them and
//! nowhere else: a tool's arguments may well hold a `usage` of their own.

use std::borrow::Cow;
use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::limit::{Allowance, Effect, Limit};
use super::pattern::{LoneText, Pattern};
use super::sse::Event;
use super::tally::{Tally, object};
use super::written::Written;
use super::{Finish, delta, unknown};
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
    /// A Responses stream has ended by its own word, which is an error.
    has_failed: bool,
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
            has_failed: false,
        }
    }

    /// See [`Limit::new`].
    pub(super) fn limit(&mut self, allowance: Allowance, shows_usage: bool) {
        self.limit = Some(Box::new(Limit::new(self.route, allowance, shows_usage)));
    }

    /// What ends the stream after the event that was heard last, if that was one too many.
    pub(super) fn cut(&mut self) -> Option<Vec<u8>> {
        let limit = self.limit.as_mut()?;
        let written = self.written.at_least();
        if limit.allows(written.max(self.tally.output())) {
            return None;
        }
        limit.cut(self.tally.usage(self.route.protocol()))
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

    /// Hears an event; `block` is all of it.
    pub(super) fn hear(&mut self, event: &Event<'_>, block: &[u8]) -> Heard {
        let protocol = self.route.protocol();
        let (heard, lone) = match protocol {
            Protocol::Chat => self.hear_chunk(event),
            Protocol::Responses | Protocol::Messages => (Heard::Other, self.hear_named(event)),
        };
        if let (Some(lone), Cow::Borrowed(data)) = (lone, &event.data) {
            let pattern = self.pattern.get_or_insert_default();
            pattern.keep(block, data, &lone, protocol == Protocol::Responses);
        }
        heard
    }

    /// Hears the event that `rest` begins with, if it differs in its text alone from one that said nothing else.
    /// Returns its length.
    pub(super) fn hear_repeated(&mut self, rest: &[u8]) -> Option<usize> {
        let repeated = self.pattern.as_ref()?.read(rest)?;
        self.written.add_text(repeated.text);
        if let Some(limit) = &mut self.limit {
            limit.hear_repeated(&repeated);
        }
        Some(repeated.taken)
    }

    /// Reads the text of a usage object; says no to anything else.
    pub(super) fn hear_usage_text(&mut self, usage: &[u8]) -> bool {
        self.tally.read(self.route.protocol(), usage)
    }

    /// Whether an error was heard, be it the orderly end of the stream.
    pub(super) fn has_error(&self) -> bool {
        self.has_failed || self.finish == Finish::Errored
    }

    /// LiteLLM ends a failed chat stream with `[DONE]`: an error stays an error.
    pub(super) fn hear_end(&mut self, finish: Finish) {
        self.finish = self.finish.max(finish);
    }

    fn hear_usage(&mut self, usage: &RawValue) -> bool {
        self.hear_usage_text(usage.get().as_bytes())
    }

    /// Counts what a chunk writes; returns its text, if it is one.
    fn count_chunk(&mut self, data: &[u8]) -> Option<LoneText> {
        if let Some(limit) = &mut self.limit {
            return limit.hear(b"", data, &mut self.written);
        }
        let key = if self.route == Route::Completions { &*TEXT } else { &*DELTA };
        let start = delta::count(data, key, false, &mut self.written)?;
        LoneText::at(start, data, Effect::None)
    }

    /// Counts the text of an event beyond what was `counted` before it and has been counted of it. The event's `lone`
    /// text stays so where it is all of its text.
    fn count_unknown(
        &mut self,
        name: &[u8],
        data: &[u8],
        counted: u64,
        lone: Option<LoneText>,
    ) -> Option<LoneText> {
        let Some(carried) = unknown::measure(self.route.protocol(), name, data) else {
            return lone;
        };
        if carried.is_partial {
            self.written.hide();
        }
        self.written.add_media(carried.media);
        let rest = carried.bytes.saturating_sub(self.written.bytes() - counted);
        if rest > 0 {
            self.written.add_length(rest);
            if let Some(limit) = &mut self.limit {
                limit.hear_unknown();
            }
        }
        lone.filter(|lone| carried.only == Some(lone.place.start))
    }

    /// Counts the output that the last event of a response has beyond what was seen.
    fn count_output(&mut self, response: Option<&RawValue>) {
        let output = response.and_then(|response| object::<Inner<'_>>(response.get().as_bytes()));
        let Some(output) = output.and_then(|response| response.output) else { return };
        let length = unknown::output_length(output.get().as_bytes());
        self.written.add_length(length.saturating_sub(self.written.bytes()));
    }

    /// Hears a chunk; returns its text, if it is one and the chunk says nothing else.
    fn hear_chunk(&mut self, event: &Event<'_>) -> (Heard, Option<LoneText>) {
        let data = &*event.data;
        let counted = self.written.bytes();
        let lone = self.count_chunk(data);
        let lone = self.count_unknown(b"", data, counted, lone);
        if data == b"[DONE]" {
            self.hear_end(Finish::Terminated);
        } else if event.name == b"error" {
            self.hear_end(Finish::Errored);
        } else if has_value(data, &USAGE) || has_value(data, &ERROR) {
            let Some(chunk) = object::<Payload<'_>>(data) else { return (Heard::Other, None) };
            if chunk.error.is_some() {
                self.hear_end(Finish::Errored);
            }
            let is_usage = chunk.usage.is_some_and(|usage| self.hear_usage(usage));
            if is_usage && chunk.choices.is_some_and(is_empty_array) {
                return (Heard::UsageChunk, None);
            }
        } else {
            return (Heard::Other, lone);
        }
        (Heard::Other, None)
    }

    /// Responses and Messages name their events, on a line of their own and in the data. Returns the text of one that
    /// says nothing else.
    fn hear_named(&mut self, event: &Event<'_>) -> Option<LoneText> {
        let data = &*event.data;
        let name = match event.name {
            b"" | b"message" => leading_type(data).or_else(|| any_type(data)),
            name => Some(name),
        };
        let counted = self.written.bytes();
        let lone = match &mut self.limit {
            Some(limit) => limit.hear(name.unwrap_or_default(), data, &mut self.written),
            None => self.count_named(name.unwrap_or_default(), data),
        };
        let lone = self.count_unknown(name.unwrap_or_default(), data, counted, lone);
        match name {
            // Whatever its data.
            Some(b"error") => self.hear_end(Finish::Errored),
            Some(b"response.failed") => {
                self.has_failed = true;
                self.hear_payload(data, Finish::Terminated);
            }
            Some(b"message_stop" | b"response.completed" | b"response.incomplete") => {
                self.hear_payload(data, Finish::Terminated);
            }
            Some(b"message_start" | b"message_delta") | None => {
                self.hear_payload(data, Finish::Unfinished);
            }
            Some(_) => (),
        }
        lone
    }

    /// Counts what an event of Responses or Messages writes; returns its text, if it is one and such events say
    /// nothing else.
    fn count_named(&mut self, name: &[u8], data: &[u8]) -> Option<LoneText> {
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
            name if name == b"content_block_delta" || name.ends_with(b".delta") => {
                let start = delta::count(data, &DELTA, true, &mut self.written)?;
                return LoneText::at(start, data, Effect::None);
            }
            _ => (),
        }
        None
    }

    /// An event whose data is cut short says nothing, not even the end.
    fn hear_payload(&mut self, data: &[u8], finish: Finish) {
        let Some(payload) = object::<Payload<'_>>(data) else { return };
        self.hear_end(finish);
        if payload.error.is_some() {
            self.hear_end(Finish::Errored);
        }
        if let Some(usage) = inner_usage(payload.message) {
            // `message_delta` has the output.
            self.tally.read_start(self.route.protocol(), usage.get().as_bytes());
        }
        if self.route.protocol() == Protocol::Responses {
            self.count_output(payload.response);
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
    #[serde(borrow)]
    output: Option<&'a RawValue>,
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
