//! The seal of a log: a record of its end, stored elsewhere, against which the file is checked later.
//!
//! A chain finds changes inside a log, and a checkpoint proves who signed the log. Neither proves that a file is the
//! log that was closed: the log of another run is valid, too, and so is the beginning of the same log, and a log that a
//! forger wrote and signed with another key. The holder of an [`AuditLogSeal`] detects all three.

use std::io::{self, BufRead, BufReader};
use std::path::Path;

use super::AuditPublicKey;
use super::read::{self, ChainBreakError};
use super::verify::{self, AuditVerifyReport};
use crate::base::regular_file::open_regular_file;

/// The end of a log when its run had ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditLogSeal {
    pub records: u64,
    /// The hash of the last record, which covers all earlier records.
    pub head: String,
    /// The public key of the last record's signature.
    pub public_key: String,
}

/// The reason why a log does not match its seal.
#[derive(Debug, thiserror::Error)]
pub enum AuditProofError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Broken(#[from] ChainBreakError),
    #[error("the file is the log of run `{0}`")]
    OtherRun(String),
    #[error(
        "the log does not have the run's end: records are missing, or the run's process could not close the log"
    )]
    Unfinished,
    #[error("the log is not signed to its end with this service's key, `{0}`")]
    Unsigned(AuditPublicKey),
    #[error("the log has {found} of its {sealed} records: some are missing at the end")]
    Shorter { found: u64, sealed: u64 },
    #[error(
        "the log has {found} records, and had {sealed} when the run ended: some records were added"
    )]
    Longer { found: u64, sealed: u64 },
    #[error("the log is another one than when the run ended, signed with another key: `{0}`")]
    OtherKey(String),
    #[error(
        "the log is another one than when the run ended: records were changed, and all were signed again"
    )]
    Rewritten,
    #[error("the log is gone: it had {sealed} records when the run ended")]
    Missing { sealed: u64 },
    #[error(
        "no seal was stored when the run ended, so the log cannot be checked against it: an earlier version made \
         the run, or the log could not be closed"
    )]
    Unsealed,
}

impl AuditLogSeal {
    /// Returns the seal of a run's log that is complete, closed in order, and signed at its end with `key`. Blocks.
    ///
    /// # Errors
    /// Returns the condition that the log does not meet.
    pub fn seal_log(path: &Path, run: &str, key: &AuditPublicKey) -> Result<Self, AuditProofError> {
        let report = verify_complete(BufReader::new(open_regular_file(path)?), run, Some(key))?;
        let Some(head) = report.head.filter(|_| report.finished) else {
            return Err(AuditProofError::Unfinished);
        };
        // The last record must be the checkpoint itself: a record after it would be unsigned.
        if report.signatures.last != Some(report.records) {
            return Err(AuditProofError::Unsigned(*key));
        }
        let public_key = key.to_string();
        Ok(Self { records: report.records, head: head.to_string(), public_key })
    }

    /// Verifies that a log is the one that was sealed.
    ///
    /// # Errors
    /// Returns an error that says how the log differs from the sealed log.
    pub fn verify_sealed(
        &self,
        log: impl BufRead,
        run: &str,
    ) -> Result<AuditVerifyReport, AuditProofError> {
        let report = verify_complete(log, run, None)?;
        let (found, sealed) = (report.records, self.records);
        let signer = report.signatures.key.map(|key| key.to_string());
        // The last hash covers all records, so an equal hash proves the whole log. Otherwise the facts name the
        // difference.
        if report.head.is_some_and(|head| head.to_string() == self.head) {
            return Ok(report);
        }
        Err(match signer.filter(|signer| *signer != self.public_key) {
            Some(signer) => AuditProofError::OtherKey(signer),
            None if found < sealed => AuditProofError::Shorter { found, sealed },
            None if found > sealed => AuditProofError::Longer { found, sealed },
            None => AuditProofError::Rewritten,
        })
    }
}

/// Verifies the log of a run that has not ended, up to its present end. The run's process signs with `key`.
///
/// # Errors
/// Returns an error that says what is wrong with the log.
pub fn verify_open_log(
    log: impl BufRead,
    run: &str,
    key: &AuditPublicKey,
) -> Result<AuditVerifyReport, AuditProofError> {
    let report = verify_complete(log, run, Some(key))?;
    match report.signatures.foreign {
        0 => Ok(report),
        _ => Err(AuditProofError::Unsigned(*key)),
    }
}

/// Verifies the whole chain of a log, and that the log belongs to the run.
fn verify_complete(
    log: impl BufRead,
    run: &str,
    key: Option<&AuditPublicKey>,
) -> Result<AuditVerifyReport, AuditProofError> {
    let report = verify::verify_log(log, key).map_err(|error| match error {
        read::AuditReadError::Io(error) => AuditProofError::Io(error),
        read::AuditReadError::Broken(broken) => AuditProofError::Broken(broken),
    })?;
    if report.records > 0 && report.run != run {
        return Err(AuditProofError::OtherRun(report.run));
    }
    Ok(report)
}
