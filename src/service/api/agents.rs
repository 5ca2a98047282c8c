//! The agents that can be asked for.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::ApiState;
use super::error::ApiError;
use super::error_docs::{AuthErrorResponses, QueryErrorResponses};
use super::extract::{AuthenticatedCaller, QueryParams};
use crate::runner::agents::AgentSummary;
use crate::service::auth::GrantScope;

/// A list of agents, sorted by their names.
#[derive(Serialize, ToSchema)]
pub(super) struct AgentsPage {
    /// The agents that the grant allows.
    agents: Vec<AgentSummary>,
}

/// The agents to list.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct AgentsQuery {
    /// `1` adds the agents that cannot run on this host, each with the reason. The default is `0`.
    #[param(minimum = 0, maximum = 1)]
    all: Option<u8>,
}

/// List agents
///
/// Returns the agents that the grant allows and that can run on this host.
#[utoipa::path(
    get,
    path = "/api/v1/ai/agents",
    tag = "agents",
    params(AgentsQuery),
    responses(
        (status = 200, description = "The agents.", body = AgentsPage),
        QueryErrorResponses, AuthErrorResponses
    )
)]
pub(super) async fn list_agents(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    QueryParams(which): QueryParams<AgentsQuery>,
) -> Result<Json<AgentsPage>, ApiError> {
    caller.require_scope(GrantScope::Read)?;
    let is_all = match which.all.unwrap_or_default() {
        0 => false,
        1 => true,
        _ => return Err(ApiError::invalid_parameter("`all` is invalid: give 0 or 1")),
    };
    let mut agents = api.agent_summaries().await;
    agents.retain(|agent| {
        caller.0.check_agent(&agent.agent_id).is_ok() && (is_all || agent.available)
    });
    Ok(Json(AgentsPage { agents }))
}

impl ApiState {
    /// Returns all agents, each with whether it can run here.
    pub(super) async fn agent_summaries(&self) -> Vec<AgentSummary> {
        let catalog = self.run_service.catalog();
        let mut listed = Vec::with_capacity(catalog.entries().len());
        for entry in catalog.entries() {
            let mut agent = AgentSummary::new(entry, &self.availability.check_cached(entry).await);
            agent.reason = agent.reason.map(|reason| self.run_service.mask_text(&reason));
            listed.push(agent);
        }
        listed
    }
}
