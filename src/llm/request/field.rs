//! The rule of each top-level field, by route. The tables are data: one file for each protocol, and
//! [`shared_fields`] for names that belong to no protocol but that LLM gateways and providers act
//! on.

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
use super::editor::{BodyEditor, MAX_INSPECTED_BYTES};
use super::error::ForbiddenReason;
use super::model_name::MODEL_NAME_RULE;
use crate::base::json::JsonType;
use crate::llm::protocol::GatewayRoute;

/// A top-level field of a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestField {
    pub name: &'static str,
    pub rule: FieldRule,
}

/// The treatment of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldRule {
    /// The field passes, if its value has the shape.
    Pass(ValueShape),
    /// The field names the model.
    Model,
    /// The field requests a stream of events.
    Stream,
    /// The field controls, among other things, whether a stream reports its usage.
    StreamOptions,
    /// The field limits the tokens of one answer. If a body has two such fields, the larger value
    /// counts.
    OutputLimit,
    /// The field limits the thinking within the output limit.
    Thinking,
    /// The field holds a text that the model is expected to write. The provider bills the parts that the answer does
    /// not contain as output, beside the output limit.
    Prediction,
    /// The field requests several answers. If a body has two such fields, the larger value counts:
    /// the model writes `best_of` answers, and the response contains `n` of them.
    Choices,
    /// The field is a prompt, or a list of prompts with separate answers for each.
    Prompts,
    /// The field holds options of Ollama, which may contain another output limit.
    Options,
    /// The field holds fields that `LiteLLM` and OpenAI's clients move to the top level. Each inner
    /// field is checked like a top-level field.
    Nested,
    /// The field makes the provider store the answer unless its value is `false`. The gateway sets
    /// `false` if storage is not granted.
    Store,
    /// The field passes if a value of `anthropic-beta` with one of these prefixes may pass, and is
    /// dropped otherwise. Anthropic refuses the field without the beta.
    Beta(&'static [&'static str]),
    /// The field passes if the capability is granted. Otherwise the request is refused.
    Needs(ProviderCapability),
    /// The field is dropped without an error, because SDKs send it in good faith.
    Drop(FieldChangeReason),
    /// The field causes the whole request to be refused.
    Refuse(ForbiddenReason),
}

/// The JSON types that a field's value may have. Null is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueShape {
    Any,
    List,
    TextOrList,
    Object,
}

/// Returns the field of this name on this route, or `None` if the name is unknown.
pub(super) fn find_field(route: GatewayRoute, name: &str) -> Option<RequestField> {
    // Exact names come first: the route's own, then the common ones. Only then the forbidden parts
    // of names apply, so a table can permit a name that contains one. The open models' fields come
    // last.
    let known = find_listed_field(route, name.as_bytes()).or_else(|| forbidden_by_name_part(name));
    known.or_else(|| if takes_open_models(route) { open_models::find(name) } else { None })
}

/// Returns the field that stands under exactly this name in a table of this route or of all routes.
pub(super) fn find_listed_field(route: GatewayRoute, name: &[u8]) -> Option<RequestField> {
    let own = field_index(route).binary_search(name);
    own.or_else(|| COMMON_INDEX.binary_search(name)).copied()
}

/// Returns true if a route takes the fields of servers of open models.
fn takes_open_models(route: GatewayRoute) -> bool {
    matches!(route, GatewayRoute::ChatCompletions | GatewayRoute::Completions)
}

/// Returns the servers and providers of open models, with the fields that each takes on chat
/// completions and completions.
pub fn open_models() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    open_models::FAMILIES.iter().copied()
}

/// Returns true if the name, in lower case, is a known field of any route. Such a name is a
/// misspelling or another protocol's field; it never passes as an unknown field.
pub(super) fn is_known_elsewhere(name: &str) -> bool {
    // Some upstreams compare names without regard to case.
    let name = name.to_ascii_lowercase();
    GatewayRoute::ALL.into_iter().any(|route| find_field(route, &name).is_some())
}

/// Returns every field that a route knows by its whole name. The route's own fields come first, in
/// the order of their names; the common fields follow.
pub fn fields_of_route(route: GatewayRoute) -> impl Iterator<Item = RequestField> {
    field_index(route).fields.iter().chain(COMMON_INDEX.fields).copied()
}

/// Returns the parts of names that are refused. A prefix is shown with a `*` behind it; any other
/// part has a `*` on each side.
pub fn forbidden_name_parts() -> impl Iterator<Item = (String, ForbiddenReason)> {
    let beginnings =
        shared_fields::FORBIDDEN_PREFIXES.iter().map(|(name, why)| (format!("{name}*"), *why));
    beginnings.chain(
        shared_fields::FORBIDDEN_SUBSTRINGS.iter().map(|(name, why)| (format!("*{name}*"), *why)),
    )
}

/// Returns the field that the gateway adds to limit the output. `None` if the route generates
/// nothing.
pub(super) fn output_limit_field(route: GatewayRoute) -> Option<&'static str> {
    match route {
        GatewayRoute::ChatCompletions => Some("max_completion_tokens"),
        GatewayRoute::Completions | GatewayRoute::Messages => Some("max_tokens"),
        GatewayRoute::Responses => Some("max_output_tokens"),
        _ => None,
    }
}

/// Returns true if the route's streams report usage only when `stream_options` requests it.
/// Responses and Messages always report usage, and Responses refuses the option.
pub(super) fn reports_usage_if_asked(route: GatewayRoute) -> bool {
    matches!(route, GatewayRoute::ChatCompletions | GatewayRoute::Completions)
}

/// Returns true if the provider stores the answer by default.
pub(super) fn stores_by_default(route: GatewayRoute) -> bool {
    route == GatewayRoute::Responses
}

fn field_index(route: GatewayRoute) -> &'static FieldIndex {
    // The compiler computes each index, so a look-up at run time only reads it.
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

/// The fields of a table in the order of their names, indexed by first letter.
struct FieldIndex {
    fields: &'static [RequestField],
    /// The number of fields before the first field of each letter.
    starts: [u8; ALPHABET_SIZE + 1],
}

impl FieldIndex {
    const fn new(fields: &'static [RequestField]) -> Self {
        let mut starts = [0; ALPHABET_SIZE + 1];
        let mut at = 0;
        while at < fields.len() {
            let letter = (fields[at].name.as_bytes()[0] - b'a') as usize;
            // A field raises the start of every letter after its own first letter.
            let mut behind = letter + 1;
            while behind <= ALPHABET_SIZE {
                starts[behind] += 1;
                behind += 1;
            }
            at += 1;
        }
        Self { fields, starts }
    }

    fn binary_search(&self, name: &[u8]) -> Option<&'static RequestField> {
        // `checked_sub` and `get` reject names that begin outside `a` to `z`.
        let letter = usize::from(name.first()?.checked_sub(b'a')?);
        let [start, end] = *self.starts.get(letter..)?.first_chunk()?;
        self.fields[start.into()..end.into()].iter().find(|field| field.name.as_bytes() == name)
    }
}

/// The number of first letters: every name in the tables begins with a lower-case letter.
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

    /// Parses the field's value. A value over [`MAX_INSPECTED_BYTES`] is an error.
    pub(super) fn parse_value<T>(&self, draft: &BodyEditor, at: usize) -> Result<T, BodyPolicyError>
    where
        T: for<'a> Deserialize<'a>,
    {
        // The limit bounds the copy: the payload may be megabytes long.
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
                "an object of at most 4 KiB, without `num_predict`; set `max_tokens` at the top level instead"
            }
            FieldRule::OutputLimit => "a whole number, 1 at least",
            FieldRule::Choices => "a whole number, not negative",
            FieldRule::Prompts => "a prompt or a list of prompts",
            FieldRule::Pass(ValueShape::List) => "a list",
            FieldRule::Pass(ValueShape::TextOrList) => "a text or a list",
            FieldRule::Thinking | FieldRule::Pass(ValueShape::Object) => "an object",
            _ => "a value that the protocol allows",
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

pub(super) const STREAM_OPTIONS_FIELD: RequestField =
    RequestField::new("stream_options", FieldRule::StreamOptions);

#[cfg(test)]
mod tests {
    use super::{fields_of_route, find_field};
    use crate::llm::protocol::GatewayRoute;

    /// Checks that each table is sorted. An unsorted table would hide fields from the index.
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
