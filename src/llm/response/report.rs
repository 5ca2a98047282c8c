//! Collects the facts that a response states: the tokens it used, their cost, and how the response
//! ended.
//!
//! Most events state none of these. The gateway recognizes such events by their name, or by keys
//! that are absent, and parses only the others. Counts are read only where the protocol defines
//! them: a tool's arguments may contain a `usage` of their own.

use std::borrow::Cow;
use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::output_estimate::OutputEstimate;
use super::output_limiter::event_pattern::{EventPattern, LoneText};
use super::output_limiter::{CallAllowance, OutputLimiter, TextEventEffect};
use super::sse::SseEvent;
use super::usage_counts::{MAX_REPORTED_TOKENS, ReportedUsage, UsageAccumulator, parse_object};
use super::{StreamEnd, delta, unknown_text};
use crate::llm::budget::{Nanodollars, TokenUsage, Tokens};
use crate::llm::protocol::{GatewayRoute, LlmProtocol};

/// The facts reported so far.
#[derive(Debug)]
pub(super) struct ResponseReport {
    route: GatewayRoute,
    finish: StreamEnd,
    /// The number of answers that have ended.
    finished_answers: u32,
    usage: UsageAccumulator,
    output: OutputEstimate,
    pattern: Option<Box<EventPattern>>,
    /// The output limit. `None` if the output is unlimited; then only few events are parsed.
    limit: Option<Box<OutputLimiter>>,
    /// True if a Responses stream ended itself with a failure.
    has_failed: bool,
    /// The text of the events that repeat a Responses stream's text, in bytes by the kind of event.
    repeated: Option<Box<[u64; unknown_text::REPEATING_KINDS]>>,
}

/// The class of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamEventClass {
    /// The usage chunk of a chat stream, requested by `include_usage`: usage without choices.
    UsageChunk,
    Other,
}

impl ResponseReport {
    pub(super) fn new(route: GatewayRoute) -> Self {
        Self {
            route,
            finish: StreamEnd::Unfinished,
            finished_answers: 0,
            usage: UsageAccumulator::default(),
            output: OutputEstimate::default(),
            pattern: None,
            limit: None,
            has_failed: false,
            repeated: None,
        }
    }

    /// Limits the output; see [`OutputLimiter::new`].
    pub(super) fn set_allowance(&mut self, allowance: CallAllowance, shows_usage: bool) {
        self.limit = Some(Box::new(OutputLimiter::new(self.route, allowance, shows_usage)));
    }

    /// Returns the bytes that end the stream after the last event, if that event exceeded the
    /// limit.
    pub(super) fn truncation_bytes(&mut self) -> Option<Vec<u8>> {
        let limit = self.limit.as_mut()?;
        // The gateway's own lower bound and the provider's running count both may exceed the limit;
        // the larger one counts.
        let written = self.output.lower_bound();
        if limit.allows_output(written.max(self.usage.total_output())) {
            return None;
        }
        limit.truncation_bytes(self.usage.total_usage(self.route.protocol()))
    }

    pub(super) fn is_truncated(&self) -> bool {
        self.limit.as_ref().is_some_and(|limit| limit.is_truncated())
    }

    pub(super) fn is_limited(&self) -> bool {
        self.limit.is_some()
    }

    /// Returns the estimate of the text seen so far.
    pub(super) fn output_estimate(&self) -> &OutputEstimate {
        &self.output
    }

    /// Counts a text of a unary body by its length.
    pub(super) fn count_text(&mut self, length: u64) {
        self.output.add_length(length);
    }

    pub(super) fn stream_end(&self) -> StreamEnd {
        self.finish
    }

    pub(super) fn finished_answers(&self) -> u32 {
        self.finished_answers
    }

    pub(super) fn reported_cost(&self) -> Option<Nanodollars> {
        self.usage.reported_cost()
    }

    /// Returns the usage reported so far, with zero for missing counts. Returns `None` if nothing
    /// was reported.
    pub(super) fn partial_usage(&self) -> Option<TokenUsage> {
        let usage = self.usage.total_usage(self.route.protocol())?;
        if self.route.counts_as_turn() {
            return Some(usage);
        }
        // Embeddings have no output. A provider that reports only the total reports their input.
        let input = Tokens(usage.input.0.saturating_add(usage.output.0)).min(MAX_REPORTED_TOKENS);
        Some(TokenUsage { input, output: Tokens::ZERO, ..usage })
    }

    /// Returns the reported usage if it is complete. A report with zero input is a placeholder.
    pub(super) fn reported_usage(&self) -> Option<TokenUsage> {
        // A turn needs both sides. Other routes, such as embeddings, have no output.
        let is_whole = self.usage.has_output() || !self.route.counts_as_turn();
        self.partial_usage().filter(|usage| is_whole && !usage.input.is_zero())
    }

    /// Reads an event. `block` is the whole event with its empty line.
    pub(super) fn on_event(&mut self, event: &SseEvent<'_>, block: &[u8]) -> StreamEventClass {
        let protocol = self.route.protocol();
        let (class, lone) = match protocol {
            LlmProtocol::Chat => self.on_chunk(event),
            LlmProtocol::Responses | LlmProtocol::Messages => {
                (StreamEventClass::Other, self.on_named_event(event))
            }
        };
        // Only data on one line lies in the block unchanged, so only such an event can become a
        // pattern.
        if let (Some(lone), Cow::Borrowed(data)) = (lone, &event.data) {
            let pattern = self.pattern.get_or_insert_default();
            pattern.keep_event(block, data, &lone, protocol == LlmProtocol::Responses);
        }
        class
    }

    /// Reads the event at the start of `rest`, if the event repeats the stored pattern with another
    /// text. Returns the event's length.
    pub(super) fn on_repeated_event(&mut self, rest: &[u8]) -> Option<usize> {
        let repeated = self.pattern.as_ref()?.match_repeated(rest)?;
        self.output.add_text(repeated.text);
        // The limiter parses each event anyway, so it also counts the text.
        if let Some(limit) = &mut self.limit {
            limit.on_repeated_event(&repeated);
        }
        Some(repeated.consumed)
    }

    pub(super) fn protocol(&self) -> LlmProtocol {
        self.route.protocol()
    }

    /// Adds the content of a usage object.
    pub(super) fn add_usage(&mut self, reported: &ReportedUsage) {
        self.usage.add_report(reported);
    }

    /// Reads the text of a usage object. Returns `false` if the text is not a usage object.
    pub(super) fn parse_usage(&mut self, usage: &[u8]) -> bool {
        self.usage.read_usage(self.route.protocol(), usage)
    }

    /// Returns true if the response reported an error, including an orderly end with a failure.
    pub(super) fn has_error(&self) -> bool {
        self.has_failed || self.finish == StreamEnd::Errored
    }

    /// Records the end of the response. An error stays an error: LiteLLM ends a failed chat stream
    /// with `[DONE]`.
    pub(super) fn on_end(&mut self, finish: StreamEnd) {
        self.finish = self.finish.max(finish);
    }

    fn on_usage(&mut self, usage: &RawValue) -> bool {
        self.parse_usage(usage.get().as_bytes())
    }

    /// Counts the text of a chunk. Returns the text if the chunk has exactly one.
    fn count_chunk(&mut self, data: &[u8]) -> Option<LoneText> {
        if let Some(limit) = &mut self.limit {
            return limit.on_event(b"", data, &mut self.output);
        }
        let key = if self.route == GatewayRoute::Completions { &*TEXT_KEY } else { &*DELTA_KEY };
        let start = delta::count_deltas(data, key, false, &mut self.output)?;
        LoneText::from_offset(start, data, TextEventEffect::None)
    }

    /// Counts the answers that an event ends.
    fn count_finished(&mut self, data: &[u8], key: &Finder<'_>) {
        // Some upstreams send an empty reason with every chunk, which is none.
        let reasons = non_null_values(data, key).filter(|reason| !reason.starts_with(b"\"\""));
        let count = u32::try_from(reasons.count()).unwrap_or(u32::MAX);
        self.finished_answers = self.finished_answers.saturating_add(count);
    }

    /// Counts the text of an event beyond the part that was already counted. `counted` is the
    /// length of all text before the event. Returns `lone` if it is the event's only text.
    fn count_unknown(
        &mut self,
        name: &[u8],
        data: &[u8],
        counted: u64,
        lone: Option<LoneText>,
    ) -> Option<LoneText> {
        let Some(carried) = unknown_text::measure_event(self.route.protocol(), name, data) else {
            return lone;
        };
        if carried.is_partial {
            self.output.mark_partial();
        }
        self.output.add_media(carried.media);
        // The ordinary count of this event is the difference to `counted`; only the rest is new.
        let rest = carried.bytes.saturating_sub(self.output.text_bytes() - counted);
        if rest > 0 {
            self.output.add_length(rest);
            if let Some(limit) = &mut self.limit {
                limit.on_unknown_text();
            }
        }
        lone.filter(|lone| carried.only == Some(lone.range.start))
    }

    /// Counts the text of an event that repeats the text of deltas, as far as the events of its kind exceed the text
    /// seen so far. A stream without deltas has its whole text in such events.
    fn count_repetition(&mut self, kind: usize, data: &[u8]) {
        let length = unknown_text::output_text_bytes(data);
        if length == 0 {
            return;
        }
        let sum = &mut self.repeated.get_or_insert_default()[kind];
        *sum = sum.saturating_add(length);
        self.output.add_length(sum.saturating_sub(self.output.text_bytes()));
    }

    /// Counts the output of a response's last event, as far as it exceeds the text seen so far.
    fn count_output(&mut self, response: Option<&RawValue>) {
        let output = response
            .and_then(|response| parse_object::<NestedPayload<'_>>(response.get().as_bytes()));
        let Some(output) = output.and_then(|response| response.output) else { return };
        // The output repeats all text. Only bytes that no event has brought before are new.
        let length = unknown_text::output_text_bytes(output.get().as_bytes());
        self.output.add_length(length.saturating_sub(self.output.text_bytes()));
    }

    /// Reads a chunk. Returns the chunk's text if the chunk has exactly one text and states nothing
    /// else.
    fn on_chunk(&mut self, event: &SseEvent<'_>) -> (StreamEventClass, Option<LoneText>) {
        let data = &*event.data;
        let counted = self.output.text_bytes();
        let lone = self.count_chunk(data);
        let lone = self.count_unknown(b"", data, counted, lone);
        self.count_finished(data, &FINISH_REASON_KEY);
        if data == b"[DONE]" {
            self.on_end(StreamEnd::Terminated);
        } else if event.name == b"error" {
            self.on_end(StreamEnd::Errored);
        } else if has_non_null_key(data, &USAGE_KEY) || has_non_null_key(data, &ERROR_KEY) {
            // The byte search may find a key of an inner object. The parser below then decides.
            let Some(chunk) = parse_object::<EventPayload<'_>>(data) else {
                return (StreamEventClass::Other, None);
            };
            if chunk.error.is_some() {
                self.on_end(StreamEnd::Errored);
            }
            let is_usage = chunk.usage.is_some_and(|usage| self.on_usage(usage));
            if is_usage && chunk.choices.is_some_and(is_empty_array) {
                return (StreamEventClass::UsageChunk, None);
            }
        } else {
            return (StreamEventClass::Other, lone);
        }
        (StreamEventClass::Other, None)
    }

    /// Reads an event of Responses or Messages. These protocols name their events, on a line of
    /// their own and in the data. Returns the event's text if the event states nothing else.
    fn on_named_event(&mut self, event: &SseEvent<'_>) -> Option<LoneText> {
        let data = &*event.data;
        // Some upstreams omit the `event` line, so the name is taken from the data.
        let name = match event.name {
            b"" | b"message" => leading_type(data).or_else(|| any_type(data)),
            name => Some(name),
        };
        let counted = self.output.text_bytes();
        let lone = match &mut self.limit {
            Some(limit) => limit.on_event(name.unwrap_or_default(), data, &mut self.output),
            None => self.count_named(name.unwrap_or_default(), data),
        };
        let lone = self.count_unknown(name.unwrap_or_default(), data, counted, lone);
        if let Some(kind) = name.and_then(unknown_text::repeating_kind)
            && self.route.protocol() == LlmProtocol::Responses
        {
            self.count_repetition(kind, data);
        }
        if name == Some(b"message_delta") {
            self.count_finished(data, &STOP_REASON_KEY);
        }
        match name {
            // An `error` event is an error whatever its data contains.
            Some(b"error") => self.on_end(StreamEnd::Errored),
            Some(b"response.failed") => {
                self.has_failed = true;
                self.on_payload(data, StreamEnd::Terminated);
            }
            Some(b"message_stop" | b"response.completed" | b"response.incomplete") => {
                self.on_payload(data, StreamEnd::Terminated);
            }
            // An event without a name is parsed too, so that its usage is not lost.
            Some(b"message_start" | b"message_delta") | None => {
                self.on_payload(data, StreamEnd::Unfinished);
            }
            Some(_) => (),
        }
        lone
    }

    /// Counts the text of an event of Responses or Messages. Returns the text if the event has
    /// exactly one text, and events of its type have no other content.
    fn count_named(&mut self, name: &[u8], data: &[u8]) -> Option<LoneText> {
        match name {
            // A summary shows only a part of the billed reasoning.
            b"response.reasoning_summary_text.delta" => self.output.mark_partial(),
            b"content_block_start" => {
                if THINKING_TYPE.find(data).is_some() {
                    self.output.mark_partial();
                }
                delta::count_deltas(data, &CONTENT_BLOCK_KEY, true, &mut self.output);
            }
            b"response.output_item.added" if REASONING_TYPE.find(data).is_some() => {
                self.output.mark_partial();
            }
            name if name == b"content_block_delta" || name.ends_with(b".delta") => {
                let start = delta::count_deltas(data, &DELTA_KEY, true, &mut self.output)?;
                return LoneText::from_offset(start, data, TextEventEffect::None);
            }
            _ => (),
        }
        None
    }

    /// Reads the parsed members of an event. An event whose data is incomplete states nothing, not
    /// even the end.
    fn on_payload(&mut self, data: &[u8], finish: StreamEnd) {
        let Some(payload) = parse_object::<EventPayload<'_>>(data) else { return };
        self.on_end(finish);
        if payload.error.is_some() {
            self.on_end(StreamEnd::Errored);
        }
        if let Some(usage) = nested_usage(payload.message) {
            // The final output count comes with `message_delta`.
            self.usage.read_initial_usage(self.route.protocol(), usage.get().as_bytes());
        }
        if self.route.protocol() == LlmProtocol::Responses {
            self.count_output(payload.response);
        }
        // The usage in a nested response takes precedence over a usage beside it.
        if let Some(usage) = nested_usage(payload.response).or(payload.usage) {
            self.on_usage(usage);
        }
    }
}

impl StreamEventClass {
    pub(super) fn is_usage_chunk(self) -> bool {
        self == Self::UsageChunk
    }
}

/// The members that matter, from any kind of event.
#[derive(Deserialize)]
struct EventPayload<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    /// The choices of a chat chunk.
    #[serde(borrow)]
    choices: Option<&'a RawValue>,
    /// The message in a Messages `message_start`.
    #[serde(borrow)]
    message: Option<&'a RawValue>,
    /// The response in the last event of a Responses stream.
    #[serde(borrow)]
    response: Option<&'a RawValue>,
}

/// A message or a response inside an event.
#[derive(Deserialize)]
struct NestedPayload<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(borrow)]
    output: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct TypedPayload<'a> {
    #[serde(borrow)]
    r#type: Option<&'a RawValue>,
}

fn nested_usage(outer: Option<&RawValue>) -> Option<&RawValue> {
    parse_object::<NestedPayload<'_>>(outer?.get().as_bytes())?.usage
}

fn is_empty_array(value: &RawValue) -> bool {
    value.get().strip_prefix('[').is_some_and(|rest| rest.trim_start() == "]")
}

/// Returns true if the JSON text seems to have the key with a value other than null. The key may
/// belong to an inner object. It cannot be a piece of a string, because there its quotes would be
/// escaped.
fn has_non_null_key(json: &[u8], key: &Finder<'_>) -> bool {
    non_null_values(json, key).next().is_some()
}

/// Returns the rest of the JSON text from each value of the key on that is not null.
fn non_null_values<'a>(json: &'a [u8], key: &Finder<'_>) -> impl Iterator<Item = &'a [u8]> {
    let values = key.find_iter(json).filter_map(|at| {
        let value = json[at + key.needle().len()..].trim_ascii_start().strip_prefix(b":")?;
        Some(value.trim_ascii_start())
    });
    values.filter(|value| !value.starts_with(b"null"))
}

/// Returns the value of `type` if it is the first key, as it nearly always is.
fn leading_type(json: &[u8]) -> Option<&[u8]> {
    let mut rest = json;
    for expected in [&b"{"[..], b"\"type\"", b":", b"\""] {
        rest = rest.trim_ascii_start().strip_prefix(expected)?;
    }
    rest.split(|byte| *byte == b'"').next()
}

/// Returns the value of `type` at any position in the object.
fn any_type(json: &[u8]) -> Option<&[u8]> {
    let name = parse_object::<TypedPayload<'_>>(json)?.r#type?.get();
    name.strip_prefix('"')?.strip_suffix('"').map(str::as_bytes)
}

/// Finders of keys. They are immutable, and building one takes long enough that it is done once.
static USAGE_KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));
static FINISH_REASON_KEY: LazyLock<Finder<'static>> =
    LazyLock::new(|| Finder::new("\"finish_reason\""));
static STOP_REASON_KEY: LazyLock<Finder<'static>> =
    LazyLock::new(|| Finder::new("\"stop_reason\""));
static CONTENT_BLOCK_KEY: LazyLock<Finder<'static>> =
    LazyLock::new(|| Finder::new("\"content_block\""));
static DELTA_KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"delta\""));
static TEXT_KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"text\""));
/// Finders of the types of blocks and items that contain reasoning.
static THINKING_TYPE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("thinking\""));
static REASONING_TYPE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"reasoning\""));
static ERROR_KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"error\""));
