//! The audit log of a run: the log itself, and the proof that nothing in the log was changed.

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

use super::ApiState;
use super::error::{ApiError, ErrorBody};
use super::error_docs::{AuthErrorResponses, QueryErrorResponses};
use super::extract::{AuthenticatedCaller, PathParam, QueryParams};
use super::proof_cache::{FileFingerprint, ProofCache, ProofKey};
use super::run_records::{find_readable_run, removed_error, stream_file};
use crate::service::store::{RunPhase as Progress, RunRow};
use crate::telemetry::audit::AuditPublicKey;
use crate::telemetry::audit::seal::{self, AuditLogSeal, AuditProofError};
use crate::telemetry::audit::verify::AuditVerifyReport;

/// A summary of a run's audit log, and the result of its verification.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct AuditView {
    /// True if the run has ended and the log is unchanged since then, to the last record. While the run goes on,
    /// `verified` is false and `signed` counts the records that are proved.
    verified: bool,
    /// The reason why the log cannot be trusted, as text for people. Null if the service has found no change. If a reason
    /// is given, all figures are 0.
    #[schema(example = "the log has 3 of its 8 records: some are missing at the end")]
    broken: Option<String>,
    /// The number of records in the log.
    records: u64,
    /// The number of records that a signed checkpoint of this service covers.
    signed: u64,
    /// The number of records after the last checkpoint, which no signature proves yet.
    unsigned: u64,
    /// The time of the first record, in RFC 3339. Empty if there is none.
    first: String,
    /// The time of the last record, in RFC 3339. Empty if there is none.
    last: String,
    /// The number of calls that the gateway admitted: it sent them upstream.
    admitted: u64,
    /// The number of calls that the gateway refused.
    refused: u64,
    /// The number of admitted calls that have ended and are charged.
    settled: u64,
    /// The number of admitted calls that have not ended.
    open: u64,
    /// The number of settled calls whose real settlement was lost in a crash.
    crashed: u64,
    /// The number of turns: calls that made a model generate.
    turns: u64,
    /// The input of all settled calls, in tokens.
    input_tokens: u64,
    /// The output of all settled calls, in tokens.
    output_tokens: u64,
    /// The cost of all settled calls by the gateway's price table, in US dollars, as a decimal text.
    #[schema(example = "0.0096")]
    cost_usd: String,
    /// True if the log contains the orderly end of the run.
    finished: bool,
    /// The Ed25519 public key of the last signature in the log. Null if the log has no signature.
    public_key: Option<String>,
}

/// The form in which the log is returned.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct AuditQuery {
    /// `1` returns the log itself, with one JSON object per line for each record. The default is `0`: the summary.
    #[param(minimum = 0, maximum = 1)]
    raw: Option<u8>,
}

/// Verify the audit log of a run
///
/// The service compares the log with the record of its end, and returns a summary with the result.
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/audit",
    tag = "runs",
    params(("id" = String, Path, description = "The id of the run, as `POST /api/v1/runs` returned it."), AuditQuery),
    responses(
        (status = 200, description = "The summary of the log. With `raw=1`, the log itself.", content(
            (AuditView = "application/json"),
            (String = "application/x-ndjson")
        )),
        (status = 429, description = "`too_many_downloads`: with `raw=1`, the grant already downloads as many files at the same time as it may. Repeat the request when a download has ended.", body = ErrorBody),
        QueryErrorResponses, AuthErrorResponses,
        (status = 404, description = "`not_found`: the grant cannot see such a run, or the run has no audit log yet.", body = ErrorBody)
    )
)]
pub(super) async fn show_audit(
    caller: AuthenticatedCaller,
    State(api): State<Arc<ApiState>>,
    PathParam(id): PathParam<String>,
    QueryParams(how): QueryParams<AuditQuery>,
) -> Result<Response, ApiError> {
    let row = find_readable_run(&api, &caller, &id).await?;
    let path = api.run_service.audit_log_path(&row.id);
    match how.raw.unwrap_or_default() {
        0 => Ok(Json(prove_cached(&api, &caller, &row, path).await?).into_response()),
        1 => stream_file(&api, &caller, &path, "application/x-ndjson").await,
        _ => Err(ApiError::invalid_parameter("`raw` is invalid: give 0 or 1")),
    }
}

/// The log to prove, with the facts that its proof needs.
struct ProofSubject {
    run: String,
    path: PathBuf,
    has_ended: bool,
    seal: Option<AuditLogSeal>,
    key: AuditPublicKey,
}

/// Returns the earlier proof if the run has ended and its log is unchanged since that proof. Otherwise proves the
/// log.
async fn prove_cached(
    api: &Arc<ApiState>,
    caller: &AuthenticatedCaller,
    row: &RunRow,
    path: PathBuf,
) -> Result<AuditView, ApiError> {
    let subject = ProofSubject {
        run: row.id.clone(),
        path,
        has_ended: row.state == Progress::Ended,
        seal: api.run_service.run_store().log_seal(&row.id).await?,
        key: api.run_service.public_key(),
    };
    let found = tokio::fs::metadata(&subject.path).await.ok();
    let key = found.as_ref().and_then(|found| subject.proof_key(found));
    if let Some(known) = key.and_then(|key| api.proofs.find_proof(&key)) {
        return Ok(known);
    }
    // The grant's permit comes before the place in the proof cache, so that one grant cannot queue for all places at
    // once.
    let turn = api.long_reads.acquire_permit(&caller.0.id).await;
    let ours = Arc::clone(api);
    let proved = api.proofs.run_proof(turn, move || subject.prove_log(&ours.proofs)).await;
    match proved.map_err(ApiError::internal_error)? {
        Ok(audit) => Ok(audit),
        Err(AuditProofError::Io(error)) => Err(removed_error(error, "audit log")),
        Err(why) => Ok(AuditView::from_proof_error(&why)),
    }
}

impl ProofSubject {
    /// Verifies the log against its seal, or the open log against its signed checkpoints. Blocks the thread.
    fn prove_log(&self, proofs: &ProofCache<AuditView>) -> Result<AuditView, AuditProofError> {
        let log = fs::File::open(&self.path);
        let Some(seal) = &self.seal else {
            let log = log?;
            // Without a seal, a log of an ended run proves nothing. A log of a live run is verified up to its last
            // whole line.
            return if self.has_ended {
                Err(AuditProofError::Unsealed)
            } else {
                let report = seal::verify_open_log(whole_lines(log)?, &self.run, &self.key)?;
                Ok(AuditView::new(&report, None))
            };
        };
        if is_not_found(&log) {
            // The seal says that a log existed, so a missing file means that the log was removed.
            return Err(AuditProofError::Missing { sealed: seal.records });
        }
        let log = log?;
        let before = self.proof_key(&log.metadata()?);
        // Another request may have stored a proof of the same log while this request waited for its place.
        if let Some(known) = before.as_ref().and_then(|key| proofs.find_proof(key)) {
            return Ok(known);
        }
        let audit = match seal.verify_sealed(BufReader::new(&log), &self.run) {
            Ok(report) => AuditView { verified: true, ..AuditView::new(&report, None) },
            Err(AuditProofError::Io(error)) => return Err(error.into()),
            Err(why) => AuditView::from_proof_error(&why),
        };
        // The proof is stored only if the file did not change while it was read. Otherwise the key and the proof
        // would not match.
        let after = self.proof_key(&log.metadata()?);
        if let Some(key) = after.filter(|after| before.as_ref() == Some(after)) {
            proofs.store_proof(key, audit.clone(), SystemTime::now());
        }
        Ok(audit)
    }

    /// Returns the key under which the proof can be stored. A log without a seal has no key, because the log of a
    /// live run changes with each call.
    fn proof_key(&self, found: &Metadata) -> Option<ProofKey> {
        let (run, file) = (self.run.clone(), FileFingerprint::from_metadata(found));
        self.seal.clone().map(|seal| ProofKey { run, seal, file })
    }
}

fn is_not_found<T>(file: &io::Result<T>) -> bool {
    matches!(file, Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// Returns a reader of the log up to the end of its last whole line. The bytes after that line belong to a record
/// that is being written.
fn whole_lines(log: fs::File) -> io::Result<impl BufRead> {
    let (mut end, mut block) = (log.metadata()?.len(), vec![0; 8 << 10]);
    while end > 0 {
        // Search backwards, block by block, for the last newline. If the log has no newline, `end` reaches 0 and
        // nothing is read.
        let start = end.saturating_sub(block.len() as u64);
        // The difference is at most one block, so the conversion cannot fail.
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

impl AuditView {
    /// Returns a view with no content but the reason. The content of a broken log is left out, because its author is
    /// unknown.
    fn from_proof_error(why: &AuditProofError) -> Self {
        Self::new(&AuditVerifyReport::default(), Some(why.to_string()))
    }

    fn new(report: &AuditVerifyReport, broken: Option<String>) -> Self {
        Self {
            verified: false,
            broken,
            records: report.records,
            signed: report.signed_records(),
            unsigned: report.unsigned_records(),
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
