//! Sandboxes that are kept ready for agents whose entries ask for them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;

use super::{RunServiceConfig, RunSubmission};
use crate::gateway::config::GatewayConfig;
use crate::runner::agents::{AgentCatalog, AgentDefinition, SandboxLifetime};
use crate::runner::warm_pool::{self, WarmPool};
use crate::runner::{ChatMessage, ChatRole};

/// A pool for each such agent of the catalog that the service began with.
pub(super) struct WarmPools(HashMap<String, Arc<WarmPool>>);

impl WarmPools {
    /// Nothing is started yet. An agent that cannot have slots is run without.
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
            let told = |error| tracing::warn!(agent = entry.name, "there are no slots: {error:#}");
            Some((entry.name.clone(), Arc::new(pool.map_err(told).ok()?)))
        });
        Self(pools.collect())
    }

    pub(super) fn for_agent(&self, agent: &str) -> Option<Arc<WarmPool>> {
        self.0.get(agent).cloned()
    }

    /// Keeps them until `stop`, and then takes them away.
    pub(super) async fn maintain(&self, stop: &CancellationToken) {
        join_all(self.0.values().map(|pool| pool.maintain(stop.clone()))).await;
    }
}

/// A run such as any of the agent's is what its slots are made for.
fn build_pool(
    entry: &AgentDefinition,
    parts: (&RunServiceConfig, &GatewayConfig, &AgentCatalog),
) -> anyhow::Result<WarmPool> {
    let models = &entry.models;
    let model = models.default.as_ref().or(models.allow.first()).cloned();
    let wanted = RunSubmission {
        agent: entry.name.clone(),
        model: model.or_else(|| Some("any".to_owned())),
        messages: vec![ChatMessage { role: ChatRole::User, content: String::new() }],
        account: "-".to_owned(),
        ..RunSubmission::default()
    };
    let order = wanted.run_plan("slot", parts)?;
    let stock = warm_pool::WarmPoolConfig { count: entry.slots as usize, max_age: MAX_SLOT_AGE };
    Ok(WarmPool::new(&order, stock)?)
}

/// What a root was made of may have changed since.
const MAX_SLOT_AGE: Duration = Duration::from_hours(1);
