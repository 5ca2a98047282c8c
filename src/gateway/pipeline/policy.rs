//! The policy that decides about a run's calls: one value, made once and replaced as a whole on a
//! reload.
//!
//! A call keeps the policy under which the call began. Budgets are not part of the policy, so a reload
//! never resets the amounts that a run has spent.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use serde::{Deserialize, Serialize};

use super::rule::{self, RuleSet};
use crate::gateway::upstream::headers::{self, InjectedHeaders};
use crate::llm::budget::PriceTable;
use crate::llm::request;
use crate::llm::response::CutoffMode;

/// The configured limits and permissions of a run's requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyConfig {
    pub headers: headers::HeaderConfig,
    pub body: request::BodyPolicy,
    /// The rules, evaluated in this order for each call that has a body.
    pub rules: Vec<rule::RuleConfig>,
    /// The largest request body, in bytes.
    pub max_body_bytes: u64,
    /// The longest time that a client may take to send its body.
    #[serde(with = "humantime_serde")]
    pub body_timeout: Duration,
    /// The treatment of the upstream's response after the client has disconnected.
    pub on_client_gone: OnClientGone,
    /// The way in which a stream ends if it exceeds the call's grant.
    pub cutoff: CutoffMode,
}

/// The treatment of a call whose client has disconnected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnClientGone {
    /// Drains a response that the upstream would complete anyway, and a stream of which only the usage is missing. Cancels
    /// any other.
    #[default]
    Auto,
    /// Closes the upstream call at once. If the upstream stops, the call is charged by estimate; if the
    /// upstream continues, the call is charged the whole reservation.
    Cancel,
    /// Reads and discards the rest, within limits, to learn the true usage.
    Drain,
}

/// The policy in force. Readers never wait and never see a partial change.
pub type SharedPolicy = ArcSwap<GatewayPolicy>;

/// A validated configuration with its compiled rules, prices and headers.
#[derive(Clone, Debug)]
pub struct GatewayPolicy {
    pub config: Arc<PolicyConfig>,
    pub rules: Arc<RuleSet>,
    pub prices: Arc<PriceTable>,
    /// The headers that the gateway sets for the policy's run.
    pub injected_headers: Arc<InjectedHeaders>,
}

impl PolicyConfig {
    /// Returns a copy of the configuration that also allows the beta headers of the granted
    /// capabilities.
    #[must_use]
    pub fn with_granted_betas(&self) -> Self {
        let mut config = self.clone();
        let granted = self.body.capabilities.iter().flat_map(|granted| granted.anthropic_betas());
        for beta in granted {
            if config.headers.anthropic_beta.iter().all(|listed| listed != beta) {
                // The list is shared by all runs with the same list; `make_mut` copies it before the
                // first change.
                Arc::make_mut(&mut config.headers.anthropic_beta).push((*beta).to_owned());
            }
        }
        config
    }
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            headers: headers::HeaderConfig::default(),
            body: request::BodyPolicy::default(),
            rules: vec![],
            // The limit of the proxy that this gateway replaced.
            max_body_bytes: 50 * 1024 * 1024,
            body_timeout: Duration::from_mins(1),
            on_client_gone: OnClientGone::default(),
            cutoff: CutoffMode::default(),
        }
    }
}
