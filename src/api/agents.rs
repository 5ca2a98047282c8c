//! The agents that can be asked for.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::Api;
use super::error::Error;
use super::extract::{Asked, Caller};
use super::refusal::{NotAllowed, NotUnderstood};
use crate::catalog::Listed;
use crate::grant::Access;

/// Agents, by their names.
#[derive(Serialize, ToSchema)]
pub(super) struct Agents {
    agents: Vec<Listed>,
}

/// Which agents.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Which {
    /// `1`: those that cannot run here, too, with the reason
    #[param(minimum = 0, maximum = 1)]
    all: Option<u8>,
}

/// List the agents that can run here, and that the grant allows
#[utoipa::path(
    get,
    path = "/api/v1/ai/agents",
    tag = "agents",
    params(Which),
    responses(
        (status = 200, description = "The agents", body = Agents),
        NotUnderstood, NotAllowed
    )
)]
pub(super) async fn list(
    caller: Caller,
    State(api): State<Arc<Api>>,
    Asked(which): Asked<Which>,
) -> Result<Json<Agents>, Error> {
    caller.may(Access::Read)?;
    let is_all = match which.all.unwrap_or_default() {
        0 => false,
        1 => true,
        _ => return Err(Error::parameter("`all` is 0 or 1")),
    };
    let mut agents = api.agents().await;
    agents.retain(|agent| {
        caller.0.allows_agent(&agent.agent_id).is_ok() && (is_all || agent.available)
    });
    Ok(Json(Agents { agents }))
}

impl Api {
    /// All agents, and which can run here.
    pub(super) async fn agents(&self) -> Vec<Listed> {
        let catalog = self.supervisor.catalog();
        let mut listed = Vec::with_capacity(catalog.entries().len());
        for entry in catalog.entries() {
            let mut agent = Listed::new(entry, &self.availability.of(entry).await);
            agent.reason = agent.reason.map(|reason| self.supervisor.masked(&reason));
            listed.push(agent);
        }
        listed
    }
}
