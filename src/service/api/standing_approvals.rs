//! The routes of standing approvals: proposals of denied calls, and answers that count for later calls, too.
//!
//! **Invariant:** a proposal is granted by POST only, with the digest that the person has seen, and never by the grant that
//! has started the run.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::ApiState;
use super::approval_terms::{
    ApprovalScopeView, WrittenTerms, check_reason, is_in_reach, list_reach, present_terms,
    require_all, require_any, too_many_standing,
};
use super::error::{ApiError, ErrorBody};
use super::error_docs::{AuthErrorResponses, NotFoundResponses, QueryErrorResponses};
use super::extract::{AuthenticatedCaller, JsonBody, PathParam, QueryParams};
use crate::service::auth::{AccessDeniedError, GrantScope};
use crate::service::store::RunPhase;
use crate::tools::approval::standing::{
    ApprovalScope, StandingApproval, StandingFilter, StandingGrant, StandingOutcome, StandingState,
};
use crate::tools::approval::store::ApprovalStore;
use crate::tools::approval::{OnDenial, format_unix_millis};

/// A yes to the same call for later: one that was proposed, or one that an answer to a question has made.
#[derive(Serialize, ToSchema)]
#[schema(as = StandingApproval)]
pub(super) struct StandingApprovalView {
    /// The id of the standing approval.
    #[schema(example = "sta-019a1b2c3d4e7f608a1b2c3d4e5f6071")]
    id: String,
    /// The state of the standing approval.
    state: StandingStateView,
    /// The calls that it counts for; of a proposal, the widest scope that a grant may have.
    scope: ApprovalScopeView,
    /// The id of the run that was denied, or that has asked.
    run: String,
    /// The account whose runs may use it.
    account: String,
    /// The agent whose runs may use it, by its `agentId`.
    agent: String,
    /// The name of the tool.
    tool: String,
    /// The program of a tool that is a file, and its arguments. Only `GET /api/v1/standing-approvals/{id}` has it, for the
    /// access `approve` or `admin`, while the tool is configured as the call has it.
    argv: Option<Vec<String>>,
    /// The image of a tool that is a file, as `argv`.
    image: Option<String>,
    /// The rules that deny the call, or the rule that has asked.
    rules: Vec<String>,
    /// The digest of the call: the account, the agent, the tool, its definition, its program, the rules about it, and the
    /// arguments. A grant has to name it.
    digest: String,
    /// The arguments of the call: a JSON object as text, as the agent has written it. Null in a list, once the approval is
    /// closed, and for one that an answer to a question has made.
    arguments: Option<String>,
    /// The arguments that the operator has listed for the records, with their values cut at 256 bytes.
    evidence: BTreeMap<String, String>,
    /// The digest of the definition of the tool.
    definition: String,
    /// The price of a call in US dollars, as a decimal text.
    price_usd: String,
    /// The time of the proposal or of the answer, in RFC 3339 with milliseconds.
    #[schema(format = DateTime)]
    created_at: String,
    /// The last moment at which the proposal may be granted, or at which a call may begin.
    #[schema(format = DateTime)]
    expires_at: String,
    /// The number of calls that have begun.
    used: u32,
    /// The number of calls that may begin. Of a proposal, 1.
    max_uses: u32,
    /// The time of the grant. Null for a proposal.
    #[schema(format = DateTime)]
    granted_at: Option<String>,
    /// The id of the grant that has allowed the call. Null for a proposal.
    by: Option<String>,
    /// The reason that was given with the grant or the answer.
    reason: Option<String>,
    /// The id of the grant that has taken it back. Null also if the grant of `by` was revoked.
    revoked_by: Option<String>,
}

/// The state of a standing approval: `proposed` (a rule has denied the call), `granted` (a person has allowed it), `spent` (all
/// its calls have begun), `revoked` (a person has taken it back, or the grant of `by` was revoked) or `expired` (its time is
/// over, or its run has ended).
#[derive(Clone, Copy, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = StandingState)]
pub(super) enum StandingStateView {
    /// A rule has denied the call, and no person has allowed it.
    Proposed,
    /// A person has allowed the call.
    Granted,
    /// All its calls have begun.
    Spent,
    /// A person has taken it back, or the grant of `by` was revoked.
    Revoked,
    /// Its time is over, or its run has ended.
    Expired,
}

/// A list of standing approvals.
#[derive(Serialize, ToSchema)]
pub(super) struct StandingApprovalsPage {
    /// The standing approvals, the newest first. Their `arguments` are null.
    standing_approvals: Vec<StandingApprovalView>,
    /// The value of `cursor` for the next page. Null on the last page.
    next: Option<String>,
}

/// The filter of standing approvals.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct StandingApprovalsQuery {
    /// The state. The default is every state.
    state: Option<StandingStateView>,
    /// The run that was denied, or that has asked. The default is every run, which needs the access `approve` or `admin`.
    run: Option<String>,
    /// The value of `next` of the page before. Absent for the first page.
    cursor: Option<String>,
    /// The largest number on the page.
    #[param(minimum = 1, maximum = 200, default = 50)]
    limit: Option<u32>,
}

/// A yes to a proposal.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = StandingGrant)]
pub(super) struct GrantBody {
    /// The digest of the proposal, as `GET /api/v1/standing-approvals/{id}` returned it.
    digest: String,
    /// The calls that the grant counts for: `run` or `always`. The default is the widest scope of the proposal.
    scope: Option<ApprovalScopeView>,
    /// The number of calls that may begin: 1 to 1,000. Needed for `always`.
    max_uses: Option<u32>,
    /// The time for which calls may begin, such as `1h`. Either this or `not_after` is needed for `always`.
    valid_for: Option<String>,
    /// The last moment at which a call may begin, in RFC 3339.
    not_after: Option<String>,
    /// The reason, for the records: at most 500 bytes.
    reason: Option<String>,
}

/// List standing approvals
///
/// Returns the proposals of denied calls, and the approvals that count for later calls. The grant needs the access `approve`
/// or `admin`; with `run`, the access `read` is enough for a run of its own.
#[utoipa::path(
    get,
    path = "/api/v1/standing-approvals",
    tag = "approvals",
    params(StandingApprovalsQuery),
    responses(
        (status = 200, description = "The standing approvals.", body = StandingApprovalsPage),
        QueryErrorResponses, AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn list_standing_approvals(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    QueryParams(which): QueryParams<StandingApprovalsQuery>,
) -> Result<Json<StandingApprovalsPage>, ApiError> {
    let limit = api.check_page(&caller, which.run.as_deref(), which.limit).await?;
    let Some(store) = api.run_service.approvals() else {
        return Ok(Json(StandingApprovalsPage { standing_approvals: vec![], next: None }));
    };
    if let Some(cursor) = &which.cursor {
        let known = store.find_standing(cursor).await?;
        // A grant that sees some runs learns nothing about those of others.
        let is_listed = |row: &StandingApproval| {
            which.run.as_ref().is_none_or(|run| *run == row.run)
                && (require_all(&caller).is_err() || is_in_reach(&caller, &row.agent, &row.account))
        };
        if !known.as_ref().is_some_and(is_listed) {
            return Err(ApiError::invalid_parameter(
                "`cursor` is invalid: give the value of `next` of the page before",
            ));
        }
    }
    let now = store.now_ms();
    let (state, run, after) = (which.state.map(Into::into), which.run, which.cursor);
    let reach = list_reach(&caller);
    let filter = StandingFilter { state, run, reach, after, limit: limit + 1 };
    let turn = api.long_reads.acquire_permit(&caller.0.id).await;
    // The read continues after the client has left. The permit is released when the read ends.
    let listed = api.tasks.run_detached(async move {
        let _held = turn;
        store.list_standing(filter).await
    });
    let rows = listed.await?.into_iter();
    let mut found: Vec<_> = rows.map(|row| StandingApprovalView::at_time(row, now)).collect();
    let is_all = found.len() <= limit as usize;
    found.truncate(limit as usize);
    let next = found.last().filter(|_| !is_all).map(|last| last.id.clone());
    Ok(Json(StandingApprovalsPage { standing_approvals: found, next }))
}

/// Show a standing approval
///
/// The grant needs the access `approve` or `admin`; the access `read` is enough for a run of its own.
#[utoipa::path(
    get,
    path = "/api/v1/standing-approvals/{id}",
    tag = "approvals",
    params(("id" = String, Path, description = "The id of the standing approval.")),
    responses(
        (status = 200, description = "The standing approval.", body = StandingApprovalView),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn show_standing_approval(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
) -> Result<Json<StandingApprovalView>, ApiError> {
    let (store, row) = api.requested_standing(&caller, &id).await?;
    // The tenant of a run need not know the operator's programs.
    let present = store.present_tools().filter(|_| require_all(&caller).is_ok());
    let program = present.and_then(|tools| tools.find_program(&row.tool, &row.definition).cloned());
    let (argv, image) = program.map(|job| (job.argv.clone(), job.image.clone())).unzip();
    let view = StandingApprovalView::at_time(row, store.now_ms());
    Ok(Json(StandingApprovalView { argv, image: image.flatten(), ..view }))
}

/// Grant a proposal
///
/// The same call of the same agent and account may begin, as often and as long as the grant says. The grant needs the
/// access `approve`, and must not be the grant that has started the run; runs that it starts itself cannot use it.
#[utoipa::path(
    post,
    path = "/api/v1/standing-approvals/{id}/grant",
    tag = "approvals",
    params(("id" = String, Path, description = "The id of the proposal.")),
    request_body = GrantBody,
    responses(
        (status = 200, description = "The standing approval.", body = StandingApprovalView),
        (status = 400, description = "`invalid_json`: the body is not JSON.", body = ErrorBody),
        (status = 408, description = "`request_timeout`: the body did not arrive in time.", body = ErrorBody),
        (status = 409, description = "`digest_mismatch`: the proposal has another digest, read it again. `approval_closed`: it was granted or taken back before, its time is over, its run has ended, or proposals are switched off. `too_many_standing_approvals`: revoke some.", body = ErrorBody),
        (status = 413, description = "`body_too_large`: the body is larger than 1 MiB.", body = ErrorBody),
        (status = 415, description = "`unsupported_media_type`: send the body as `application/json`.", body = ErrorBody),
        (status = 422, description = "`invalid_request`: a field of the body is invalid; the message names it.", body = ErrorBody),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn grant_proposal(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
    JsonBody(body): JsonBody<GrantBody>,
) -> Result<Json<StandingApprovalView>, ApiError> {
    caller.require_scope(GrantScope::Approve)?;
    let (store, row) = api.requested_standing(&caller, &id).await?;
    if row.owner.as_ref() == Some(&caller.0.id) {
        return Err(AccessDeniedError::OwnRun.into());
    }
    caller.0.check_approver(&row.agent, &row.account)?;
    let terms = present_terms(&store);
    if terms.on_denial != OnDenial::Propose {
        let message = "proposals are switched off: `tools.approvals.on_denial` is not `propose`";
        return Err(closed(message.to_owned()));
    }
    check_reason(body.reason.as_deref())?;
    let scope = body.scope.map_or(row.scope, Into::into);
    if scope == ApprovalScope::Run {
        let run = api.run_service.run_store().find_run(&row.run).await?;
        if run.is_none_or(|run| run.state == RunPhase::Ended) {
            return Err(closed(format!("the run of proposal `{id}` has ended")));
        }
    }
    let GrantBody { digest, max_uses, valid_for, not_after, reason, .. } = body;
    let written = WrittenTerms { scope, max_uses, valid_for, not_after };
    let grant = StandingGrant {
        digest,
        terms: written.check_terms(&store)?,
        by: caller.0.id.clone(),
        reason,
    };
    changed_view(&store, &id, store.grant_standing(&id, grant).await?)
}

/// Take a standing approval back
///
/// No further call begins by it; calls that have begun go on. A proposal is closed, and the next denied call makes a new one.
/// The grant needs the access `approve`.
#[utoipa::path(
    post,
    path = "/api/v1/standing-approvals/{id}/revoke",
    tag = "approvals",
    params(("id" = String, Path, description = "The id of the standing approval.")),
    responses(
        (status = 200, description = "The standing approval.", body = StandingApprovalView),
        (status = 409, description = "`approval_closed`: it is spent, taken back or expired already.", body = ErrorBody),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn revoke_standing_approval(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
) -> Result<Json<StandingApprovalView>, ApiError> {
    caller.require_scope(GrantScope::Approve)?;
    let (store, row) = api.requested_standing(&caller, &id).await?;
    caller.0.check_approver(&row.agent, &row.account)?;
    changed_view(&store, &id, store.revoke_standing(&id, &caller.0.id).await?)
}

impl ApiState {
    /// Returns a standing approval that the caller may see.
    async fn requested_standing(
        &self,
        caller: &AuthenticatedCaller,
        id: &str,
    ) -> Result<(ApprovalStore, StandingApproval), ApiError> {
        require_any(caller)?;
        let store = self.run_service.approvals().ok_or_else(|| no_such_standing(id))?;
        let row = store.find_standing(id).await?.ok_or_else(|| no_such_standing(id))?;
        // One of a run that the caller may not see answers like one that does not exist.
        match self.require_row_of(caller, &row.run, (&row.agent, &row.account)).await {
            Err(ApiError::NotFound(_)) => Err(no_such_standing(id)),
            Err(error) => Err(error),
            Ok(()) => Ok((store, row)),
        }
    }
}

fn changed_view(
    store: &ApprovalStore,
    id: &str,
    outcome: StandingOutcome,
) -> Result<Json<StandingApprovalView>, ApiError> {
    let conflict = |code, message| Err(ApiError::Conflict { code, message });
    match outcome {
        StandingOutcome::Changed(row) => {
            Ok(Json(StandingApprovalView::at_time(*row, store.now_ms())))
        }
        StandingOutcome::Unknown => Err(no_such_standing(id)),
        StandingOutcome::GrantRevoked => Err(AccessDeniedError::Revoked.into()),
        StandingOutcome::ScopeTooWide => Err(ApiError::invalid_body(
            "`scope` is invalid: the tool's program is or may be an interpreter, or starts other programs; give `run`",
        )),
        StandingOutcome::OtherDigest => conflict(
            "digest_mismatch",
            format!("standing approval `{id}` has another digest; read it again"),
        ),
        StandingOutcome::Closed(state) => {
            Err(closed(format!("standing approval `{id}` is {} already", state.as_str())))
        }
        StandingOutcome::Full => Err(too_many_standing()),
    }
}

fn closed(message: String) -> ApiError {
    ApiError::Conflict { code: "approval_closed", message }
}

fn no_such_standing(id: &str) -> ApiError {
    let id: String = id.chars().take(80).collect();
    ApiError::NotFound(format!("standing approval `{id}` that this grant can see"))
}

impl StandingApprovalView {
    fn at_time(row: StandingApproval, now_ms: i64) -> Self {
        let state = row.state_at(now_ms).into();
        Self {
            id: row.id,
            state,
            scope: row.scope.into(),
            run: row.run,
            account: row.account,
            agent: row.agent,
            tool: row.tool,
            argv: None,
            image: None,
            rules: row.rules,
            digest: row.digest,
            arguments: row.arguments,
            evidence: row.evidence,
            definition: row.definition,
            price_usd: row.price.to_string(),
            created_at: format_unix_millis(row.created_ms),
            expires_at: format_unix_millis(row.not_after_ms),
            used: row.used,
            max_uses: row.max_uses,
            granted_at: row.granted_ms.map(format_unix_millis),
            by: row.by,
            reason: row.reason,
            revoked_by: row.revoked_by,
        }
    }
}

impl From<StandingState> for StandingStateView {
    fn from(state: StandingState) -> Self {
        match state {
            StandingState::Proposed => Self::Proposed,
            StandingState::Granted => Self::Granted,
            StandingState::Spent => Self::Spent,
            StandingState::Revoked => Self::Revoked,
            StandingState::Expired => Self::Expired,
        }
    }
}

impl From<StandingStateView> for StandingState {
    fn from(state: StandingStateView) -> Self {
        match state {
            StandingStateView::Proposed => Self::Proposed,
            StandingStateView::Granted => Self::Granted,
            StandingStateView::Spent => Self::Spent,
            StandingStateView::Revoked => Self::Revoked,
            StandingStateView::Expired => Self::Expired,
        }
    }
}
