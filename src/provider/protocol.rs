//! The shapes of the three protocols (and of the older completions), one file each.

mod chat;
mod messages;
mod responses;

use http::StatusCode;
use serde_json::{Value, json};

use super::answer::Answer;

/// How an answer is put on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// `OpenAI` chat completions.
    Chat,
    /// The older completions, which know no tools.
    Completions,
    /// `OpenAI` Responses.
    Responses,
    /// Anthropic Messages.
    Messages,
}

impl Protocol {
    /// The body of a unary answer.
    pub(super) fn unary(self, answer: &Answer) -> Value {
        match self {
            Self::Chat | Self::Completions => chat::unary(answer, self == Self::Completions),
            Self::Responses => responses::unary(answer),
            Self::Messages => messages::unary(answer),
        }
    }

    /// The events before the content.
    pub(super) fn opening(self, answer: &Answer) -> Vec<String> {
        match self {
            Self::Chat => chat::opening(answer),
            Self::Completions => Vec::new(),
            Self::Responses => responses::opening(answer),
            Self::Messages => messages::opening(answer),
        }
    }

    /// The event with one chunk of content.
    pub(super) fn chunk(self, answer: &Answer, content: &str) -> String {
        match self {
            Self::Chat => chat::chunk(answer, content),
            Self::Completions => chat::text_chunk(answer, content),
            Self::Responses => responses::chunk(answer, content),
            Self::Messages => messages::chunk(answer, content),
        }
    }

    /// The events after the content.
    pub(super) fn closing(self, answer: &Answer) -> Vec<String> {
        match self {
            Self::Chat | Self::Completions => chat::closing(answer, self == Self::Completions),
            Self::Responses => responses::closing(answer),
            Self::Messages => messages::closing(answer),
        }
    }

    /// The events that end a stream that failed on the way, as `LiteLLM` passes them on.
    pub(super) fn failure(self, answer: &Answer) -> Vec<String> {
        match self {
            Self::Chat | Self::Completions => chat::failure(answer),
            Self::Responses => responses::failure(answer),
            Self::Messages => messages::failure(),
        }
    }

    /// The body of an error.
    pub(super) fn error(self, status: StatusCode, message: &str) -> Value {
        // LiteLLM says so of its own budgets, in this envelope on every route.
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

/// An event without a name.
fn data(data: &Value) -> String {
    format!("data: {data}\n\n")
}

/// An event named by its own `type`.
fn named(data: &Value) -> String {
    let name = data["type"].as_str().unwrap_or_default();
    format!("event: {name}\ndata: {data}\n\n")
}

/// The message of [`Protocol::failure`].
const FAILURE: &str = "the fake provider failed on the way, as its script says";
