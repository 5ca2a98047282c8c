//! What a rule may ask about: one table of names, and where each is read.
//!
//! **Invariant:** each fact has a value at every call, so that no rule fails for want of one: a text
//! that is not there is empty, a number is 0, and what is left of a budget without a limit is more
//! than anyone asks for.

use std::borrow::Cow;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value as Json};

use super::expression::{Kind, Value};
use crate::body::Call;
use crate::budget::{Nanodollars, Status, Tokens};
use crate::protocol::{Protocol, Route};
use crate::run::Identity;

/// What is known of a call before it is reserved for. An example in a rule says as much of it as
/// matters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Facts<'a> {
    pub run: Run<'a>,
    pub agent: Agent<'a>,
    pub request: Request<'a>,
    pub usage: Usage,
}

/// Who calls, as the host said.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Run<'a> {
    pub id: Cow<'a, str>,
    pub attempt: Cow<'a, str>,
    pub account: Cow<'a, str>,
    pub metadata: Cow<'a, Map<String, Json>>,
}

/// The agent that the run executes: the metadata's `graph_id`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Agent<'a> {
    pub name: Cow<'a, str>,
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Request<'a> {
    #[serde(serialize_with = "serialize_route_name", deserialize_with = "route_by_name")]
    pub route: Route,
    /// By the upstream's name: aliases are resolved before rules are asked.
    pub model: Cow<'a, str>,
    pub stream: bool,
    pub bytes: u64,
    /// Estimated from the size.
    pub input_tokens: Tokens,
    /// For all answers together; `None` where the client set no limit.
    pub max_output_tokens: Option<Tokens>,
    pub choices: u32,
}

/// What the run has spent in calls that are settled, and what it may still reserve.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Usage {
    pub turns: u64,
    pub input_tokens: Tokens,
    pub output_tokens: Tokens,
    /// The sum of the two where an example does not say otherwise.
    pub total_tokens: Option<Tokens>,
    pub cost_usd: Nanodollars,
    pub left: Left,
}

/// `None` where there is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Left {
    pub turns: Option<u64>,
    pub input_tokens: Option<Tokens>,
    pub output_tokens: Option<Tokens>,
    pub total_tokens: Option<Tokens>,
    pub cost_usd: Option<Nanodollars>,
}

/// The name of a fact, and how it is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fact {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    read: for<'a> fn(&'a Facts<'_>) -> Value<'a>,
}

impl<'a> Facts<'a> {
    /// What is known of a run before it asks for anything.
    pub fn of(identity: &'a Identity) -> Self {
        Self { run: Run::of(identity), agent: Agent::of(identity), ..Self::default() }
    }
}

impl<'a> Run<'a> {
    fn of(identity: &'a Identity) -> Self {
        Self {
            id: Cow::Borrowed(&identity.run),
            attempt: Cow::Borrowed(&identity.attempt),
            account: Cow::Borrowed(&identity.account),
            metadata: Cow::Borrowed(&identity.metadata),
        }
    }

    /// A text as it is, anything else as JSON; what the metadata does not have is empty.
    pub(super) fn metadata(&self, name: &str) -> Cow<'_, str> {
        match self.metadata.get(name) {
            Some(Json::String(text)) => short(text),
            Some(other) => Cow::Owned(short(&other.to_string()).into_owned()),
            None => Cow::Borrowed(""),
        }
    }
}

impl<'a> Agent<'a> {
    fn of(identity: &'a Identity) -> Self {
        let name = identity.metadata.get("graph_id").and_then(Json::as_str);
        Self { name: Cow::Borrowed(name.unwrap_or_default()) }
    }
}

impl<'a> Request<'a> {
    /// A call of `bytes`, as it was admitted.
    pub fn of(route: Route, bytes: u64, call: &'a Call) -> Self {
        Self {
            route,
            model: Cow::Borrowed(call.model.as_deref().unwrap_or_default()),
            stream: call.stream,
            bytes,
            input_tokens: call.input_estimate,
            max_output_tokens: call.output(),
            choices: call.choices,
        }
    }
}

impl Usage {
    pub fn of(status: &Status) -> Self {
        Self {
            turns: status.spent.turns,
            input_tokens: status.spent.input,
            output_tokens: status.spent.output,
            total_tokens: None,
            cost_usd: status.spent.cost,
            left: Left {
                turns: status.turns_left,
                input_tokens: status.input_tokens_left,
                output_tokens: status.output_tokens_left,
                total_tokens: status.total_tokens_left,
                cost_usd: status.cost_left_usd,
            },
        }
    }

    fn total(&self) -> Tokens {
        self.total_tokens.unwrap_or(self.input_tokens + self.output_tokens)
    }
}

impl Default for Request<'_> {
    fn default() -> Self {
        Self {
            route: Route::ChatCompletions,
            model: Cow::Borrowed(""),
            stream: false,
            bytes: 0,
            input_tokens: Tokens::ZERO,
            max_output_tokens: None,
            choices: 1,
        }
    }
}

impl Fact {
    pub(super) fn find(name: &str) -> Option<Self> {
        FACTS.into_iter().find(|fact| fact.name == name)
    }

    pub(super) fn read<'a>(&self, facts: &'a Facts<'_>) -> Value<'a> {
        (self.read)(facts)
    }

    /// What may follow `prefix` and a dot; the metadata's names are the operator's own.
    pub(super) fn below(prefix: &str) -> Vec<&'static str> {
        let names = FACTS.into_iter().map(|fact| fact.name).chain(["run.metadata.NAME"]);
        names.filter_map(|name| name.strip_prefix(prefix)?.strip_prefix('.')).collect()
    }

    /// The words that are all the fact can be, where there are such.
    pub(super) fn words(&self) -> Option<Vec<&'static str>> {
        match self.name {
            "request.route" => Some(judged().map(Route::name).collect()),
            "request.protocol" => Some(PROTOCOLS.map(protocol).to_vec()),
            _ => None,
        }
    }
}

const fn fact(
    name: &'static str,
    kind: Kind,
    read: for<'a> fn(&'a Facts<'_>) -> Value<'a>,
) -> Fact {
    Fact { name, kind, read }
}

/// All facts but the metadata, whose names are the operator's own.
const FACTS: [Fact; 22] = [
    fact("run.id", Kind::Text, |facts| text(&facts.run.id)),
    fact("run.attempt", Kind::Text, |facts| text(&facts.run.attempt)),
    fact("run.account", Kind::Text, |facts| text(&facts.run.account)),
    fact("agent.name", Kind::Text, |facts| text(&facts.agent.name)),
    fact("request.route", Kind::Text, |facts| text(facts.request.route.name())),
    fact("request.protocol", Kind::Text, |facts| text(protocol(facts.request.route.protocol()))),
    fact("request.model", Kind::Text, |facts| text(&facts.request.model)),
    fact("request.stream", Kind::Bool, |facts| Value::Bool(facts.request.stream)),
    fact("request.bytes", Kind::Int, |facts| int(facts.request.bytes)),
    fact("request.input_tokens", Kind::Int, |facts| tokens(facts.request.input_tokens)),
    fact("request.max_output_tokens", Kind::Int, |facts| {
        tokens(facts.request.max_output_tokens.unwrap_or_default())
    }),
    fact("request.choices", Kind::Int, |facts| int(facts.request.choices.into())),
    fact("usage.turns", Kind::Int, |facts| int(facts.usage.turns)),
    fact("usage.input_tokens", Kind::Int, |facts| tokens(facts.usage.input_tokens)),
    fact("usage.output_tokens", Kind::Int, |facts| tokens(facts.usage.output_tokens)),
    fact("usage.total_tokens", Kind::Int, |facts| tokens(facts.usage.total())),
    fact("usage.cost_usd", Kind::Double, |facts| dollars(facts.usage.cost_usd)),
    fact("usage.left.turns", Kind::Int, |facts| int(facts.usage.left.turns.unwrap_or(NO_LIMIT))),
    fact("usage.left.input_tokens", Kind::Int, |facts| left(facts.usage.left.input_tokens)),
    fact("usage.left.output_tokens", Kind::Int, |facts| left(facts.usage.left.output_tokens)),
    fact("usage.left.total_tokens", Kind::Int, |facts| left(facts.usage.left.total_tokens)),
    fact("usage.left.cost_usd", Kind::Double, |facts| {
        facts.usage.left.cost_usd.map_or(Value::Double(f64::INFINITY), dollars)
    }),
];

fn text(text: &str) -> Value<'_> {
    Value::Text(short(text))
}

fn short(text: &str) -> Cow<'_, str> {
    Cow::Borrowed(&text[..text.floor_char_boundary(MAX_TEXT)])
}

fn int(number: u64) -> Value<'static> {
    Value::Int(i64::try_from(number.min(NO_LIMIT)).expect("2^53 fits"))
}

fn tokens(tokens: Tokens) -> Value<'static> {
    int(tokens.0)
}

fn dollars(amount: Nanodollars) -> Value<'static> {
    Value::Double(amount.dollars())
}

fn left(tokens: Option<Tokens>) -> Value<'static> {
    int(tokens.map_or(NO_LIMIT, |tokens| tokens.0))
}

/// The routes whose calls are judged: those with a body.
fn judged() -> impl Iterator<Item = Route> {
    Route::ALL.into_iter().filter(|route| route.method() == http::Method::POST)
}

fn protocol(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Chat => "chat",
        Protocol::Responses => "responses",
        Protocol::Messages => "messages",
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands references")]
fn serialize_route_name<S: Serializer>(route: &Route, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(route.name())
}

fn route_by_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Route, D::Error> {
    let name = <Cow<'_, str>>::deserialize(deserializer)?;
    judged().find(|route| route.name() == name).ok_or_else(|| {
        let names: Vec<_> = judged().map(Route::name).collect();
        serde::de::Error::custom(format!(
            "`{name}` is not a route that rules see; give `{}`",
            names.join("`, `")
        ))
    })
}

const PROTOCOLS: [Protocol; 3] = [Protocol::Chat, Protocol::Responses, Protocol::Messages];

/// Bytes of a text that rules see. The longest model's name has as many; only metadata may be longer.
const MAX_TEXT: usize = 256;

/// Larger than any budget, and small enough that adding to it neither overflows nor loses a digit as
/// a double.
const NO_LIMIT: u64 = 1 << 53;
