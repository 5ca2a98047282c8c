//! Validates configured rules and compiles them.
//!
//! A rule that would do nothing, contradict itself or fail its own examples is rejected, not repaired.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use http::{HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};

use super::CompiledRule;
use super::context::{RuleContext, RuleFact, RuleFactTable};
use crate::base::condition::{RuleCompileError, RuleEvalError, RuleExpr, compile_condition};
use crate::llm::budget::Tokens;
use crate::llm::request::{MODEL_NAME_RULE, is_model_name};

/// One rule, as the operator configured it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleConfig {
    /// The name that responses and records show.
    pub name: String,
    /// The condition, in CEL.
    pub when: String,
    /// The message to the client. A rule with this message refuses the call.
    pub refuse: Option<String>,
    /// The replacement model, by the upstream's name.
    pub set_model: Option<String>,
    /// The most output tokens of each answer. The client may request fewer.
    pub max_output_tokens: Option<Tokens>,
    /// The headers added to the upstream request.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// Example calls for which the condition must hold.
    #[serde(default, rename = "match")]
    pub matching: Vec<RuleContext<'static>>,
    /// Example calls for which the condition must not hold.
    #[serde(default)]
    pub not_match: Vec<RuleContext<'static>>,
}

/// A rule that cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rule `{rule}`: {problem}")]
pub struct RuleConfigError {
    pub rule: String,
    pub problem: RuleProblem,
}

/// A mistake in a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleProblem {
    #[error("there are more than {MAX_RULES} rules; join some of them with `||`")]
    TooManyRules,
    #[error("the name is not 1 to 64 small letters, digits and `-`")]
    InvalidName,
    #[error("an earlier rule has the same name; give each rule its own name")]
    DuplicateName,
    #[error("the rule has no effect; give `refuse`, `set_model`, `max_output_tokens` or `headers`")]
    NoEffect,
    #[error("`refuse` ends the call, so `{0}` has no effect; remove `{0}` or `refuse`")]
    AfterRefusal(&'static str),
    #[error("`{field}` is empty, longer than {limit} bytes, or has a control character")]
    InvalidText { field: &'static str, limit: usize },
    #[error("`set_model` must be {MODEL_NAME_RULE}")]
    InvalidModel,
    #[error("`max_output_tokens` is 0; use `refuse` to let nothing through")]
    ZeroOutputTokens,
    #[error("there are more than {MAX_RULE_HEADERS} headers")]
    TooManyHeaders,
    #[error(
        "the header `{0}` may not be set; use a name of your own in small letters that begins with `x-`"
    )]
    ForbiddenHeader(String),
    #[error("`when`{} {}", format_error_position(.0), .0.problem)]
    InvalidCondition(RuleCompileError),
    #[error(
        "`when` cannot be evaluated for the first call of a run: {0}; add a guard, as in `usage.turns > 0 && …`"
    )]
    ConditionFails(RuleEvalError),
    #[error("example {number} of `{list}` {}", if *.list == "match" { "does not match" } else { "matches" })]
    WrongExample { list: &'static str, number: usize },
    #[error("example {number} of `{list}` cannot be evaluated: {fault}")]
    ExampleFails { list: &'static str, number: usize, fault: RuleEvalError },
}

/// Compiles all rules, or returns the first mistake.
pub(super) fn compile_rules(configs: &[RuleConfig]) -> Result<Vec<CompiledRule>, RuleConfigError> {
    let mut names = BTreeSet::new();
    let mut rules = Vec::with_capacity(configs.len());
    for config in configs {
        let problem = |problem| RuleConfigError { rule: config.name.clone(), problem };
        if rules.len() == MAX_RULES {
            return Err(problem(RuleProblem::TooManyRules));
        }
        if !names.insert(&config.name) {
            return Err(problem(RuleProblem::DuplicateName));
        }
        rules.push(compile_rule(config).map_err(problem)?);
    }
    Ok(rules)
}

fn compile_rule(config: &RuleConfig) -> Result<CompiledRule, RuleProblem> {
    check_rule_config(config)?;
    let when =
        compile_condition(&config.when, &RuleFactTable).map_err(RuleProblem::InvalidCondition)?;
    // A condition that fails with empty facts, such as a division by the number of turns, would refuse
    // each run's first call.
    when.eval_bool(&RuleContext::default()).map_err(RuleProblem::ConditionFails)?;
    check_examples(&when, "match", &config.matching, true)?;
    check_examples(&when, "not_match", &config.not_match, false)?;
    Ok(CompiledRule {
        name: Arc::from(config.name.as_str()),
        when,
        refuse: config.refuse.as_deref().map(Arc::from),
        model: config.set_model.as_deref().map(Box::from),
        max_output: config.max_output_tokens,
        headers: compile_headers(&config.headers)?,
    })
}

/// Checks everything that does not need the condition.
fn check_rule_config(config: &RuleConfig) -> Result<(), RuleProblem> {
    let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if !(1..=64).contains(&config.name.len()) || !config.name.bytes().all(is_name) {
        return Err(RuleProblem::InvalidName);
    }
    let effects = [
        ("set_model", config.set_model.is_some()),
        ("max_output_tokens", config.max_output_tokens.is_some()),
        ("headers", !config.headers.is_empty()),
    ];
    let effect = effects.into_iter().find(|(_, is_given)| *is_given).map(|(name, _)| name);
    match (&config.refuse, effect) {
        (None, None) => return Err(RuleProblem::NoEffect),
        (Some(_), Some(effect)) => return Err(RuleProblem::AfterRefusal(effect)),
        _ => {}
    }
    check_text("refuse", config.refuse.as_deref(), MAX_REASON_BYTES)?;
    if config.set_model.as_deref().is_some_and(|name| !is_model_name(name)) {
        return Err(RuleProblem::InvalidModel);
    }
    if config.max_output_tokens == Some(Tokens::ZERO) {
        Err(RuleProblem::ZeroOutputTokens)
    } else {
        Ok(())
    }
}

fn check_text(field: &'static str, text: Option<&str>, limit: usize) -> Result<(), RuleProblem> {
    let is_fine =
        |text: &str| (1..=limit).contains(&text.len()) && !text.chars().any(char::is_control);
    if text.is_none_or(is_fine) { Ok(()) } else { Err(RuleProblem::InvalidText { field, limit }) }
}

fn compile_headers(
    headers: &BTreeMap<String, String>,
) -> Result<Box<[(HeaderName, HeaderValue)]>, RuleProblem> {
    if headers.len() > MAX_RULE_HEADERS {
        return Err(RuleProblem::TooManyHeaders);
    }
    headers.iter().map(|(name, value)| compile_header(name, value)).collect()
}

fn compile_header(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), RuleProblem> {
    // A rule must not set headers that authenticate, attribute or route a call.
    let is_ours = !name.starts_with("x-")
        || RESERVED_HEADER_PREFIXES.iter().any(|ours| name.starts_with(ours));
    let parsed = HeaderName::from_lowercase(name.as_bytes()).ok().filter(|_| !is_ours);
    let name = parsed.ok_or_else(|| RuleProblem::ForbiddenHeader(name.to_owned()))?;
    check_text("headers", Some(value), MAX_HEADER_BYTES)?;
    // `from_str` also rejects text that is not ASCII.
    let value = HeaderValue::from_str(value);
    let value = value
        .map_err(|_| RuleProblem::InvalidText { field: "headers", limit: MAX_HEADER_BYTES })?;
    Ok((name, value))
}

fn check_examples(
    when: &RuleExpr<RuleFact>,
    list: &'static str,
    examples: &[RuleContext<'static>],
    expected: bool,
) -> Result<(), RuleProblem> {
    for (number, facts) in (1..).zip(examples) {
        match when.eval_bool(facts) {
            Ok(holds) if holds == expected => {}
            Ok(_) => return Err(RuleProblem::WrongExample { list, number }),
            Err(fault) => return Err(RuleProblem::ExampleFails { list, number, fault }),
        }
    }
    Ok(())
}

fn format_error_position(invalid: &RuleCompileError) -> String {
    invalid
        .place
        .map(|(line, column)| format!(", line {line}, column {column}:"))
        .unwrap_or_default()
}

/// Prefixes of header names that decide the caller, the route or the meaning of a call. Each prefix is
/// measured with LiteLLM, or is in use by another proxy or provider.
const RESERVED_HEADER_PREFIXES: &[&str] = &[
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

/// The most rules of a policy. Our choice, like the limits below: the gateway evaluates rules at each
/// call, and a person must be able to read them.
const MAX_RULES: usize = 64;

const MAX_RULE_HEADERS: usize = 16;

/// The longest message of `refuse`, in bytes: the longest text in an audit record.
const MAX_REASON_BYTES: usize = 256;

const MAX_HEADER_BYTES: usize = 256;
