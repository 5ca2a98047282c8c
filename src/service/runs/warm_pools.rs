//! Pools of warm sandboxes, for agents whose entries request them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;

use super::{RunServiceConfig, RunSubmission};
use crate::gateway::config::GatewayConfig;
use crate::runner::agents::{AgentCatalog, AgentDefinition, SandboxLifetime};
use crate::runner::warm_pool::{self, WarmPool};
use crate::runner::{ChatMessage, ChatRole, GatewayServer};

/// The warm pools by agent. The catalog at the service's start decides which agents have a pool.
pub(super) struct WarmPools(HashMap<String, Arc<WarmPool>>);

impl WarmPools {
    /// Builds the pools without starting a sandbox. An agent whose pool cannot be built runs without warm sandboxes.
    pub(super) fn new(
        settings: &RunServiceConfig,
        config: &GatewayConfig,
        catalog: &AgentCatalog,
    ) -> Self {
        let asks = |entry: &&Arc<AgentDefinition>| {
            entry.slots > 0 && entry.mode == SandboxLifetime::OneShot
        };
        let pools = catalog.entries().filter(asks).filter_map(|entry| {
            let pool = build_pool(entry, (settings, config, catalog));
            let told = |error| {
                tracing::warn!(agent = entry.name, "the agent has no warm sandboxes: {error:#}");
            };
            Some((entry.name.clone(), Arc::new(pool.map_err(told).ok()?)))
        });
        Self(pools.collect())
    }

    pub(super) fn for_agent(&self, agent: &str) -> Option<Arc<WarmPool>> {
        self.0.get(agent).cloned()
    }

    /// Maintains the pools until `stop`, and then removes their sandboxes.
    pub(super) async fn maintain(&self, stop: &CancellationToken) {
        join_all(self.0.values().map(|pool| pool.maintain(stop.clone()))).await;
    }
}

/// Builds an agent's pool from the plan of a typical run of the agent.
fn build_pool(
    entry: &AgentDefinition,
    parts: (&RunServiceConfig, &GatewayConfig, &AgentCatalog),
) -> anyhow::Result<WarmPool> {
    let models = &entry.models;
    let model = models.default.as_ref().or(models.allow.first()).cloned();
    // The message, the account, the gateway and an unknown model are placeholders: a claimed sandbox gets the gateway
    // and the files of the claiming run's own plan.
    let wanted = RunSubmission {
        agent: entry.name.clone(),
        model: model.or_else(|| Some("any".to_owned())),
        messages: vec![ChatMessage { role: ChatRole::User, content: String::new() }],
        account: "-".to_owned(),
        ..RunSubmission::default()
    };
    let order = wanted.resolve("slot", GatewayServer::OwnProcess, parts)?;
    let stock = warm_pool::WarmPoolConfig { count: entry.slots as usize, max_age: MAX_SLOT_AGE };
    Ok(WarmPool::new(&order, stock)?)
}

/// The maximum age of a warm sandbox. Our choice: the files that a root was made from may change.
const MAX_SLOT_AGE: Duration = Duration::from_hours(1);
