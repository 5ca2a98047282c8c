//! What a run's calls are judged by: one value, made once and swapped whole on a reload.
//!
//! A call keeps the policy that it began under. Budgets are not in here: what is spent stays spent,
//! whatever the policy becomes.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use serde::{Deserialize, Serialize};

use super::rule::{self, RuleSet};
use crate::gateway::upstream::headers::{self, InjectedHeaders};
use crate::llm::budget::PriceTable;
use crate::llm::request;
use crate::llm::response::CutoffMode;

/// What a run's requests may be and do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyConfig {
    pub headers: headers::HeaderConfig,
    pub body: request::BodyPolicy,
    /// Asked about each call that has a body, in their order.
    pub rules: Vec<rule::RuleConfig>,
    /// Largest request body.
    pub max_body_bytes: u64,
    /// How long a client may take to send its body.
    #[serde(with = "humantime_serde")]
    pub body_timeout: Duration,
    /// What happens to the upstream's answer when the client has left.
    pub on_client_gone: OnClientGone,
    /// How a stream ends that writes more than its call was granted.
    pub cutoff: CutoffMode,
}

/// What happens to a call whose client has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnClientGone {
    /// What the upstream would write to its end anyway is drained, what it stops is cancelled.
    #[default]
    Auto,
    /// The upstream call is closed at once. What stops is charged by estimate, and what goes on as reserved.
    Cancel,
    /// The rest is read and thrown away, within bounds, to learn the true usage.
    Drain,
}

/// The policy in force. Readers never wait, and never see half of a change.
pub type SharedPolicy = ArcSwap<GatewayPolicy>;

/// A configuration that has been found good, with all that it names.
#[derive(Clone, Debug)]
pub struct GatewayPolicy {
    pub config: Arc<PolicyConfig>,
    pub rules: Arc<RuleSet>,
    pub prices: Arc<PriceTable>,
    /// The headers that are ours, for the run that the policy is for.
    pub overwrites: Arc<InjectedHeaders>,
}

impl PolicyConfig {
    /// The same, where the betas pass that belong to what is granted.
    #[must_use]
    pub fn with_granted_betas(&self) -> Self {
        let mut config = self.clone();
        let granted = self.body.capabilities.iter().flat_map(|granted| granted.anthropic_betas());
        for beta in granted {
            if config.headers.anthropic_beta.iter().all(|listed| listed != beta) {
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
            // As the proxy before us had it.
            max_body_bytes: 50 * 1024 * 1024,
            body_timeout: Duration::from_mins(1),
            on_client_gone: OnClientGone::default(),
            cutoff: CutoffMode::default(),
        }
    }
}
