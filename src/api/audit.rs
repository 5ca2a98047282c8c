//! A run's audit log: the log itself, and the proof of it.

use std::fs::{self, Metadata};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::Api;
use super::error::{Error, ErrorBody};
use super::extract::{Asked, At, Caller};
use super::proofs::{FileState, ProofKey, Proofs};
use super::records::{gone, readable, send};
use super::refusal::{NotAllowed, NotUnderstood};
use crate::audit::PublicKey;
use crate::audit::seal::{self, Seal, Unproved};
use crate::audit::verify::Report;
use crate::journal::{Row, State as Progress};

/// What a run's audit log says, and whether that can be believed.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Audit {
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
        (status = 429, description = "With `raw`, `too_many_downloads`: of this grant", body = ErrorBody),
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
        0 => Ok(Json(prove(&api, &caller, &row, path).await?).into_response()),
        1 => send(&api, &caller, &path, "application/x-ndjson").await,
        _ => Err(Error::parameter("`raw` is 0 or 1")),
    }
}

/// What is to be proved.
struct Subject {
    run: String,
    path: PathBuf,
    has_ended: bool,
    seal: Option<Seal>,
    key: PublicKey,
}

/// Answers with the proof that was made before, where the log of a run that has ended is as it was then; else proves it.
async fn prove(api: &Arc<Api>, caller: &Caller, row: &Row, path: PathBuf) -> Result<Audit, Error> {
    let subject = Subject {
        run: row.id.clone(),
        path,
        has_ended: row.state == Progress::Ended,
        seal: api.supervisor.journal().seal(&row.id).await?,
        key: api.supervisor.public_key(),
    };
    let found = tokio::fs::metadata(&subject.path).await.ok();
    let key = found.as_ref().and_then(|found| subject.proof_key(found));
    if let Some(known) = key.and_then(|key| api.proofs.find(&key)) {
        return Ok(known);
    }
    let turn = api.long_reads.wait(&caller.0.id).await;
    let ours = Arc::clone(api);
    let proved = api.proofs.make(turn, move || subject.prove(&ours.proofs)).await;
    match proved.map_err(Error::internal)? {
        Ok(audit) => Ok(audit),
        Err(Unproved::Io(error)) => Err(gone(error, "audit log")),
        Err(why) => Ok(Audit::unproved(&why)),
    }
}

impl Subject {
    /// Blocks.
    fn prove(&self, proofs: &Proofs<Audit>) -> Result<Audit, Unproved> {
        let log = fs::File::open(&self.path);
        let Some(seal) = &self.seal else {
            let log = log?;
            return if self.has_ended {
                Err(Unproved::Unsealed)
            } else {
                let report = seal::check_open(whole_lines(log)?, &self.run, &self.key)?;
                Ok(Audit::new(&report, None))
            };
        };
        if is_gone(&log) {
            return Err(Unproved::Gone { sealed: seal.records });
        }
        let log = log?;
        let before = self.proof_key(&log.metadata()?);
        // Another request may have had it proved while this one was waiting.
        if let Some(known) = before.as_ref().and_then(|key| proofs.find(key)) {
            return Ok(known);
        }
        let audit = match seal.check(BufReader::new(&log), &self.run) {
            Ok(report) => Audit { verified: true, ..Audit::new(&report, None) },
            Err(Unproved::Io(error)) => return Err(error.into()),
            Err(why) => Audit::unproved(&why),
        };
        let after = self.proof_key(&log.metadata()?);
        if let Some(key) = after.filter(|after| before.as_ref() == Some(after)) {
            proofs.keep(key, audit.clone(), SystemTime::now());
        }
        Ok(audit)
    }

    /// The log of a run that goes on has none: it changes with each call.
    fn proof_key(&self, found: &Metadata) -> Option<ProofKey> {
        let (run, file) = (self.run.clone(), FileState::of(found));
        self.seal.clone().map(|seal| ProofKey { run, seal, file })
    }
}

fn is_gone<T>(file: &io::Result<T>) -> bool {
    matches!(file, Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// A log up to the end of its last whole line: what comes after that is being written just now.
fn whole_lines(log: fs::File) -> io::Result<impl BufRead> {
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
