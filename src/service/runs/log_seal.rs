//! What the service vouches for when a run has ended: its audit log, as it was then.
//!
//! A log is closed before it is sealed. Where the disk has no room for that, it is tried again for as long as the run has
//! not ended; an ended run whose log is open all the same, since an earlier version did not try again, is looked at by the
//! next process.

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
    /// Closes a run's log where that is not done, and returns what is remembered of it. Of a run that never had a gateway
    /// there is no log; of a log that is not whole nothing is remembered, so that nobody is told later that it is as it
    /// should be.
    ///
    /// # Errors
    /// The log cannot be closed now, and may be later.
    pub(super) async fn seal_log(&self, run: &str) -> anyhow::Result<Option<AuditLogSeal>> {
        match self.seats.run_manager().closing_state(run) {
            Some(RunClosingState::Unwritten) => {
                bail!("the end of its audit log cannot be written yet")
            }
            Some(RunClosingState::Draining) => bail!("its calls have not ended yet"),
            None => (),
        }
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
        tracing::error!(
            run,
            "the audit log of a run that has ended is not as it should be: {why:#}"
        );
        Ok(None)
    }

    /// Closes and books the logs of runs that have ended and whose end is not in their logs: an earlier version did not try
    /// again where the disk was full. What is whole is left as it is: nobody can tell whether it is what it was.
    ///
    /// # Errors
    /// Something cannot be read or written now, and may be later.
    pub(super) async fn close_unsealed(&self, stop: &CancellationToken) -> anyhow::Result<()> {
        for run in self.journal.unsealed_runs().await? {
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
        // Booked first: once the log is closed, nobody looks at it again. Calls without a settlement come to the same.
        let log = self.settings.audit_log_path(run);
        let read = move || call_usage::CallUsageReader::open(&log).finish();
        let (facts, whole) = tokio::task::spawn_blocking(read).await?;
        if let Err(error) = whole {
            tracing::error!(run, "the open audit log of an ended run cannot be read: {error:#}");
            return Ok(());
        }
        self.books.record_calls(&facts).await?;
        let Some(seal) = self.seal_log(run).await? else { return Ok(()) };
        self.journal.record_seal(run, seal).await?;
        let calls = facts.len();
        tracing::warn!(
            run,
            calls,
            "the audit log of an ended run was open, and is closed and booked"
        );
        Ok(())
    }

    /// Whether a log is closed and signed to its end, whoever has signed it.
    async fn is_log_complete(&self, run: &str) -> bool {
        let log = self.settings.audit_log_path(run);
        let verified = tokio::task::spawn_blocking(move || verify::verify_file(&log, None)).await;
        verified.is_ok_and(|report| {
            report.is_ok_and(|report| {
                report.finished && report.signatures.last == Some(report.records)
            })
        })
    }

    /// Settles what is open, as carefully as can be told, and closes the log.
    async fn close_orphaned_log(&self, run: &str) -> anyhow::Result<()> {
        let wanted: RunSubmission = serde_json::from_str(&self.journal.submission(run).await?)?;
        let config = wanted.gateway_config(run, &self.settings, &self.config.load());
        self.seats.close_abandoned_run(config).await
    }

    async fn try_seal_log(&self, run: &str) -> Result<Option<AuditLogSeal>, AuditProofError> {
        let (path, id, key) = (self.settings.audit_log_path(run), run.to_owned(), self.public_key);
        let sealed = tokio::task::spawn_blocking(move || {
            // One without a record is of a run that could not begin.
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

/// Whether taking the log up again closes it: nothing is wrong with it but that its end is missing.
fn is_closable(why: &AuditProofError) -> bool {
    matches!(why, AuditProofError::Unfinished | AuditProofError::Unsigned(_)) || has_torn_tail(why)
}

/// A crash in the midst of a write leaves the beginning of a record.
fn has_torn_tail(why: &AuditProofError) -> bool {
    matches!(why, AuditProofError::Broken(broken) if broken.why == ChainBreakReason::Torn)
}
