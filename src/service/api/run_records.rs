//! The records of a finished run: output, deliveries and files. The number of files that are sent at the same time is
//! bounded.

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

use super::ApiState;
use super::error::{ApiError, ErrorBody};
use super::error_docs::{AuthErrorResponses, NotFoundResponses, RecordsRemovedResponses};
use super::extract::{AuthenticatedCaller, PathParam};
use super::large_answer::{acquire_download, send_json};
use crate::relay::delivery::outbox::{DeliveryJob, VerdictKind};
use crate::relay::repo::ArtifactDir;
use crate::service::store::{RunPhase as Progress, RunRow};

/// The standard output and standard error of a run's program.
#[derive(Serialize, ToSchema)]
pub(super) struct RunOutputView {
    /// True if the run has ended and this is the whole output. A run that has not ended has no output yet.
    complete: bool,
    /// The standard output. The middle of a long output is left out.
    stdout: String,
    /// The standard error. The middle of a long output is left out.
    stderr: String,
}

/// The deliveries of a run's commits.
#[derive(Serialize, ToSchema)]
pub(super) struct DeliveriesView {
    /// The deliveries. Empty if the run has no branch, or made no commits.
    deliveries: Vec<DeliveryView>,
}

/// The delivery of a run's commits to a branch.
#[derive(Serialize, ToSchema)]
pub(super) struct DeliveryView {
    /// The id of the delivery, for `cogni-gateway relay`.
    id: String,
    /// The branch that receives the commits.
    #[schema(example = "sandbox/issue-7")]
    branch: String,
    /// The step that the delivery has reached: `extracted`, `quarantined`, `judged`, `pushed`, `pull_requested`, `done`,
    /// `held` or `failed`. The last three are final.
    #[schema(example = "done")]
    step: &'static str,
    /// The verdict of the review: `push`, `review` (a person has to look at the pull request) or `hold` (an operator has to
    /// decide). Null until the review has ended.
    verdict: Option<&'static str>,
    /// The commit id that the branch has, or would have, after the delivery.
    head: Option<String>,
    /// True if the branch has the commits.
    is_pushed: bool,
    /// The URL of the pull request. Null if there is none.
    pull_request_url: Option<String>,
    /// The reason why the delivery waits, is held or has failed. Null if there is none.
    why: Option<String>,
}

/// The artifacts of a run: files that came out of its sandbox. The service keeps them until they are delivered, and longer
/// if the delivery is held.
#[derive(Serialize, ToSchema)]
pub(super) struct ArtifactsView {
    /// The artifacts. Empty if there are none.
    artifacts: Vec<ArtifactView>,
}

/// An artifact of a run.
#[derive(Serialize, ToSchema)]
pub(super) struct ArtifactView {
    /// The name: `bundle` (the commits as a git bundle) or `patches` (the same commits as patches, for people).
    #[schema(example = "patches")]
    name: &'static str,
    /// The size in bytes.
    bytes: u64,
}

/// Show the output of a run
///
/// A run has no output until it has ended.
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/output",
    tag = "runs",
    params(("id" = String, Path, description = "The id of the run, as `POST /api/v1/runs` returned it.")),
    responses(
        (status = 200, description = "The beginning and the end of the output.", body = RunOutputView),
        (status = 429, description = "`too_many_downloads`: the answer has more than 64 KiB, and the grant already downloads as much at the same time as it may. Repeat the request when a download has ended.", body = ErrorBody),
        AuthErrorResponses, NotFoundResponses, RecordsRemovedResponses
    )
)]
pub(super) async fn show_output(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
) -> Result<Response, ApiError> {
    let row = find_readable_run(&api, &caller, &id).await?;
    api.require_records(&row.id).await?;
    let printed = api.run_service.run_store().run_output(&row.id).await?;
    let (stdout, stderr) = printed.unwrap_or_default();
    let complete = row.state == Progress::Ended;
    send_json(&api, &caller, &RunOutputView { complete, stdout, stderr })
}

/// List the deliveries of a run's commits
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/relay",
    tag = "runs",
    params(("id" = String, Path, description = "The id of the run, as `POST /api/v1/runs` returned it.")),
    responses(
        (status = 200, description = "The deliveries, each with the step that it has reached.", body = DeliveriesView),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn list_deliveries(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
) -> Result<Json<DeliveriesView>, ApiError> {
    let row = find_readable_run(&api, &caller, &id).await?;
    let jobs = list_jobs(&api, row).await?;
    let deliveries = jobs.iter().map(|job| DeliveryView::from_job(job, &api)).collect();
    Ok(Json(DeliveriesView { deliveries }))
}

/// List the artifacts of a run
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/artifacts",
    tag = "runs",
    params(("id" = String, Path, description = "The id of the run, as `POST /api/v1/runs` returned it.")),
    responses(
        (status = 200, description = "The artifacts that the service still has.", body = ArtifactsView),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn list_artifacts(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
) -> Result<Json<ArtifactsView>, ApiError> {
    let row = find_readable_run(&api, &caller, &id).await?;
    let mut artifacts = vec![];
    for (name, path) in artifact_files(&api, row).await? {
        if let Ok(found) = tokio::fs::metadata(&path).await {
            artifacts.push(ArtifactView { name, bytes: found.len() });
        }
    }
    Ok(Json(ArtifactsView { artifacts }))
}

/// Download an artifact of a run
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/artifacts/{name}",
    tag = "runs",
    params(
        ("id" = String, Path, description = "The id of the run, as `POST /api/v1/runs` returned it."),
        ("name" = String, Path, description = "The name of the artifact: `bundle` or `patches`.")
    ),
    responses(
        (status = 200, description = "The content of the artifact.", body = String, content_type = "application/octet-stream"),
        (status = 429, description = "`too_many_downloads`: the grant already downloads as many files at the same time as it may. Repeat the request when a download has ended.", body = ErrorBody),
        AuthErrorResponses, NotFoundResponses
    )
)]
pub(super) async fn download_artifact(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam((id, name)): PathParam<(String, String)>,
) -> Result<Response, ApiError> {
    let row = find_readable_run(&api, &caller, &id).await?;
    let file = artifact_files(&api, row).await?.into_iter().find(|(known, _)| *known == name);
    let (name, path) = file.ok_or_else(|| ApiError::NotFound("such artifact".to_owned()))?;
    let mut response = stream_file(&api, &caller, &path, "application/octet-stream").await?;
    // An artifact is an agent's work, so a browser must save the file and not show it.
    let named = format!("attachment; filename=\"{name}\"");
    let named = named.parse().expect("the name is one of ours");
    response.headers_mut().insert(CONTENT_DISPOSITION, named);
    Ok(response)
}

pub(super) async fn find_readable_run(
    api: &ApiState,
    caller: &AuthenticatedCaller,
    id: &str,
) -> Result<RunRow, ApiError> {
    caller.require_read()?;
    api.requested_run(caller, id).await
}

/// Returns the run's jobs in the outbox.
async fn list_jobs(api: &ApiState, row: RunRow) -> Result<Vec<DeliveryJob>, ApiError> {
    let Some(relay) = api.run_service.delivery_service() else { return Ok(vec![]) };
    let listed = tokio::task::spawn_blocking(move || relay.outbox().jobs_of_run(&row.id));
    listed.await.map_err(ApiError::internal_error)?.map_err(ApiError::internal_error)
}

async fn artifact_files(
    api: &ApiState,
    row: RunRow,
) -> Result<Vec<(&'static str, PathBuf)>, ApiError> {
    let Some(job) = list_jobs(api, row).await?.pop() else { return Ok(vec![]) };
    let kept = ArtifactDir::from_path(&job.request.artifacts);
    Ok(vec![("bundle", kept.bundle_path()), ("patches", kept.patches_path())])
}

/// Sends a file with its present length; bytes that are appended later are left out. The download counts for the grant
/// until the last byte is sent, or the client has left.
pub(super) async fn stream_file(
    api: &ApiState,
    caller: &AuthenticatedCaller,
    path: &File,
    kind: &'static str,
) -> Result<Response, ApiError> {
    let share = acquire_download(api, caller)?;
    let file =
        tokio::fs::File::open(path).await.map_err(|error| removed_error(error, "such file"))?;
    let length = file.metadata().await.map_err(ApiError::internal_error)?.len();
    let bytes = ReaderStream::with_capacity(file.take(length), CHUNK_BYTES);
    let body = Body::from_stream(bytes.map(move |chunk| {
        let _counted = &share;
        chunk
    }));
    Ok(([(CONTENT_TYPE, kind)], body).into_response())
}

pub(super) fn removed_error(error: io::Error, what: &str) -> ApiError {
    match error.kind() {
        io::ErrorKind::NotFound => ApiError::NotFound(format!("{what} of this run")),
        _ => ApiError::internal_error(error),
    }
}

impl DeliveryView {
    fn from_job(job: &DeliveryJob, api: &ApiState) -> Self {
        Self {
            id: job.id.clone(),
            branch: job.request.branch().to_string(),
            step: job.step.as_str(),
            verdict: job.verdict.map(VerdictKind::as_str),
            head: job.head.map(|head| head.to_string()),
            is_pushed: job.is_pushed,
            pull_request_url: job.pull_request.as_ref().map(|pull| pull.url.clone()),
            why: job.error.as_deref().map(|why| api.run_service.mask_text(why)),
        }
    }
}

/// The size of one piece of a file that is read and sent, in bytes.
const CHUNK_BYTES: usize = 64 << 10;
