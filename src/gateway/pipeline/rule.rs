//! Rules: an operator's own conditions on a call, and what follows from them.
//!
//! A condition is a CEL expression over the [`RuleContext`]; `rules.md` in the manual says what may stand
//! in it. Names, types and the rule's own examples are checked when the configuration is loaded, so
//! that a rule that loads can be asked at each call, at a cost that is bounded by its size.
//!
//! All rules are asked in their order, of the call as its client made it. A later rule's model or
//! header replaces an earlier one's, of limits the smallest holds, and the first rule that refuses
//! is the last that is asked.
//!
//! **Invariant:** a rule that cannot be answered refuses the call.

mod compile;
mod context;
mod expression;
mod validate;

use std::sync::Arc;

use http::{HeaderName, HeaderValue};

use self::expression::RuleExpr;
use crate::gateway::upstream::headers::UpstreamRequestHead;
use crate::llm::budget::Tokens;
use crate::llm::request::{FieldChangeReason, LlmCall};

pub use compile::RuleCompileError;
pub use context::{
    RuleAgentContext, RuleContext, RuleRemainingBudget, RuleRequestContext, RuleRunContext,
    RuleUsageContext,
};
pub use expression::RuleEvalError;
pub use validate::{RuleConfig, RuleConfigError, RuleProblem};

/// All rules of a run, ready to be asked.
#[derive(Debug, Default)]
pub struct RuleSet(Box<[CompiledRule]>);

#[derive(Debug)]
struct CompiledRule {
    name: Arc<str>,
    when: RuleExpr,
    refuse: Option<Arc<str>>,
    model: Option<Box<str>>,
    max_output: Option<Tokens>,
    headers: Box<[(HeaderName, HeaderValue)]>,
}

/// What the rules change about a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleEffects<'a> {
    /// The rules that matched, in their order.
    pub matched: Vec<Arc<str>>,
    /// The model to use instead, by the upstream's name. The operator's word: the list of models
    /// that a client may name does not apply to it.
    pub model: Option<&'a str>,
    /// The most tokens that each answer may have.
    pub max_output: Option<Tokens>,
    /// Sent upstream, each name once.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

/// Why the rules do not let a call through.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    #[error("refused by the rule `{rule}`: {reason}")]
    Refused { rule: Arc<str>, reason: Arc<str> },
    #[error("the rule `{rule}` cannot be answered: {fault}; tell who operates this gateway")]
    Failed { rule: Arc<str>, fault: RuleEvalError },
}

impl RuleSet {
    /// Checks the rules, and their examples.
    ///
    /// # Errors
    /// The first mistake: in which rule, where, and what to do about it.
    pub fn compile_rules(rules: &[RuleConfig]) -> Result<Self, RuleConfigError> {
        validate::compile_rules(rules).map(|rules| Self(rules.into()))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Asks the rules about a call.
    ///
    /// # Errors
    /// The first rule that refuses it, or cannot be answered.
    pub fn evaluate_rules(&self, facts: &RuleContext<'_>) -> Result<RuleEffects<'_>, RuleError> {
        let mut verdict = RuleEffects::default();
        for rule in &self.0 {
            let failed = |fault| RuleError::Failed { rule: Arc::clone(&rule.name), fault };
            if rule.when.eval_bool(facts).map_err(failed)? {
                rule.collect_effects(&mut verdict)?;
            }
        }
        Ok(verdict)
    }
}

impl RuleEffects<'_> {
    /// Changes a call as the rules say.
    pub fn apply_to_call(&self, call: &mut LlmCall, head: &mut UpstreamRequestHead) {
        let before = call.changes.len();
        if let Some(model) = self.model {
            call.rename_model(model);
        }
        if let Some(limit) = self.max_output {
            call.limit_output(limit);
        }
        for change in &mut call.changes[before..] {
            change.why = FieldChangeReason::Rule;
        }
        for (name, value) in &self.headers {
            head.push(name, value);
        }
    }
}

impl CompiledRule {
    fn collect_effects<'a>(&'a self, verdict: &mut RuleEffects<'a>) -> Result<(), RuleError> {
        if let Some(reason) = &self.refuse {
            let (rule, reason) = (Arc::clone(&self.name), Arc::clone(reason));
            return Err(RuleError::Refused { rule, reason });
        }
        verdict.matched.push(Arc::clone(&self.name));
        verdict.model = self.model.as_deref().or(verdict.model);
        verdict.max_output = verdict.max_output.into_iter().chain(self.max_output).min();
        for (name, value) in &self.headers {
            verdict.headers.retain(|(other, _)| other != name);
            verdict.headers.push((name.clone(), value.clone()));
        }
        Ok(())
    }
}

impl RuleError {
    /// The stable code that clients, metrics and the audit see.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "refused_by_rule",
            Self::Failed { .. } => "policy_error",
        }
    }

    /// The name of the rule.
    pub fn rule_name(&self) -> Arc<str> {
        let (Self::Refused { rule, .. } | Self::Failed { rule, .. }) = self;
        Arc::clone(rule)
    }
}
