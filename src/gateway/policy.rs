//! What a run's calls are judged by: one value, made once and swapped whole on a reload.
//!
//! A call keeps the policy that it began under. Budgets are not in here: what is spent stays spent,
//! whatever the policy becomes.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use serde::{Deserialize, Serialize};

use super::rule::{self, Rules};
use crate::body;
use crate::budget::Prices;
use crate::stream::Cutoff;
use crate::upstream::headers::{self, Overwrites};

/// What a run's requests may be and do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub headers: headers::Config,
    pub body: body::Policy,
    /// Asked about each call that has a body, in their order.
    pub rules: Vec<rule::Config>,
    /// Largest request body.
    pub max_body_bytes: u64,
    /// How long a client may take to send its body.
    #[serde(with = "humantime_serde")]
    pub body_timeout: Duration,
    /// What happens to the upstream's answer when the client has left.
    pub on_client_gone: OnClientGone,
    /// How a stream ends that writes more than its call was granted.
    pub cutoff: Cutoff,
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
pub type Live = ArcSwap<Policy>;

/// A configuration that has been found good, with all that it names.
#[derive(Clone, Debug)]
pub struct Policy {
    pub config: Arc<Config>,
    pub rules: Arc<Rules>,
    pub prices: Arc<Prices>,
    /// The headers that are ours, for the run that the policy is for.
    pub overwrites: Arc<Overwrites>,
}

impl Config {
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

impl Default for Config {
    fn default() -> Self {
        Self {
            headers: headers::Config::default(),
            body: body::Policy::default(),
            rules: vec![],
            // As the proxy before us had it.
            max_body_bytes: 50 * 1024 * 1024,
            body_timeout: Duration::from_mins(1),
            on_client_gone: OnClientGone::default(),
            cutoff: Cutoff::default(),
        }
    }
}
