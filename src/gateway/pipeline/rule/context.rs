//! The facts that a rule may use: one table of names, each with the function that reads the value.
//!
//! **Invariant:** each fact has a value at every call, so no rule fails because a fact is missing. A
//! missing text is empty and a missing number is 0. The rest of a budget without a limit is larger than
//! any request.

use std::borrow::Cow;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value as Json};

use crate::base::condition::{FactTable, FactValues, RuleValue, RuleValueType};
use crate::gateway::run::RunIdentity;
use crate::llm::budget::{BudgetStatus, Nanodollars, Tokens};
use crate::llm::protocol::{GatewayRoute, LlmProtocol};
use crate::llm::request::LlmCall;

/// The facts about a call before its budget is reserved. An example in a rule sets only the facts that
/// matter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RuleContext<'a> {
    pub run: RuleRunContext<'a>,
    pub agent: RuleAgentContext<'a>,
    pub request: RuleRequestContext<'a>,
    pub usage: RuleUsageContext,
}

/// The facts about the calling run, as the host configured the run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RuleRunContext<'a> {
    pub id: Cow<'a, str>,
    pub attempt: Cow<'a, str>,
    pub account: Cow<'a, str>,
    pub metadata: Cow<'a, Map<String, Json>>,
}

/// The agent that the run executes: the metadata's `graph_id`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RuleAgentContext<'a> {
    pub name: Cow<'a, str>,
}

/// The facts about the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RuleRequestContext<'a> {
    #[serde(serialize_with = "serialize_route_name", deserialize_with = "deserialize_route_name")]
    pub route: GatewayRoute,
    /// The model by the upstream's name, because aliases are resolved before rules are evaluated.
    pub model: Cow<'a, str>,
    pub stream: bool,
    pub bytes: u64,
    /// The estimate from the size of the request.
    pub input_tokens: Tokens,
    /// The limit for all answers together; `None` if the client set no limit.
    pub max_output_tokens: Option<Tokens>,
    pub choices: u32,
}

/// The amounts that the run has spent in settled calls, and the amounts that the run may still reserve.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RuleUsageContext {
    pub turns: u64,
    pub input_tokens: Tokens,
    pub output_tokens: Tokens,
    /// The total; `None` means the sum of input and output. An example may set another total.
    pub total_tokens: Option<Tokens>,
    pub cost_usd: Nanodollars,
    pub left: RuleRemainingBudget,
}

/// The remaining budgets; `None` means that the budget has no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RuleRemainingBudget {
    pub turns: Option<u64>,
    pub input_tokens: Option<Tokens>,
    pub output_tokens: Option<Tokens>,
    pub total_tokens: Option<Tokens>,
    pub cost_usd: Option<Nanodollars>,
}

/// The name of a fact, its type, and the function that reads its value.
#[derive(Clone, Copy, Debug)]
pub(super) struct RuleContextField {
    pub(super) name: &'static str,
    pub(super) kind: RuleValueType,
    read: for<'a> fn(&'a RuleContext<'_>) -> RuleValue<'a>,
}

impl<'a> RuleContext<'a> {
    /// Creates the facts of a run before the run's first call.
    pub fn from_identity(identity: &'a RunIdentity) -> Self {
        Self {
            run: RuleRunContext::from_identity(identity),
            agent: RuleAgentContext::from_identity(identity),
            ..Self::default()
        }
    }
}

impl<'a> RuleRunContext<'a> {
    fn from_identity(identity: &'a RunIdentity) -> Self {
        Self {
            id: Cow::Borrowed(&identity.run),
            attempt: Cow::Borrowed(&identity.attempt),
            account: Cow::Borrowed(&identity.account),
            metadata: Cow::Borrowed(&identity.metadata),
        }
    }

    /// Returns a text value unchanged and any other value as JSON. A missing name gives an empty text.
    pub(super) fn metadata_text(&self, name: &str) -> Cow<'_, str> {
        match self.metadata.get(name) {
            None => Cow::Borrowed(""),
            Some(Json::String(text)) => truncated_text(text),
            Some(Json::Null) => Cow::Borrowed("null"),
            Some(Json::Bool(true)) => Cow::Borrowed("true"),
            Some(Json::Bool(false)) => Cow::Borrowed("false"),
            Some(other) => {
                let mut text = other.to_string();
                text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
                Cow::Owned(text)
            }
        }
    }
}

impl<'a> RuleAgentContext<'a> {
    fn from_identity(identity: &'a RunIdentity) -> Self {
        let name = identity.metadata.get("graph_id").and_then(Json::as_str);
        Self { name: Cow::Borrowed(name.unwrap_or_default()) }
    }
}

impl<'a> RuleRequestContext<'a> {
    /// Creates the facts of an admitted call whose request has `bytes` bytes.
    pub fn from_call(route: GatewayRoute, bytes: u64, call: &'a LlmCall) -> Self {
        Self {
            route,
            model: Cow::Borrowed(call.model.as_deref().unwrap_or_default()),
            stream: call.stream,
            bytes,
            input_tokens: call.input_estimate,
            max_output_tokens: call.max_output(),
            choices: call.choices,
        }
    }
}

impl RuleUsageContext {
    pub fn from_status(status: &BudgetStatus) -> Self {
        Self {
            turns: status.spent.turns,
            input_tokens: status.spent.input,
            output_tokens: status.spent.output,
            total_tokens: None,
            cost_usd: status.spent.cost,
            left: RuleRemainingBudget {
                turns: status.turns_left,
                input_tokens: status.input_tokens_left,
                output_tokens: status.output_tokens_left,
                total_tokens: status.total_tokens_left,
                cost_usd: status.cost_left_usd,
            },
        }
    }

    fn total_tokens(&self) -> Tokens {
        self.total_tokens.unwrap_or(self.input_tokens + self.output_tokens)
    }
}

impl Default for RuleRequestContext<'_> {
    fn default() -> Self {
        Self {
            route: GatewayRoute::ChatCompletions,
            model: Cow::Borrowed(""),
            stream: false,
            bytes: 0,
            input_tokens: Tokens::ZERO,
            max_output_tokens: None,
            choices: 1,
        }
    }
}

/// A fact in a compiled condition.
#[derive(Clone, Debug)]
pub(super) enum RuleFact {
    Field(RuleContextField),
    /// The text of this name in the run's metadata.
    Metadata(Box<str>),
}

/// The table of the facts about a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct RuleFactTable;

impl FactTable for RuleFactTable {
    type Fact = RuleFact;

    fn find_fact(&self, path: &[&str]) -> Option<(RuleFact, RuleValueType)> {
        if let ["run", "metadata", name] = path {
            return Some((RuleFact::Metadata((*name).into()), RuleValueType::Text));
        }
        let field = RuleContextField::find_field(&path.join("."))?;
        Some((RuleFact::Field(field), field.kind))
    }

    fn names_under(&self, prefix: &str) -> Vec<String> {
        let names = RuleContextField::field_names_under(prefix);
        names.into_iter().map(str::to_owned).collect()
    }

    fn roots(&self) -> &'static str {
        "`run`, `agent`, `request` or `usage`"
    }

    fn allowed_values(&self, fact: &RuleFact) -> Option<(String, Vec<String>)> {
        let RuleFact::Field(field) = fact else { return None };
        let words = field.allowed_values()?.into_iter().map(str::to_owned).collect();
        Some((field.name.to_owned(), words))
    }
}

impl FactValues<RuleFact> for RuleContext<'_> {
    fn read_fact<'a>(&'a self, fact: &'a RuleFact) -> RuleValue<'a> {
        match fact {
            RuleFact::Field(field) => field.read_value(self),
            RuleFact::Metadata(name) => RuleValue::Text(self.run.metadata_text(name)),
        }
    }
}

impl RuleContextField {
    pub(super) fn find_field(name: &str) -> Option<Self> {
        CONTEXT_FIELDS.into_iter().find(|fact| fact.name == name)
    }

    pub(super) fn read_value<'a>(&self, facts: &'a RuleContext<'_>) -> RuleValue<'a> {
        (self.read)(facts)
    }

    /// Returns the names that may follow `prefix` and a dot. The operator chooses the names in the
    /// metadata.
    pub(super) fn field_names_under(prefix: &str) -> Vec<&'static str> {
        let names = CONTEXT_FIELDS.into_iter().map(|fact| fact.name).chain(["run.metadata.NAME"]);
        names.filter_map(|name| name.strip_prefix(prefix)?.strip_prefix('.')).collect()
    }

    /// Returns all values that the fact can have, if the values are a fixed set of words.
    pub(super) fn allowed_values(&self) -> Option<Vec<&'static str>> {
        match self.name {
            "request.route" => Some(routes_with_body().map(GatewayRoute::name).collect()),
            "request.protocol" => Some(ALL_PROTOCOLS.map(protocol_name).to_vec()),
            _ => None,
        }
    }
}

const fn context_field(
    name: &'static str,
    kind: RuleValueType,
    read: for<'a> fn(&'a RuleContext<'_>) -> RuleValue<'a>,
) -> RuleContextField {
    RuleContextField { name, kind, read }
}

/// The facts except the metadata, whose names the operator chooses.
const CONTEXT_FIELDS: [RuleContextField; 22] = [
    context_field("run.id", RuleValueType::Text, |facts| text_value(&facts.run.id)),
    context_field("run.attempt", RuleValueType::Text, |facts| text_value(&facts.run.attempt)),
    context_field("run.account", RuleValueType::Text, |facts| text_value(&facts.run.account)),
    context_field("agent.name", RuleValueType::Text, |facts| text_value(&facts.agent.name)),
    context_field("request.route", RuleValueType::Text, |facts| {
        text_value(facts.request.route.name())
    }),
    context_field("request.protocol", RuleValueType::Text, |facts| {
        text_value(protocol_name(facts.request.route.protocol()))
    }),
    context_field("request.model", RuleValueType::Text, |facts| text_value(&facts.request.model)),
    context_field("request.stream", RuleValueType::Bool, |facts| {
        RuleValue::Bool(facts.request.stream)
    }),
    context_field("request.bytes", RuleValueType::Int, |facts| int_value(facts.request.bytes)),
    context_field("request.input_tokens", RuleValueType::Int, |facts| {
        tokens_value(facts.request.input_tokens)
    }),
    context_field("request.max_output_tokens", RuleValueType::Int, |facts| {
        tokens_value(facts.request.max_output_tokens.unwrap_or_default())
    }),
    context_field("request.choices", RuleValueType::Int, |facts| {
        int_value(facts.request.choices.into())
    }),
    context_field("usage.turns", RuleValueType::Int, |facts| int_value(facts.usage.turns)),
    context_field("usage.input_tokens", RuleValueType::Int, |facts| {
        tokens_value(facts.usage.input_tokens)
    }),
    context_field("usage.output_tokens", RuleValueType::Int, |facts| {
        tokens_value(facts.usage.output_tokens)
    }),
    context_field("usage.total_tokens", RuleValueType::Int, |facts| {
        tokens_value(facts.usage.total_tokens())
    }),
    context_field("usage.cost_usd", RuleValueType::Double, |facts| {
        dollars_value(facts.usage.cost_usd)
    }),
    context_field("usage.left.turns", RuleValueType::Int, |facts| {
        int_value(facts.usage.left.turns.unwrap_or(UNLIMITED_VALUE))
    }),
    context_field("usage.left.input_tokens", RuleValueType::Int, |facts| {
        remaining_value(facts.usage.left.input_tokens)
    }),
    context_field("usage.left.output_tokens", RuleValueType::Int, |facts| {
        remaining_value(facts.usage.left.output_tokens)
    }),
    context_field("usage.left.total_tokens", RuleValueType::Int, |facts| {
        remaining_value(facts.usage.left.total_tokens)
    }),
    context_field("usage.left.cost_usd", RuleValueType::Double, |facts| {
        facts.usage.left.cost_usd.map_or(RuleValue::Double(f64::INFINITY), dollars_value)
    }),
];

fn text_value(text: &str) -> RuleValue<'_> {
    RuleValue::Text(truncated_text(text))
}

fn truncated_text(text: &str) -> Cow<'_, str> {
    // A text is truncated at a character boundary, so the cost of a test is bounded.
    Cow::Borrowed(&text[..text.floor_char_boundary(MAX_TEXT_BYTES)])
}

fn int_value(number: u64) -> RuleValue<'static> {
    // Any larger number counts as unlimited; the cap makes the conversion infallible.
    RuleValue::Int(i64::try_from(number.min(UNLIMITED_VALUE)).expect("2^53 fits"))
}

fn tokens_value(tokens: Tokens) -> RuleValue<'static> {
    int_value(tokens.0)
}

fn dollars_value(amount: Nanodollars) -> RuleValue<'static> {
    RuleValue::Double(amount.to_dollars())
}

fn remaining_value(tokens: Option<Tokens>) -> RuleValue<'static> {
    int_value(tokens.map_or(UNLIMITED_VALUE, |tokens| tokens.0))
}

/// Returns the routes whose calls the rules see: the routes with a body.
fn routes_with_body() -> impl Iterator<Item = GatewayRoute> {
    GatewayRoute::ALL.into_iter().filter(|route| route.method() == http::Method::POST)
}

fn protocol_name(protocol: LlmProtocol) -> &'static str {
    match protocol {
        LlmProtocol::Chat => "chat",
        LlmProtocol::Responses => "responses",
        LlmProtocol::Messages => "messages",
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands references")]
fn serialize_route_name<S: Serializer>(
    route: &GatewayRoute,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(route.name())
}

fn deserialize_route_name<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<GatewayRoute, D::Error> {
    let name = <Cow<'_, str>>::deserialize(deserializer)?;
    routes_with_body().find(|route| route.name() == name).ok_or_else(|| {
        let names: Vec<_> = routes_with_body().map(GatewayRoute::name).collect();
        serde::de::Error::custom(format!(
            "`{name}` is not a route that rules see; give `{}`",
            names.join("`, `")
        ))
    })
}

const ALL_PROTOCOLS: [LlmProtocol; 3] =
    [LlmProtocol::Chat, LlmProtocol::Responses, LlmProtocol::Messages];

/// The most bytes of a text that rules see. The longest model name has this length; only metadata may
/// be longer.
const MAX_TEXT_BYTES: usize = 256;

/// The value of an unlimited budget: larger than any budget, and small enough that an addition neither
/// overflows nor loses a digit in a double.
const UNLIMITED_VALUE: u64 = 1 << 53;
