//! A run from its acceptance to its beginning: the run waits for its turn, and its watchers receive its position.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::json;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::execute::RunFailure;
use super::run_queue::{QueueEntry, QueueStanding, QueueTurn, RunPlace};
use super::{RunService, RunServiceInner, RunSubmission};
use crate::runner::RunPlan;
use crate::service::auth;
use crate::service::store::{EventFeed, RunEventKind};
use crate::telemetry::metrics::RunQueueGauges;

/// A run of the queue with its events.
pub(super) struct QueuedRun {
    pub(super) entry: QueueEntry,
    pub(super) feed: EventFeed,
    /// The time at which the run has waited as long as a run may wait.
    pub(super) wait_ends: Instant,
}

/// A submission and its plan. Only a run that begins at once keeps them in memory; a run that waits reads its
/// submission again from the run store, because the messages of a thousand submissions may be a gigabyte.
pub(super) type ResolvedSubmission = (Box<RunSubmission>, Box<RunPlan>);

/// The outcome of a run's wait for its turn.
enum QueueOutcome {
    /// The run begins. A run that has waited has no plan yet.
    Begin(Box<RunSubmission>, Option<Box<RunPlan>>, RunPlace),
    /// The run ends before it has begun.
    Ended(RunFailure),
    /// The process ends before the run begins. The next process begins the run.
    Postponed,
}

impl RunService {
    /// Brings a run of the run store through the queue and to its end, in a background task.
    pub(super) fn spawn_run(&self, queued: QueuedRun, resolved: Option<ResolvedSubmission>) {
        // A child of `force_stop`: if the service is already leaving, this run is cancelled, too.
        let (shared, cancel) = (Arc::clone(&self.0), self.0.force_stop.child_token());
        let QueuedRun { entry, feed, wait_ends } = queued;
        shared.lock_live().insert(feed.run_id().to_owned(), cancel.clone());
        // A run that begins at once has its place before its client reads the run's state.
        let queued = match resolved {
            Some((wanted, plan)) => Ok(QueueOutcome::Begin(wanted, Some(plan), entry.take_place())),
            None => Err(QueuedRun { entry, feed: feed.clone(), wait_ends }),
        };
        self.0.tasks.spawn_task(async move {
            let outcome = match queued {
                Ok(outcome) => outcome,
                Err(queued) => shared.wait_for_turn(queued, &cancel).await,
            };
            match outcome {
                QueueOutcome::Begin(wanted, plan, place) => {
                    Box::pin(shared.execute_run((&wanted, plan), &feed, cancel, place)).await;
                }
                QueueOutcome::Ended(why) => {
                    let mut bill = shared.usage_recorder(&feed);
                    shared.persist_end(&mut bill, shared.run_end(Err(why), &feed)).await;
                }
                QueueOutcome::Postponed => shared.run_store.detach_watchers(&feed),
            }
            shared.lock_live().remove(feed.run_id());
        });
    }

    /// Ends the queued runs of grants that were revoked or have expired.
    pub(super) async fn deny_revoked_grants(&self) {
        for grant in self.0.queue.waiting_grants() {
            // A grant that cannot be read now is checked again soon, and at its runs' turns.
            let checked = self.0.grants.check_id(&grant).await;
            if let Err(auth::GrantStoreError::Denied(denied)) = checked {
                self.0.queue.deny_grant(&grant, &denied);
            }
        }
    }

    /// Returns the standing of a run. `None` if the run has ended, or is about to end without having begun.
    pub fn queue_standing(&self, run: &str) -> Option<QueueStanding> {
        self.0.queue.standing_of(run)
    }

    /// Returns the figures of the queue and of the places.
    pub fn queue_gauges(&self) -> RunQueueGauges {
        self.0.queue.gauges()
    }

    /// Returns the standings of all runs that wait or have begun.
    pub fn queue_standings(&self) -> HashMap<String, QueueStanding> {
        self.0.queue.standings()
    }
}

impl RunServiceInner {
    /// Waits until a run has a place, and reads the run's submission.
    async fn wait_for_turn(&self, queued: QueuedRun, cancel: &CancellationToken) -> QueueOutcome {
        let QueuedRun { mut entry, feed, wait_ends } = queued;
        loop {
            let turn = tokio::select! {
                // `biased` polls in this order: when the service leaves, both `force_stop` and its child `cancel` are
                // cancelled, and `force_stop` must win.
                biased;
                // `force_stop` cancels every run, but runs that have not begun belong to the next process.
                () = self.force_stop.cancelled() => return QueueOutcome::Postponed,
                () = cancel.cancelled() => return QueueOutcome::Ended(RunFailure::Cancelled),
                () = self.draining.cancelled() => return QueueOutcome::Postponed,
                turn = entry.next_turn() => turn,
                () = sleep_until(wait_ends) => {
                    return QueueOutcome::Ended(RunFailure::QueueTimeout(self.settings.max_queue_wait));
                }
            };
            match turn {
                QueueTurn::Waiting { position } => {
                    let told = json!({"run": feed.run_id(), "position": position});
                    feed.publish(RunEventKind::Queued, &told);
                }
                QueueTurn::Denied(denied) => {
                    return QueueOutcome::Ended(RunFailure::Grant(denied));
                }
                QueueTurn::Begin => break,
            }
        }
        // The grant was valid when the run was accepted; an operator may have revoked the grant while the run waited.
        match self.grants.check_id(entry.grant()).await {
            Ok(()) => (),
            Err(auth::GrantStoreError::Denied(denied)) => {
                return QueueOutcome::Ended(RunFailure::Grant(denied));
            }
            Err(error) => return QueueOutcome::Ended(RunFailure::Internal(error.into())),
        }
        match self.load_submission(feed.run_id()).await {
            Ok(wanted) => QueueOutcome::Begin(wanted, None, entry.take_place()),
            Err(error) => QueueOutcome::Ended(RunFailure::Internal(error)),
        }
    }

    async fn load_submission(&self, run: &str) -> anyhow::Result<Box<RunSubmission>> {
        let stored = self.run_store.submission(run).await?;
        let wanted: RunSubmission = serde_json::from_str(&stored)?;
        let reserved = self.run_store.reserved_money(run).await?;
        Ok(Box::new(wanted.with_reserved_cost(reserved)))
    }
}
