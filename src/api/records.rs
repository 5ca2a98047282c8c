//! What is left of a run: what it printed, its work, and files of it, of which a bounded number is sent at the same time.

use std::io;
use std::path::{Path as File, PathBuf};
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use serde::Serialize;
use tokio::io::AsyncReadExt;
use tokio_util::io::ReaderStream;
use utoipa::ToSchema;

use super::Api;
use super::error::{Error, ErrorBody};
use super::extract::{At, Caller};
use super::refusal::{NotAllowed, NotFound};
use super::shares::SharesFull;
use crate::delivery::outbox::{Job, Verdict};
use crate::journal::{Row, State as Progress};
use crate::relay::Artifacts;

/// What a run has printed.
#[derive(Serialize, ToSchema)]
pub(super) struct Output {
    /// Whether the run has ended, and this is all; until then there is nothing.
    complete: bool,
    stdout: String,
    stderr: String,
}

/// What has become of a run's commits.
#[derive(Serialize, ToSchema)]
pub(super) struct Relay {
    /// Empty where the run has no branch, or made no commits.
    deliveries: Vec<Delivery>,
}

/// Some work on its way to a branch.
#[derive(Serialize, ToSchema)]
pub(super) struct Delivery {
    id: String,
    #[schema(example = "sandbox/issue-7")]
    branch: String,
    /// How far it has come; `done`, `held` and `failed` are ends.
    #[schema(example = "done")]
    step: &'static str,
    /// `push`, `review` or `hold`.
    verdict: Option<&'static str>,
    /// What the branch is at, or would be.
    head: Option<String>,
    is_pushed: bool,
    pull_request_url: Option<String>,
    /// Why it is not further.
    why: Option<String>,
}

/// Files that came out of a run's sandbox. They are kept until they are delivered, and longer where they are held.
#[derive(Serialize, ToSchema)]
pub(super) struct Kept {
    artifacts: Vec<Artifact>,
}

/// One file.
#[derive(Serialize, ToSchema)]
pub(super) struct Artifact {
    #[schema(example = "patches")]
    name: &'static str,
    bytes: u64,
}

/// What a run has printed, once it has ended
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/output",
    tag = "runs",
    params(("id" = String, Path, description = "The run")),
    responses(
        (status = 200, description = "Beginning and end of it, where it was long", body = Output),
        NotAllowed, NotFound
    )
)]
pub(super) async fn output(
    caller: Caller,
    State(api): State<Arc<Api>>,
    At(id): At<String>,
) -> Result<Json<Output>, Error> {
    let row = readable(&api, &caller, &id).await?;
    let printed = api.supervisor.journal().output(&row.id).await?;
    let (stdout, stderr) = printed.unwrap_or_default();
    Ok(Json(Output { complete: row.state == Progress::Ended, stdout, stderr }))
}

/// What has become of a run's commits
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/relay",
    tag = "runs",
    params(("id" = String, Path, description = "The run")),
    responses(
        (status = 200, description = "How far they have come", body = Relay),
        NotAllowed, NotFound
    )
)]
pub(super) async fn relay(
    caller: Caller,
    State(api): State<Arc<Api>>,
    At(id): At<String>,
) -> Result<Json<Relay>, Error> {
    let row = readable(&api, &caller, &id).await?;
    let jobs = jobs(&api, row).await?;
    let deliveries = jobs.iter().map(|job| Delivery::of(job, &api)).collect();
    Ok(Json(Relay { deliveries }))
}

/// The files that came out of a run's sandbox, and are kept
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/artifacts",
    tag = "runs",
    params(("id" = String, Path, description = "The run")),
    responses(
        (status = 200, description = "`bundle`: its commits, exactly; `patches`: the same for people", body = Kept),
        NotAllowed, NotFound
    )
)]
pub(super) async fn artifacts(
    caller: Caller,
    State(api): State<Arc<Api>>,
    At(id): At<String>,
) -> Result<Json<Kept>, Error> {
    let row = readable(&api, &caller, &id).await?;
    let mut artifacts = vec![];
    for (name, path) in files(&api, row).await? {
        if let Ok(found) = tokio::fs::metadata(&path).await {
            artifacts.push(Artifact { name, bytes: found.len() });
        }
    }
    Ok(Json(Kept { artifacts }))
}

/// One of the files that came out of a run's sandbox
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/artifacts/{name}",
    tag = "runs",
    params(
        ("id" = String, Path, description = "The run"),
        ("name" = String, Path, description = "`bundle` or `patches`")
    ),
    responses(
        (status = 200, description = "The file", body = String, content_type = "application/octet-stream"),
        (status = 429, description = "`too_many_downloads`: of this grant", body = ErrorBody),
        NotAllowed, NotFound
    )
)]
pub(super) async fn artifact(
    caller: Caller,
    State(api): State<Arc<Api>>,
    At((id, name)): At<(String, String)>,
) -> Result<Response, Error> {
    let row = readable(&api, &caller, &id).await?;
    let file = files(&api, row).await?.into_iter().find(|(known, _)| *known == name);
    let (name, path) = file.ok_or_else(|| Error::NotFound("such artifact".to_owned()))?;
    let mut response = send(&api, &caller, &path, "application/octet-stream").await?;
    // It is an agent's work: nothing that a browser should show.
    let named = format!("attachment; filename=\"{name}\"");
    let named = named.parse().expect("the name is one of ours");
    response.headers_mut().insert(CONTENT_DISPOSITION, named);
    Ok(response)
}

pub(super) async fn readable(api: &Api, caller: &Caller, id: &str) -> Result<Row, Error> {
    caller.may_look()?;
    api.run_of(caller, id).await
}

/// What of a run is in the outbox.
async fn jobs(api: &Api, row: Row) -> Result<Vec<Job>, Error> {
    let Some(relay) = api.supervisor.relay() else { return Ok(vec![]) };
    let listed = tokio::task::spawn_blocking(move || relay.outbox().of_run(&row.id));
    listed.await.map_err(Error::internal)?.map_err(Error::internal)
}

async fn files(api: &Api, row: Row) -> Result<Vec<(&'static str, PathBuf)>, Error> {
    let Some(job) = jobs(api, row).await?.pop() else { return Ok(vec![]) };
    let kept = Artifacts::at(&job.order.artifacts);
    Ok(vec![("bundle", kept.bundle()), ("patches", kept.patches())])
}

/// A file as it is now; what is added to it while it is sent is left out. It counts as one of the grant's until the last
/// byte is sent, or the client has left.
pub(super) async fn send(
    api: &Api,
    caller: &Caller,
    path: &File,
    kind: &'static str,
) -> Result<Response, Error> {
    let share = api.downloads.enter(&caller.0.id).map_err(|full| match full {
        SharesFull::Grant(most) => Error::TooManyDownloads(most),
        SharesFull::All => Error::busy("as many files are being sent as may be"),
    })?;
    let file = tokio::fs::File::open(path).await.map_err(|error| gone(error, "such file"))?;
    let length = file.metadata().await.map_err(Error::internal)?.len();
    let bytes = ReaderStream::with_capacity(file.take(length), CHUNK_BYTES);
    let body = Body::from_stream(bytes.map(move |chunk| {
        let _counted = &share;
        chunk
    }));
    Ok(([(CONTENT_TYPE, kind)], body).into_response())
}

pub(super) fn gone(error: io::Error, what: &str) -> Error {
    match error.kind() {
        io::ErrorKind::NotFound => Error::NotFound(format!("{what} of this run")),
        _ => Error::internal(error),
    }
}

impl Delivery {
    fn of(job: &Job, api: &Api) -> Self {
        Self {
            id: job.id.clone(),
            branch: job.order.branch().to_string(),
            step: job.step.as_str(),
            verdict: job.verdict.map(Verdict::as_str),
            head: job.head.map(|head| head.to_string()),
            is_pushed: job.is_pushed,
            pull_request_url: job.pull.as_ref().map(|pull| pull.url.clone()),
            why: job.error.as_deref().map(|why| api.supervisor.masked(why)),
        }
    }
}

/// Of a file that is sent, read at once.
const CHUNK_BYTES: usize = 64 << 10;
