//! The audit log of a row: what is done to it when its run is over, and that log closed.
//!
//! It is a log like a run's, chained and signed, which `audit verify` proves; its run is the one whose work it is. The
//! run's own log names the row where the work came out, and so this file: nothing has to be written twice.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::outbox::DeliveryJob;
use crate::base::secret::SecretString;
use crate::llm::budget::BudgetAmount;
use crate::telemetry::audit::delivery_records as event;
use crate::telemetry::audit::records::{RunFinishedRecord, RunStartedRecord};
use crate::telemetry::audit::{AuditConfig, AuditError, AuditLog};

/// A row's log, while somebody is at it.
pub struct JobAuditLog(AuditLog);

impl JobAuditLog {
    /// Opens a row's log below the relay's directory. Blocks.
    ///
    /// # Errors
    /// It cannot be used, or is not as it was written: then nothing more is done to the row.
    pub fn open(
        state: &Path,
        job: &DeliveryJob,
        signing_key: Option<SecretString>,
    ) -> Result<Self, AuditError> {
        let path = log_path(state, &job.id);
        let directory = path.with_file_name("");
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        made.map_err(|source| AuditError::File { path: directory, source })?;
        let facts = &job.order.facts;
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
        let config = AuditConfig { path: Some(path), signing_key, ..AuditConfig::default() };
        AuditLog::open_log(&config, &started).map(|(log, _)| Self(log))
    }

    pub fn log(&self) -> &AuditLog {
        &self.0
    }

    /// Somebody has brought the work into a clone.
    pub fn record_applied(&self, job: &DeliveryJob) {
        let DeliveryJob { id, head, order, .. } = job;
        let head = head.unwrap_or(order.announced.tip).to_string();
        self.0.record_delivery(&event::WorkAppliedRecord { relay: id, head: &head });
    }

    /// The row is let go of: what is in the log is signed, and on the disk. Blocks.
    ///
    /// # Errors
    /// The disk does not take it.
    pub fn finish(self) -> Result<(), AuditError> {
        self.0.finish_log(&RunFinishedRecord {
            spent: BudgetAmount::default(),
            admitted: 0,
            refused: 0,
        })
    }
}

/// Where a row's log is, if it has one.
pub fn log_path(state: &Path, id: &str) -> PathBuf {
    state.join("audit").join(format!("{id}.jsonl"))
}
