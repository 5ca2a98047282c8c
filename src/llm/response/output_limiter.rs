//! Compares the output of a stream with the granted output, and ends a stream that exceeds it.
//!
//! The upstream receives the limit in the request, and an honest upstream keeps it. This module is
//! for upstreams that do not. It uses the lower bound of the output
//! ([`OutputEstimate::lower_bound`]), so no honest stream is truncated. The client receives the
//! ending that a model produces at its limit. Inside a tool call or inside reasoning the client
//! receives an error instead. A tool call must not be executed in part, and reasoning cannot be
//! sent back without its signature.
//!
//! **Invariant:** a stream is truncated between two events, however it was split into frames, and
//! only while a part of it is open. The output forwarded by then exceeds the granted output by at
//! most one event.

mod chat;
pub(super) mod event_pattern;
mod messages;
mod responses;

use std::fmt::{self, Formatter};
use std::marker::PhantomData;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use self::event_pattern::{LoneText, RepeatedEvent};
use super::output_estimate::OutputEstimate;
use crate::llm::budget::{TokenUsage, Tokens};
use crate::llm::protocol::{GatewayRoute, LlmProtocol};

/// The tokens that a call was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallAllowance {
    /// The input that the client is shown if the upstream has not reported it.
    pub input: Tokens,
    /// The maximum output of all answers together.
    pub output: Tokens,
    pub cutoff: CutoffMode,
}

/// The way to truncate a stream that exceeds its granted output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CutoffMode {
    /// The stream ends as if the model had reached its limit, if that is safe. The clients that
    /// were measured then continue, and their next call is refused. After an error they repeat the
    /// same call up to eight times.
    #[default]
    Graceful,
    /// The stream always ends with an error event.
    Error,
}

/// The code in records and in the error that a client receives.
pub const OUTPUT_LIMIT_REACHED_CODE: &str = "output_limit_reached";

/// The state of one stream and its allowance.
#[derive(Debug)]
pub(super) struct OutputLimiter {
    allowance: CallAllowance,
    progress: ProtocolState,
    /// True if the latest event contained text that no protocol defines. Such a stream continues,
    /// even if no known part is open.
    is_unknown: bool,
    is_cut: bool,
}

/// The open parts of the stream, by protocol.
#[derive(Debug)]
enum ProtocolState {
    Chat(chat::ChatStreamState),
    Messages(messages::MessagesStreamState),
    Responses(responses::ResponsesStreamState),
}

/// The effect on a stream's state of an event that contains one text and nothing else.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum TextEventEffect {
    /// No effect: the stream is unlimited, or the event only adds text.
    #[default]
    None,
    Choice(chat::ChoiceAdvance),
    Part(responses::OutputPartPosition),
}

/// The position of a stream between two events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CutSafety {
    /// No part is open.
    Ended,
    /// Text is open, or the stream is between two parts. A model at its limit stops at the same position.
    Safe,
    /// A part is open that is useless or dangerous if it is incomplete.
    Unsafe,
}

/// The error of a truncated stream.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("output limit reached: this call was granted {} tokens and the model went on", granted.0)]
struct LimitReachedError {
    granted: Tokens,
}

impl OutputLimiter {
    /// Creates the state of a stream. `shows_usage` is true if a chat client requested the usage
    /// chunk.
    pub(super) fn new(route: GatewayRoute, allowance: CallAllowance, shows_usage: bool) -> Self {
        let progress = match route.protocol() {
            LlmProtocol::Chat => {
                ProtocolState::Chat(chat::ChatStreamState::new(route, shows_usage))
            }
            LlmProtocol::Messages => {
                ProtocolState::Messages(messages::MessagesStreamState::default())
            }
            LlmProtocol::Responses => {
                ProtocolState::Responses(responses::ResponsesStreamState::default())
            }
        };
        Self { allowance, progress, is_unknown: false, is_cut: false }
    }

    /// Updates the state by an event and counts the event's text. Chat events have no name. Returns
    /// the text if the event contains one text and nothing else.
    pub(super) fn on_event(
        &mut self,
        name: &[u8],
        data: &[u8],
        written: &mut OutputEstimate,
    ) -> Option<LoneText> {
        self.is_unknown = false;
        match &mut self.progress {
            ProtocolState::Chat(answer) => answer.on_chunk(data, written),
            ProtocolState::Messages(message) => message.on_event(name, data, written),
            ProtocolState::Responses(response) => response.on_event(name, data, written),
        }
    }

    /// Records that the last event contained text that no protocol defines.
    pub(super) fn on_unknown_text(&mut self) {
        self.is_unknown = true;
    }

    /// Updates the state by an event that repeats an earlier one with another text. The text is
    /// already counted.
    pub(super) fn on_repeated_event(&mut self, event: &RepeatedEvent<'_>) {
        self.is_unknown = false;
        match (&mut self.progress, event.effect) {
            (ProtocolState::Chat(answer), TextEventEffect::Choice(update)) => {
                answer.advance_choice(update);
            }
            // A Messages pattern needs no effect: a repeated delta always belongs to the open
            // block.
            (ProtocolState::Messages(message), _) => message.on_repeated_delta(),
            (ProtocolState::Responses(response), TextEventEffect::Part(part)) => {
                response.on_repeated_delta(event.sequence, part, event.text);
            }
            _ => (),
        }
    }

    /// Returns true if the stream may have this much output.
    pub(super) fn allows_output(&self, output: Tokens) -> bool {
        output <= self.allowance.output
    }

    /// Returns the bytes that end the stream here. The caller has found that the stream exceeds its
    /// allowance, by its own lower bound or by the usage `reported` so far. Returns `None` if no
    /// part of the stream is open.
    pub(super) fn truncation_bytes(&mut self, reported: Option<TokenUsage>) -> Option<Vec<u8>> {
        let output = reported.map_or(Tokens::ZERO, |usage| usage.output);
        let state = self.cut_safety();
        // An ended stream is complete for the client: there is nothing to truncate.
        if state == CutSafety::Ended {
            return None;
        }
        self.is_cut = true;
        let reported = reported.unwrap_or_default();
        // A Messages stream has reported its input by now. Other streams usually report usage only at
        // their end, so the input of the allowance stands in. The output is at least the granted
        // amount, because the stream has exceeded that amount.
        let input = if reported.input.is_zero() { self.allowance.input } else { reported.input };
        let usage = TokenUsage { input, output: output.max(self.allowance.output), ..reported };
        // A graceful ending is only correct where a model could stop.
        let is_clean = state == CutSafety::Safe && self.allowance.cutoff == CutoffMode::Graceful;
        Some(if is_clean { self.graceful_ending(&usage) } else { self.error_ending(&usage) })
    }

    pub(super) fn is_truncated(&self) -> bool {
        self.is_cut
    }

    fn cut_safety(&self) -> CutSafety {
        let state = match &self.progress {
            ProtocolState::Chat(answer) => answer.cut_safety(),
            ProtocolState::Messages(message) => message.cut_safety(),
            ProtocolState::Responses(response) => response.cut_safety(),
        };
        // Unknown text shows that the stream goes on, but not in which part; the safe ending is an
        // error.
        if state == CutSafety::Ended && self.is_unknown { CutSafety::Unsafe } else { state }
    }

    fn graceful_ending(&self, usage: &TokenUsage) -> Vec<u8> {
        let mut end = Vec::new();
        match &self.progress {
            ProtocolState::Chat(answer) => answer.write_graceful_ending(usage, &mut end),
            ProtocolState::Messages(message) => message.write_graceful_ending(usage, &mut end),
            ProtocolState::Responses(response) => response.write_graceful_ending(usage, &mut end),
        }
        end
    }

    fn error_ending(&self, usage: &TokenUsage) -> Vec<u8> {
        let reached = LimitReachedError { granted: self.allowance.output };
        let mut end = Vec::new();
        match &self.progress {
            ProtocolState::Chat(_) => chat::write_error_ending(reached, &mut end),
            ProtocolState::Messages(_) => messages::write_error_ending(reached, &mut end),
            ProtocolState::Responses(response) => {
                response.write_error_ending(reached, usage, &mut end);
            }
        }
        end
    }
}

/// Appends a server-sent event, with its name if the protocol names events.
fn push_event(end: &mut Vec<u8>, name: Option<&str>, data: &impl Serialize) {
    if let Some(name) = name {
        end.extend_from_slice(b"event: ");
        end.extend_from_slice(name.as_bytes());
        end.push(b'\n');
    }
    end.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *end, data).expect("memory takes all, and all keys are strings");
    end.extend_from_slice(b"\n\n");
}

/// A JSON array. An array of one element, the usual case, allocates nothing.
#[derive(Debug)]
struct OneOrMany<T> {
    first: Option<T>,
    more: Vec<T>,
}

impl<T> OneOrMany<T> {
    fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(&self.more)
    }
}

impl<'a, T: Deserialize<'a>> Deserialize<'a> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(OneOrManyVisitor(PhantomData))
    }
}

struct OneOrManyVisitor<T>(PhantomData<T>);

impl<'a, T: Deserialize<'a>> Visitor<'a> for OneOrManyVisitor<T> {
    type Value = OneOrMany<T>;

    fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut array: A) -> Result<OneOrMany<T>, A::Error> {
        let mut list = OneOrMany { first: array.next_element()?, more: Vec::new() };
        while let Some(element) = array.next_element()? {
            list.more.push(element);
        }
        Ok(list)
    }
}
