//! Rules: an operator's own conditions on a call, and their effects.
//!
//! A condition is a CEL expression over the [`RuleContext`]; `rules.md` in the manual describes the
//! language. Names, types and the rule's own examples are checked when the configuration is loaded. So
//! a loaded rule can be evaluated for each call, at a cost that the rule's size bounds.
//!
//! All rules are evaluated in their order, on the call as the client made it. A later rule's model or
//! header replaces the model or header of an earlier rule. Among limits the smallest applies.
//! Evaluation stops at the first rule that refuses the call.
//!
//! **Invariant:** a rule that cannot be evaluated refuses the call.

mod context;
mod validate;

use std::sync::Arc;

use http::{HeaderName, HeaderValue};

use self::context::RuleFact;
use crate::base::condition::RuleExpr;
use crate::gateway::upstream::headers::UpstreamRequestHead;
use crate::llm::budget::Tokens;
use crate::llm::request::{FieldChangeReason, LlmCall};

pub use crate::base::condition::{RuleCompileError, RuleEvalError};
pub use context::{
    RuleAgentContext, RuleContext, RuleRemainingBudget, RuleRequestContext, RuleRunContext,
    RuleUsageContext,
};
pub use validate::{RuleConfig, RuleConfigError, RuleProblem};

/// The compiled rules of a run.
#[derive(Debug, Default)]
pub struct RuleSet(Box<[CompiledRule]>);

#[derive(Debug)]
struct CompiledRule {
    name: Arc<str>,
    when: RuleExpr<RuleFact>,
    refuse: Option<Arc<str>>,
    model: Option<Box<str>>,
    max_output: Option<Tokens>,
    headers: Box<[(HeaderName, HeaderValue)]>,
}

/// The changes that the matching rules make to a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleEffects<'a> {
    /// The rules that matched, in their order.
    pub matched: Vec<Arc<str>>,
    /// The replacement model, by the upstream's name. The operator chose this model, so the list of
    /// models that a client may name does not apply.
    pub model: Option<&'a str>,
    /// The most tokens that each answer may have.
    pub max_output: Option<Tokens>,
    /// The headers to send upstream. Each name occurs once.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

/// A reason why the rules do not admit a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    #[error("refused by the rule `{rule}`: {reason}")]
    Refused { rule: Arc<str>, reason: Arc<str> },
    #[error(
        "the rule `{rule}` cannot be evaluated: {fault}; report this to the operator of the gateway"
    )]
    Failed { rule: Arc<str>, fault: RuleEvalError },
}

impl RuleSet {
    /// Compiles the rules and checks their examples.
    ///
    /// # Errors
    /// Returns the first mistake: the rule, the position in the rule, and the remedy.
    pub fn compile_rules(rules: &[RuleConfig]) -> Result<Self, RuleConfigError> {
        validate::compile_rules(rules).map(|rules| Self(rules.into()))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Evaluates the rules for a call.
    ///
    /// # Errors
    /// Returns an error for the first rule that refuses the call or cannot be evaluated.
    pub fn evaluate_rules(&self, facts: &RuleContext<'_>) -> Result<RuleEffects<'_>, RuleError> {
        // `facts` does not change between rules: the effects are only collected here and applied later.
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
    /// Applies the collected changes to a call.
    pub fn apply_to_call(&self, call: &mut LlmCall, head: &mut UpstreamRequestHead) {
        let before = call.changes.len();
        if let Some(model) = self.model {
            call.rename_model(model);
        }
        if let Some(limit) = self.max_output {
            call.limit_output(limit);
        }
        // The two setters record other reasons; the rule is the true reason of the changes that they
        // added.
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
        // A rule with `refuse` has no other effects; the validation guarantees this.
        if let Some(reason) = &self.refuse {
            let (rule, reason) = (Arc::clone(&self.name), Arc::clone(reason));
            return Err(RuleError::Refused { rule, reason });
        }
        verdict.matched.push(Arc::clone(&self.name));
        verdict.model = self.model.as_deref().or(verdict.model);
        // The smaller limit of the two applies; a missing limit never wins.
        verdict.max_output = verdict.max_output.into_iter().chain(self.max_output).min();
        for (name, value) in &self.headers {
            verdict.headers.retain(|(other, _)| other != name);
            verdict.headers.push((name.clone(), value.clone()));
        }
        Ok(())
    }
}

impl RuleError {
    /// Returns the stable code that clients, metrics and the audit log receive.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "refused_by_rule",
            Self::Failed { .. } => "policy_error",
        }
    }

    /// Returns the name of the rule.
    pub fn rule_name(&self) -> Arc<str> {
        let (Self::Refused { rule, .. } | Self::Failed { rule, .. }) = self;
        Arc::clone(rule)
    }
}
