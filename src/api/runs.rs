//! Runs: begun, listed, looked at, ended.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use axum::http::header::LOCATION;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use super::Api;
use super::ask::NewRun;
use super::error::Error;
use super::extract::{Asked, At, Body, Caller};
use super::refusal::{NotAllowed, NotBegun, NotFound, NotUnderstood};
use crate::base::trace;
use crate::grant::Access;
use crate::journal::{self, Caps, Filter, Row};
use crate::supervisor::{self, Refused, Started, Wanted};

/// One run.
#[derive(Serialize, ToSchema)]
pub(super) struct Run {
    #[serde(flatten)]
    listed: Listed,
    /// What came of it, once it is over.
    #[schema(value_type = Option<Object>)]
    result: Option<Box<RawValue>>,
}

/// A run as lists have it: without what came of it, which may be long.
#[derive(Serialize, ToSchema)]
#[schema(as = ListedRun)]
pub(super) struct Listed {
    #[schema(example = "run-019a1b2c-3d4e-7f60-8a1b-2c3d4e5f6071")]
    id: String,
    /// Whose it is.
    grant: String,
    agent: String,
    /// Who pays.
    account: String,
    model: String,
    state: Progress,
    created_at: String,
    started_at: Option<String>,
    ended_at: Option<String>,
    /// Why it is not ok; null where it is, or is not over.
    error_code: Option<String>,
}

/// How far a run has come.
#[derive(Clone, Copy, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = State)]
pub(super) enum Progress {
    /// It was accepted, and has not begun.
    Queued,
    Running,
    Ended,
}

/// Some runs, newest first.
#[derive(Serialize, ToSchema)]
pub(super) struct Runs {
    runs: Vec<Listed>,
    /// The `cursor` for the runs that are older than these; null where there are none.
    next: Option<String>,
}

/// Which runs.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct Which {
    /// Only runs of this agent
    agent: Option<String>,
    /// Only runs that have come so far
    state: Option<Progress>,
    /// `next` of the page before
    cursor: Option<String>,
    /// At most so many
    #[param(minimum = 1, maximum = 200, default = 50)]
    limit: Option<u32>,
}

/// Begin a run
///
/// Asked again with the same `Idempotency-Key` and the same body, it is the same run.
#[utoipa::path(
    post,
    path = "/api/v1/runs",
    tag = "runs",
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "Of this grant; 1 to 255 visible characters"),
        ("traceparent" = Option<String>, Header, description = "The span that the run is part of; W3C Trace Context")
    ),
    request_body = NewRun,
    responses(
        (status = 201, description = "It was accepted, and begins", body = Run,
         headers(("location" = String, description = "The run's path"))),
        (status = 200, description = "It was accepted before", body = Run),
        NotBegun
    )
)]
pub(super) async fn create(
    caller: Caller,
    State(api): State<Arc<Api>>,
    headers: HeaderMap,
    Body(run): Body<NewRun>,
) -> Result<Response, Error> {
    let Started { run, is_known } = start(&api, &caller, &headers, run).await?;
    let row = api.supervisor.journal().run(&run).await?.ok_or_else(|| Error::no_such_run(&run))?;
    let path = HeaderValue::from_str(&format!("/api/v1/runs/{run}")).expect("it is a plain name");
    let status = if is_known { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, [(LOCATION, path)], Json(Run::of(&api, row).await?)).into_response())
}

/// Begins a run, if the grant allows it.
pub(super) async fn start(
    api: &Api,
    caller: &Caller,
    headers: &HeaderMap,
    run: NewRun,
) -> Result<Started, Error> {
    let key = idempotency_key(headers)?;
    let traceparent = traceparent(headers);
    let wanted = Wanted { traceparent, ..run.allowed_by(&caller.0)? };
    let terms = &caller.0.terms;
    let caps = Caps { total: terms.max_cost_usd_total, per_day: terms.max_cost_usd_per_day };
    let terms = supervisor::Terms { key, most: terms.max_runs, caps };
    let started = api.supervisor.start(wanted, terms).await;
    started.map_err(|refused| match refused {
        // Of agents that it may not run it is told nothing.
        Refused::NoAgent(unknown) => {
            let may_know = |name: &str| caller.0.allows_agent(name).is_ok();
            Error::NoSuchAgent(unknown.shown_to(may_know).to_string())
        }
        refused => refused.into(),
    })
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Error> {
    let Some(given) = headers.get("idempotency-key") else { return Ok(None) };
    let given = given.to_str().unwrap_or_default();
    if !(1..=255).contains(&given.len()) || !given.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Error::parameter("`Idempotency-Key` has 1 to 255 visible characters"));
    }
    Ok(Some(given.to_owned()))
}

/// The span that the run is part of. What makes no sense is left out, as W3C Trace Context has it.
fn traceparent(headers: &HeaderMap) -> Option<trace::Context> {
    let mut given = headers.get_all("traceparent").iter();
    let only = given.next().filter(|_| given.next().is_none())?;
    only.to_str().ok()?.parse().ok()
}

pub(super) fn id_header(run: &str) -> HeaderValue {
    HeaderValue::from_str(run).expect("the service has made it of plain characters")
}

/// End a run
///
/// It is over some moments later. A run that has ended stays as it is.
#[utoipa::path(
    post,
    path = "/api/v1/runs/{id}/cancel",
    tag = "runs",
    params(("id" = String, Path, description = "The run")),
    responses(
        (status = 202, description = "The run, which will end soon", body = Run),
        (status = 200, description = "The run, which had ended", body = Run),
        NotAllowed, NotFound
    )
)]
pub(super) async fn cancel(
    caller: Caller,
    State(api): State<Arc<Api>>,
    At(id): At<String>,
) -> Result<(StatusCode, Json<Run>), Error> {
    caller.may(Access::Runs).or_else(|denied| caller.may(Access::Admin).map_err(|_| denied))?;
    let row = api.run_of(&caller, &id).await?;
    if row.state == journal::State::Ended {
        return Ok((StatusCode::OK, Json(Run::of(&api, row).await?)));
    }
    tracing::info!(run = row.id, agent = row.agent, "a run is cancelled by a grant");
    api.supervisor.cancel(&row.id);
    Ok((StatusCode::ACCEPTED, Json(Run::of(&api, row).await?)))
}

/// List runs, newest first
///
/// What came of each is left out; it is told with the run.
#[utoipa::path(
    get,
    path = "/api/v1/runs",
    tag = "runs",
    params(Which),
    responses(
        (status = 200, description = "The runs of this grant; of all grants for an admin", body = Runs),
        NotUnderstood, NotAllowed
    )
)]
pub(super) async fn list(
    caller: Caller,
    State(api): State<Arc<Api>>,
    Asked(which): Asked<Which>,
) -> Result<Json<Runs>, Error> {
    caller.may_look()?;
    let limit = which.limit.unwrap_or(50);
    if !(1..=200).contains(&limit) {
        return Err(Error::parameter("`limit` is from 1 to 200"));
    }
    if let Some(cursor) = &which.cursor {
        let known = api.run_of(&caller, cursor).await;
        known.map_err(|error| match error {
            Error::NotFound(_) => Error::parameter("`cursor` is the `next` of a page before"),
            error => error,
        })?;
    }
    let filter = Filter {
        grant: (!caller.0.is_admin()).then(|| caller.0.id.clone()),
        agent: which.agent,
        state: which.state.map(Into::into),
        before: which.cursor,
        limit: limit + 1,
    };
    let turn = api.long_reads.wait(&caller.0.id).await;
    let journal = api.supervisor.journal().clone();
    // Also for a client that leaves: its turn is over when the read is.
    let listed = api.tasks.carry(async move {
        let _held = turn;
        journal.list(filter).await
    });
    let mut runs: Vec<_> = listed.await?.into_iter().map(Listed::from).collect();
    let is_all = runs.len() <= limit as usize;
    runs.truncate(limit as usize);
    let next = runs.last().filter(|_| !is_all).map(|run: &Listed| run.id.clone());
    Ok(Json(Runs { runs, next }))
}

/// Look at a run
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}",
    tag = "runs",
    params(("id" = String, Path, description = "The run")),
    responses(
        (status = 200, description = "The run", body = Run),
        NotAllowed, NotFound
    )
)]
pub(super) async fn show(
    caller: Caller,
    State(api): State<Arc<Api>>,
    At(id): At<String>,
) -> Result<Json<Run>, Error> {
    caller.may_look()?;
    let row = api.run_of(&caller, &id).await?;
    Ok(Json(Run::of(&api, row).await?))
}

impl Run {
    /// With what came of it, as it was written down.
    async fn of(api: &Api, row: Row) -> Result<Self, Error> {
        let result = match row.state {
            journal::State::Ended => api.supervisor.journal().result(&row.id).await?,
            _ => None,
        };
        let result = result.map(RawValue::from_string).transpose().map_err(Error::internal)?;
        Ok(Self { listed: row.into(), result })
    }
}

impl From<Row> for Listed {
    fn from(row: Row) -> Self {
        let Row { id, grant, agent, account, model, state, error_code, .. } = row;
        Self {
            id,
            grant,
            agent,
            account,
            model,
            state: state.into(),
            created_at: date(row.created_ms),
            started_at: row.started_ms.map(date),
            ended_at: row.ended_ms.map(date),
            error_code,
        }
    }
}

impl From<journal::State> for Progress {
    fn from(state: journal::State) -> Self {
        match state {
            journal::State::Queued => Self::Queued,
            journal::State::Running => Self::Running,
            journal::State::Ended => Self::Ended,
        }
    }
}

impl From<Progress> for journal::State {
    fn from(state: Progress) -> Self {
        match state {
            Progress::Queued => Self::Queued,
            Progress::Running => Self::Running,
            Progress::Ended => Self::Ended,
        }
    }
}

/// RFC 3339, to the millisecond.
fn date(millis: i64) -> String {
    let since = Duration::from_millis(millis.try_into().unwrap_or_default());
    humantime::format_rfc3339_millis(UNIX_EPOCH + since).to_string()
}
