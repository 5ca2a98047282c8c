//! Liveness and readiness of the process.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use tokio::time::timeout;
use utoipa::ToSchema;

use super::ApiState;
use crate::service::runs::ServiceStatus;
use crate::service::runs::storage::check_writable;

/// The answer of the liveness check.
#[derive(Serialize, ToSchema)]
pub(super) struct LivenessView {
    /// The text `ok`.
    #[schema(example = "ok")]
    status: &'static str,
}

/// The answer of the readiness check.
#[derive(Serialize, ToSchema)]
pub(super) struct ReadinessView {
    /// True if the service accepts runs.
    #[serde(rename = "ready")]
    can_accept: bool,
    /// The result of each check: `ok`, or the problem. Problems of `relay`, `upstream` and `forge` do not refuse runs:
    /// an operator may run without them, and every other instance of the service would have the same problem.
    checks: BTreeMap<&'static str, String>,
    /// The state of the upstream, at most half a minute old: `ok`, `upstream_unreachable` with its cause,
    /// `upstream_auth`, or
    /// `not known yet`.
    #[schema(example = "ok")]
    upstream: String,
}

/// Check that the process is alive
#[utoipa::path(
    get,
    path = "/healthz",
    tag = "service",
    security(()),
    responses((status = 200, description = "The process is alive.", body = LivenessView))
)]
pub(super) async fn show_liveness() -> Json<LivenessView> {
    Json(LivenessView { status: "ok" })
}

/// Check that the service accepts runs
///
/// The answer has the result of each check, and the reason if a check has failed.
#[utoipa::path(
    get,
    path = "/readyz",
    tag = "service",
    security(()),
    responses(
        (status = 200, description = "The service accepts runs.", body = ReadinessView),
        (status = 503, description = "The service accepts no runs.", body = ReadinessView)
    )
)]
pub(super) async fn show_readiness(
    State(api): State<Arc<ApiState>>,
) -> (StatusCode, Json<ReadinessView>) {
    let database = api.run_service.run_store().check_writable().await;
    let checks = [
        ("accepting", check_accepting(&api)),
        ("agents", check_agents(&api).await),
        ("database", database.map_err(|error| error.to_string())),
    ];
    let directories = api.run_service.settings().written_directories();
    let directories = directories.map(|(what, path)| (what, check_directory(&path)));
    let checks: Vec<_> = checks.into_iter().chain(directories).collect();
    let ready = checks.iter().all(|(_, found)| found.is_ok());
    let said = |found: Result<(), String>| found.err().unwrap_or_else(|| "ok".to_owned());
    // Runs without a repository need no relay.
    let all = checks.into_iter().chain([("relay", check_relay(&api))]);
    let mut checks: BTreeMap<_, _> = all.map(|(what, found)| (what, said(found))).collect();
    let ServiceStatus { upstream, forge } = standing(&api).await;
    checks.extend([("upstream", upstream.clone()), ("forge", forge), ("queue", check_queue(&api))]);
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(ReadinessView { can_accept: ready, checks, upstream }))
}

/// Returns the state of the upstream and the forge. A readiness probe has little time, so a slow check continues in the
/// background and its result is shown by the next probe.
async fn standing(api: &ApiState) -> ServiceStatus {
    let run_service = api.run_service.clone();
    let asked = api.tasks.run_detached(async move { run_service.standing().await });
    timeout(PATIENCE, asked).await.unwrap_or_else(|_| {
        let unknown = || "not known yet".to_owned();
        ServiceStatus { upstream: unknown(), forge: unknown() }
    })
}

fn check_accepting(api: &ApiState) -> Result<(), String> {
    if api.run_service.is_draining() { Err("draining".to_owned()) } else { Ok(()) }
}

/// A full queue refuses new runs for some time, and the runs that the service has must stay readable meanwhile.
fn check_queue(api: &ApiState) -> String {
    let queue = api.run_service.queue_gauges();
    if queue.queued >= queue.capacity && queue.places_taken >= queue.places {
        return format!("full: {} runs wait, and new runs are refused", queue.queued);
    }
    "ok".to_owned()
}

fn check_relay(api: &ApiState) -> Result<(), String> {
    let why = "there is no git that is new enough, so runs have no repositories; the log says more";
    api.run_service.delivery_service().map(|_| ()).ok_or_else(|| why.to_owned())
}

/// Checks that at least one agent can run here. `GET /api/v1/ai/agents?all=1` lists the problems of the other agents.
async fn check_agents(api: &ApiState) -> Result<(), String> {
    let agents = api.agent_summaries().await;
    if agents.iter().any(|agent| agent.available) {
        return Ok(());
    }
    let why = agents.into_iter().find_map(|agent| agent.reason);
    Err(format!("no agent can run here: {}", why.unwrap_or_else(|| "there is none".to_owned())))
}

/// Checks that the directory has room for the files of a run. Permission to write does not imply permission to make a
/// file, and a full disk still has room for an empty file.
fn check_directory(directory: &Path) -> Result<(), String> {
    check_writable(directory).map_err(|error| {
        let path = directory.display();
        tracing::warn!(%path, %error, "a directory of the service cannot be written");
        format!("its directory cannot be written: {error}")
    })
}

/// The maximum wait for the upstream and the forge. A probe of Kubernetes waits one second by default.
const PATIENCE: Duration = Duration::from_millis(500);
