//! Where answers wait until somebody lets them go on: order by events, never by the clock.

use std::sync::Arc;

use tokio::sync::{Semaphore, watch};

/// A handle to a gate. Clones are the same gate.
#[derive(Clone, Debug)]
pub struct Gate {
    passes: Arc<Semaphore>,
    waiting: watch::Sender<usize>,
}

impl Gate {
    /// Lets so many answers pass: those that wait, then those that come.
    pub fn open(&self, answers: usize) {
        self.passes.add_permits(answers);
    }

    /// Answers that wait now.
    pub fn waiting(&self) -> usize {
        *self.waiting.borrow()
    }

    /// Returns when at least so many answers wait.
    pub async fn reached(&self, answers: usize) {
        // It fails when the sender is gone, and `self` holds it.
        let _ = self.waiting.subscribe().wait_for(|waiting| *waiting >= answers).await;
    }

    /// Waits for a pass and uses it up.
    pub async fn pass(&self) {
        let _place = Place::take(&self.waiting);
        self.passes.acquire().await.expect("the gate is never closed").forget();
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self { passes: Arc::new(Semaphore::new(0)), waiting: watch::Sender::new(0) }
    }
}

/// Counts as waiting until it is dropped.
struct Place<'a>(&'a watch::Sender<usize>);

impl<'a> Place<'a> {
    fn take(waiting: &'a watch::Sender<usize>) -> Self {
        waiting.send_modify(|waiting| *waiting += 1);
        Self(waiting)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|waiting| *waiting -= 1);
    }
}
