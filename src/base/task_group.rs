//! Groups of tasks that end in order: each task is told to finish, waited for, and aborted after the grace period.
//!
//! This module alone spawns tasks, so no task can outlive a shutdown unseen.

use std::future::Future;
use std::time::Duration;

use hyper::rt::Executor;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// A handle to a group of tasks. All clones belong to the same group.
#[derive(Clone, Debug, Default)]
pub struct TaskGroup {
    tasks: TaskTracker,
    /// The tasks of the parent group; `None` for a group without a parent.
    all: Option<TaskTracker>,
    closing: CancellationToken,
    cut: CancellationToken,
}

/// The result of a shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownOutcome {
    /// Every task ended by itself.
    Graceful,
    /// The grace period ended, and the remaining tasks were aborted.
    Aborted,
}

/// Runs hyper's own tasks in the group, so that a shutdown waits for them, too.
impl<F> Executor<F> for TaskGroup
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.spawn_task(task);
    }
}

impl TaskGroup {
    /// Creates a group within this group. The shutdown of this group also shuts the new group down; the new group can
    /// be shut down earlier by itself.
    #[must_use]
    pub fn child_group(&self) -> Self {
        Self {
            tasks: TaskTracker::new(),
            all: Some(self.all.as_ref().unwrap_or(&self.tasks).clone()),
            closing: self.closing.child_token(),
            cut: self.cut.child_token(),
        }
    }

    /// Runs a task in the background of the current runtime; [`TaskGroup::shut_down`] waits for it.
    pub fn spawn_task<F>(&self, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let task = self.tasks.track_future(task);
        match &self.all {
            Some(all) => spawn_in_span(all.track_future(task)),
            None => spawn_in_span(task),
        }
    }

    /// Runs the task to its end, even if the caller stops waiting. The result is dropped in that case.
    ///
    /// # Panics
    /// Panics if the task panicked.
    pub async fn run_detached<F>(&self, task: F) -> F::Output
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let (done, outcome) = oneshot::channel();
        self.spawn_task(async move {
            let _ = done.send(task.await);
        });
        outcome.await.expect("the task sends what it comes to")
    }

    /// Counts work within a task of another group like a task of this group, until the token is dropped. Returns `None`
    /// if no new work should begin.
    pub fn track_work(&self) -> Option<TaskTrackerToken> {
        // The work is counted before the check: a shutdown that begins after the check waits for it.
        let token = self.tasks.token();
        (!self.closing.is_cancelled()).then_some(token)
    }

    /// Returns the token that is cancelled when no new work should begin.
    pub fn shutdown_token(&self) -> &CancellationToken {
        &self.closing
    }

    /// Returns the token that is cancelled when open work must stop at once.
    pub fn abort_token(&self) -> &CancellationToken {
        &self.cut
    }

    /// Waits until the group's shutdown has begun and its last task has ended.
    pub async fn wait_ended(&self) {
        self.tasks.wait().await;
    }

    /// Tells every task to finish, waits for `grace`, then aborts the remaining tasks and waits for their end.
    pub async fn shut_down(&self, grace: Duration) -> ShutdownOutcome {
        self.closing.cancel();
        self.tasks.close();
        if tokio::time::timeout(grace, self.tasks.wait()).await.is_ok() {
            return ShutdownOutcome::Graceful;
        }
        self.cut.cancel();
        self.tasks.wait().await;
        ShutdownOutcome::Aborted
    }
}

fn spawn_in_span<F>(task: F)
where
    F: Future<Output = ()> + Send + 'static,
{
    #[expect(clippy::disallowed_methods, reason = "the one place that spawns; a tracker waits")]
    tokio::spawn(task);
}
