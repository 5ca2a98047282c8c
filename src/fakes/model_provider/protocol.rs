//! The formats of the three protocols and of the older completions, one file for each.

mod chat;
mod messages;
mod responses;

use http::StatusCode;
use serde_json::{Value, json};

use super::answer::ScriptedAnswer;

/// The wire format of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProviderProtocol {
    /// `OpenAI` chat completions.
    Chat,
    /// The older completions, which have no tools.
    Completions,
    /// `OpenAI` Responses.
    Responses,
    /// Anthropic Messages.
    Messages,
}

impl ProviderProtocol {
    /// Returns the body of a unary answer.
    pub(super) fn unary_body(self, answer: &ScriptedAnswer) -> Value {
        match self {
            Self::Chat | Self::Completions => chat::unary_body(answer, self == Self::Completions),
            Self::Responses => responses::unary_body(answer),
            Self::Messages => messages::unary_body(answer),
        }
    }

    /// Returns the events before the content.
    pub(super) fn opening_events(self, answer: &ScriptedAnswer) -> Vec<String> {
        match self {
            Self::Chat => chat::opening_events(answer),
            Self::Completions => Vec::new(),
            Self::Responses => responses::opening_events(answer),
            Self::Messages => messages::opening_events(answer),
        }
    }

    /// Returns the event with one chunk of content.
    pub(super) fn chunk_event(self, answer: &ScriptedAnswer, content: &str) -> String {
        match self {
            Self::Chat => chat::chunk_event(answer, content),
            Self::Completions => chat::text_chunk_event(answer, content),
            Self::Responses => responses::chunk_event(answer, content),
            Self::Messages => messages::chunk_event(answer, content),
        }
    }

    /// Returns the events after the content.
    pub(super) fn closing_events(self, answer: &ScriptedAnswer) -> Vec<String> {
        match self {
            Self::Chat | Self::Completions => {
                chat::closing_events(answer, self == Self::Completions)
            }
            Self::Responses => responses::closing_events(answer),
            Self::Messages => messages::closing_events(answer),
        }
    }

    /// Returns the events that end a failed stream, as `LiteLLM` passes them on.
    pub(super) fn failure_events(self, answer: &ScriptedAnswer) -> Vec<String> {
        match self {
            Self::Chat | Self::Completions => chat::failure_events(answer),
            Self::Responses => responses::failure_events(answer),
            Self::Messages => messages::failure_events(),
        }
    }

    /// Returns the body of an error.
    pub(super) fn error_body(self, status: StatusCode, message: &str) -> Value {
        // LiteLLM reports its own exhausted budgets in this format on every route.
        let budget = status == StatusCode::UNPROCESSABLE_ENTITY;
        if self == Self::Messages && !budget {
            return json!({
                "type": "error",
                "error": { "type": messages::error_type(status), "message": message },
            });
        }
        let kind = if budget { "budget_exceeded" } else { chat::error_type(status) };
        json!({ "error": {
            "message": message,
            "type": kind,
            "param": null,
            "code": status.as_str(),
        }})
    }
}

/// Formats an event without a name.
fn data_event(data: &Value) -> String {
    format!("data: {data}\n\n")
}

/// Formats an event that is named by its own `type`.
fn named_event(data: &Value) -> String {
    let name = data["type"].as_str().unwrap_or_default();
    format!("event: {name}\ndata: {data}\n\n")
}

/// The message of [`ProviderProtocol::failure_events`].
const FAILURE_MESSAGE: &str = "the fake provider failed on the way, as its script says";
