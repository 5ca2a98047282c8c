//! Whether the process is alive, and whether it can take work.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use super::Api;

/// The process answers.
#[derive(Serialize, ToSchema)]
pub(super) struct Alive {
    #[schema(example = "ok")]
    status: &'static str,
}

/// Whether runs can be accepted, and what stands in the way.
#[derive(Serialize, ToSchema)]
pub(super) struct Ready {
    ready: bool,
    /// By what is looked at: `ok`, or why not.
    checks: BTreeMap<&'static str, String>,
}

/// Whether the process is alive
#[utoipa::path(
    get,
    path = "/healthz",
    tag = "service",
    security(()),
    responses((status = 200, description = "It is", body = Alive))
)]
pub(super) async fn alive() -> Json<Alive> {
    Json(Alive { status: "ok" })
}

/// Whether runs can be accepted, and if not, why
#[utoipa::path(
    get,
    path = "/readyz",
    tag = "service",
    security(()),
    responses(
        (status = 200, description = "They can", body = Ready),
        (status = 503, description = "They cannot", body = Ready)
    )
)]
pub(super) async fn ready(State(api): State<Arc<Api>>) -> (StatusCode, Json<Ready>) {
    let database = api.journal.probe().await.map_err(|error| error.to_string());
    let checks = [("database", database)];
    let ready = checks.iter().all(|(_, found)| found.is_ok());
    let said = |found: Result<(), String>| found.err().unwrap_or_else(|| "ok".to_owned());
    let checks = checks.into_iter().map(|(what, found)| (what, said(found))).collect();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(Ready { ready, checks }))
}
