//! The routes that list, show and answer questions about tool calls and budgets.
//!
//! **Invariant:** a question is answered by POST only, with the digest of the call that the person has seen, and never by
//! the grant that has started the run.

use std::collections::BTreeMap;
use std::iter;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::ApiState;
use super::approval_terms::{
    ApprovalScopeView, WrittenTerms, check_reason, is_in_reach, list_reach, require_all,
    require_any, too_many_standing, wrong_scope,
};
use super::error::{ApiError, ErrorBody};
use super::error_docs::{AuthErrorResponses, NotFoundResponses, QueryErrorResponses};
use super::extract::{AuthenticatedCaller, JsonBody, PathParam, QueryParams};
use crate::llm::budget::{Nanodollars, SpendingLimits, Tokens};
use crate::service::auth::{AccessDeniedError, AccessGrant, GrantScope};
use crate::service::runs::BudgetRaiseError;
use crate::service::store::RunRow;
use crate::tools::approval::standing::{ApprovalScope, standing_id};
use crate::tools::approval::store::{
    ApprovalDecision, ApprovalFilter, ApprovalStore, DecisionOutcome,
};
use crate::tools::approval::{ApprovalRow, ApprovalState, BudgetQuestion, format_unix_millis};

/// A question about one call of a tool.
#[derive(Serialize, ToSchema)]
pub(super) struct ApprovalView {
    /// The id of the question.
    #[schema(example = "apr-019a1b2c3d4e7f608a1b2c3d4e5f6071")]
    id: String,
    /// The state of the question.
    state: ApprovalStateView,
    /// The id of the run that has called the tool.
    run: String,
    /// The agent of the run, by its `agentId`.
    agent: String,
    /// The account of the run. Only `GET /api/v1/approvals/{id}` has it.
    account: Option<String>,
    /// The id of the grant that has started the run. Only `GET /api/v1/approvals/{id}` has it.
    grant: Option<String>,
    /// The name of the tool.
    tool: String,
    /// The program of a tool that is a file, and its arguments. Only `GET /api/v1/approvals/{id}` has it, for the access
    /// `approve` or `admin`, while the tool is configured as the call has it.
    argv: Option<Vec<String>>,
    /// The image of a tool that is a file, as `argv`.
    image: Option<String>,
    /// The rule that asks.
    rule: String,
    /// The digest of the call: its run, tool, definition, arguments, policy and end of time. An answer has to name it.
    digest: String,
    /// The arguments of the call: a JSON object as text, as the agent has written it. Null in a list, and once the
    /// question is closed.
    arguments: Option<String>,
    /// The arguments that the operator has listed for the records, with their values cut at 256 bytes.
    evidence: BTreeMap<String, String>,
    /// The digest of the definition of the tool.
    definition: String,
    /// The digest of the policy about the tools of the run.
    policy: String,
    /// The price of the call in US dollars, as a decimal text.
    price_usd: String,
    /// The time of the question, in RFC 3339 with milliseconds.
    #[schema(format = DateTime)]
    requested_at: String,
    /// The last moment at which the call may begin.
    #[schema(format = DateTime)]
    expires_at: String,
    /// The time of the answer, or of the end without an answer. Null for a pending question.
    #[schema(format = DateTime)]
    resolved_at: Option<String>,
    /// The id of the grant that has answered. Null without an answer.
    by: Option<String>,
    /// The reason that was given with the answer, or the reason for the end without an answer.
    reason: Option<String>,
    /// The id of the call that has begun. Null until then.
    call: Option<String>,
    /// The spent limit, for a question about a budget. Its `tool` is `budget`. Null for a question about a call.
    budget: Option<BudgetQuestionView>,
    /// The limits that the answer has raised. Null for any other answer.
    raised: Option<SpendingLimitsView>,
    /// The scopes that an answer may have.
    scopes: Vec<ApprovalScopeView>,
    /// The id of the standing approval that the answer has made. Null for an answer about one call.
    standing_approval: Option<String>,
}

/// A spent limit of a run.
#[derive(Serialize, ToSchema)]
#[schema(as = BudgetQuestion)]
pub(super) struct BudgetQuestionView {
    /// The limit that is spent, by its name in `limits`.
    #[schema(example = "max_cost_usd")]
    limit: &'static str,
    /// The limits in force at the time of the question.
    limits: SpendingLimitsView,
    /// The turns that were spent.
    spent_turns: u64,
    /// The input tokens that were spent.
    spent_input_tokens: u64,
    /// The output tokens that were spent.
    spent_output_tokens: u64,
    /// The money that was spent, in US dollars, as a decimal text.
    spent_cost_usd: String,
}

/// Limits on everything that a run spends. A missing limit is no limit; in an answer it is no change.
#[derive(Default, Deserialize, Serialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
#[schema(as = SpendingLimits)]
#[expect(clippy::struct_field_names, reason = "the names are the keys of `[budget]`")]
pub(super) struct SpendingLimitsView {
    /// The number of calls that make a model generate.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_turns: Option<u64>,
    /// The number of input and output tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_total_tokens: Option<u64>,
    /// The number of input tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_input_tokens: Option<u64>,
    /// The number of output tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_output_tokens: Option<u64>,
    /// The money in US dollars, as a decimal text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "2.50")]
    max_cost_usd: Option<Nanodollars>,
}

/// The state of a question: `pending` (no person has answered), `approved` (the call is about to begin), `denied`, `expired`,
/// `withdrawn` (the run has ended, or the approved call could not begin) or `consumed` (the approved call has begun).
#[derive(Clone, Copy, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ApprovalState)]
pub(super) enum ApprovalStateView {
    /// No person has answered.
    Pending,
    /// A person has allowed the call, which is about to begin.
    Approved,
    /// A person has denied the call.
    Denied,
    /// No person has answered in time, or the approved call has not begun in time.
    Expired,
    /// The run has ended, or the approved call could not begin.
    Withdrawn,
    /// The approved call has begun.
    Consumed,
}

/// A list of questions.
#[derive(Serialize, ToSchema)]
pub(super) struct ApprovalsPage {
    /// The questions: pending ones oldest first, if `state` is `pending`, else the newest first. Their `arguments` are
    /// null: `GET /api/v1/approvals/{id}` has them.
    approvals: Vec<ApprovalView>,
    /// The value of `cursor` for the next page. Null on the last page.
    next: Option<String>,
}

/// The filter of questions.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct ApprovalsQuery {
    /// The state of the questions. The default is every state.
    state: Option<ApprovalStateView>,
    /// The run that asks. The default is every run, which needs the access `approve` or `admin`.
    run: Option<String>,
    /// The value of `next` of the page before. Absent for the first page.
    cursor: Option<String>,
    /// The largest number of questions on the page.
    #[param(minimum = 1, maximum = 200, default = 50)]
    limit: Option<u32>,
}

/// An answer to a question.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct DecisionBody {
    /// The answer.
    pub(super) decision: DecisionWord,
    /// The digest of the question, as `GET /api/v1/approvals/{id}` returned it.
    pub(super) digest: String,
    /// The reason, for the agent and for the records: at most 500 bytes.
    pub(super) reason: Option<String>,
    /// The new values of limits, for a yes to a question about a budget. The spent limit must be among them. Each value
    /// is above the limit in force, and not above the limit of the grant that has started the run.
    pub(super) raise: Option<SpendingLimitsView>,
    /// The calls that a yes counts for. The default is `once`. A wider scope must be among the question's `scopes`.
    pub(super) scope: Option<ApprovalScopeView>,
    /// The number of calls that may begin later, with a wider scope: 1 to 1,000. Needed for `always`.
    pub(super) max_uses: Option<u32>,
    /// The time for which later calls may begin, such as `1h`. Either this or `not_after` is needed for `always`.
    pub(super) valid_for: Option<String>,
    /// The last moment at which a later call may begin, in RFC 3339.
    pub(super) not_after: Option<String>,
}

/// The answer to a question.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ApprovalDecision)]
pub(super) enum DecisionWord {
    /// Let this call run; with a wider `scope`, the same call later, too.
    Approve,
    /// Do not let the call run. The run is not asked about the same call again.
    Deny,
}

/// List questions about tool calls
///
/// Returns the questions that wait for a person, and earlier ones. The grant needs the access `approve` or `admin`; with
/// `run`, the access `read` is enough for a run of its own.
#[utoipa::path(
    get,
    path = "/api/v1/approvals",
    tag = "approvals",
    params(ApprovalsQuery),
    responses(
        (status = 200, description = "The questions.", body = ApprovalsPage),
        QueryErrorResponses, AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn list_approvals(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    QueryParams(which): QueryParams<ApprovalsQuery>,
) -> Result<Json<ApprovalsPage>, ApiError> {
    let limit = api.check_page(&caller, which.run.as_deref(), which.limit).await?;
    let Some(store) = api.run_service.approvals() else {
        return Ok(Json(ApprovalsPage { approvals: vec![], next: None }));
    };
    if let Some(cursor) = &which.cursor {
        let known = store.find(cursor).await?;
        // A grant that sees some runs learns nothing about the questions of others.
        let is_listed = |row: &ApprovalRow| {
            which.run.as_ref().is_none_or(|run| *run == row.run)
                && (require_all(&caller).is_err() || is_in_reach(&caller, &row.agent, &row.account))
        };
        if !known.as_ref().is_some_and(is_listed) {
            return Err(ApiError::invalid_parameter(
                "`cursor` is invalid: give the value of `next` of the page before",
            ));
        }
    }
    let (state, run, after) = (which.state.map(Into::into), which.run, which.cursor);
    let reach = list_reach(&caller);
    let filter = ApprovalFilter { state, run, reach, after, limit: limit + 1 };
    let turn = api.long_reads.acquire_permit(&caller.0.id).await;
    // The read continues after the client has left. The permit is released when the read ends.
    let listed = api.tasks.run_detached(async move {
        let _held = turn;
        store.list(filter).await
    });
    let mut approvals: Vec<ApprovalView> = listed.await?.into_iter().map(Into::into).collect();
    let is_all = approvals.len() <= limit as usize;
    approvals.truncate(limit as usize);
    let next = approvals.last().filter(|_| !is_all).map(|last| last.id.clone());
    Ok(Json(ApprovalsPage { approvals, next }))
}

/// Show a question about a tool call
///
/// The grant needs the access `approve` or `admin`; the access `read` is enough for a run of its own.
#[utoipa::path(
    get,
    path = "/api/v1/approvals/{id}",
    tag = "approvals",
    params(("id" = String, Path, description = "The id of the question.")),
    responses(
        (status = 200, description = "The question.", body = ApprovalView),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn show_approval(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
) -> Result<Json<ApprovalView>, ApiError> {
    let (store, row) = api.requested_approval(&caller, &id).await?;
    let run = api.run_service.run_store().find_run(&row.run).await?;
    // The tenant of a run need not know the operator's programs.
    let present = store.present_tools().filter(|_| require_all(&caller).is_ok());
    let program = present.and_then(|tools| tools.find_program(&row.tool, &row.definition).cloned());
    let (account, grant) = run.map(|run| (run.account, run.grant)).unzip();
    let (argv, image) = program.map(|job| (job.argv.clone(), job.image.clone())).unzip();
    Ok(Json(ApprovalView { account, grant, argv, image: image.flatten(), ..row.into() }))
}

/// Answer a question about a tool call
///
/// The answer is for one call: the call with the digest. With a wider `scope`, it also makes a standing approval. A repeated answer is refused. The grant needs the access
/// `approve`, and must not be the grant that has started the run.
#[utoipa::path(
    post,
    path = "/api/v1/approvals/{id}/decision",
    tag = "approvals",
    params(("id" = String, Path, description = "The id of the question.")),
    request_body = DecisionBody,
    responses(
        (status = 200, description = "The answered question.", body = ApprovalView),
        (status = 400, description = "`invalid_json`: the body is not JSON.", body = ErrorBody),
        (status = 408, description = "`request_timeout`: the body did not arrive in time.", body = ErrorBody),
        (status = 409, description = "`digest_mismatch`: the question has another digest, read it again. `approval_closed`: the question was answered before, its time is over, or its run has ended. `too_many_standing_approvals`: revoke some.", body = ErrorBody),
        (status = 413, description = "`body_too_large`: the body is larger than 1 MiB.", body = ErrorBody),
        (status = 415, description = "`unsupported_media_type`: send the body as `application/json`.", body = ErrorBody),
        (status = 402, description = "`grant_budget_exhausted`: the caps of the grant that has started the run do not leave the money for the raise.", body = ErrorBody),
        (status = 422, description = "`invalid_request`: a field of the body is invalid; the message names it.", body = ErrorBody),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn decide_approval(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
    JsonBody(answer): JsonBody<DecisionBody>,
) -> Result<Json<ApprovalView>, ApiError> {
    caller.require_scope(GrantScope::Approve)?;
    let (store, row) = api.requested_approval(&caller, &id).await?;
    let decided = api.decide(&caller.0, (&store, row), answer, None).await?;
    Ok(Json(decided.into()))
}

impl ApiState {
    /// Returns a question that the caller may see.
    async fn requested_approval(
        &self,
        caller: &AuthenticatedCaller,
        id: &str,
    ) -> Result<(ApprovalStore, ApprovalRow), ApiError> {
        require_any(caller)?;
        let store = self.run_service.approvals().ok_or_else(|| no_such_approval(id))?;
        let row = store.find(id).await?.ok_or_else(|| no_such_approval(id))?;
        // A question of a run that the caller may not see answers like one that does not exist.
        match self.require_row_of(caller, &row.run, (&row.agent, &row.account)).await {
            Err(ApiError::NotFound(_)) => Err(no_such_approval(id)),
            Err(error) => Err(error),
            Ok(()) => Ok((store, row)),
        }
    }

    /// Writes the answer of a grant that may approve. `reply` is the id of the signed reply that has the answer.
    pub(super) async fn decide(
        &self,
        grant: &AccessGrant,
        (store, row): (&ApprovalStore, ApprovalRow),
        answer: DecisionBody,
        reply: Option<String>,
    ) -> Result<ApprovalRow, ApiError> {
        check_reason(answer.reason.as_deref())?;
        // A run whose row is gone has no grant to compare with, and no call that waits.
        let run = self.run_service.run_store().find_run(&row.run).await?;
        let run = run.ok_or_else(|| no_such_approval(&row.id))?;
        if run.grant == grant.id {
            return Err(AccessDeniedError::OwnRun.into());
        }
        // The access `admin` shows more questions than the grant may answer.
        grant.check_approver(&row.agent, &row.account)?;
        let is_yes = answer.decision == DecisionWord::Approve;
        let written = WrittenTerms {
            scope: answer.scope.map_or(ApprovalScope::Once, ApprovalScope::from),
            max_uses: answer.max_uses,
            valid_for: answer.valid_for,
            not_after: answer.not_after,
        };
        let standing = written.check_answer(store, &run, is_yes)?;
        let raise = answer.raise.map(SpendingLimits::from);
        let mut _turn = None;
        if let Some(raise) = &raise {
            if !is_yes {
                return Err(wrong_raise(&RAISE_MISMATCH));
            }
            // Of several answers at once, the second finds the question closed, and reserves nothing.
            _turn = Some(BUDGET_ANSWERS.lock().await);
            let row = store.find(&row.id).await?.ok_or_else(|| no_such_approval(&row.id))?;
            self.reserve_raise(&run, (&row, &answer.digest), raise).await?;
        }
        let decision = ApprovalDecision {
            is_approved: is_yes,
            digest: answer.digest,
            by: grant.id.clone(),
            reason: answer.reason,
            raise,
            standing,
            reply,
        };
        let conflict = |code, message| Err(ApiError::Conflict { code, message });
        let id = row.id;
        match store.decide(&id, decision, store.read_time()).await? {
            DecisionOutcome::Decided(row) => Ok(*row),
            DecisionOutcome::Unknown => Err(no_such_approval(&id)),
            DecisionOutcome::GrantRevoked => Err(AccessDeniedError::Revoked.into()),
            DecisionOutcome::WrongRaise(error) => Err(wrong_raise(&error)),
            DecisionOutcome::RaiseMismatch => Err(wrong_raise(&RAISE_MISMATCH)),
            DecisionOutcome::ScopeNotOffered => Err(wrong_scope(
                "the question takes `once` only, or a narrower scope; its `scopes` names them",
            )),
            DecisionOutcome::TooManyStanding => Err(too_many_standing()),
            DecisionOutcome::Replayed => {
                conflict("reply_replayed", "this reply was received before".to_owned())
            }
            DecisionOutcome::OtherDigest => conflict(
                "digest_mismatch",
                format!("question `{id}` has another digest; read the question again"),
            ),
            DecisionOutcome::Closed(state) => conflict(
                "approval_closed",
                format!("question `{id}` is {} already, and takes no answer", state.as_str()),
            ),
        }
    }

    /// Reserves the money for an answer that raises limits, if the answer can count.
    async fn reserve_raise(
        &self,
        run: &RunRow,
        (row, digest): (&ApprovalRow, &str),
        raise: &SpendingLimits,
    ) -> Result<(), ApiError> {
        // An answer to another digest or to a closed question reserves nothing. The store says what is wrong with it.
        let Some(budget) = &row.budget else { return Ok(()) };
        if row.digest != digest || row.state != ApprovalState::Pending {
            return Ok(());
        }
        budget.limits.check_raise(raise, budget.limit).map_err(|error| wrong_raise(&error))?;
        let reserved = self.run_service.reserve_budget_raise(run, raise).await;
        reserved.map_err(|error| match error {
            BudgetRaiseError::Limit(error) => wrong_raise(&error),
            BudgetRaiseError::Caps { .. } => {
                ApiError::GrantBudget { message: error.to_string(), opens_after: None }
            }
            BudgetRaiseError::Grant(error) => error.into(),
            BudgetRaiseError::Store(error) => error.into(),
        })
    }

    /// Checks that the caller may see a list, of one run or of all, and returns the number of rows on its page.
    pub(super) async fn check_page(
        &self,
        caller: &AuthenticatedCaller,
        run: Option<&str>,
        limit: Option<u32>,
    ) -> Result<u32, ApiError> {
        match run {
            None => require_all(caller)?,
            Some(run) => self.require_questions_of(caller, run).await?,
        }
        let limit = limit.unwrap_or(50);
        if !(1..=200).contains(&limit) {
            let why = "`limit` is invalid: give a number from 1 to 200";
            return Err(ApiError::invalid_parameter(why));
        }
        Ok(limit)
    }

    /// Checks that the caller may list the questions of a run.
    async fn require_questions_of(
        &self,
        caller: &AuthenticatedCaller,
        run: &str,
    ) -> Result<(), ApiError> {
        if require_all(caller).is_ok() {
            return Ok(());
        }
        caller.require_read()?;
        self.requested_run(caller, run).await.map(|_| ())
    }
}

fn wrong_raise(problem: &dyn std::fmt::Display) -> ApiError {
    ApiError::invalid_body(format_args!("`raise` is invalid: {problem}"))
}

pub(super) fn no_such_approval(id: &str) -> ApiError {
    let id: String = id.chars().take(80).collect();
    ApiError::NotFound(format!("question `{id}` that this grant can see"))
}

impl From<ApprovalRow> for ApprovalView {
    fn from(row: ApprovalRow) -> Self {
        let offered = row.standing.iter().flat_map(|offer| offer.scopes.iter().copied());
        let scopes = iter::once(ApprovalScope::Once).chain(offered).map(Into::into).collect();
        let is_standing = row.standing.as_ref().is_some_and(|offer| offer.answered.is_some());
        Self {
            scopes,
            standing_approval: is_standing.then(|| standing_id(&row.id)),
            id: row.id,
            state: row.state.into(),
            run: row.run,
            agent: row.agent,
            account: None,
            grant: None,
            tool: row.tool,
            argv: None,
            image: None,
            rule: row.rule,
            digest: row.digest,
            arguments: row.arguments,
            evidence: row.evidence,
            definition: row.definition,
            policy: row.policy,
            price_usd: row.price.to_string(),
            requested_at: format_unix_millis(row.requested_ms),
            expires_at: format_unix_millis(row.not_after_ms),
            resolved_at: row.resolved_ms.map(format_unix_millis),
            by: row.by,
            reason: row.reason,
            call: row.call,
            budget: row.budget.map(Into::into),
            raised: row.raised.map(Into::into),
        }
    }
}

impl From<BudgetQuestion> for BudgetQuestionView {
    fn from(question: BudgetQuestion) -> Self {
        let BudgetQuestion { limit, limits, spent } = question;
        Self {
            limit: limit.as_str(),
            limits: limits.into(),
            spent_turns: spent.turns,
            spent_input_tokens: spent.input.0,
            spent_output_tokens: spent.output.0,
            spent_cost_usd: spent.cost.to_string(),
        }
    }
}

impl From<SpendingLimits> for SpendingLimitsView {
    fn from(limits: SpendingLimits) -> Self {
        Self {
            max_turns: limits.max_turns,
            max_total_tokens: limits.max_total_tokens.map(|tokens| tokens.0),
            max_input_tokens: limits.max_input_tokens.map(|tokens| tokens.0),
            max_output_tokens: limits.max_output_tokens.map(|tokens| tokens.0),
            max_cost_usd: limits.max_cost_usd,
        }
    }
}

impl From<SpendingLimitsView> for SpendingLimits {
    fn from(limits: SpendingLimitsView) -> Self {
        Self {
            max_turns: limits.max_turns,
            max_total_tokens: limits.max_total_tokens.map(Tokens),
            max_input_tokens: limits.max_input_tokens.map(Tokens),
            max_output_tokens: limits.max_output_tokens.map(Tokens),
            max_cost_usd: limits.max_cost_usd,
        }
    }
}

impl From<ApprovalState> for ApprovalStateView {
    fn from(state: ApprovalState) -> Self {
        match state {
            ApprovalState::Pending => Self::Pending,
            ApprovalState::Approved => Self::Approved,
            ApprovalState::Denied => Self::Denied,
            ApprovalState::Expired => Self::Expired,
            ApprovalState::Withdrawn => Self::Withdrawn,
            ApprovalState::Consumed => Self::Consumed,
        }
    }
}

impl From<ApprovalStateView> for ApprovalState {
    fn from(state: ApprovalStateView) -> Self {
        match state {
            ApprovalStateView::Pending => Self::Pending,
            ApprovalStateView::Approved => Self::Approved,
            ApprovalStateView::Denied => Self::Denied,
            ApprovalStateView::Expired => Self::Expired,
            ApprovalStateView::Withdrawn => Self::Withdrawn,
            ApprovalStateView::Consumed => Self::Consumed,
        }
    }
}

/// The turn of an answer that raises a budget: it reserves money before it is written, and only one of several answers to
/// a question can count.
static BUDGET_ANSWERS: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// The problem of a raise that does not fit its question.
const RAISE_MISMATCH: &str =
    "a yes to a question about a budget needs it, and no other answer may have it";
