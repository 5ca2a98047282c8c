//! The routes that start, list, show and cancel runs.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use axum::http::header::LOCATION;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use super::error::{ApiError, ErrorBody};
use super::error_docs::{
    AuthErrorResponses, CreateRunErrorResponses, NotFoundResponses, QueryErrorResponses,
};
use super::extract::{AuthenticatedCaller, JsonBody, PathParam, QueryParams};
use super::large_answer::send_json;
use super::result_docs::RunResultDoc;
use super::run_request::CreateRunBody;
use super::{ApiState, request_log};
use crate::base::timestamp;
use crate::base::trace_context;
use crate::service::auth::GrantScope;
use crate::service::runs::{self, AcceptedRun, QueueStanding, RunStartError, RunSubmission};
use crate::service::store::{self, RunFilter, RunRow, SpendingCaps};

/// A run with its result.
#[derive(Serialize, ToSchema)]
pub(super) struct RunView {
    #[serde(flatten)]
    listed: RunSummary,
    /// The result of the run. Null until the run has ended, and after its records were removed (`records_removed`).
    #[schema(value_type = Option<RunResultDoc>)]
    result: Option<Box<RawValue>>,
}

/// A run without its result, which may be long.
#[derive(Serialize, ToSchema)]
pub(super) struct RunSummary {
    /// The id of the run.
    #[schema(example = "run-019a1b2c-3d4e-7f60-8a1b-2c3d4e5f6071")]
    id: String,
    /// The id of the grant that started the run.
    grant: String,
    /// The agent, by its `agentId`.
    agent: String,
    /// The account that pays.
    account: String,
    /// The model that the agent uses.
    model: String,
    /// The state of the run.
    state: RunStateView,
    /// The position in the queue: 1 for the run that begins next. Null for a run that does not wait. The position can rise
    /// by the run of another grant, because the grants take turns.
    queue_position: Option<usize>,
    /// The time when the service accepted the run, in RFC 3339 with milliseconds.
    #[schema(format = DateTime)]
    created_at: String,
    /// The time when the run got its place. Null for a run that has not begun.
    #[schema(format = DateTime)]
    started_at: Option<String>,
    /// The time when the run ended. Null until then.
    #[schema(format = DateTime)]
    ended_at: Option<String>,
    /// The error code of a run that has failed. Null for a successful run, and until the run has ended.
    error_code: Option<String>,
}

/// The state of a run: `queued` (the run waits for a place), `running` (the run has a place: its sandbox starts, its agent
/// works, or its work is delivered) or `ended` (the run has a result).
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = RunState)]
pub(super) enum RunStateView {
    /// The service has accepted the run, and the run waits for a place.
    Queued,
    /// The run has a place: its sandbox starts, its agent works, or its work is delivered.
    Running,
    /// The run has ended and has a result.
    Ended,
}

/// A page of runs.
#[derive(Serialize, ToSchema)]
pub(super) struct RunsPage {
    /// The runs, newest first.
    runs: Vec<RunSummary>,
    /// The value of `cursor` for the next page, with older runs. Null on the last page.
    next: Option<String>,
}

/// The filter and the page of runs.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct RunsQuery {
    /// The agent of the runs. The default is every agent.
    agent: Option<String>,
    /// The state of the runs. The default is every state.
    state: Option<RunStateView>,
    /// The value of `next` of the page before. Absent for the first page.
    cursor: Option<String>,
    /// The largest number of runs on the page.
    #[param(minimum = 1, maximum = 200, default = 50)]
    limit: Option<u32>,
}

/// Start a run
///
/// The answer does not wait for the run. Read its result with `GET /api/v1/runs/{id}`, or follow its events with
/// `GET /api/v1/runs/{id}/events`. A repeated request with the same `Idempotency-Key` and the same body starts no second
/// run: it returns the first one. The grant needs the access `runs`.
#[utoipa::path(
    post,
    path = "/api/v1/runs",
    tag = "runs",
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "A text of 1 to 255 visible ASCII characters that identifies this request within the grant. Repeat a request whose answer was lost with the same key: the service then starts no second run."),
        ("traceparent" = Option<String>, Header, description = "The caller's span in the format of W3C Trace Context. The run becomes part of its trace. An invalid value is ignored.")
    ),
    request_body = CreateRunBody,
    responses(
        (status = 201, description = "The service has accepted the run. The run begins now, or waits in the queue.", body = RunView,
         headers(("location" = String, description = "The path of the run."))),
        (status = 200, description = "An earlier request with the same `Idempotency-Key` has started this run.", body = RunView),
        CreateRunErrorResponses
    )
)]
pub(super) async fn create_run(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    headers: HeaderMap,
    JsonBody(run): JsonBody<CreateRunBody>,
) -> Result<Response, ApiError> {
    let AcceptedRun { run, is_known } = submit_run(&api, &caller, &headers, run).await?;
    request_log::name_run(&run);
    let row = api
        .run_service
        .run_store()
        .find_run(&run)
        .await?
        .ok_or_else(|| ApiError::no_such_run(&run))?;
    let path = HeaderValue::from_str(&format!("/api/v1/runs/{run}")).expect("it is a plain name");
    let status = if is_known { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, [(LOCATION, path)], Json(RunView::from_row(&api, row).await?)).into_response())
}

/// Begins a run, if the grant allows it.
pub(super) async fn submit_run(
    api: &ApiState,
    caller: &AuthenticatedCaller,
    headers: &HeaderMap,
    run: CreateRunBody,
) -> Result<AcceptedRun, ApiError> {
    let key = idempotency_key(headers)?;
    let traceparent = parse_traceparent(headers);
    let wanted = RunSubmission { traceparent, ..run.authorize(&caller.0)? };
    let terms = &caller.0.terms;
    let caps =
        SpendingCaps { total: terms.max_cost_usd_total, per_day: terms.max_cost_usd_per_day };
    let limits = runs::GrantRunLimits::from_terms(terms);
    let terms = runs::RunStartOptions { key, limits, caps };
    let started = api.run_service.start_run(wanted, terms).await;
    started.map_err(|refused| match refused {
        // The error names only agents that the grant allows.
        RunStartError::NoAgent(unknown) => {
            let may_know = |name: &str| caller.0.check_agent(name).is_ok();
            ApiError::NoSuchAgent(unknown.redact_names(may_know).to_string())
        }
        refused => refused.into(),
    })
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(given) = headers.get("idempotency-key") else { return Ok(None) };
    let given = given.to_str().unwrap_or_default();
    if !(1..=255).contains(&given.len()) || !given.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(ApiError::invalid_parameter(
            "`Idempotency-Key` is invalid: give 1 to 255 visible ASCII characters",
        ));
    }
    Ok(Some(given.to_owned()))
}

/// Returns the span of the caller that the run is part of. An invalid or repeated header is ignored, as W3C Trace
/// Context requires.
fn parse_traceparent(headers: &HeaderMap) -> Option<trace_context::TraceContext> {
    let mut given = headers.get_all("traceparent").iter();
    let only = given.next().filter(|_| given.next().is_none())?;
    only.to_str().ok()?.parse().ok()
}

pub(super) fn run_id_header(run: &str) -> HeaderValue {
    HeaderValue::from_str(run).expect("the service has made it of plain characters")
}

/// Cancel a run
///
/// The run ends some moments later, with the error code `cancelled`. A run that has ended stays unchanged.
#[utoipa::path(
    post,
    path = "/api/v1/runs/{id}/cancel",
    tag = "runs",
    params(("id" = String, Path, description = "The id of the run, as `POST /api/v1/runs` returned it.")),
    responses(
        (status = 202, description = "The service is cancelling the run.", body = RunView),
        (status = 200, description = "The run had already ended.", body = RunView),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn cancel_run(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
) -> Result<(StatusCode, Json<RunView>), ApiError> {
    caller
        .require_scope(GrantScope::Runs)
        .or_else(|denied| caller.require_scope(GrantScope::Admin).map_err(|_| denied))?;
    let row = api.requested_run(&caller, &id).await?;
    if row.state == store::RunPhase::Ended {
        return Ok((StatusCode::OK, Json(RunView::from_row(&api, row).await?)));
    }
    tracing::info!(run = row.id, agent = row.agent, "a run is cancelled by a grant");
    api.run_service.cancel_run(&row.id);
    // The answer promises the end, and the process may be killed before the run's end is written.
    api.run_service.run_store().mark_cancelled(&row.id).await?;
    Ok((StatusCode::ACCEPTED, Json(RunView::from_row(&api, row).await?)))
}

/// List runs
///
/// The newest run comes first. The results are left out: `GET /api/v1/runs/{id}` has the result of a run.
#[utoipa::path(
    get,
    path = "/api/v1/runs",
    tag = "runs",
    params(RunsQuery),
    responses(
        (status = 200, description = "A page of the runs of this grant. With the access `admin`, a page of the runs of all grants.", body = RunsPage),
        QueryErrorResponses, AuthErrorResponses
    )
)]
pub(super) async fn list_runs(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    QueryParams(which): QueryParams<RunsQuery>,
) -> Result<Json<RunsPage>, ApiError> {
    caller.require_read()?;
    let limit = which.limit.unwrap_or(50);
    if !(1..=200).contains(&limit) {
        return Err(ApiError::invalid_parameter("`limit` is invalid: give a number from 1 to 200"));
    }
    if let Some(cursor) = &which.cursor {
        let known = api.visible_run(&caller, cursor).await;
        known.map_err(|error| match error {
            ApiError::NotFound(_) => ApiError::invalid_parameter(
                "`cursor` is invalid: give the value of `next` of the page before",
            ),
            error => error,
        })?;
    }
    let filter = RunFilter {
        grant: (!caller.0.is_admin()).then(|| caller.0.id.clone()),
        agent: which.agent,
        state: which.state.map(Into::into),
        before: which.cursor,
        limit: limit + 1,
    };
    let turn = api.long_reads.acquire_permit(&caller.0.id).await;
    let run_store = api.run_service.run_store().clone();
    // The read continues after the client has left. The permit is released when the read ends.
    let listed = api.tasks.run_detached(async move {
        let _held = turn;
        run_store.list_runs(filter).await
    });
    let rows = listed.await?;
    let standings = api.run_service.queue_standings();
    let mut runs: Vec<_> = rows
        .into_iter()
        .map(|row| {
            let standing = standings.get(&row.id).copied();
            RunSummary::from_row(row, standing)
        })
        .collect();
    let is_all = runs.len() <= limit as usize;
    runs.truncate(limit as usize);
    let next = runs.last().filter(|_| !is_all).map(|run: &RunSummary| run.id.clone());
    // A run may have got its place after its row was read. Such a run is not queued any more.
    if which.state.is_some_and(|state| state == RunStateView::Queued) {
        runs.retain(|run| run.state == RunStateView::Queued);
    }
    Ok(Json(RunsPage { runs, next }))
}

/// Show a run
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}",
    tag = "runs",
    params(("id" = String, Path, description = "The id of the run, as `POST /api/v1/runs` returned it.")),
    responses(
        (status = 200, description = "The run, with its result if the run has ended.", body = RunView),
        (status = 429, description = "`too_many_downloads`: the answer has more than 64 KiB, and the grant already downloads as much at the same time as it may. Repeat the request when a download has ended.", body = ErrorBody),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn show_run(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
) -> Result<Response, ApiError> {
    caller.require_read()?;
    let row = api.requested_run(&caller, &id).await?;
    send_json(&api, &caller, &RunView::from_row(&api, row).await?)
}

impl RunView {
    /// Returns the row with its result, as the store has it.
    async fn from_row(api: &ApiState, row: RunRow) -> Result<Self, ApiError> {
        let result = match row.state {
            store::RunPhase::Ended => api.run_service.run_store().run_result(&row.id).await?,
            _ => None,
        };
        let result =
            result.map(result_with_status).transpose().map_err(ApiError::internal_error)?;
        let standing = api.run_service.queue_standing(&row.id);
        Ok(Self { listed: RunSummary::from_row(row, standing), result })
    }
}

impl RunSummary {
    /// Returns the row as callers read it.
    fn from_row(row: RunRow, standing: Option<QueueStanding>) -> Self {
        let RunRow { id, grant, agent, account, model, state, error_code, .. } = row;
        // A run that has begun is not queued any more, although its row says so for a moment. A run that is about to end
        // without having begun has no position, and is queued to its end.
        let (state, queue_position) = match (state, standing) {
            (store::RunPhase::Queued, Some(QueueStanding::Begun)) => (RunStateView::Running, None),
            (store::RunPhase::Queued, Some(QueueStanding::Waiting(position))) => {
                (RunStateView::Queued, Some(position))
            }
            (state, _) => (state.into(), None),
        };
        Self {
            id,
            grant,
            agent,
            account,
            model,
            state,
            queue_position,
            created_at: format_date(row.created_ms),
            started_at: row.started_ms.map(format_date),
            ended_at: row.ended_ms.map(format_date),
            error_code,
        }
    }
}

impl From<store::RunPhase> for RunStateView {
    fn from(state: store::RunPhase) -> Self {
        match state {
            store::RunPhase::Queued => Self::Queued,
            store::RunPhase::Running => Self::Running,
            store::RunPhase::Ended => Self::Ended,
        }
    }
}

impl From<RunStateView> for store::RunPhase {
    fn from(state: RunStateView) -> Self {
        match state {
            RunStateView::Queued => Self::Queued,
            RunStateView::Running => Self::Running,
            RunStateView::Ended => Self::Ended,
        }
    }
}

/// Returns a stored result, and adds `status` to a result of an earlier version, which had no such field.
fn result_with_status(stored: String) -> serde_json::Result<Box<RawValue>> {
    let head: StoredResultHead = serde_json::from_str(&stored)?;
    let status = match head {
        StoredResultHead { status: Some(_), .. } => return RawValue::from_string(stored),
        StoredResultHead { ok: true, .. } => "succeeded",
        StoredResultHead { usage: Some(_), .. } => "failed",
        StoredResultHead { .. } => "incomplete",
    };
    // The service stores results without white space, and a result is never empty.
    RawValue::from_string(stored.replacen('{', &format!("{{\"status\":\"{status}\","), 1))
}

/// The fields of a stored result that decide about its `status`.
#[derive(Deserialize)]
struct StoredResultHead {
    status: Option<IgnoredAny>,
    #[serde(default)]
    ok: bool,
    usage: Option<IgnoredAny>,
}

/// Formats a time in RFC 3339, to the millisecond.
fn format_date(millis: i64) -> String {
    let since = Duration::from_millis(millis.try_into().unwrap_or_default());
    timestamp::format_rfc3339_millis(UNIX_EPOCH + since).to_string()
}

#[cfg(test)]
mod tests {
    use super::result_with_status;

    #[test]
    fn a_result_of_an_earlier_version_gets_its_status() {
        for (stored, shown) in [
            (r#"{"ok":true,"usage":{}}"#, r#"{"status":"succeeded","ok":true,"usage":{}}"#),
            (r#"{"ok":false,"usage":{}}"#, r#"{"status":"failed","ok":false,"usage":{}}"#),
            (r#"{"ok":false}"#, r#"{"status":"incomplete","ok":false}"#),
            (r#"{"ok":true,"status":"failed"}"#, r#"{"ok":true,"status":"failed"}"#),
        ] {
            assert_eq!(result_with_status(stored.to_owned()).unwrap().get(), shown);
        }
    }
}
