//! The routes of the operator's socket.
//!
//! | method and path | effect |
//! |---|---|
//! | `GET /runs` | lists every open run: its identity, its limits and spending, and its state |
//! | `GET /runs/{id}` | returns one run of that list |
//! | `POST /runs` | opens a run, described as in `[[shared.runs]]`; only if runs share a listener |
//! | `DELETE /runs/{id}` | closes a run: open calls may end, then the run's records are closed |
//! | `POST /runs/{id}/pause` | rejects new calls until `resume` |
//! | `POST /runs/{id}/resume` | admits new calls again |
//! | `POST /runs/{id}/drain` | rejects new calls for good; open calls go on |
//! | `POST /runs/{id}/cut` | aborts the open calls |
//! | `PATCH /runs/{id}/budget` | changes limits; `null` removes a limit |
//! | `PATCH /runs/{id}/models` | changes `models` and `aliases` |
//! | `POST /reload` | reads the configuration again, as SIGHUP does |
//!
//! In a path, each `/` of a run's id is written as `%2F`.

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

pub(super) fn admin_router(state: Arc<AdminState>) -> Router {
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
        .with_state(state)
}

async fn list_runs(State(state): State<Arc<AdminState>>) -> Json<Value> {
    // The map has no order; sorted output lets operators compare two answers.
    let mut runs: Vec<_> =
        state.runs.list_handles().iter().map(|control| run_status_json(control)).collect();
    runs.sort_by(|a, b| a["run_id"].as_str().cmp(&b["run_id"].as_str()));
    Json(json!({ "runs": runs }))
}

async fn show_run(State(state): State<Arc<AdminState>>, Path(id): Path<String>) -> AdminResult {
    Ok(Json(run_status_json(&*state.find_run(&id)?)))
}

async fn open_run(
    State(state): State<Arc<AdminState>>,
    ConnectInfo(operator): OperatorInfo,
    body: Bytes,
) -> Result<(StatusCode, Json<Value>), AdminError> {
    let spec: SharedRunConfig = parse_json(&body)?;
    let (runs, id) = (state.runs.clone(), spec.run_id.clone());
    // Opening waits for the disk, which must not stop this worker's connections.
    let opened = tokio::task::spawn_blocking(move || runs.open_run(spec)).await;
    opened.map_err(Into::into).flatten().map_err(AdminError::Refused)?;
    let control = state.find_run(&id)?;
    operator.record_action("open", &control);
    Ok((StatusCode::CREATED, Json(run_status_json(&control))))
}

async fn close_run(
    State(state): State<Arc<AdminState>>,
    ConnectInfo(operator): OperatorInfo,
    Path(id): Path<String>,
) -> AdminResult {
    // This check is first, so that a process with one run records no action that it cannot do.
    state.runs.check_can_open_runs().map_err(AdminError::Refused)?;
    // The record must come first: after the closing the log accepts no record.
    operator.record_action("close", &*state.find_run(&id)?);
    let drained = state.runs.close_run(&id).await.map_err(AdminError::Refused)?;
    Ok(Json(
        json!({"run_id": id, "closed": true, "calls_cut": drained == ShutdownOutcome::Aborted}),
    ))
}

async fn pause_run(
    state: State<Arc<AdminState>>,
    operator: OperatorInfo,
    id: Path<String>,
) -> AdminResult {
    set_run_state(state, operator, id, ("pause", control::RunControlState::Paused))
}

async fn resume_run(
    state: State<Arc<AdminState>>,
    operator: OperatorInfo,
    id: Path<String>,
) -> AdminResult {
    set_run_state(state, operator, id, ("resume", control::RunControlState::Open))
}

async fn drain_run(
    state: State<Arc<AdminState>>,
    operator: OperatorInfo,
    id: Path<String>,
) -> AdminResult {
    set_run_state(state, operator, id, ("drain", control::RunControlState::Draining))
}

fn set_run_state(
    State(state): State<Arc<AdminState>>,
    ConnectInfo(operator): OperatorInfo,
    Path(id): Path<String>,
    (action, new_state): (&'static str, control::RunControlState),
) -> AdminResult {
    let control = state.find_run(&id)?;
    // A draining run refuses every other state. The record is written only for a change that happened.
    if !control.run().control.set_state(new_state) {
        return Err(AdminError::RunEnding(id));
    }
    operator.record_action(action, &control);
    Ok(Json(run_status_json(&control)))
}

async fn abort_calls(
    State(state): State<Arc<AdminState>>,
    ConnectInfo(operator): OperatorInfo,
    Path(id): Path<String>,
) -> AdminResult {
    let control = state.find_run(&id)?;
    // The record comes before the abort, so that the log shows the reason before the ends of the calls.
    operator.record_action("cut", &control);
    control.run().control.abort_calls();
    Ok(Json(run_status_json(&control)))
}

async fn patch_budget(
    state: State<Arc<AdminState>>,
    operator: OperatorInfo,
    id: Path<String>,
    body: Bytes,
) -> AdminResult {
    let patch = parse_json(&body)?;
    apply_change(
        state,
        operator,
        id,
        ("budget", |config: &mut GatewayConfig| {
            config.budget = patch::merge_limits(&config.budget, patch)?;
            Ok(())
        }),
    )
}

async fn patch_models(
    state: State<Arc<AdminState>>,
    operator: OperatorInfo,
    id: Path<String>,
    body: Bytes,
) -> AdminResult {
    let models: ModelsPatch = parse_json(&body)?;
    apply_change(
        state,
        operator,
        id,
        ("models", |config: &mut GatewayConfig| {
            models.apply_patch(config);
            Ok(())
        }),
    )
}

fn apply_change(
    State(state): State<Arc<AdminState>>,
    ConnectInfo(operator): OperatorInfo,
    Path(id): Path<String>,
    (action, change): (&'static str, impl FnOnce(&mut GatewayConfig) -> anyhow::Result<()>),
) -> AdminResult {
    let control = state.find_run(&id)?;
    control.change_config(ChangeSource::Admin, change).map_err(AdminError::Refused)?;
    operator.record_action(action, &control);
    Ok(Json(run_status_json(&control)))
}

async fn reload_config(
    State(state): State<Arc<AdminState>>,
    ConnectInfo(operator): OperatorInfo,
) -> AdminResult {
    // The reload is done for all runs or for none, so each open run records it.
    (state.reload)().map_err(AdminError::Refused)?;
    let controls = state.runs.list_handles();
    for control in &controls {
        operator.record_action("reload", control);
    }
    // These runs still differ from the files. The operator learns which, because a reload does not undo such changes.
    let mut changed: Vec<_> = controls.iter().filter(|control| control.is_overridden()).collect();
    changed.sort_by(|a, b| a.run().identity.run.cmp(&b.run().identity.run));
    let changed: Vec<_> = changed.iter().map(|control| &control.run().identity.run).collect();
    Ok(Json(json!({"reloaded": true, "runs": controls.len(), "keep_changes": changed})))
}

impl AdminState {
    fn find_run(&self, id: &str) -> Result<Arc<ServedRunHandle>, AdminError> {
        self.runs.find_handle(id).ok_or_else(|| AdminError::NoSuchRun(id.to_owned()))
    }
}

impl OperatorCredentials {
    /// Records an operator's action in the run's audit log, with the user of the operator's process.
    fn record_action(self, action: &'static str, control: &ServedRunHandle) {
        let run = control.run();
        run.audit.record_operator_action(&OperatorActedRecord { action, uid: self.uid });
        tracing::info!(run = run.identity.run, action, uid = self.uid, "an operator has acted");
    }
}

/// Parses a JSON body of any content type, because operators who type a command by hand omit the content type.
fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, AdminError> {
    let read = serde_words::from_slice(body).map_err(AdminError::InvalidBody)?;
    // This check runs after the types are known. A document with a key twice is ambiguous: parsers disagree on its
    // meaning.
    check_document(body).map_err(AdminError::AmbiguousBody)?;
    Ok(read)
}

/// Returns the state, the settings in force and the spending of a run.
fn run_status_json(control: &ServedRunHandle) -> Value {
    let run = control.run();
    let (config, version) = control.config_and_version();
    let body = &config.policy.body;
    json!({
        "run_id": run.identity.run,
        "attempt": run.identity.attempt,
        "account": run.identity.account,
        "state": run.control.state(),
        "policy": {"version": version, "digest": config.digest()},
        "models": body.models,
        "aliases": body.aliases,
        "admitted": run.counts.admitted_calls(),
        "refused": run.counts.refused_calls(),
        "budget": run.ledger.budget_status(),
    })
}
