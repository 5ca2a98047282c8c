//! An agent's own policy, which is laid over the policy of its gateway.
//!
//! A value of the agent's policy replaces the value of the gateway's policy. Rules are an exception: the agent's rules
//! are appended to the gateway's rules, so that an agent's file cannot remove a rule. Models and capabilities have keys
//! of their own in an agent's definition.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::gateway::pipeline::policy::{OnClientGone, PolicyConfig};
use crate::gateway::pipeline::rule;
use crate::llm::request::UnknownFieldPolicy;
use crate::llm::response::CutoffMode;

/// The part of a policy that an agent's file may set. The keys are those of `[policy]` in `config/gateway.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyOverlay {
    pub headers: HeaderOverlay,
    pub body: BodyOverlay,
    pub rules: Vec<rule::RuleConfig>,
    pub max_body_bytes: Option<u64>,
    #[serde(with = "humantime_serde")]
    pub body_timeout: Option<Duration>,
    pub on_client_gone: Option<OnClientGone>,
    pub cutoff: Option<CutoffMode>,
}

/// The part of a policy about headers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeaderOverlay {
    pub anthropic_beta: Option<Vec<String>>,
    pub openai_beta: Option<Vec<String>>,
    pub queries: Option<Vec<String>>,
    pub tags: Option<Vec<String>>,
    pub expose_response_cost: Option<bool>,
    pub traceparent: Option<bool>,
}

/// The part of a policy about bodies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BodyOverlay {
    pub aliases: Option<BTreeMap<String, String>>,
    pub unknown_fields: Option<UnknownFieldPolicy>,
    pub max_choices: Option<u32>,
}

impl PolicyOverlay {
    /// Lays the values over the policy of the gateway.
    pub(super) fn apply_to(self, base: &mut PolicyConfig) {
        // The complete pattern makes the compiler report a new key that this function does not apply.
        let Self { headers, body, rules, max_body_bytes, body_timeout, on_client_gone, cutoff } =
            self;
        set_if_some(&mut base.headers.anthropic_beta, headers.anthropic_beta.map(Arc::new));
        set_if_some(&mut base.headers.openai_beta, headers.openai_beta);
        set_if_some(&mut base.headers.queries, headers.queries);
        set_if_some(&mut base.headers.tags, headers.tags);
        set_if_some(&mut base.headers.expose_response_cost, headers.expose_response_cost);
        set_if_some(&mut base.headers.traceparent, headers.traceparent);
        set_if_some(&mut base.body.aliases, body.aliases);
        set_if_some(&mut base.body.unknown_fields, body.unknown_fields);
        set_if_some(&mut base.body.max_choices, body.max_choices);
        set_if_some(&mut base.max_body_bytes, max_body_bytes);
        set_if_some(&mut base.body_timeout, body_timeout);
        set_if_some(&mut base.on_client_gone, on_client_gone);
        set_if_some(&mut base.cutoff, cutoff);
        // Rules are appended: an agent's file cannot remove a rule.
        base.rules.extend(rules);
    }
}

fn set_if_some<T>(to: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *to = value;
    }
}
