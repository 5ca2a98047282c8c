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

use super::bill::Bill;
use super::{Shared, Supervisor, ending};
use crate::delivery::outbox::{Desk, Job};
use crate::delivery::{self, Delivered, Relay};
use crate::runner::delivery::of_run;

impl Supervisor {
    /// Brings each to its end, in the background.
    pub(super) fn see_through(&self, left: Vec<Bill>) {
        let shared = Arc::clone(&self.0);
        for bill in &left {
            shared.live().insert(bill.feed().run().to_owned(), CancellationToken::new());
        }
        self.0.tasks.spawn(async move {
            let shared = &shared;
            let ends = stream::iter(left).map(|bill| Box::pin(shared.end_delivered(bill)));
            ends.buffer_unordered(AT_ONCE).for_each(std::future::ready).await;
        });
    }
}

impl Shared {
    /// Whether there is a row for a run, or may be one when its workspace has been looked at.
    pub(super) async fn has_work(&self, run: &str) -> anyhow::Result<bool> {
        let Some(relay) = self.relay.load_full() else { return Ok(false) };
        let run = run.to_owned();
        let asked = move || {
            let is_its = |desk: &Desk| desk.plan.facts.run == run && desk.left.is_none();
            let outbox = relay.outbox();
            anyhow::Ok(!outbox.of_run(&run)?.is_empty() || outbox.desks()?.iter().any(is_its))
        };
        spawn_blocking(asked).await?
    }

    /// The row of a run, whose work is taken out first if it is not yet.
    async fn row(relay: &Arc<Relay>, run: &str) -> anyhow::Result<Option<Job>> {
        let taken = timeout(LONGEST, Box::pin(of_run(relay, run))).await;
        if let Ok(Err(error)) = taken {
            tracing::error!(run, "what it has left is not taken out: {error:#}");
        }
        let (relay, run) = (Arc::clone(relay), run.to_owned());
        let jobs = spawn_blocking(move || relay.outbox().of_run(&run)).await??;
        Ok(jobs.into_iter().next_back())
    }

    async fn end_delivered(&self, mut bill: Bill) {
        let feed = bill.feed().clone();
        let mut delivered = match self.relay.load_full() {
            Some(relay) => self.delivered(&relay, feed.run()).await,
            None => None,
        };
        if let Some(delivered) = &mut delivered {
            self.mask_delivered(feed.run(), delivered);
        }
        if let Some(Delivered { id, step, .. }) = &delivered {
            tracing::info!(run = feed.run(), relay = id, step, "delivered");
        }
        self.end(&mut bill, ending::interrupted(delivered.as_ref(), &feed)).await;
        self.live().remove(feed.run());
    }

    /// How far it has come, when it goes no further for now.
    async fn delivered(&self, relay: &Arc<Relay>, run: &str) -> Option<Delivered> {
        let row = self.leave.run_until_cancelled(Box::pin(Self::row(relay, run))).await?;
        let row = row.inspect_err(|error| tracing::error!(run, "it is lost sight of: {error:#}"));
        let id = &*row.ok()??.id;
        let gone = timeout(LONGEST, Box::pin(go(relay, id)));
        let gone = self.leave.run_until_cancelled(gone).await;
        if let Some(Ok(Err(error))) = gone {
            tracing::warn!(%error, relay = id, "a relay cannot be taken up");
        }
        let looked = relay.look(id).await;
        looked.inspect_err(|error| tracing::error!(%error, relay = id, "it is lost sight of")).ok()
    }
}

/// Takes a row as far as it goes, or waits until somebody else has who is at its branch: a run that begins there
/// delivers what it finds first.
async fn go(relay: &Arc<Relay>, id: &str) -> Result<(), delivery::Error> {
    loop {
        let (outbox, known) = (Arc::clone(relay), id.to_owned());
        let job = spawn_blocking(move || outbox.outbox().get(&known)).await??;
        if job.step.is_end() || is_put_off(&job) || relay.resume(id).await?.is_some() {
            return Ok(());
        }
        sleep(AGAIN).await;
    }
}

/// Somebody has tried, and said when to try again.
fn is_put_off(job: &Job) -> bool {
    job.error.is_some() && !job.is_due()
}

/// As many as the relay takes up at once by itself.
const AT_ONCE: usize = 4;

/// How often to look whether a branch is free.
const AGAIN: Duration = Duration::from_millis(500);

/// Longer than git and a forge are ever waited for; then the run ends with what is known.
const LONGEST: Duration = Duration::from_mins(20);
