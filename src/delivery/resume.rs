//! Taking up what an earlier process, or an earlier hour, has left.

use std::sync::Arc;
use std::time::SystemTime;

use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use super::outbox::{Job, Step};
use super::record::Record;
use super::{Delivered, Error, Relay, Settings};
use crate::audit::relay as event;
use crate::relay::{self, Lease};

impl Relay {
    /// Takes up one row, also where its time has not come. `None` where somebody else is at its branch.
    ///
    /// # Errors
    /// There is no such row, or the outbox does not work.
    pub async fn resume(self: &Arc<Self>, id: &str) -> Result<Option<Delivered>, Error> {
        let (relay, id) = (self.clone(), id.to_owned());
        let job = spawn_blocking(move || relay.outbox.get(&id)).await??;
        Box::pin(self.resume_job(job)).await
    }

    /// Takes up one row because somebody asks for it: one that is at its end begins again, with new rules if that is asked
    /// for, too. `None` where somebody else is at its branch; then nothing is changed.
    ///
    /// # Errors
    /// There is no such row, it cannot be taken up here, or the outbox does not work.
    pub async fn retry(
        self: &Arc<Self>,
        id: &str,
        new_rules: bool,
    ) -> Result<Option<Delivered>, Error> {
        let (relay, id) = (self.clone(), id.to_owned());
        let taken = spawn_blocking(move || {
            let order = relay.outbox.get(&id)?.order;
            let lease = relay.lease(&order.repository, order.branch().key())?;
            // Only who has the branch knows how the row stands.
            Ok((relay.revived(relay.outbox.get(&id)?, new_rules)?, lease))
        });
        match taken.await? {
            Ok((job, lease)) => Box::pin(self.take_up(job, &lease)).await.map(Some),
            Err(Error::Relay(relay::Error::Busy { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes down that work has come out after its run's log was closed.
    ///
    /// # Errors
    /// The row's own log cannot be used.
    pub async fn found(self: &Arc<Self>, job: &Job) -> Result<(), Error> {
        let (relay, job) = (self.clone(), job.clone());
        let write = move || {
            let Settings { state, signing_key, .. } = &relay.settings;
            let record = Record::open(state, &job, signing_key.clone())?;
            super::extracted(&job, record.log());
            Ok(record.finish()?)
        };
        spawn_blocking(write).await?
    }

    fn revived(&self, mut job: Job, new_rules: bool) -> Result<Job, Error> {
        if new_rules && !job.step.is_end() && self.check_known(&job.order).is_ok() {
            return Err(Error::OnItsWay);
        }
        if new_rules {
            job = self.renew(&job)?;
        }
        if !job.step.is_end() {
            return Ok(job);
        }
        if job.step != Step::Done && !job.can_be_retried() {
            return Err(Error::Overtaken { id: job.id });
        }
        self.check_known(&job.order)?;
        Ok(self.outbox.revive(&job)?)
    }

    /// Takes up all rows whose time has come, a few at once, until `stop`. Those at whose branch somebody else is are left
    /// to them; what is cut off by `stop` is taken up another time.
    ///
    /// # Errors
    /// The outbox does not work.
    pub async fn resume_due(
        self: &Arc<Self>,
        stop: &CancellationToken,
    ) -> Result<Vec<Delivered>, Error> {
        let relay = self.clone();
        let due = spawn_blocking(move || relay.outbox.due(SystemTime::now())).await??;
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
        Ok(rows.buffer_unordered(AT_ONCE).filter_map(std::future::ready).collect().await)
    }

    async fn resume_job(self: &Arc<Self>, job: Job) -> Result<Option<Delivered>, Error> {
        let (relay, order) = (self.clone(), job.order.clone());
        let lease = spawn_blocking(move || {
            relay.mirror(&order.repository)?.lease(order.branch().key()).map_err(Error::from)
        });
        match lease.await? {
            Ok(lease) => Box::pin(self.take_up(job, &lease)).await.map(Some),
            Err(Error::Relay(relay::Error::Busy { .. })) => {
                tracing::info!(relay = job.id, "somebody else is at this branch");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Takes a row as far as it goes without its run, whose log is closed: what is done is in the row's own.
    pub(super) async fn take_up(
        self: &Arc<Self>,
        job: Job,
        lease: &Lease,
    ) -> Result<Delivered, Error> {
        let (relay, row) = (self.clone(), job.clone());
        let opened = spawn_blocking(move || {
            let Settings { state, signing_key, .. } = &relay.settings;
            Record::open(state, &row, signing_key.clone())
        });
        let record = opened.await??;
        record.log().relayed(&event::Resumed { relay: &job.id, step: job.step.as_str() });
        let delivered = Box::pin(self.go(job, lease, record.log())).await;
        spawn_blocking(move || record.finish()).await??;
        delivered
    }
}

/// Each is a git and a call or two, and may wait for an API that does not answer.
const AT_ONCE: usize = 4;
