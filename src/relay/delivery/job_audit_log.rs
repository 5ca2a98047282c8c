//! The audit log of a row: a record of the steps that are done after the run has ended and its log is closed.
//!
//! The log has the form of a run's log, chained and signed, and `audit verify` proves it. Its run is the run that made
//! the work. The run's own log names the row when the work is extracted, and thereby this file, so nothing is written
//! twice.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::outbox::DeliveryJob;
use crate::base::secret::SecretString;
use crate::llm::budget::BudgetAmount;
use crate::telemetry::audit::delivery_records as event;
use crate::telemetry::audit::records::{RunFinishedRecord, RunStartedRecord};
use crate::telemetry::audit::{AuditConfig, AuditError, AuditLog};

/// The open audit log of a row that this process works on.
pub struct JobAuditLog(AuditLog);

impl JobAuditLog {
    /// Opens a row's log below the relay's state directory. Blocks.
    ///
    /// # Errors
    /// Returns an error if the file cannot be used, or if its chain is broken. The caller then does nothing more to the
    /// row.
    pub fn open(
        state: &Path,
        job: &DeliveryJob,
        signing_key: Option<SecretString>,
    ) -> Result<Self, AuditError> {
        let path = log_path(state, &job.id);
        let directory = path.with_file_name("");
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        created.map_err(|source| AuditError::File { path: directory, source })?;
        let facts = &job.request.facts;
        let started = RunStartedRecord {
            run: facts.run.clone(),
            attempt: format!("relay {}", job.id),
            account: "-".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            policy: facts.policy.clone(),
            prices: "-".to_owned(),
            trace: None,
            upstream: "-",
        };
        // The log continues the file of earlier attempts: each attempt adds a start and a finish to the same chain.
        let config = AuditConfig { path: Some(path), signing_key, ..AuditConfig::default() };
        AuditLog::open_log(&config, &started).map(|(log, _)| Self(log))
    }

    pub fn log(&self) -> &AuditLog {
        &self.0
    }

    /// Records that a person has brought the work into a clone.
    pub fn record_applied(&self, job: &DeliveryJob) {
        let DeliveryJob { id, head, request, .. } = job;
        let head = head.unwrap_or(request.announced.tip).to_string();
        self.0.record_delivery(&event::WorkAppliedRecord { relay: id, head: &head });
    }

    /// Finishes the log: signs what is in it, and waits until the disk has it. Blocks.
    ///
    /// # Errors
    /// Returns an error if the disk cannot be written.
    pub fn finish(self) -> Result<(), AuditError> {
        self.0.finish_log(&RunFinishedRecord {
            spent: BudgetAmount::default(),
            admitted: 0,
            refused: 0,
        })
    }
}

/// Returns the path of a row's log. The file exists only if something was recorded there.
pub fn log_path(state: &Path, id: &str) -> PathBuf {
    state.join("audit").join(format!("{id}.jsonl"))
}
