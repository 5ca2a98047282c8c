//! Runs whose process ended while their work was on its way to a branch: it is brought there first, and then they end,
//! so that whoever watches is told where it is.
//!
//! A delivery that cannot go on now is not waited for: the outbox has it, and tries again when its time has come.

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
    /// Brings each to its end, in the background.
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
    /// Whether there is a row for a run, or may be one when its workspace has been looked at.
    pub(super) async fn has_pending_work(&self, run: &str) -> anyhow::Result<bool> {
        let Some(relay) = self.relay.load_full() else { return Ok(false) };
        let run = run.to_owned();
        let asked = move || {
            let is_its = |desk: &WorkspaceRow| desk.plan.facts.run == run && desk.left.is_none();
            let outbox = relay.outbox();
            anyhow::Ok(
                !outbox.jobs_of_run(&run)?.is_empty() || outbox.workspaces()?.iter().any(is_its),
            )
        };
        spawn_blocking(asked).await?
    }

    /// The row of a run, whose work is taken out first if it is not yet.
    async fn find_job(
        relay: &Arc<DeliveryService>,
        run: &str,
    ) -> anyhow::Result<Option<DeliveryJob>> {
        let taken = timeout(MAX_DELIVERY_TIME, Box::pin(recover_for_run(relay, run))).await;
        if let Ok(Err(error)) = taken {
            tracing::error!(run, "what it has left is not taken out: {error:#}");
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

    /// How far it has come, when it goes no further for now.
    async fn delivery_status(
        &self,
        relay: &Arc<DeliveryService>,
        run: &str,
    ) -> Option<DeliveryStatus> {
        let row = self.leave.run_until_cancelled(Box::pin(Self::find_job(relay, run))).await?;
        let row = row.inspect_err(|error| tracing::error!(run, "it is lost sight of: {error:#}"));
        let id = &*row.ok()??.id;
        let gone = timeout(MAX_DELIVERY_TIME, Box::pin(run_or_wait(relay, id)));
        let gone = self.leave.run_until_cancelled(gone).await;
        if let Some(Ok(Err(error))) = gone {
            tracing::warn!(%error, relay = id, "a relay cannot be taken up");
        }
        let looked = relay.status(id).await;
        looked.inspect_err(|error| tracing::error!(%error, relay = id, "it is lost sight of")).ok()
    }
}

/// Takes a row as far as it goes, or waits until somebody else has who is at its branch: a run that begins there
/// delivers what it finds first.
async fn run_or_wait(
    relay: &Arc<DeliveryService>,
    id: &str,
) -> Result<(), delivery::DeliveryError> {
    loop {
        let (outbox, known) = (Arc::clone(relay), id.to_owned());
        let job = spawn_blocking(move || outbox.outbox().get(&known)).await??;
        if job.step.is_terminal()
            || is_rescheduled(&job)
            || relay.resume_delivery(id).await?.is_some()
        {
            return Ok(());
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Somebody has tried, and said when to try again.
fn is_rescheduled(job: &DeliveryJob) -> bool {
    job.error.is_some() && !job.is_due()
}

/// As many as the relay takes up at once by itself.
const MAX_CONCURRENT: usize = 4;

/// How often to look whether a branch is free.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Longer than git and a forge are ever waited for; then the run ends with what is known.
const MAX_DELIVERY_TIME: Duration = Duration::from_mins(20);
