//! Tasks that end in order: told to finish, waited for, and cut when the time is up.
//!
//! This is the only place that spawns, so nothing can outlive a shutdown unseen.

use std::future::Future;
use std::time::Duration;

use hyper::rt::Executor;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// A handle to a group of tasks. Clones share the group.
#[derive(Clone, Debug, Default)]
pub struct TaskGroup {
    tasks: TaskTracker,
    /// The tasks of the group that this one is a part of.
    all: Option<TaskTracker>,
    closing: CancellationToken,
    cut: CancellationToken,
}

/// The end of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownOutcome {
    /// Every task ended by itself.
    Graceful,
    /// The grace period was over; what was left has been cut.
    Aborted,
}

/// So that hyper's own tasks are waited for, too.
impl<F> Executor<F> for TaskGroup
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.spawn_task(task);
    }
}

impl TaskGroup {
    /// A group within this one: it finishes when this one does, or before and by itself.
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

    /// Counts work within a task of another group like a task of this one, until the token is dropped;
    /// `None` where no new work should begin.
    pub fn track_work(&self) -> Option<TaskTrackerToken> {
        // Counted first: who finishes the group after this has looked will wait for it.
        let token = self.tasks.token();
        (!self.closing.is_cancelled()).then_some(token)
    }

    /// Cancelled when no new work should begin.
    pub fn shutdown_token(&self) -> &CancellationToken {
        &self.closing
    }

    /// Cancelled when work still open must stop at once.
    pub fn abort_token(&self) -> &CancellationToken {
        &self.cut
    }

    /// Waits until the group is told to finish and its last task has ended.
    pub async fn wait_ended(&self) {
        self.tasks.wait().await;
    }

    /// Tells every task to finish, waits for `grace`, then cuts what is left and waits for that.
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
