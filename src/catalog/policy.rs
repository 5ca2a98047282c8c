//! An agent's own policy, laid over its gateway's.
//!
//! What is said here holds in place of what is said there, but for rules, which are asked after the gateway's own: an
//! agent's file takes none of them away. Models and capabilities have keys of their own in an entry.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Entry;
use crate::body::UnknownFields;
use crate::gateway::policy::{Config, OnClientGone};
use crate::gateway::rule;
use crate::stream::Cutoff;

/// As much of a policy as an entry says; the keys are those of `[policy]` in `config/gateway.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    pub headers: Headers,
    pub body: Body,
    pub rules: Vec<rule::Config>,
    pub max_body_bytes: Option<u64>,
    #[serde(with = "humantime_serde")]
    pub body_timeout: Option<Duration>,
    pub on_client_gone: Option<OnClientGone>,
    pub cutoff: Option<Cutoff>,
}

/// Of headers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Headers {
    pub anthropic_beta: Option<Vec<String>>,
    pub openai_beta: Option<Vec<String>>,
    pub queries: Option<Vec<String>>,
    pub tags: Option<Vec<String>>,
    pub expose_response_cost: Option<bool>,
    pub traceparent: Option<bool>,
}

/// Of bodies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Body {
    pub aliases: Option<BTreeMap<String, String>>,
    pub unknown_fields: Option<UnknownFields>,
    pub max_choices: Option<u32>,
}

/// An agent and its gateway have lists of models with nothing in common.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "none of the models that `{agent}` may use is let through by the gateway's `policy.body.models`; add one of them there"
)]
pub struct NoModel {
    agent: String,
}

impl Entry {
    /// Lays what the agent's entry says over its gateway's policy.
    ///
    /// # Errors
    /// There is no model left, and a list without one would let all of them through.
    pub fn lay_over(&self, base: &mut Config) -> Result<(), NoModel> {
        let Policy { headers, body, rules, max_body_bytes, body_timeout, on_client_gone, cutoff } =
            self.policy.clone();
        set(&mut base.headers.anthropic_beta, headers.anthropic_beta.map(Arc::new));
        set(&mut base.headers.openai_beta, headers.openai_beta);
        set(&mut base.headers.queries, headers.queries);
        set(&mut base.headers.tags, headers.tags);
        set(&mut base.headers.expose_response_cost, headers.expose_response_cost);
        set(&mut base.headers.traceparent, headers.traceparent);
        set(&mut base.body.aliases, body.aliases);
        set(&mut base.body.unknown_fields, body.unknown_fields);
        set(&mut base.body.max_choices, body.max_choices);
        set(&mut base.body.capabilities, self.capabilities.clone());
        set(&mut base.max_body_bytes, max_body_bytes);
        set(&mut base.body_timeout, body_timeout);
        set(&mut base.on_client_gone, on_client_gone);
        set(&mut base.cutoff, cutoff);
        base.rules.extend(rules);
        base.body.models = self.models_within(&base.body.models)?;
        Ok(())
    }

    /// Of two lists, what is in both; one that is empty lets all through.
    fn models_within(&self, base: &[String]) -> Result<Vec<String>, NoModel> {
        let own = &self.models.allow;
        if own.is_empty() {
            return Ok(base.to_vec());
        }
        let is_let_through = |model: &&String| base.is_empty() || base.contains(model);
        let models: Vec<_> = own.iter().filter(is_let_through).cloned().collect();
        if models.is_empty() {
            return Err(NoModel { agent: self.name.clone() });
        }
        Ok(models)
    }
}

fn set<T>(to: &mut T, said: Option<T>) {
    if let Some(said) = said {
        *to = said;
    }
}
