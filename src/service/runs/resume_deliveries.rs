//! Finishes runs whose process ended during the delivery of their work. The work is delivered first; then the runs end,
//! so that watchers learn where the work is.
//!
//! The service does not wait for a delivery that cannot continue now. The outbox stores the delivery and its next retry
//! time.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::usage_recorder::UsageRecorder;
use super::{RunService, RunServiceInner, outcome};
use crate::relay::delivery::outbox::{DeliveryJob, WorkspaceRow};
use crate::relay::delivery::{self, DeliveryService, DeliveryStatus};
use crate::runner::branch_delivery::recover_for_run;

impl RunService {
    /// Delivers the work of the given runs and writes their ends, in a background task.
    pub(super) fn finish_pending(&self, left: Vec<UsageRecorder>) {
        let shared = Arc::clone(&self.0);
        for bill in &left {
            shared.lock_live().insert(bill.feed().run_id().to_owned(), CancellationToken::new());
        }
        self.0.tasks.spawn_task(async move {
            let shared = &shared;
            let ends = stream::iter(left).map(|bill| Box::pin(shared.finish_one(bill)));
            ends.buffer_unordered(MAX_CONCURRENT).for_each(std::future::ready).await;
        });
    }
}

impl RunServiceInner {
    /// Returns true if the outbox has a delivery of a run, or a workspace from which a delivery may follow.
    pub(super) async fn has_pending_work(&self, run: &str) -> anyhow::Result<bool> {
        let Some(relay) = self.relay.load_full() else { return Ok(false) };
        let run = run.to_owned();
        let asked = move || {
            let is_its = |row: &WorkspaceRow| row.plan.facts.run == run && row.left.is_none();
            let outbox = relay.outbox();
            anyhow::Ok(
                !outbox.jobs_of_run(&run)?.is_empty() || outbox.workspaces()?.iter().any(is_its),
            )
        };
        spawn_blocking(asked).await?
    }

    /// Returns the latest delivery of a run, after collecting work that is still in the run's workspace.
    async fn find_job(
        relay: &Arc<DeliveryService>,
        run: &str,
    ) -> anyhow::Result<Option<DeliveryJob>> {
        let taken = timeout(MAX_DELIVERY_TIME, Box::pin(recover_for_run(relay, run))).await;
        if let Ok(Err(error)) = taken {
            tracing::error!(run, "cannot collect the work of the run's workspace: {error:#}");
        }
        let (relay, run) = (Arc::clone(relay), run.to_owned());
        let jobs = spawn_blocking(move || relay.outbox().jobs_of_run(&run)).await??;
        Ok(jobs.into_iter().next_back())
    }

    async fn finish_one(&self, mut bill: UsageRecorder) {
        let feed = bill.feed().clone();
        let mut delivered = match self.relay.load_full() {
            Some(relay) => self.delivery_status(&relay, feed.run_id()).await,
            None => None,
        };
        if let Some(delivered) = &mut delivered {
            self.mask_delivered(feed.run_id(), delivered);
        }
        if let Some(DeliveryStatus { id, step, .. }) = &delivered {
            tracing::info!(run = feed.run_id(), relay = id, step, "delivered");
        }
        self.persist_end(&mut bill, outcome::interrupted_end(delivered.as_ref(), &feed)).await;
        self.lock_live().remove(feed.run_id());
    }

    /// Returns the delivery's state when the delivery cannot continue for now. `None` if the service leaves or the
    /// outbox cannot be read.
    async fn delivery_status(
        &self,
        relay: &Arc<DeliveryService>,
        run: &str,
    ) -> Option<DeliveryStatus> {
        let row = self.force_stop.run_until_cancelled(Box::pin(Self::find_job(relay, run))).await?;
        let row = row.inspect_err(|error| {
            tracing::error!(run, "cannot read the run's delivery from the outbox: {error:#}");
        });
        let id = &*row.ok()??.id;
        // A timeout is not an error here: the state below says how far the delivery has come.
        let gone = timeout(MAX_DELIVERY_TIME, Box::pin(run_or_wait(relay, id)));
        let gone = self.force_stop.run_until_cancelled(gone).await;
        if let Some(Ok(Err(error))) = gone {
            tracing::warn!(%error, relay = id, "cannot resume a delivery");
        }
        let looked = relay.status(id).await;
        looked
            .inspect_err(
                |error| tracing::error!(%error, relay = id, "cannot read the delivery's state"),
            )
            .ok()
    }
}

/// Resumes a delivery until it cannot continue, or waits while another run holds the branch: a run that begins on the
/// branch delivers the pending work first.
async fn run_or_wait(
    relay: &Arc<DeliveryService>,
    id: &str,
) -> Result<(), delivery::DeliveryError> {
    loop {
        let (outbox, known) = (Arc::clone(relay), id.to_owned());
        let job = spawn_blocking(move || outbox.outbox().get(&known)).await??;
        // Three reasons to stop: the delivery has ended, an attempt has set a later retry time, or this attempt held
        // the branch and went as far as it could.
        if job.step.is_terminal()
            || is_rescheduled(&job)
            || relay.resume_delivery(id).await?.is_some()
        {
            return Ok(());
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Returns true if an attempt has failed and set a later retry time.
fn is_rescheduled(job: &DeliveryJob) -> bool {
    job.error.is_some() && !job.is_due()
}

/// The maximum number of concurrent deliveries: the same number as the relay resumes at once by itself.
const MAX_CONCURRENT: usize = 4;

/// The interval between checks for a free branch. Our choice.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The maximum time of a delivery, before the run ends with the state that is known. Our choice: longer than git and a
/// forge are ever waited for.
const MAX_DELIVERY_TIME: Duration = Duration::from_mins(20);
