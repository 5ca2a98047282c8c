//! What an operator can ask for.
//!
//! | method and path | what it does |
//! |---|---|
//! | `GET /runs` | every open run: who it is, what it may and did spend, whether calls may begin |
//! | `GET /runs/{id}` | one of them |
//! | `POST /runs` | opens a run, described as in `[[shared.runs]]`; where runs share a listener |
//! | `DELETE /runs/{id}` | closes a run: open calls may end, then its records are closed |
//! | `POST /runs/{id}/pause` | lets no call begin, until `resume` |
//! | `POST /runs/{id}/resume` | lets calls begin again |
//! | `POST /runs/{id}/drain` | lets no call begin any more; those that are open go on |
//! | `POST /runs/{id}/cut` | ends the calls that are open |
//! | `PATCH /runs/{id}/budget` | changes limits; `null` lifts one |
//! | `PATCH /runs/{id}/models` | changes `models` and `aliases` |
//! | `POST /reload` | reads the configuration again, as SIGHUP does |
//!
//! A run's id stands in a path with its `/` as `%2F`.

use std::sync::Arc;

use axum::extract::{ConnectInfo, Path, State};
use axum::http::StatusCode;
use axum::routing::{get, patch, post};
use axum::{Json, Router};
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::error::AdminError;
use super::patch::{self, ModelsPatch};
use super::{AdminState, OperatorCredentials};
use crate::base::json::check_document;
use crate::base::serde_words;
use crate::base::task_group::ShutdownOutcome;
use crate::gateway::config::{GatewayConfig, SharedRunConfig};
use crate::gateway::process::{ChangeSource, ServedRunHandle};
use crate::gateway::run::control;
use crate::telemetry::audit::records::OperatorActedRecord;

type AdminResult = Result<Json<Value>, AdminError>;
type OperatorInfo = ConnectInfo<OperatorCredentials>;

pub(super) fn admin_router(desk: Arc<AdminState>) -> Router {
    Router::new()
        .route("/runs", get(list_runs).post(open_run))
        .route("/runs/{id}", get(show_run).delete(close_run))
        .route("/runs/{id}/pause", post(pause_run))
        .route("/runs/{id}/resume", post(resume_run))
        .route("/runs/{id}/drain", post(drain_run))
        .route("/runs/{id}/cut", post(abort_calls))
        .route("/runs/{id}/budget", patch(patch_budget))
        .route("/runs/{id}/models", patch(patch_models))
        .route("/reload", post(reload_config))
        .with_state(desk)
}

async fn list_runs(State(desk): State<Arc<AdminState>>) -> Json<Value> {
    let mut runs: Vec<_> =
        desk.runs.list_handles().iter().map(|control| run_status_json(control)).collect();
    runs.sort_by(|one, other| one["run_id"].as_str().cmp(&other["run_id"].as_str()));
    Json(json!({ "runs": runs }))
}

async fn show_run(State(desk): State<Arc<AdminState>>, Path(id): Path<String>) -> AdminResult {
    Ok(Json(run_status_json(&*desk.find_run(&id)?)))
}

async fn open_run(
    State(desk): State<Arc<AdminState>>,
    ConnectInfo(operator): OperatorInfo,
    body: Bytes,
) -> Result<(StatusCode, Json<Value>), AdminError> {
    let spec: SharedRunConfig = parse_json(&body)?;
    let (runs, id) = (desk.runs.clone(), spec.run_id.clone());
    let opened = tokio::task::spawn_blocking(move || runs.open_run(spec)).await;
    opened.map_err(Into::into).flatten().map_err(AdminError::Refused)?;
    let control = desk.find_run(&id)?;
    operator.record_action("open", &control);
    Ok((StatusCode::CREATED, Json(run_status_json(&control))))
}

async fn close_run(
    State(desk): State<Arc<AdminState>>,
    ConnectInfo(operator): OperatorInfo,
    Path(id): Path<String>,
) -> AdminResult {
    desk.runs.check_can_open_runs().map_err(AdminError::Refused)?;
    // While its records are open.
    operator.record_action("close", &*desk.find_run(&id)?);
    let drained = desk.runs.close_run(&id).await.map_err(AdminError::Refused)?;
    Ok(Json(json!({"run_id": id, "closed": true, "calls_cut": drained == ShutdownOutcome::Cut})))
}

async fn pause_run(
    desk: State<Arc<AdminState>>,
    operator: OperatorInfo,
    id: Path<String>,
) -> AdminResult {
    set_run_state(desk, operator, id, ("pause", control::RunControlState::Paused))
}

async fn resume_run(
    desk: State<Arc<AdminState>>,
    operator: OperatorInfo,
    id: Path<String>,
) -> AdminResult {
    set_run_state(desk, operator, id, ("resume", control::RunControlState::Open))
}

async fn drain_run(
    desk: State<Arc<AdminState>>,
    operator: OperatorInfo,
    id: Path<String>,
) -> AdminResult {
    set_run_state(desk, operator, id, ("drain", control::RunControlState::Draining))
}

fn set_run_state(
    State(desk): State<Arc<AdminState>>,
    ConnectInfo(operator): OperatorInfo,
    Path(id): Path<String>,
    (action, state): (&'static str, control::RunControlState),
) -> AdminResult {
    let control = desk.find_run(&id)?;
    if !control.run().gate.set_state(state) {
        return Err(AdminError::Ending(id));
    }
    operator.record_action(action, &control);
    Ok(Json(run_status_json(&control)))
}

async fn abort_calls(
    State(desk): State<Arc<AdminState>>,
    ConnectInfo(operator): OperatorInfo,
    Path(id): Path<String>,
) -> AdminResult {
    let control = desk.find_run(&id)?;
    operator.record_action("cut", &control);
    control.run().gate.abort_calls();
    Ok(Json(run_status_json(&control)))
}

async fn patch_budget(
    desk: State<Arc<AdminState>>,
    operator: OperatorInfo,
    id: Path<String>,
    body: Bytes,
) -> AdminResult {
    let patch = parse_json(&body)?;
    apply_change(
        desk,
        operator,
        id,
        ("budget", |config: &mut GatewayConfig| {
            config.budget = patch::merge_limits(&config.budget, patch)?;
            Ok(())
        }),
    )
}

async fn patch_models(
    desk: State<Arc<AdminState>>,
    operator: OperatorInfo,
    id: Path<String>,
    body: Bytes,
) -> AdminResult {
    let models: ModelsPatch = parse_json(&body)?;
    apply_change(
        desk,
        operator,
        id,
        ("models", |config: &mut GatewayConfig| {
            models.apply_patch(config);
            Ok(())
        }),
    )
}

fn apply_change(
    State(desk): State<Arc<AdminState>>,
    ConnectInfo(operator): OperatorInfo,
    Path(id): Path<String>,
    (action, change): (&'static str, impl FnOnce(&mut GatewayConfig) -> anyhow::Result<()>),
) -> AdminResult {
    let control = desk.find_run(&id)?;
    control.change_config(ChangeSource::Admin, change).map_err(AdminError::Refused)?;
    operator.record_action(action, &control);
    Ok(Json(run_status_json(&control)))
}

async fn reload_config(
    State(desk): State<Arc<AdminState>>,
    ConnectInfo(operator): OperatorInfo,
) -> AdminResult {
    (desk.reload)().map_err(AdminError::Refused)?;
    let controls = desk.runs.list_handles();
    for control in &controls {
        operator.record_action("reload", control);
    }
    let mut changed: Vec<_> = controls.iter().filter(|control| control.is_overridden()).collect();
    changed.sort_by(|one, other| one.run().identity.run.cmp(&other.run().identity.run));
    let changed: Vec<_> = changed.iter().map(|control| &control.run().identity.run).collect();
    Ok(Json(json!({"reloaded": true, "runs": controls.len(), "keep_changes": changed})))
}

impl AdminState {
    fn find_run(&self, id: &str) -> Result<Arc<ServedRunHandle>, AdminError> {
        self.runs.find_handle(id).ok_or_else(|| AdminError::NoSuchRun(id.to_owned()))
    }
}

impl OperatorCredentials {
    /// Writes into a run's audit log what was done to it, and by whom.
    fn record_action(self, action: &'static str, control: &ServedRunHandle) {
        let run = control.run();
        run.audit.record_operator_action(&OperatorActedRecord { action, uid: self.uid });
        tracing::info!(run = run.identity.run, action, uid = self.uid, "an operator has acted");
    }
}

/// Reads a body, whatever its content type says: who types a command by hand leaves that out.
fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, AdminError> {
    let read = serde_words::from_slice(body).map_err(AdminError::Invalid)?;
    check_document(body).map_err(AdminError::Ambiguous)?;
    Ok(read)
}

fn run_status_json(control: &ServedRunHandle) -> Value {
    let run = control.run();
    let (config, version) = control.config_and_version();
    let body = &config.policy.body;
    json!({
        "run_id": run.identity.run,
        "attempt": run.identity.attempt,
        "account": run.identity.account,
        "state": run.gate.state(),
        "policy": {"version": version, "digest": config.digest()},
        "models": body.models,
        "aliases": body.aliases,
        "admitted": run.counts.admitted_calls(),
        "refused": run.counts.refused_calls(),
        "budget": run.ledger.budget_status(),
    })
}
