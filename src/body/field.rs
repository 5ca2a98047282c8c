//! What becomes of each top-level field, by route. The tables are data: one file for each protocol, and
//! [`everywhere`] for what no protocol has but every gateway listens to.

mod chat;
mod completions;
mod embeddings;
mod everywhere;
mod messages;
mod open_models;
mod responses;

use serde::Deserialize;

use super::Refusal;
use super::capability::Capability;
use super::change::Why;
use super::draft::Draft;
use super::model_name::MODEL_NAME_RULE;
use crate::base::json::Kind;
use crate::protocol::Route;

/// A top-level field of a request.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub name: &'static str,
    pub rule: Rule,
}

/// What becomes of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// It passes.
    Pass(Shape),
    /// Names the model.
    Model,
    /// Asks for a stream of events.
    Stream,
    /// Says, among other things, whether a stream reports its usage.
    StreamOptions,
    /// Limits the tokens of one answer. Where two such fields stand, the larger counts.
    OutputLimit,
    /// Says how much may be thought within the output limit.
    Thinking,
    /// Asks for several answers. Where two such fields stand, the larger counts: of `best_of`
    /// answers written, `n` are shown.
    Choices,
    /// Is a prompt, or a list of prompts with answers for each.
    Prompts,
    /// Holds options of Ollama, which may limit the output once more.
    Options,
    /// Holds fields that `LiteLLM` and OpenAI's clients put beside it: each is judged as if it stood there.
    Nested,
    /// Keeps the answer at the provider, unless it says `false`; made to say so where that is not granted.
    Store,
    /// Passes where a value of `anthropic-beta` that begins with one of these does, and is dropped elsewhere: Anthropic
    /// refuses the one without the other.
    Beta(&'static [&'static str]),
    /// Passes where the capability is granted, and is refused elsewhere.
    Needs(Capability),
    /// Does not pass, and nobody is told: SDKs send it in good faith.
    Drop(Why),
    /// The whole request is refused.
    Refuse(Forbidden),
}

/// The kinds of value that may pass; null always may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Any,
    List,
    TextOrList,
    Object,
}

/// Why a field is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forbidden {
    /// It would choose the upstream, the credentials or what is sent along.
    Upstream,
    /// It would choose another model than the one that is allowed.
    Routing,
    /// It would make one call many, or a long one.
    Retry,
    /// It would change what the call is said to cost.
    Price,
    /// It would keep the call from the records, or send them elsewhere.
    Record,
    /// It would change how the upstream's gateway works.
    Gateway,
}

/// The field of this name on this route; `None` where it is unknown.
pub(super) fn find(route: Route, name: &str) -> Option<Field> {
    let own = index(route).find(name);
    let known = own.or_else(|| EVERYWHERE.find(name)).copied().or_else(|| family(name));
    known.or_else(|| if takes_open_models(route) { open_models::find(name) } else { None })
}

/// Whether a route takes the fields of servers of open models.
fn takes_open_models(route: Route) -> bool {
    matches!(route, Route::ChatCompletions | Route::Completions)
}

/// The servers and providers of open models, and the fields that each takes on chat completions and completions.
pub fn open_models() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    open_models::FAMILIES.iter().copied()
}

/// Whether the name is somebody's: of another protocol, or in other letters. Nobody means it to be new.
pub(super) fn is_taken(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    Route::ALL.into_iter().any(|route| find(route, &name).is_some())
}

/// Every field that is known on a route by its whole name, in the order of names; those that are the
/// same everywhere come last.
pub fn fields(route: Route) -> impl Iterator<Item = Field> {
    index(route).fields.iter().chain(EVERYWHERE.fields).copied()
}

/// The parts of names that are refused: beginnings with a `*` behind, others with one on each side.
pub fn families() -> impl Iterator<Item = (String, Forbidden)> {
    let beginnings = everywhere::FAMILIES.iter().map(|(name, why)| (format!("{name}*"), *why));
    beginnings.chain(everywhere::PARTS.iter().map(|(name, why)| (format!("*{name}*"), *why)))
}

/// The field that limits the output where none does; `None` where nothing is generated.
pub(super) fn output_limit(route: Route) -> Option<&'static str> {
    match route {
        Route::ChatCompletions => Some("max_completion_tokens"),
        Route::Completions | Route::Messages => Some("max_tokens"),
        Route::Responses => Some("max_output_tokens"),
        _ => None,
    }
}

/// Whether the route's streams report usage only where `stream_options` asks for it. Responses and
/// Messages always do, and Responses refuses the option.
pub(super) fn reports_usage_if_asked(route: Route) -> bool {
    matches!(route, Route::ChatCompletions | Route::Completions)
}

/// Whether the provider keeps the answer if it is not told otherwise.
pub(super) fn stores_unless_told(route: Route) -> bool {
    route == Route::Responses
}

fn index(route: Route) -> &'static Index {
    static CHAT_COMPLETIONS: Index = Index::new(chat::CHAT_COMPLETIONS);
    static COMPLETIONS: Index = Index::new(completions::COMPLETIONS);
    static RESPONSES: Index = Index::new(responses::RESPONSES);
    static MESSAGES: Index = Index::new(messages::MESSAGES);
    static COUNT_TOKENS: Index = Index::new(messages::COUNT_TOKENS);
    static EMBEDDINGS: Index = Index::new(embeddings::EMBEDDINGS);
    static NONE: Index = Index::new(&[]);
    match route {
        Route::ChatCompletions => &CHAT_COMPLETIONS,
        Route::Completions => &COMPLETIONS,
        Route::Responses => &RESPONSES,
        Route::Messages => &MESSAGES,
        Route::CountTokens => &COUNT_TOKENS,
        Route::Embeddings => &EMBEDDINGS,
        Route::Models | Route::Model | Route::Health | Route::RunStatus => &NONE,
    }
}

static EVERYWHERE: Index = Index::new(everywhere::EVERYWHERE);

/// Fields in the order of their names, found by the first letter.
struct Index {
    fields: &'static [Field],
    /// How many fields stand before those of each letter.
    starts: [u8; LETTERS + 1],
}

impl Index {
    const fn new(fields: &'static [Field]) -> Self {
        let mut starts = [0; LETTERS + 1];
        let mut at = 0;
        while at < fields.len() {
            let letter = (fields[at].name.as_bytes()[0] - b'a') as usize;
            // Each is one more to all letters behind its own.
            let mut behind = letter + 1;
            while behind <= LETTERS {
                starts[behind] += 1;
                behind += 1;
            }
            at += 1;
        }
        Self { fields, starts }
    }

    fn find(&self, name: &str) -> Option<&'static Field> {
        let letter = usize::from(name.bytes().next()?.checked_sub(b'a')?);
        let [start, end] = *self.starts.get(letter..)?.first_chunk()?;
        self.fields[start.into()..end.into()].iter().find(|field| field.name == name)
    }
}

/// Names begin with a small letter.
const LETTERS: usize = 26;

fn family(name: &str) -> Option<Field> {
    let begins = everywhere::FAMILIES.iter().find(|(family, _)| name.starts_with(family));
    let found =
        begins.or_else(|| everywhere::PARTS.iter().find(|(part, _)| name.contains(part)))?;
    Some(Field::new(found.0, Rule::Refuse(found.1)))
}

impl Field {
    const fn new(name: &'static str, rule: Rule) -> Self {
        Self { name, rule }
    }

    /// The field's value, which has to be short.
    pub(super) fn value<T>(&self, draft: &Draft, at: usize) -> Result<T, Refusal>
    where
        T: for<'a> Deserialize<'a>,
    {
        let value = &draft.members()[at].value;
        if value.end - value.start > SHORT {
            return Err(self.invalid());
        }
        serde_json::from_slice(&draft.value(at)).map_err(|_| self.invalid())
    }

    pub(super) fn invalid(&self) -> Refusal {
        let expected = match self.rule {
            Rule::Model => MODEL_NAME_RULE,
            Rule::Stream | Rule::Store => "true or false",
            Rule::StreamOptions | Rule::Nested => "an object of at most 4 KiB",
            Rule::Options => {
                "an object of at most 4 KiB, without `num_predict`: say `max_tokens` beside it"
            }
            Rule::OutputLimit => "a whole number, 1 at least",
            Rule::Choices => "a whole number, not negative",
            Rule::Prompts => "a prompt or a list of prompts",
            Rule::Pass(Shape::List) => "a list",
            Rule::Pass(Shape::TextOrList) => "a text or a list",
            Rule::Thinking | Rule::Pass(Shape::Object) => "an object",
            _ => "what the protocol says",
        };
        Refusal::InvalidField { name: self.name, expected }
    }
}

impl Shape {
    pub(super) fn has(self, kind: Kind) -> bool {
        match (self, kind) {
            (Self::Any, _) | (_, Kind::Null) => true,
            (Self::List, kind) => kind == Kind::Array,
            (Self::TextOrList, kind) => matches!(kind, Kind::String | Kind::Array),
            (Self::Object, kind) => kind == Kind::Object,
        }
    }
}

impl Forbidden {
    /// What the field would do, after "it".
    pub fn text(self) -> &'static str {
        match self {
            Self::Upstream => "would choose the upstream or its credentials",
            Self::Routing => "would choose other models than the one that is allowed",
            Self::Retry => "would make one call many or endless",
            Self::Price => "would change what the call is said to cost",
            Self::Record => "would change what is recorded of the call",
            Self::Gateway => "is an order to the upstream's gateway",
        }
    }
}

pub(super) const STREAM_OPTIONS: Field = Field::new("stream_options", Rule::StreamOptions);

/// Longest value, in bytes, that is looked at. Ours: a model's name in full escapes takes 1,538.
pub(super) const SHORT: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::{fields, find};
    use crate::protocol::Route;

    /// Tables are in order, or a field would be another's.
    #[test]
    fn each_field_is_found_by_its_name() {
        for route in Route::ALL {
            for field in fields(route) {
                let found = find(route, field.name).unwrap();
                assert_eq!(found.name, field.name, "{route:?}");
            }
            for name in ["", "A", "model_", "mode", "{", "`", "é", "Model"] {
                assert!(find(route, name).is_none(), "{name}");
            }
        }
    }
}
