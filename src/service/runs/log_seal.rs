//! Closes and seals the audit logs of ended runs. A seal records the log as it was when the run ended.
//!
//! A log is closed before it is sealed. If the disk is full, the service retries for as long as the run has not ended.
//! An earlier version did not retry, so an ended run may have an open log. The next process closes such a log.

use std::io;

use anyhow::bail;
use tokio_util::sync::CancellationToken;

use super::{RunServiceInner, RunSubmission};
use crate::base::disk;
use crate::gateway::process::RunClosingState;
use crate::service::billing::call_usage;
use crate::telemetry::audit::chain::ChainBreakReason;
use crate::telemetry::audit::seal::{AuditLogSeal, AuditProofError};
use crate::telemetry::audit::verify;

impl RunServiceInner {
    /// Closes a run's audit log if it is open, and returns the seal to store. A run that never had a gateway has no log
    /// and no seal. A damaged log gets no seal, so that the service never attests later that the log is intact.
    ///
    /// # Errors
    /// Returns an error if the log cannot be closed now; a later attempt may succeed.
    pub(super) async fn seal_log(&self, run: &str) -> anyhow::Result<Option<AuditLogSeal>> {
        // 1. The gateway of this process may still write to the log; a seal now would miss the last records.
        match self.gateway_host.run_manager().closing_state(run) {
            Some(RunClosingState::WriteFailed) => {
                bail!("the end of the run's audit log cannot be written yet")
            }
            Some(RunClosingState::Draining) => bail!("the run's calls have not ended yet"),
            None => (),
        }
        // 2. Seal the log. If only its end is missing, close the log and seal once more. Transient I/O errors go to the
        // caller, who retries; every other damage is final.
        let why = match self.try_seal_log(run).await {
            Ok(seal) => return Ok(seal),
            Err(why) if is_closable(&why) => match Box::pin(self.close_orphaned_log(run)).await {
                Ok(()) => match self.try_seal_log(run).await {
                    Ok(seal) => return Ok(seal),
                    Err(why) => anyhow::Error::from(why),
                },
                Err(error) if disk::is_transient(error.as_ref()) => return Err(error),
                Err(error) => error,
            },
            Err(AuditProofError::Io(error)) if disk::is_transient(&error) => {
                return Err(error.into());
            }
            Err(why) => why.into(),
        };
        tracing::error!(run, "the audit log of an ended run is damaged and gets no seal: {why:#}");
        Ok(None)
    }

    /// Closes and records the open logs of ended runs. An earlier version left such logs when the disk was full. A
    /// complete log does not change: no later check can prove that a complete log is the original.
    ///
    /// # Errors
    /// Returns an error if a file or the database cannot be read or written now; a later attempt may succeed.
    pub(super) async fn close_unsealed(&self, stop: &CancellationToken) -> anyhow::Result<()> {
        for run in self.run_store.unsealed_runs().await? {
            if stop.is_cancelled() {
                break;
            }
            match self.try_seal_log(&run).await {
                Err(why) if is_closable(&why) && !self.is_log_complete(&run).await => {
                    Box::pin(self.close_ended_run(&run)).await?;
                }
                _ => (),
            }
        }
        Ok(())
    }

    async fn close_ended_run(&self, run: &str) -> anyhow::Result<()> {
        // The calls are recorded first: once the log is closed, no later process reads it again. A call without a
        // settlement has the same usage before and after the closing.
        let log = self.settings.audit_log_path(run);
        let read = move || call_usage::CallUsageReader::open(&log).finish();
        let (facts, whole) = tokio::task::spawn_blocking(read).await?;
        if let Err(error) = whole {
            tracing::error!(run, "the open audit log of an ended run cannot be read: {error:#}");
            return Ok(());
        }
        self.billing.record_calls(&facts).await?;
        let Some(seal) = self.seal_log(run).await? else { return Ok(()) };
        self.run_store.record_seal(run, seal).await?;
        let calls = facts.len();
        tracing::warn!(
            run,
            calls,
            "the audit log of an ended run was open, and is closed and recorded in the billing store"
        );
        Ok(())
    }

    /// Returns true if a log is closed and signed to its end, by any key.
    async fn is_log_complete(&self, run: &str) -> bool {
        let log = self.settings.audit_log_path(run);
        let verified = tokio::task::spawn_blocking(move || verify::verify_file(&log, None)).await;
        verified.is_ok_and(|report| {
            report.is_ok_and(|report| {
                report.finished && report.signatures.last == Some(report.records)
            })
        })
    }

    /// Settles the open calls as after a crash, and closes the log.
    async fn close_orphaned_log(&self, run: &str) -> anyhow::Result<()> {
        let wanted: RunSubmission = serde_json::from_str(&self.run_store.submission(run).await?)?;
        let config = wanted.gateway_config(run, &self.settings, &self.config.load());
        self.gateway_host.close_abandoned_run(config).await
    }

    async fn try_seal_log(&self, run: &str) -> Result<Option<AuditLogSeal>, AuditProofError> {
        let (path, id, key) = (self.settings.audit_log_path(run), run.to_owned(), self.public_key);
        let sealed = tokio::task::spawn_blocking(move || {
            // An empty log belongs to a run that could not begin.
            match path.metadata()?.len() {
                0 => Ok(None),
                _ => AuditLogSeal::seal_log(&path, &id, &key).map(Some),
            }
        });
        match sealed.await.unwrap_or_else(|error| Err(AuditProofError::Io(io::Error::other(error))))
        {
            Err(AuditProofError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            sealed => sealed,
        }
    }
}

/// Returns true if only the end of the log is missing, so that reopening the log can close it.
fn is_closable(why: &AuditProofError) -> bool {
    matches!(why, AuditProofError::Unfinished | AuditProofError::Unsigned(_)) || has_torn_tail(why)
}

/// Returns true if the last record is incomplete, as after a crash during a write.
fn has_torn_tail(why: &AuditProofError) -> bool {
    matches!(why, AuditProofError::Broken(broken) if broken.why == ChainBreakReason::Torn)
}
