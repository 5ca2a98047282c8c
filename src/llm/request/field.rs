//! What becomes of each top-level field, by route. The tables are data: one file for each protocol, and
//! [`shared_fields`] for what no protocol has but every gateway listens to.

mod chat;
mod completions;
mod embeddings;
mod messages;
mod open_models;
mod responses;
mod shared_fields;

use serde::Deserialize;

use super::BodyPolicyError;
use super::capability::ProviderCapability;
use super::change::FieldChangeReason;
use super::editor::BodyEditor;
use super::model_name::MODEL_NAME_RULE;
use crate::base::json::JsonType;
use crate::llm::protocol::GatewayRoute;

/// A top-level field of a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestField {
    pub name: &'static str,
    pub rule: FieldRule,
}

/// What becomes of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldRule {
    /// It passes.
    Pass(ValueShape),
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
    Needs(ProviderCapability),
    /// Does not pass, and nobody is told: SDKs send it in good faith.
    Drop(FieldChangeReason),
    /// The whole request is refused.
    Refuse(ForbiddenReason),
}

/// The kinds of value that may pass; null always may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueShape {
    Any,
    List,
    TextOrList,
    Object,
}

/// Why a field is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForbiddenReason {
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
pub(super) fn find_field(route: GatewayRoute, name: &str) -> Option<RequestField> {
    let own = field_index(route).binary_search(name);
    let known = own
        .or_else(|| COMMON_INDEX.binary_search(name))
        .copied()
        .or_else(|| forbidden_by_name_part(name));
    known.or_else(|| if takes_open_models(route) { open_models::find(name) } else { None })
}

/// Whether a route takes the fields of servers of open models.
fn takes_open_models(route: GatewayRoute) -> bool {
    matches!(route, GatewayRoute::ChatCompletions | GatewayRoute::Completions)
}

/// The servers and providers of open models, and the fields that each takes on chat completions and completions.
pub fn open_models() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    open_models::FAMILIES.iter().copied()
}

/// Whether the name is somebody's: of another protocol, or in other letters. Nobody means it to be new.
pub(super) fn is_known_elsewhere(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    GatewayRoute::ALL.into_iter().any(|route| find_field(route, &name).is_some())
}

/// Every field that is known on a route by its whole name, in the order of names; those that are the
/// same everywhere come last.
pub fn fields_of_route(route: GatewayRoute) -> impl Iterator<Item = RequestField> {
    field_index(route).fields.iter().chain(COMMON_INDEX.fields).copied()
}

/// The parts of names that are refused: beginnings with a `*` behind, others with one on each side.
pub fn forbidden_name_parts() -> impl Iterator<Item = (String, ForbiddenReason)> {
    let beginnings =
        shared_fields::FORBIDDEN_PREFIXES.iter().map(|(name, why)| (format!("{name}*"), *why));
    beginnings.chain(
        shared_fields::FORBIDDEN_SUBSTRINGS.iter().map(|(name, why)| (format!("*{name}*"), *why)),
    )
}

/// The field that limits the output where none does; `None` where nothing is generated.
pub(super) fn output_limit_field(route: GatewayRoute) -> Option<&'static str> {
    match route {
        GatewayRoute::ChatCompletions => Some("max_completion_tokens"),
        GatewayRoute::Completions | GatewayRoute::Messages => Some("max_tokens"),
        GatewayRoute::Responses => Some("max_output_tokens"),
        _ => None,
    }
}

/// Whether the route's streams report usage only where `stream_options` asks for it. Responses and
/// Messages always do, and Responses refuses the option.
pub(super) fn reports_usage_if_asked(route: GatewayRoute) -> bool {
    matches!(route, GatewayRoute::ChatCompletions | GatewayRoute::Completions)
}

/// Whether the provider keeps the answer if it is not told otherwise.
pub(super) fn stores_by_default(route: GatewayRoute) -> bool {
    route == GatewayRoute::Responses
}

fn field_index(route: GatewayRoute) -> &'static FieldIndex {
    static CHAT_COMPLETIONS_INDEX: FieldIndex = FieldIndex::new(chat::CHAT_COMPLETIONS_FIELDS);
    static COMPLETIONS_INDEX: FieldIndex = FieldIndex::new(completions::COMPLETIONS_FIELDS);
    static RESPONSES_INDEX: FieldIndex = FieldIndex::new(responses::RESPONSES_FIELDS);
    static MESSAGES_INDEX: FieldIndex = FieldIndex::new(messages::MESSAGES_FIELDS);
    static COUNT_TOKENS_INDEX: FieldIndex = FieldIndex::new(messages::COUNT_TOKENS_FIELDS);
    static EMBEDDINGS_INDEX: FieldIndex = FieldIndex::new(embeddings::EMBEDDINGS_FIELDS);
    static EMPTY_INDEX: FieldIndex = FieldIndex::new(&[]);
    match route {
        GatewayRoute::ChatCompletions => &CHAT_COMPLETIONS_INDEX,
        GatewayRoute::Completions => &COMPLETIONS_INDEX,
        GatewayRoute::Responses => &RESPONSES_INDEX,
        GatewayRoute::Messages => &MESSAGES_INDEX,
        GatewayRoute::CountTokens => &COUNT_TOKENS_INDEX,
        GatewayRoute::Embeddings => &EMBEDDINGS_INDEX,
        GatewayRoute::Models
        | GatewayRoute::Model
        | GatewayRoute::Health
        | GatewayRoute::RunStatus => &EMPTY_INDEX,
    }
}

static COMMON_INDEX: FieldIndex = FieldIndex::new(shared_fields::COMMON_FIELDS);

/// Fields in the order of their names, found by the first letter.
struct FieldIndex {
    fields: &'static [RequestField],
    /// How many fields stand before those of each letter.
    starts: [u8; ALPHABET_SIZE + 1],
}

impl FieldIndex {
    const fn new(fields: &'static [RequestField]) -> Self {
        let mut starts = [0; ALPHABET_SIZE + 1];
        let mut at = 0;
        while at < fields.len() {
            let letter = (fields[at].name.as_bytes()[0] - b'a') as usize;
            // Each is one more to all letters behind its own.
            let mut behind = letter + 1;
            while behind <= ALPHABET_SIZE {
                starts[behind] += 1;
                behind += 1;
            }
            at += 1;
        }
        Self { fields, starts }
    }

    fn binary_search(&self, name: &str) -> Option<&'static RequestField> {
        let letter = usize::from(name.bytes().next()?.checked_sub(b'a')?);
        let [start, end] = *self.starts.get(letter..)?.first_chunk()?;
        self.fields[start.into()..end.into()].iter().find(|field| field.name == name)
    }
}

/// Names begin with a small letter.
const ALPHABET_SIZE: usize = 26;

fn forbidden_by_name_part(name: &str) -> Option<RequestField> {
    let begins =
        shared_fields::FORBIDDEN_PREFIXES.iter().find(|(family, _)| name.starts_with(family));
    let found = begins.or_else(|| {
        shared_fields::FORBIDDEN_SUBSTRINGS.iter().find(|(part, _)| name.contains(part))
    })?;
    Some(RequestField::new(found.0, FieldRule::Refuse(found.1)))
}

impl RequestField {
    const fn new(name: &'static str, rule: FieldRule) -> Self {
        Self { name, rule }
    }

    /// The field's value, which has to be short.
    pub(super) fn parse_value<T>(&self, draft: &BodyEditor, at: usize) -> Result<T, BodyPolicyError>
    where
        T: for<'a> Deserialize<'a>,
    {
        let value = &draft.members()[at].value;
        if value.end - value.start > MAX_INSPECTED_BYTES {
            return Err(self.invalid_error());
        }
        serde_json::from_slice(&draft.member_value(at)).map_err(|_| self.invalid_error())
    }

    pub(super) fn invalid_error(&self) -> BodyPolicyError {
        let expected = match self.rule {
            FieldRule::Model => MODEL_NAME_RULE,
            FieldRule::Stream | FieldRule::Store => "true or false",
            FieldRule::StreamOptions | FieldRule::Nested => "an object of at most 4 KiB",
            FieldRule::Options => {
                "an object of at most 4 KiB, without `num_predict`: say `max_tokens` beside it"
            }
            FieldRule::OutputLimit => "a whole number, 1 at least",
            FieldRule::Choices => "a whole number, not negative",
            FieldRule::Prompts => "a prompt or a list of prompts",
            FieldRule::Pass(ValueShape::List) => "a list",
            FieldRule::Pass(ValueShape::TextOrList) => "a text or a list",
            FieldRule::Thinking | FieldRule::Pass(ValueShape::Object) => "an object",
            _ => "what the protocol says",
        };
        BodyPolicyError::InvalidField { name: self.name, expected }
    }
}

impl ValueShape {
    pub(super) fn accepts_type(self, kind: JsonType) -> bool {
        match (self, kind) {
            (Self::Any, _) | (_, JsonType::Null) => true,
            (Self::List, kind) => kind == JsonType::Array,
            (Self::TextOrList, kind) => matches!(kind, JsonType::String | JsonType::Array),
            (Self::Object, kind) => kind == JsonType::Object,
        }
    }
}

impl ForbiddenReason {
    /// What the field would do, after "it".
    pub fn description(self) -> &'static str {
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

pub(super) const STREAM_OPTIONS_FIELD: RequestField =
    RequestField::new("stream_options", FieldRule::StreamOptions);

/// Longest value, in bytes, that is looked at. Ours: a model's name in full escapes takes 1,538.
pub(super) const MAX_INSPECTED_BYTES: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::{fields_of_route, find_field};
    use crate::llm::protocol::GatewayRoute;

    /// Tables are in order, or a field would be another's.
    #[test]
    fn each_field_is_found_by_its_name() {
        for route in GatewayRoute::ALL {
            for field in fields_of_route(route) {
                let found = find_field(route, field.name).unwrap();
                assert_eq!(found.name, field.name, "{route:?}");
            }
            for name in ["", "A", "model_", "mode", "{", "`", "é", "Model"] {
                assert!(find_field(route, name).is_none(), "{name}");
            }
        }
    }
}
