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

use super::change::{self, Models};
use super::error::Error;
use super::{Desk, Operator};
use crate::app::{By, Control};
use crate::audit::record::Operated;
use crate::base::drain::Drained;
use crate::base::json::check_document;
use crate::base::serde_words;
use crate::config::{Config, RunSpec};
use crate::run::gate;

type Answer = Result<Json<Value>, Error>;
type Caller = ConnectInfo<Operator>;

pub(super) fn router(desk: Arc<Desk>) -> Router {
    Router::new()
        .route("/runs", get(list).post(open))
        .route("/runs/{id}", get(show).delete(close))
        .route("/runs/{id}/pause", post(pause))
        .route("/runs/{id}/resume", post(resume))
        .route("/runs/{id}/drain", post(drain))
        .route("/runs/{id}/cut", post(cut))
        .route("/runs/{id}/budget", patch(budget))
        .route("/runs/{id}/models", patch(models))
        .route("/reload", post(reload))
        .with_state(desk)
}

async fn list(State(desk): State<Arc<Desk>>) -> Json<Value> {
    let mut runs: Vec<_> = desk.runs.controls().iter().map(|control| status(control)).collect();
    runs.sort_by(|one, other| one["run_id"].as_str().cmp(&other["run_id"].as_str()));
    Json(json!({ "runs": runs }))
}

async fn show(State(desk): State<Arc<Desk>>, Path(id): Path<String>) -> Answer {
    Ok(Json(status(&*desk.control(&id)?)))
}

async fn open(
    State(desk): State<Arc<Desk>>,
    ConnectInfo(operator): Caller,
    body: Bytes,
) -> Result<(StatusCode, Json<Value>), Error> {
    let spec: RunSpec = read(&body)?;
    let (runs, id) = (desk.runs.clone(), spec.run_id.clone());
    let opened = tokio::task::spawn_blocking(move || runs.open(spec)).await;
    opened.map_err(Into::into).flatten().map_err(Error::Refused)?;
    let control = desk.control(&id)?;
    operator.did("open", &control);
    Ok((StatusCode::CREATED, Json(status(&control))))
}

async fn close(
    State(desk): State<Arc<Desk>>,
    ConnectInfo(operator): Caller,
    Path(id): Path<String>,
) -> Answer {
    desk.runs.check_shared().map_err(Error::Refused)?;
    // While its records are open.
    operator.did("close", &*desk.control(&id)?);
    let drained = desk.runs.close(&id).await.map_err(Error::Refused)?;
    Ok(Json(json!({"run_id": id, "closed": true, "calls_cut": drained == Drained::Cut})))
}

async fn pause(desk: State<Arc<Desk>>, operator: Caller, id: Path<String>) -> Answer {
    set(desk, operator, id, ("pause", gate::State::Paused))
}

async fn resume(desk: State<Arc<Desk>>, operator: Caller, id: Path<String>) -> Answer {
    set(desk, operator, id, ("resume", gate::State::Open))
}

async fn drain(desk: State<Arc<Desk>>, operator: Caller, id: Path<String>) -> Answer {
    set(desk, operator, id, ("drain", gate::State::Draining))
}

fn set(
    State(desk): State<Arc<Desk>>,
    ConnectInfo(operator): Caller,
    Path(id): Path<String>,
    (action, state): (&'static str, gate::State),
) -> Answer {
    let control = desk.control(&id)?;
    if !control.run().gate.set(state) {
        return Err(Error::Ending(id));
    }
    operator.did(action, &control);
    Ok(Json(status(&control)))
}

async fn cut(
    State(desk): State<Arc<Desk>>,
    ConnectInfo(operator): Caller,
    Path(id): Path<String>,
) -> Answer {
    let control = desk.control(&id)?;
    operator.did("cut", &control);
    control.run().gate.cut();
    Ok(Json(status(&control)))
}

async fn budget(desk: State<Arc<Desk>>, operator: Caller, id: Path<String>, body: Bytes) -> Answer {
    let patch = read(&body)?;
    changed(
        desk,
        operator,
        id,
        ("budget", |config: &mut Config| {
            config.budget = change::merge(&config.budget, patch)?;
            Ok(())
        }),
    )
}

async fn models(desk: State<Arc<Desk>>, operator: Caller, id: Path<String>, body: Bytes) -> Answer {
    let models: Models = read(&body)?;
    changed(
        desk,
        operator,
        id,
        ("models", |config: &mut Config| {
            models.apply(config);
            Ok(())
        }),
    )
}

fn changed(
    State(desk): State<Arc<Desk>>,
    ConnectInfo(operator): Caller,
    Path(id): Path<String>,
    (action, change): (&'static str, impl FnOnce(&mut Config) -> anyhow::Result<()>),
) -> Answer {
    let control = desk.control(&id)?;
    control.change(By::Admin, change).map_err(Error::Refused)?;
    operator.did(action, &control);
    Ok(Json(status(&control)))
}

async fn reload(State(desk): State<Arc<Desk>>, ConnectInfo(operator): Caller) -> Answer {
    (desk.reload)().map_err(Error::Refused)?;
    let controls = desk.runs.controls();
    for control in &controls {
        operator.did("reload", control);
    }
    let mut changed: Vec<_> = controls.iter().filter(|control| control.is_overridden()).collect();
    changed.sort_by(|one, other| one.run().identity.run.cmp(&other.run().identity.run));
    let changed: Vec<_> = changed.iter().map(|control| &control.run().identity.run).collect();
    Ok(Json(json!({"reloaded": true, "runs": controls.len(), "keep_changes": changed})))
}

impl Desk {
    fn control(&self, id: &str) -> Result<Arc<Control>, Error> {
        self.runs.control(id).ok_or_else(|| Error::NoSuchRun(id.to_owned()))
    }
}

impl Operator {
    /// Writes into a run's audit log what was done to it, and by whom.
    fn did(self, action: &'static str, control: &Control) {
        let run = control.run();
        run.audit.operated(&Operated { action, uid: self.uid });
        tracing::info!(run = run.identity.run, action, uid = self.uid, "an operator has acted");
    }
}

/// Reads a body, whatever its content type says: who types a command by hand leaves that out.
fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Error> {
    let read = serde_words::from_slice(body).map_err(Error::Invalid)?;
    check_document(body).map_err(Error::Ambiguous)?;
    Ok(read)
}

fn status(control: &Control) -> Value {
    let run = control.run();
    let (config, version) = control.config();
    let body = &config.policy.body;
    json!({
        "run_id": run.identity.run,
        "attempt": run.identity.attempt,
        "account": run.identity.account,
        "state": run.gate.state(),
        "policy": {"version": version, "digest": config.digest()},
        "models": body.models,
        "aliases": body.aliases,
        "admitted": run.counts.admitted(),
        "refused": run.counts.refused(),
        "budget": run.ledger.status(),
    })
}
