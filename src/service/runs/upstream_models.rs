//! The models that the upstream has, for agents that want to know them all.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::gateway::config::GatewayConfig;
use crate::gateway::upstream::models::list_models;
use crate::runner::agents::{AgentDefinition, WorkspaceSetup};

/// What was said last, and when.
#[derive(Debug, Default)]
pub(super) struct UpstreamModelCache(Mutex<Option<(Instant, Vec<String>)>>);

impl UpstreamModelCache {
    /// What an agent is told. Only `OpenClaw` wants it, and only where neither its entry nor its gateway has a list.
    /// An upstream that does not say is not waited for again for a while: the agent has the model of its run.
    pub(super) async fn for_agent(
        &self,
        entry: &AgentDefinition,
        config: &GatewayConfig,
    ) -> Vec<String> {
        let is_told = entry.setup == WorkspaceSetup::OpenClaw
            && entry.models.allow.is_empty()
            && config.policy.body.models.is_empty();
        if !is_told {
            return vec![];
        }
        // Held while it is asked, so that runs that begin together ask once.
        let mut known = self.0.lock().await;
        match &*known {
            Some((asked, models)) if asked.elapsed() < CACHE_TTL => models.clone(),
            _ => {
                let said = list_models(&config.upstream).await;
                let models = said.unwrap_or_else(|error| {
                    tracing::warn!(%error, "an agent is not told which models there are");
                    vec![]
                });
                known.insert((Instant::now(), models)).1.clone()
            }
        }
    }
}

/// A new model is known after this.
const CACHE_TTL: Duration = Duration::from_mins(5);
