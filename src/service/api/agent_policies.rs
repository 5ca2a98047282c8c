//! The routes of the policies that people set for the tools of agents.
//!
//! **Invariant:** a policy is replaced by PUT only, with the digest of the policy that it replaces, and never by a grant
//! that can start runs.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ApiState;
use super::approval_terms::require_all;
use super::error::{ApiError, ErrorBody};
use super::error_docs::{AuthErrorResponses, NotFoundResponses};
use super::extract::{AuthenticatedCaller, JsonBody, PathParam};
use crate::service::auth::{AccessDeniedError, GrantScope};
use crate::tools::approval::agent_policy::{
    AgentPolicyRow, AgentToolPolicy, PolicyAsk, PolicyChange, PolicySecurity,
};
use crate::tools::approval::format_unix_millis;
use crate::tools::approval::store::ApprovalStore;

/// The policy of an agent about its tools.
#[derive(Serialize, ToSchema)]
#[schema(as = AgentPolicy)]
pub(super) struct AgentPolicyView {
    /// The name of the agent in the catalog, its `agentId`.
    agent: String,
    /// The tools that the agent may call: `deny` (none), `allowlist` (those on the list) or `full` (all that its other
    /// layers allow).
    security: PolicySecurityView,
    /// The calls that wait for a person: `off` (none), `on_miss` (those of tools that are not on the list) or `always`.
    ask: PolicyAskView,
    /// The tools on the list; a `*` stands for any text.
    allowlist: Vec<String>,
    /// The digest of the policy: the `base` of the next change.
    digest: String,
    /// The time of the last change, in RFC 3339 with milliseconds. Null for a policy that no person has set.
    #[schema(format = DateTime)]
    changed_at: Option<String>,
    /// The id of the grant that has set the policy. Null like `changed_at`.
    by: Option<String>,
}

/// The tools that a policy allows.
#[derive(Clone, Copy, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = PolicySecurity)]
pub(super) enum PolicySecurityView {
    /// No tool.
    Deny,
    /// The tools on the list.
    Allowlist,
    /// All tools.
    Full,
}

/// The calls that a policy lets a person be asked about.
#[derive(Clone, Copy, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = PolicyAsk)]
pub(super) enum PolicyAskView {
    /// None.
    Off,
    /// The calls of tools that are not on the list.
    OnMiss,
    /// Every call that the policy does not deny.
    Always,
}

/// A new policy for an agent.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AgentPolicyChange)]
pub(super) struct AgentPolicyBody {
    /// The digest of the policy that is replaced, as `GET /api/v1/ai/agents/{agent}/policy` returned it.
    base: String,
    /// The tools that the agent may call.
    security: PolicySecurityView,
    /// The calls that wait for a person.
    ask: PolicyAskView,
    /// The tools of `allowlist`: at most 256 names; a `*` stands for any text. Absent means none.
    #[serde(default)]
    allowlist: Vec<String>,
}

/// Show the policy of an agent about its tools
///
/// The grant needs the access `approve` or `admin`.
#[utoipa::path(
    get,
    path = "/api/v1/ai/agents/{agent}/policy",
    tag = "approvals",
    params(("agent" = String, Path, description = "The agent's `agentId`.")),
    responses(
        (status = 200, description = "The policy.", body = AgentPolicyView),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn show_agent_policy(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(agent): PathParam<String>,
) -> Result<Json<AgentPolicyView>, ApiError> {
    require_all(&caller)?;
    let store = api.policies_of(&caller, &agent).await?;
    let row = store.find_agent_policy(&agent).await?;
    Ok(Json(AgentPolicyView::new(agent, row)))
}

/// Replace the policy of an agent about its tools
///
/// The policy counts from the next call of each run on, also for calls that wait for a person. It cannot allow what
/// another layer denies. The grant needs the access `approve`, and must not have the access `runs`.
#[utoipa::path(
    put,
    path = "/api/v1/ai/agents/{agent}/policy",
    tag = "approvals",
    params(("agent" = String, Path, description = "The agent's `agentId`.")),
    request_body = AgentPolicyBody,
    responses(
        (status = 200, description = "The new policy.", body = AgentPolicyView),
        (status = 400, description = "`invalid_json`: the body is not JSON.", body = ErrorBody),
        (status = 408, description = "`request_timeout`: the body did not arrive in time.", body = ErrorBody),
        (status = 409, description = "`base_mismatch`: another policy is in force, read it again.", body = ErrorBody),
        (status = 413, description = "`body_too_large`: the body is larger than 1 MiB.", body = ErrorBody),
        (status = 415, description = "`unsupported_media_type`: send the body as `application/json`.", body = ErrorBody),
        (status = 422, description = "`invalid_request`: a field of the body is invalid; the message names it.", body = ErrorBody),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn replace_agent_policy(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(agent): PathParam<String>,
    JsonBody(body): JsonBody<AgentPolicyBody>,
) -> Result<Json<AgentPolicyView>, ApiError> {
    caller.require_scope(GrantScope::Approve)?;
    let store = api.policies_of(&caller, &agent).await?;
    caller.0.check_policy_change(&agent)?;
    let AgentPolicyBody { base, security, ask, allowlist } = body;
    let policy = AgentToolPolicy { security: security.into(), ask: ask.into(), allowlist };
    policy.check_parts().map_err(ApiError::invalid_body)?;
    let by = &caller.0.id;
    match store.replace_agent_policy((&agent, &base), policy, by).await? {
        PolicyChange::Replaced(row) => {
            let digest = row.policy.digest();
            tracing::info!(%agent, %by, base, digest, "the policy of an agent was replaced");
            Ok(Json(AgentPolicyView::new(agent, row)))
        }
        PolicyChange::GrantRevoked => Err(AccessDeniedError::Revoked.into()),
        PolicyChange::OtherBase => Err(ApiError::Conflict {
            code: "base_mismatch",
            message: format!(
                "agent `{agent}` has another policy than the one that `base` names; read the policy again"
            ),
        }),
    }
}

impl ApiState {
    /// Returns the store of policies, if the service knows the agent and the caller may see its policy.
    async fn policies_of(
        &self,
        caller: &AuthenticatedCaller,
        agent: &str,
    ) -> Result<ApprovalStore, ApiError> {
        let store = self.run_service.approvals().ok_or_else(|| {
            ApiError::NotFound(
                "policy in a service without grants; take `insecure_no_auth` out".to_owned(),
            )
        })?;
        let may_see = caller.0.is_admin() || caller.0.check_approver_of(agent).is_ok();
        if may_see && self.knows_agent(&store, agent).await? {
            Ok(store)
        } else {
            Err(no_such_agent(agent))
        }
    }

    /// Returns true if the catalog has an agent, or had it: a run of it goes on, or a person has set its policy.
    async fn knows_agent(&self, store: &ApprovalStore, agent: &str) -> Result<bool, ApiError> {
        if self.run_service.catalog().find_agent(agent).is_ok() {
            return Ok(true);
        }
        let is_set = store.find_agent_policy(agent).await?.changed_ms.is_some();
        Ok(is_set || self.run_service.run_store().has_unfinished_run(agent).await?)
    }
}

fn no_such_agent(agent: &str) -> ApiError {
    let agent: String = agent.chars().take(80).collect();
    ApiError::NotFound(format!("agent `{agent}`; `GET /api/v1/ai/agents?all=1` lists them"))
}

impl AgentPolicyView {
    fn new(agent: String, row: AgentPolicyRow) -> Self {
        let digest = row.policy.digest();
        let AgentToolPolicy { security, ask, allowlist } = row.policy;
        Self {
            agent,
            security: security.into(),
            ask: ask.into(),
            allowlist,
            digest,
            changed_at: row.changed_ms.map(format_unix_millis),
            by: row.by,
        }
    }
}

impl From<PolicySecurity> for PolicySecurityView {
    fn from(security: PolicySecurity) -> Self {
        match security {
            PolicySecurity::Deny => Self::Deny,
            PolicySecurity::Allowlist => Self::Allowlist,
            PolicySecurity::Full => Self::Full,
        }
    }
}

impl From<PolicySecurityView> for PolicySecurity {
    fn from(security: PolicySecurityView) -> Self {
        match security {
            PolicySecurityView::Deny => Self::Deny,
            PolicySecurityView::Allowlist => Self::Allowlist,
            PolicySecurityView::Full => Self::Full,
        }
    }
}

impl From<PolicyAsk> for PolicyAskView {
    fn from(ask: PolicyAsk) -> Self {
        match ask {
            PolicyAsk::Off => Self::Off,
            PolicyAsk::OnMiss => Self::OnMiss,
            PolicyAsk::Always => Self::Always,
        }
    }
}

impl From<PolicyAskView> for PolicyAsk {
    fn from(ask: PolicyAskView) -> Self {
        match ask {
            PolicyAskView::Off => Self::Off,
            PolicyAskView::OnMiss => Self::OnMiss,
            PolicyAskView::Always => Self::Always,
        }
    }
}
