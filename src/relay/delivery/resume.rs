//! Taking up what an earlier process, or an earlier hour, has left.

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
    /// Takes up one row, also where its time has not come. `None` where somebody else is at its branch.
    ///
    /// # Errors
    /// There is no such row, or the outbox does not work.
    pub async fn resume_delivery(
        self: &Arc<Self>,
        id: &str,
    ) -> Result<Option<DeliveryStatus>, DeliveryError> {
        let (relay, id) = (self.clone(), id.to_owned());
        let job = spawn_blocking(move || relay.outbox.get(&id)).await??;
        Box::pin(self.resume_job(job)).await
    }

    /// Takes up one row because somebody asks for it: one that is at its end begins again, with new rules if that is asked
    /// for, too. `None` where somebody else is at its branch; then nothing is changed.
    ///
    /// # Errors
    /// There is no such row, it cannot be taken up here, or the outbox does not work.
    pub async fn retry_delivery(
        self: &Arc<Self>,
        id: &str,
        new_rules: bool,
    ) -> Result<Option<DeliveryStatus>, DeliveryError> {
        let (relay, id) = (self.clone(), id.to_owned());
        let taken = spawn_blocking(move || {
            let order = relay.outbox.get(&id)?.order;
            let lease = relay.try_lease_branch(&order.repository, order.branch().key())?;
            // Only who has the branch knows how the row stands.
            Ok((relay.restart_job(relay.outbox.get(&id)?, new_rules)?, lease))
        });
        match taken.await? {
            Ok((job, lease)) => Box::pin(self.run_detached_job(job, &lease)).await.map(Some),
            Err(DeliveryError::Relay(repo::RepoError::Busy { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes down that work has come out after its run's log was closed.
    ///
    /// # Errors
    /// The row's own log cannot be used.
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

    fn restart_job(
        &self,
        mut job: DeliveryJob,
        new_rules: bool,
    ) -> Result<DeliveryJob, DeliveryError> {
        if new_rules && !job.step.is_terminal() && self.check_secrets_known(&job.order).is_ok() {
            return Err(DeliveryError::OnItsWay);
        }
        if new_rules {
            job = self.renew_rules(&job)?;
        }
        if !job.step.is_terminal() {
            return Ok(job);
        }
        if job.step != DeliveryStep::Done && !job.can_be_retried() {
            return Err(DeliveryError::Overtaken { id: job.id });
        }
        self.check_secrets_known(&job.order)?;
        Ok(self.outbox.restart(&job)?)
    }

    /// Takes up all rows whose time has come, a few at once, until `stop`. Those at whose branch somebody else is are left
    /// to them; what is cut off by `stop` is taken up another time.
    ///
    /// # Errors
    /// The outbox does not work.
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
                    tracing::warn!(%error, relay = id, "a relay cannot be taken up");
                    None
                }
                None => None,
            }
        });
        Ok(rows.buffer_unordered(MAX_CONCURRENT).filter_map(std::future::ready).collect().await)
    }

    async fn resume_job(
        self: &Arc<Self>,
        job: DeliveryJob,
    ) -> Result<Option<DeliveryStatus>, DeliveryError> {
        let (relay, order) = (self.clone(), job.order.clone());
        let lease = spawn_blocking(move || {
            relay
                .open_mirror(&order.repository)?
                .lease_branch(order.branch().key())
                .map_err(DeliveryError::from)
        });
        match lease.await? {
            Ok(lease) => Box::pin(self.run_detached_job(job, &lease)).await.map(Some),
            Err(DeliveryError::Relay(repo::RepoError::Busy { .. })) => {
                tracing::info!(relay = job.id, "somebody else is at this branch");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Takes a row as far as it goes without its run, whose log is closed: what is done is in the row's own.
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
        spawn_blocking(move || record.finish()).await??;
        delivered
    }
}

/// Each is a git and a call or two, and may wait for an API that does not answer.
const MAX_CONCURRENT: usize = 4;
