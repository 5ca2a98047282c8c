//! Holds what a stream writes against what was granted to it, and ends it where it writes more.
//!
//! The upstream is told its limit and an honest one keeps it. This is for the others, so it goes by
//! what must have been written at least ([`Written::at_least`]): no honest stream is cut. The client
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

use super::pattern::{LoneText, Repeated};
use super::written::Written;
use crate::budget::{Tokens, Usage};
use crate::protocol::{Protocol, Route};

/// What a call was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// What its client is told of the input where the upstream has not reported it.
    pub input: Tokens,
    /// For all of its answers together.
    pub output: Tokens,
    pub cutoff: Cutoff,
}

/// How a stream is cut that writes more than it was granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cutoff {
    /// As by a model at its limit, where that is safe: measured clients then go on, and their next
    /// call is refused. After an error they send the same call again, up to eight times.
    #[default]
    Graceful,
    /// By an error event, always.
    Error,
}

/// The code in records and in the error that a client sees.
pub const OUTPUT_LIMIT_REACHED: &str = "output_limit_reached";

/// One stream and its allowance.
#[derive(Debug)]
pub(super) struct Limit {
    allowance: Allowance,
    progress: Progress,
    /// The latest event had text that no protocol has: something goes on, whatever is open.
    is_unknown: bool,
    is_cut: bool,
}

/// What is open in the stream, as its protocol has it.
#[derive(Debug)]
enum Progress {
    Chat(chat::Answer),
    Messages(messages::Message),
    Responses(responses::Response),
}

/// What an event that brings one text, and nothing else, does to a stream's progress.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Effect {
    /// The stream is not limited, or the text is all.
    #[default]
    None,
    Choice(chat::Advance),
    Part(responses::PartPlace),
}

/// Where a stream stands between two events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
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
struct Reached {
    granted: Tokens,
}

impl Limit {
    /// `shows_usage` says whether a chat client asked for the usage chunk.
    pub(super) fn new(route: Route, allowance: Allowance, shows_usage: bool) -> Self {
        let progress = match route.protocol() {
            Protocol::Chat => Progress::Chat(chat::Answer::new(route, shows_usage)),
            Protocol::Messages => Progress::Messages(messages::Message::default()),
            Protocol::Responses => Progress::Responses(responses::Response::default()),
        };
        Self { allowance, progress, is_unknown: false, is_cut: false }
    }

    /// Follows an event, and counts what it writes. Chat's have no name. Returns the text of an event that brings one
    /// and nothing else.
    pub(super) fn hear(
        &mut self,
        name: &[u8],
        data: &[u8],
        written: &mut Written,
    ) -> Option<LoneText> {
        self.is_unknown = false;
        match &mut self.progress {
            Progress::Chat(answer) => answer.hear(data, written),
            Progress::Messages(message) => message.hear(name, data, written),
            Progress::Responses(response) => response.hear(name, data, written),
        }
    }

    /// The event that was heard last has text that no protocol has.
    pub(super) fn hear_unknown(&mut self) {
        self.is_unknown = true;
    }

    /// Follows an event like one that has been heard, with another text, which is counted already.
    pub(super) fn hear_repeated(&mut self, event: &Repeated<'_>) {
        self.is_unknown = false;
        match (&mut self.progress, event.effect) {
            (Progress::Chat(answer), Effect::Choice(update)) => answer.advance(update),
            (Progress::Messages(message), _) => message.go_on(),
            (Progress::Responses(response), Effect::Part(part)) => {
                response.extend_by(event.sequence, part, event.text);
            }
            _ => (),
        }
    }

    /// Whether a stream may have so much output.
    pub(super) fn allows(&self, output: Tokens) -> bool {
        output <= self.allowance.output
    }

    /// What ends a stream here that has outrun its allowance, by what was written at least or by what the upstream has
    /// `reported` so far; `None` where nothing in it is open.
    pub(super) fn cut(&mut self, reported: Option<Usage>) -> Option<Vec<u8>> {
        let output = reported.map_or(Tokens::ZERO, |usage| usage.output);
        let state = self.state();
        if state == State::Ended {
            return None;
        }
        self.is_cut = true;
        let reported = reported.unwrap_or_default();
        let input = if reported.input.is_zero() { self.allowance.input } else { reported.input };
        let usage = Usage { input, output: output.max(self.allowance.output), ..reported };
        let is_clean = state == State::Sound && self.allowance.cutoff == Cutoff::Graceful;
        Some(if is_clean { self.finish(&usage) } else { self.fail(&usage) })
    }

    pub(super) fn is_cut(&self) -> bool {
        self.is_cut
    }

    fn state(&self) -> State {
        let state = match &self.progress {
            Progress::Chat(answer) => answer.state(),
            Progress::Messages(message) => message.state(),
            Progress::Responses(response) => response.state(),
        };
        if state == State::Ended && self.is_unknown { State::Halfway } else { state }
    }

    fn finish(&self, usage: &Usage) -> Vec<u8> {
        let mut end = Vec::new();
        match &self.progress {
            Progress::Chat(answer) => answer.finish(usage, &mut end),
            Progress::Messages(message) => message.finish(usage, &mut end),
            Progress::Responses(response) => response.finish(usage, &mut end),
        }
        end
    }

    fn fail(&self, usage: &Usage) -> Vec<u8> {
        let reached = Reached { granted: self.allowance.output };
        let mut end = Vec::new();
        match &self.progress {
            Progress::Chat(_) => chat::fail(reached, &mut end),
            Progress::Messages(_) => messages::fail(reached, &mut end),
            Progress::Responses(response) => response.fail(reached, usage, &mut end),
        }
        end
    }
}

/// Puts an event, with its name where the protocol gives it one.
fn put(end: &mut Vec<u8>, name: Option<&str>, data: &impl Serialize) {
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
struct List<T> {
    first: Option<T>,
    more: Vec<T>,
}

impl<T> List<T> {
    fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(&self.more)
    }
}

impl<'a, T: Deserialize<'a>> Deserialize<'a> for List<T> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Elements(PhantomData))
    }
}

struct Elements<T>(PhantomData<T>);

impl<'a, T: Deserialize<'a>> Visitor<'a> for Elements<T> {
    type Value = List<T>;

    fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut array: A) -> Result<List<T>, A::Error> {
        let mut list = List { first: array.next_element()?, more: Vec::new() };
        while let Some(element) = array.next_element()? {
            list.more.push(element);
        }
        Ok(list)
    }
}
