//! A gate that holds responses until the caller opens the gate: tests order events without a clock.

use std::sync::Arc;

use tokio::sync::{Semaphore, watch};

/// A handle to a gate. All clones open the same gate.
#[derive(Clone, Debug)]
pub struct ResponseGate {
    permits: Arc<Semaphore>,
    waiting: watch::Sender<usize>,
}

impl ResponseGate {
    /// Lets `answers` responses pass: waiting responses first, then later ones.
    pub fn allow_answers(&self, answers: usize) {
        self.permits.add_permits(answers);
    }

    /// Returns the number of responses that wait now.
    pub fn waiting_answers(&self) -> usize {
        *self.waiting.borrow()
    }

    /// Returns when at least `answers` responses wait.
    pub async fn wait_for_waiting(&self, answers: usize) {
        // The call cannot fail: the sender lives in `self`.
        let _ = self.waiting.subscribe().wait_for(|waiting| *waiting >= answers).await;
    }

    /// Waits for one permission to pass, and consumes it.
    pub async fn wait_for_pass(&self) {
        let _place = GateWaitGuard::start_waiting(&self.waiting);
        self.permits.acquire().await.expect("the gate is never closed").forget();
    }
}

impl Default for ResponseGate {
    fn default() -> Self {
        Self { permits: Arc::new(Semaphore::new(0)), waiting: watch::Sender::new(0) }
    }
}

/// A guard that counts one response as waiting until the guard is dropped.
struct GateWaitGuard<'a>(&'a watch::Sender<usize>);

impl<'a> GateWaitGuard<'a> {
    fn start_waiting(waiting: &'a watch::Sender<usize>) -> Self {
        waiting.send_modify(|waiting| *waiting += 1);
        Self(waiting)
    }
}

impl Drop for GateWaitGuard<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|waiting| *waiting -= 1);
    }
}
