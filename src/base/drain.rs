//! Tasks that end in order: told to finish, waited for, and cut when the time is up.
//!
//! This is the only place that spawns, so nothing can outlive a shutdown unseen.

use std::future::Future;
use std::time::Duration;

use hyper::rt::Executor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A handle to a group of tasks. Clones share the group.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    tasks: TaskTracker,
    closing: CancellationToken,
    cut: CancellationToken,
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Every task ended by itself.
    Graceful,
    /// The grace period was over; what was left has been cut.
    Cut,
}

/// So that hyper's own tasks are waited for, too.
impl<F> Executor<F> for Drain
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.spawn(task);
    }
}

impl Drain {
    /// Runs a task in the background of the current runtime; [`Drain::finish`] waits for it.
    pub fn spawn<F>(&self, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        #[expect(
            clippy::disallowed_methods,
            reason = "the one place that spawns; the tracker waits"
        )]
        tokio::spawn(self.tasks.track_future(task));
    }

    /// Cancelled when no new work should begin.
    pub fn closing(&self) -> &CancellationToken {
        &self.closing
    }

    /// Cancelled when work still open must stop at once.
    pub fn cut(&self) -> &CancellationToken {
        &self.cut
    }

    /// Waits until the group is told to finish and its last task has ended.
    pub async fn ended(&self) {
        self.tasks.wait().await;
    }

    /// Tells every task to finish, waits for `grace`, then cuts what is left and waits for that.
    pub async fn finish(&self, grace: Duration) -> Drained {
        self.closing.cancel();
        self.tasks.close();
        if tokio::time::timeout(grace, self.tasks.wait()).await.is_ok() {
            return Drained::Graceful;
        }
        self.cut.cancel();
        self.tasks.wait().await;
        Drained::Cut
    }
}
