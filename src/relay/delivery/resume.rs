//! The resumption of deliveries that an earlier process, or an earlier attempt, has not finished.

use std::sync::Arc;
use std::time::SystemTime;

use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use super::job_audit_log::JobAuditLog;
use super::outbox::{DeliveryJob, DeliveryStep};
use super::{DeliveryConfig, DeliveryError, DeliveryService, DeliveryStatus};
use crate::relay::repo::{self, BranchLease};
use crate::telemetry::audit::delivery_records as event;

impl DeliveryService {
    /// Resumes one row, even before its due time. Returns `None` if another run or process holds its branch.
    ///
    /// # Errors
    /// Returns an error if there is no such row, or if the outbox does not work.
    pub async fn resume_delivery(
        self: &Arc<Self>,
        id: &str,
    ) -> Result<Option<DeliveryStatus>, DeliveryError> {
        let (relay, id) = (self.clone(), id.to_owned());
        let job = spawn_blocking(move || relay.outbox.get(&id)).await??;
        Box::pin(self.resume_job(job)).await
    }

    /// Retries one row at an operator's request. A row whose step is terminal starts again, with new rules if
    /// `new_rules` is true. Returns `None`, and changes nothing, if another run or process holds the row's branch.
    ///
    /// # Errors
    /// Returns an error if there is no such row, if the row cannot be retried on this host, or if the outbox does not
    /// work.
    pub async fn retry_delivery(
        self: &Arc<Self>,
        id: &str,
        new_rules: bool,
    ) -> Result<Option<DeliveryStatus>, DeliveryError> {
        let (relay, id) = (self.clone(), id.to_owned());
        let taken = spawn_blocking(move || {
            let request = relay.outbox.get(&id)?.request;
            let lease = relay.try_lease_branch(&request.repository, request.branch().key())?;
            // The row is read again under the lease: only the holder of the branch knows that the step does not change.
            Ok((relay.restart_job(relay.outbox.get(&id)?, new_rules)?, lease))
        });
        match taken.await? {
            Ok((job, lease)) => Box::pin(self.run_detached_job(job, &lease)).await.map(Some),
            Err(DeliveryError::Relay(repo::RepoError::BranchInUse { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Records the extraction of work in the row's own log, because the run's log is closed.
    ///
    /// # Errors
    /// Returns an error if the row's own log cannot be used.
    pub async fn log_late_extraction(
        self: &Arc<Self>,
        job: &DeliveryJob,
    ) -> Result<(), DeliveryError> {
        let (relay, job) = (self.clone(), job.clone());
        let write = move || {
            let DeliveryConfig { state, signing_key, .. } = &relay.settings;
            let record = JobAuditLog::open(state, &job, signing_key.clone())?;
            super::record_extracted(&job, record.log());
            Ok(record.finish()?)
        };
        spawn_blocking(write).await?
    }

    /// Restarts a terminal row, and returns any other row as it is. The caller holds the lease of the row's branch.
    fn restart_job(
        &self,
        mut job: DeliveryJob,
        new_rules: bool,
    ) -> Result<DeliveryJob, DeliveryError> {
        // New rules are refused while the delivery can go on by itself. A row that lacks a secret cannot, so it may get
        // them.
        if new_rules && !job.step.is_terminal() && self.check_secrets_known(&job.request).is_ok() {
            return Err(DeliveryError::InProgress);
        }
        if new_rules {
            job = self.renew_rules(&job)?;
        }
        // A row in progress continues from its step. Only a terminal row starts again.
        if !job.step.is_terminal() {
            return Ok(job);
        }
        if job.step != DeliveryStep::Done && !job.can_be_retried() {
            return Err(DeliveryError::BranchAdvanced { id: job.id });
        }
        // The secrets are checked before the row changes: the review would only stop at a missing secret.
        self.check_secrets_known(&job.request)?;
        Ok(self.outbox.restart(&job)?)
    }

    /// Resumes all due rows, a few at a time, until `stop` is cancelled. A row whose branch is held by another run or
    /// process is left to that holder. A later call continues rows that `stop` has interrupted.
    ///
    /// # Errors
    /// Returns an error if the outbox does not work.
    pub async fn resume_due_jobs(
        self: &Arc<Self>,
        stop: &CancellationToken,
    ) -> Result<Vec<DeliveryStatus>, DeliveryError> {
        let relay = self.clone();
        let due = spawn_blocking(move || relay.outbox.due_jobs(SystemTime::now())).await??;
        let rows = stream::iter(due).map(async |job| {
            let id = job.id.clone();
            let resumed = stop.run_until_cancelled(Box::pin(self.resume_job(job))).await;
            match resumed {
                Some(Ok(delivered)) => delivered,
                Some(Err(error)) => {
                    tracing::warn!(%error, relay = id, "cannot resume a delivery");
                    None
                }
                None => None,
            }
        });
        Ok(rows.buffer_unordered(MAX_CONCURRENT).filter_map(std::future::ready).collect().await)
    }

    /// Resumes one row under a new lease of its branch. Returns `None` if the branch is held.
    async fn resume_job(
        self: &Arc<Self>,
        job: DeliveryJob,
    ) -> Result<Option<DeliveryStatus>, DeliveryError> {
        let (relay, request) = (self.clone(), job.request.clone());
        let lease = spawn_blocking(move || {
            relay
                .open_mirror(&request.repository)?
                .lease_branch(request.branch().key())
                .map_err(DeliveryError::from)
        });
        match lease.await? {
            Ok(lease) => Box::pin(self.run_detached_job(job, &lease)).await.map(Some),
            Err(DeliveryError::Relay(repo::RepoError::BranchInUse { .. })) => {
                tracing::info!(
                    relay = job.id,
                    "cannot resume a delivery now: another holder has its branch"
                );
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Runs the steps of a row after its run's log was closed, and records them in the row's own log.
    pub(super) async fn run_detached_job(
        self: &Arc<Self>,
        job: DeliveryJob,
        lease: &BranchLease,
    ) -> Result<DeliveryStatus, DeliveryError> {
        let (relay, row) = (self.clone(), job.clone());
        let opened = spawn_blocking(move || {
            let DeliveryConfig { state, signing_key, .. } = &relay.settings;
            JobAuditLog::open(state, &row, signing_key.clone())
        });
        let record = opened.await??;
        record.log().record_delivery(&event::DeliveryResumedRecord {
            relay: &job.id,
            step: job.step.as_str(),
        });
        let delivered = Box::pin(self.run_job(job, lease, record.log())).await;
        // The log is signed and closed also after an error, so that the steps that were done are proved.
        spawn_blocking(move || record.finish()).await??;
        delivered
    }
}

/// The number of rows that are resumed at the same time. Each one runs a git process and a request or two, and may wait
/// for an API that does not answer. Our choice.
const MAX_CONCURRENT: usize = 4;
