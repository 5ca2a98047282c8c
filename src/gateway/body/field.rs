//! The fields that mean something to us, by route.

use serde::Deserialize;

use super::Refusal;
use crate::gateway::json::Member;
use crate::gateway::protocol::Route;
use crate::gateway::rope::Rope;

/// A top-level field of a request.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) rule: Rule,
}

/// What a field means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Names the model.
    Model,
    /// Asks for a stream of events.
    Stream,
    /// Says, among other things, whether a stream reports its usage.
    StreamOptions,
    /// Limits the tokens of one answer. Where two such fields stand, the larger counts.
    OutputLimit,
    /// Asks for several answers. Where two such fields stand, the larger counts: of `best_of`
    /// answers written, `n` are shown.
    Choices,
    /// Is a prompt, or a list of prompts with answers for each.
    Prompts,
}

/// The field of this name, if it means something on this route.
pub(super) fn find(route: Route, name: &str) -> Option<&'static Field> {
    let fields = match route {
        Route::ChatCompletions => CHAT_COMPLETIONS,
        Route::Completions => COMPLETIONS,
        Route::Responses => RESPONSES,
        Route::Messages => MESSAGES,
        Route::CountTokens | Route::Embeddings => INPUT_ONLY,
        Route::Models | Route::Health | Route::RunStatus => &[],
    };
    fields.iter().find(|field| field.name == name)
}

/// Whether the route's streams report usage only where `stream_options` asks for it. Responses and
/// Messages always do, and Responses refuses the option.
pub(super) fn reports_usage_if_asked(route: Route) -> bool {
    matches!(route, Route::ChatCompletions | Route::Completions)
}

impl Field {
    const fn new(name: &'static str, rule: Rule) -> Self {
        Self { name, rule }
    }

    /// The field's value, which has to be short.
    pub(super) fn value<T>(&self, member: &Member, rope: &Rope) -> Result<T, Refusal>
    where
        T: for<'a> Deserialize<'a>,
    {
        if member.value.end - member.value.start > SHORT {
            return Err(self.invalid());
        }
        let text = rope.slice(member.value.clone());
        serde_json::from_slice(&text).map_err(|_| self.invalid())
    }

    pub(super) fn invalid(&self) -> Refusal {
        let expected = match self.rule {
            Rule::Model => "the name of a model, at most 256 bytes long",
            Rule::Stream => "true or false",
            Rule::StreamOptions => "an object of at most 4 KiB",
            Rule::OutputLimit | Rule::Choices => "a whole number, not negative",
            Rule::Prompts => "a prompt or a list of prompts",
        };
        Refusal::InvalidField { name: self.name, expected }
    }
}

pub(super) const STREAM_OPTIONS: Field = Field::new("stream_options", Rule::StreamOptions);

const MODEL: Field = Field::new("model", Rule::Model);
const STREAM: Field = Field::new("stream", Rule::Stream);
const MAX_TOKENS: Field = Field::new("max_tokens", Rule::OutputLimit);
const N: Field = Field::new("n", Rule::Choices);

const CHAT_COMPLETIONS: &[Field] = &[
    MODEL,
    STREAM,
    STREAM_OPTIONS,
    MAX_TOKENS,
    Field::new("max_completion_tokens", Rule::OutputLimit),
    N,
];

const COMPLETIONS: &[Field] = &[
    MODEL,
    STREAM,
    STREAM_OPTIONS,
    MAX_TOKENS,
    N,
    Field::new("best_of", Rule::Choices),
    Field::new("prompt", Rule::Prompts),
];

const RESPONSES: &[Field] = &[MODEL, STREAM, Field::new("max_output_tokens", Rule::OutputLimit)];

const MESSAGES: &[Field] = &[MODEL, STREAM, MAX_TOKENS];

const INPUT_ONLY: &[Field] = &[MODEL, STREAM];

/// Longest value, in bytes, that is looked at. Ours: a model's name in full escapes takes 1,538.
pub(super) const SHORT: u64 = 4096;
