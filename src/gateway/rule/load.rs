//! From what an operator wrote to rules that can be asked.
//!
//! A rule that would do nothing, contradict itself or fail its own examples is refused, not repaired.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use http::{HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};

use super::compile::{Invalid, compile};
use super::expression::Fault;
use super::facts::Facts;
use super::{Node, Rule};
use crate::body::{MODEL_NAME_RULE, is_model_name};
use crate::budget::Tokens;

/// One rule, as it is written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Stands in answers and records.
    pub name: String,
    /// The condition, in CEL.
    pub when: String,
    /// What the client is told; the call ends here.
    pub refuse: Option<String>,
    /// By the upstream's name.
    pub set_model: Option<String>,
    /// For each answer; the client may ask for less.
    pub max_output_tokens: Option<Tokens>,
    /// Added to what goes upstream.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// Calls for which the condition has to hold.
    #[serde(default, rename = "match")]
    pub matching: Vec<Facts<'static>>,
    /// Calls for which it must not.
    #[serde(default)]
    pub not_match: Vec<Facts<'static>>,
}

/// A rule that cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rule `{rule}`: {problem}")]
pub struct Error {
    pub rule: String,
    pub problem: Problem,
}

/// What is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error("there are more than {MAX_RULES} rules; join some of them with `||`")]
    TooMany,
    #[error("the name is not 1 to 64 small letters, digits and `-`")]
    Name,
    #[error("an earlier rule has the same name; each needs its own")]
    Twice,
    #[error(
        "nothing follows from it; give `refuse`, `set_model`, `max_output_tokens` or `headers`"
    )]
    NoEffect,
    #[error("it refuses the call, so nothing else can follow; leave `{0}` out, or `refuse`")]
    AfterRefusal(&'static str),
    #[error("`{field}` is empty, longer than {limit} bytes, or has a control character")]
    Text { field: &'static str, limit: usize },
    #[error("`set_model` must be {MODEL_NAME_RULE}")]
    Model,
    #[error("`max_output_tokens` is 0; use `refuse` to let nothing through")]
    NoOutput,
    #[error("there are more than {MAX_HEADERS} headers")]
    TooManyHeaders,
    #[error(
        "the header `{0}` may not be set; use a name of your own in small letters that begins with `x-`"
    )]
    Header(String),
    #[error("`when`{} {}", place(.0), .0.problem)]
    When(Invalid),
    #[error(
        "`when` has no answer for the first call of a run: {0}; test for it before, as in `usage.turns > 0 && …`"
    )]
    Fault(Fault),
    #[error("example {number} of `{list}` {}", if *.list == "match" { "does not match" } else { "matches" })]
    Example { list: &'static str, number: usize },
    #[error("example {number} of `{list}` has no answer: {fault}")]
    ExampleFault { list: &'static str, number: usize, fault: Fault },
}

/// All rules, or the first mistake.
pub(super) fn rules(configs: &[Config]) -> Result<Vec<Rule>, Error> {
    let mut names = BTreeSet::new();
    let mut rules = Vec::with_capacity(configs.len());
    for config in configs {
        let problem = |problem| Error { rule: config.name.clone(), problem };
        if rules.len() == MAX_RULES {
            return Err(problem(Problem::TooMany));
        }
        if !names.insert(&config.name) {
            return Err(problem(Problem::Twice));
        }
        rules.push(rule(config).map_err(problem)?);
    }
    Ok(rules)
}

fn rule(config: &Config) -> Result<Rule, Problem> {
    check(config)?;
    let when = compile(&config.when).map_err(Problem::When)?;
    when.holds(&Facts::default()).map_err(Problem::Fault)?;
    examples(&when, "match", &config.matching, true)?;
    examples(&when, "not_match", &config.not_match, false)?;
    Ok(Rule {
        name: Arc::from(config.name.as_str()),
        when,
        refuse: config.refuse.as_deref().map(Arc::from),
        model: config.set_model.as_deref().map(Box::from),
        max_output: config.max_output_tokens,
        headers: headers(&config.headers)?,
    })
}

/// Checks all that does not need the condition.
fn check(config: &Config) -> Result<(), Problem> {
    let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if !(1..=64).contains(&config.name.len()) || !config.name.bytes().all(is_name) {
        return Err(Problem::Name);
    }
    let effects = [
        ("set_model", config.set_model.is_some()),
        ("max_output_tokens", config.max_output_tokens.is_some()),
        ("headers", !config.headers.is_empty()),
    ];
    let effect = effects.into_iter().find(|(_, is_given)| *is_given).map(|(name, _)| name);
    match (&config.refuse, effect) {
        (None, None) => return Err(Problem::NoEffect),
        (Some(_), Some(effect)) => return Err(Problem::AfterRefusal(effect)),
        _ => {}
    }
    text("refuse", config.refuse.as_deref(), MAX_REASON)?;
    if config.set_model.as_deref().is_some_and(|name| !is_model_name(name)) {
        return Err(Problem::Model);
    }
    if config.max_output_tokens == Some(Tokens::ZERO) { Err(Problem::NoOutput) } else { Ok(()) }
}

fn text(field: &'static str, text: Option<&str>, limit: usize) -> Result<(), Problem> {
    let is_fine =
        |text: &str| (1..=limit).contains(&text.len()) && !text.chars().any(char::is_control);
    if text.is_none_or(is_fine) { Ok(()) } else { Err(Problem::Text { field, limit }) }
}

fn headers(
    headers: &BTreeMap<String, String>,
) -> Result<Box<[(HeaderName, HeaderValue)]>, Problem> {
    if headers.len() > MAX_HEADERS {
        return Err(Problem::TooManyHeaders);
    }
    headers.iter().map(|(name, value)| header(name, value)).collect()
}

fn header(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), Problem> {
    let is_ours = !name.starts_with("x-") || OURS.iter().any(|ours| name.starts_with(ours));
    let parsed = HeaderName::from_lowercase(name.as_bytes()).ok().filter(|_| !is_ours);
    let name = parsed.ok_or_else(|| Problem::Header(name.to_owned()))?;
    text("headers", Some(value), MAX_HEADER)?;
    let value = HeaderValue::from_str(value);
    let value = value.map_err(|_| Problem::Text { field: "headers", limit: MAX_HEADER })?;
    Ok((name, value))
}

fn examples(
    when: &Node,
    list: &'static str,
    examples: &[Facts<'static>],
    expected: bool,
) -> Result<(), Problem> {
    for (number, facts) in (1..).zip(examples) {
        match when.holds(facts) {
            Ok(holds) if holds == expected => {}
            Ok(_) => return Err(Problem::Example { list, number }),
            Err(fault) => return Err(Problem::ExampleFault { list, number, fault }),
        }
    }
    Ok(())
}

fn place(invalid: &Invalid) -> String {
    invalid
        .place
        .map(|(line, column)| format!(", line {line}, column {column}:"))
        .unwrap_or_default()
}

/// Beginnings of names that decide who calls, where a call goes or what it is taken for; measured
/// with LiteLLM, or in use by another proxy or provider.
const OURS: &[&str] = &[
    "x-api-key",
    "x-amz-",
    "x-amzn-",
    "x-cogni-",
    "x-forwarded",
    "x-goog-",
    "x-http-method",
    "x-litellm-",
    "x-mcp-",
    "x-ms-",
    "x-original-",
    "x-real-ip",
    "x-rewrite-",
    "x-should-retry",
];

/// Ours, like the limits below: asked at each call, they are what a person can still read.
const MAX_RULES: usize = 64;

const MAX_HEADERS: usize = 16;

/// As long as a text in an audit record.
const MAX_REASON: usize = 256;

const MAX_HEADER: usize = 256;
