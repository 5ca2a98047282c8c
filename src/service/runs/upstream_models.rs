//! The list of the upstream's models, for agents that need the whole list.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::gateway::config::GatewayConfig;
use crate::gateway::upstream::models::list_models;
use crate::runner::AgentInvocation;
use crate::runner::agents::WorkspaceSetup;

/// A cache of the upstream's last list of models, with the time of the request.
#[derive(Debug, Default)]
pub(super) struct UpstreamModelCache(Mutex<Option<(Instant, Vec<String>)>>);

impl UpstreamModelCache {
    /// Returns the models for an agent. Only `OpenClaw` needs the list, and only if neither its entry nor its gateway
    /// has a list. If the upstream fails, the empty list is cached for a while, too: the agent still has the model of
    /// its run.
    pub(super) async fn for_agent(
        &self,
        agent: &AgentInvocation,
        config: &GatewayConfig,
    ) -> Vec<String> {
        if agent.entry.setup != WorkspaceSetup::OpenClaw || !agent.models.is_empty() {
            return vec![];
        }
        // The lock is held during the request, so that runs that begin together send one request.
        let mut known = self.0.lock().await;
        match &*known {
            Some((asked, models)) if asked.elapsed() < CACHE_TTL => models.clone(),
            _ => {
                let said = list_models(&config.upstream).await;
                let models = said.unwrap_or_else(|error| {
                    tracing::warn!(%error, "cannot list the upstream's models; the agent has only its run's model");
                    vec![]
                });
                known.insert((Instant::now(), models)).1.clone()
            }
        }
    }
}

/// The time for which a list of models is cached. Our choice.
const CACHE_TTL: Duration = Duration::from_mins(5);
