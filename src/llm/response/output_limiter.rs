//! Holds what a stream writes against what was granted to it, and ends it where it writes more.
//!
//! The upstream is told its limit and an honest one keeps it. This is for the others, so it goes by
//! what must have been written at least ([`OutputEstimate::lower_bound`]): no honest stream is cut. The client
//! sees the end that a model makes at its limit. Inside of a tool call, which must not be executed in
//! part, or of reasoning, which cannot be sent back without its signature, it sees an error.
//!
//! **Invariant:** a stream is cut between two events, wherever its frames were split, and only while
//! something in it is open. What has gone on by then exceeds what was granted by one event at most.

mod chat;
mod messages;
mod responses;

use std::fmt::{self, Formatter};
use std::marker::PhantomData;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::event_pattern::{LoneText, RepeatedEvent};
use super::output_estimate::OutputEstimate;
use crate::llm::budget::{TokenUsage, Tokens};
use crate::llm::protocol::{GatewayRoute, LlmProtocol};

/// What a call was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallAllowance {
    /// What its client is told of the input where the upstream has not reported it.
    pub input: Tokens,
    /// For all of its answers together.
    pub output: Tokens,
    pub cutoff: CutoffMode,
}

/// How a stream is cut that writes more than it was granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CutoffMode {
    /// As by a model at its limit, where that is safe: measured clients then go on, and their next
    /// call is refused. After an error they send the same call again, up to eight times.
    #[default]
    Graceful,
    /// By an error event, always.
    Error,
}

/// The code in records and in the error that a client sees.
pub const OUTPUT_LIMIT_REACHED_CODE: &str = "output_limit_reached";

/// One stream and its allowance.
#[derive(Debug)]
pub(super) struct OutputLimiter {
    allowance: CallAllowance,
    progress: ProtocolState,
    /// The latest event had text that no protocol has: something goes on, whatever is open.
    is_unknown: bool,
    is_cut: bool,
}

/// What is open in the stream, as its protocol has it.
#[derive(Debug)]
enum ProtocolState {
    Chat(chat::ChatStreamState),
    Messages(messages::MessagesStreamState),
    Responses(responses::ResponsesStreamState),
}

/// What an event that brings one text, and nothing else, does to a stream's progress.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum TextEventEffect {
    /// The stream is not limited, or the text is all.
    #[default]
    None,
    Choice(chat::ChoiceAdvance),
    Part(responses::OutputPartPosition),
}

/// Where a stream stands between two events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CutSafety {
    /// Nothing is open.
    Ended,
    /// In text, or between two parts: a model at its limit stops so, too.
    Sound,
    /// In a part that is worth nothing, or is dangerous, without its rest.
    Halfway,
}

/// The error of a stream that was cut.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("output limit reached: this call was granted {} tokens and the model went on", granted.0)]
struct LimitReachedError {
    granted: Tokens,
}

impl OutputLimiter {
    /// `shows_usage` says whether a chat client asked for the usage chunk.
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

    /// Follows an event, and counts what it writes. Chat's have no name. Returns the text of an event that brings one
    /// and nothing else.
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

    /// The event that was heard last has text that no protocol has.
    pub(super) fn on_unknown_text(&mut self) {
        self.is_unknown = true;
    }

    /// Follows an event like one that has been heard, with another text, which is counted already.
    pub(super) fn on_repeated_event(&mut self, event: &RepeatedEvent<'_>) {
        self.is_unknown = false;
        match (&mut self.progress, event.effect) {
            (ProtocolState::Chat(answer), TextEventEffect::Choice(update)) => {
                answer.advance_choice(update);
            }
            (ProtocolState::Messages(message), _) => message.on_repeated_delta(),
            (ProtocolState::Responses(response), TextEventEffect::Part(part)) => {
                response.on_repeated_delta(event.sequence, part, event.text);
            }
            _ => (),
        }
    }

    /// Whether a stream may have so much output.
    pub(super) fn allows_output(&self, output: Tokens) -> bool {
        output <= self.allowance.output
    }

    /// What ends a stream here that has outrun its allowance, by what was written at least or by what the upstream has
    /// `reported` so far; `None` where nothing in it is open.
    pub(super) fn truncation_bytes(&mut self, reported: Option<TokenUsage>) -> Option<Vec<u8>> {
        let output = reported.map_or(Tokens::ZERO, |usage| usage.output);
        let state = self.cut_safety();
        if state == CutSafety::Ended {
            return None;
        }
        self.is_cut = true;
        let reported = reported.unwrap_or_default();
        let input = if reported.input.is_zero() { self.allowance.input } else { reported.input };
        let usage = TokenUsage { input, output: output.max(self.allowance.output), ..reported };
        let is_clean = state == CutSafety::Sound && self.allowance.cutoff == CutoffMode::Graceful;
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
        if state == CutSafety::Ended && self.is_unknown { CutSafety::Halfway } else { state }
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

/// Puts an event, with its name where the protocol gives it one.
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

/// An array; that of one element, as nearly all are, takes no memory.
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
