//! What is left of a run: what it printed, its audit log, and its work.

use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path as File, PathBuf};
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use tokio_util::io::ReaderStream;
use utoipa::{IntoParams, ToSchema};

use super::Api;
use super::error::{Error, ErrorBody};
use super::extract::{Asked, At, Caller};
use super::refusal::{NotAllowed, NotFound, NotUnderstood};
use crate::audit::seal::{self, Seal, Unproved};
use crate::audit::verify::Report;
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

/// What a run's audit log says, and whether that can be believed.
#[derive(Serialize, ToSchema)]
pub(super) struct Audit {
    /// The run has ended, and the log is what it was then, to the last record. While the run goes on this is false:
    /// `signed` says how much is proved.
    verified: bool,
    /// Why the log cannot be believed, in words.
    #[schema(example = "it has 3 of its 8 records: some are missing at its end")]
    broken: Option<String>,
    records: u64,
    /// Records that a signed checkpoint of this service covers.
    signed: u64,
    /// Records after the last checkpoint, which nothing proves yet.
    unsigned: u64,
    /// The times of the first and the last record.
    first: String,
    last: String,
    /// Calls that were let through, and not.
    admitted: u64,
    refused: u64,
    settled: u64,
    /// Of those let through, those that have not ended.
    open: u64,
    /// Of those settled, those whose real settlement a crash has lost.
    crashed: u64,
    turns: u64,
    input_tokens: u64,
    output_tokens: u64,
    cost_usd: String,
    /// Whether the run's orderly end is in it.
    finished: bool,
    /// Of whoever signed it last.
    public_key: Option<String>,
}

/// How to see it.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct How {
    /// `1`: the log itself, a line of JSON for each record
    #[param(minimum = 0, maximum = 1)]
    raw: Option<u8>,
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

/// A run's audit log, proved
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/audit",
    tag = "runs",
    params(("id" = String, Path, description = "The run"), How),
    responses(
        (status = 200, description = "What the log says; with `raw`, the log", content(
            (Audit = "application/json"),
            (String = "application/x-ndjson")
        )),
        NotUnderstood, NotAllowed,
        (status = 404, description = "`not_found`: also where it has no log yet", body = ErrorBody)
    )
)]
pub(super) async fn audit(
    caller: Caller,
    State(api): State<Arc<Api>>,
    At(id): At<String>,
    Asked(how): Asked<How>,
) -> Result<Response, Error> {
    let row = readable(&api, &caller, &id).await?;
    let path = api.supervisor.audit_log(&row.id);
    match how.raw.unwrap_or_default() {
        0 => {
            let _turn = api.long_reads.wait(&caller.0.id).await;
            Ok(Json(prove(&api, &row, path).await?).into_response())
        }
        1 => send(&path, "application/x-ndjson").await,
        _ => Err(Error::parameter("`raw` is 0 or 1")),
    }
}

async fn prove(api: &Api, row: &Row, path: PathBuf) -> Result<Audit, Error> {
    let seal = api.supervisor.journal().seal(&row.id).await?;
    let (run, key) = (row.id.clone(), api.supervisor.public_key());
    let (has_ended, is_sealed) = (row.state == Progress::Ended, seal.is_some());
    let proved = tokio::task::spawn_blocking(move || {
        let log = std::fs::File::open(&path);
        match seal {
            Some(Seal { records: sealed, .. }) if is_gone(&log) => Err(Unproved::Gone { sealed }),
            Some(seal) => seal.check(BufReader::new(log?), &run),
            None if has_ended => log.map_err(Unproved::Io).and(Err(Unproved::Unsealed)),
            None => seal::check_open(whole_lines(log?)?, &run, &key),
        }
    });
    match proved.await.map_err(Error::internal)? {
        Ok(report) => Ok(Audit { verified: is_sealed, ..Audit::new(&report, None) }),
        Err(Unproved::Io(error)) => Err(gone(error, "audit log")),
        Err(why) => Ok(Audit::unproved(&why)),
    }
}

fn is_gone<T>(file: &io::Result<T>) -> bool {
    matches!(file, Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// A log up to the end of its last whole line: what comes after that is being written just now.
fn whole_lines(log: std::fs::File) -> io::Result<impl BufRead> {
    let (mut end, mut block) = (log.metadata()?.len(), vec![0; 8 << 10]);
    while end > 0 {
        let start = end.saturating_sub(block.len() as u64);
        let part = &mut block[..usize::try_from(end - start).unwrap_or(0)];
        log.read_exact_at(part, start)?;
        if let Some(at) = part.iter().rposition(|byte| *byte == b'\n') {
            end = start + at as u64 + 1;
            break;
        }
        end = start;
    }
    Ok(BufReader::new(log.take(end)))
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
    let deliveries = jobs(&api, row).await?.iter().map(Delivery::of).collect();
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
    let mut response = send(&path, "application/octet-stream").await?;
    // It is an agent's work: nothing that a browser should show.
    let named = format!("attachment; filename=\"{name}\"");
    let named = named.parse().expect("the name is one of ours");
    response.headers_mut().insert(CONTENT_DISPOSITION, named);
    Ok(response)
}

async fn readable(api: &Api, caller: &Caller, id: &str) -> Result<Row, Error> {
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

/// A file as it is.
async fn send(path: &File, kind: &'static str) -> Result<Response, Error> {
    let file = tokio::fs::File::open(path).await.map_err(|error| gone(error, "such file"))?;
    let body = Body::from_stream(ReaderStream::new(file));
    Ok(([(CONTENT_TYPE, kind)], body).into_response())
}

fn gone(error: io::Error, what: &str) -> Error {
    match error.kind() {
        io::ErrorKind::NotFound => Error::NotFound(format!("{what} of this run")),
        _ => Error::internal(error),
    }
}

impl Audit {
    /// What such a log says is not told, since nobody can tell who says it.
    fn unproved(why: &Unproved) -> Self {
        Self::new(&Report::default(), Some(why.to_string()))
    }

    fn new(report: &Report, broken: Option<String>) -> Self {
        Self {
            verified: false,
            broken,
            records: report.records,
            signed: report.signed(),
            unsigned: report.unsigned(),
            first: report.first.clone(),
            last: report.last.clone(),
            admitted: report.admitted,
            refused: report.refused,
            settled: report.settled,
            open: report.open,
            crashed: report.crashed,
            turns: report.spent.turns,
            input_tokens: report.spent.input.0,
            output_tokens: report.spent.output.0,
            cost_usd: report.spent.cost.to_string(),
            finished: report.finished,
            public_key: report.signatures.key.map(|key| key.to_string()),
        }
    }
}

impl Delivery {
    fn of(job: &Job) -> Self {
        Self {
            id: job.id.clone(),
            branch: job.order.branch().to_string(),
            step: job.step.as_str(),
            verdict: job.verdict.map(Verdict::as_str),
            head: job.head.map(|head| head.to_string()),
            is_pushed: job.is_pushed,
            pull_request_url: job.pull.as_ref().map(|pull| pull.url.clone()),
            why: job.error.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::whole_lines;

    #[test]
    fn a_line_that_is_being_written_is_left_out() {
        let whole = "one line\n".repeat(3000);
        for (log, read) in [
            (String::new(), ""),
            ("x".repeat(20_000), ""),
            (whole.clone(), &*whole),
            (format!("{whole}half a li"), &whole),
            (format!("{whole}{}", "x".repeat(20_000)), &whole),
        ] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(log.as_bytes()).unwrap();
            std::io::Seek::rewind(&mut file).unwrap();
            let mut found = String::new();
            whole_lines(file).unwrap().read_to_string(&mut found).unwrap();
            assert_eq!(found, read);
        }
    }
}
