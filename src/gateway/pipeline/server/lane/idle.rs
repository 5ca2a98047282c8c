//! Connections that wait for a request: one sweep closes them when their time is over, in place of a timer each.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::base::cancel_watch::CancelWatch;
use crate::base::time::MAX_TIME;

/// All connections of one listener.
#[derive(Debug)]
pub(super) struct IdleConnections {
    timeout: Duration,
    /// What times are counted from.
    began: Instant,
    connections: Mutex<OpenConnections>,
    /// Told when there is a connection again.
    filled: Notify,
}

#[derive(Debug, Default)]
struct OpenConnections {
    open: BTreeMap<u64, Arc<IdleState>>,
    next: u64,
}

#[derive(Debug)]
struct IdleState {
    /// Milliseconds from the beginning, and one more; zero while the connection is served.
    since: AtomicU64,
    closing: CancellationToken,
}

/// One connection among those of its listener, for as long as it lives.
pub(in crate::gateway::pipeline::server) struct IdleConnection<'a> {
    all: &'a IdleConnections,
    number: u64,
    state: Arc<IdleState>,
    closing: Mutex<CancelWatch>,
}

impl IdleConnections {
    pub(super) fn new(timeout: Duration) -> Self {
        Self {
            timeout: timeout.min(MAX_TIME),
            began: Instant::now(),
            connections: Mutex::default(),
            filled: Notify::new(),
        }
    }

    /// Adds a connection, which is told to close when `closing` is cancelled, too.
    pub(super) fn track_connection(&self, closing: &CancellationToken) -> IdleConnection<'_> {
        let closing = closing.child_token();
        let watch = Mutex::new(CancelWatch::new(closing.clone()));
        let state = Arc::new(IdleState { since: AtomicU64::new(0), closing });
        let mut connections = self.lock();
        let number = connections.next;
        connections.next += 1;
        connections.open.insert(number, Arc::clone(&state));
        if connections.open.len() == 1 {
            self.filled.notify_one();
        }
        IdleConnection { all: self, number, state, closing: watch }
    }

    /// Closes connections when their time is over, for as long as it is polled. It sleeps until the first may be due, and
    /// for good while there is none, after it has called `release`.
    pub(super) async fn close_expired(&self, release: impl Fn()) -> Infallible {
        loop {
            match self.close_due() {
                None => {
                    release();
                    self.filled.notified().await;
                }
                Some(wait) => sleep(wait).await,
            }
        }
    }

    /// Closes what is due, and says when to look again.
    fn close_due(&self) -> Option<Duration> {
        let now = self.elapsed_millis();
        let timeout = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        let connections = self.lock();
        let mut wait = timeout;
        for state in connections.open.values() {
            let since = state.since.load(Ordering::Relaxed);
            if since != 0 {
                let left = since.saturating_add(timeout).saturating_sub(now);
                if left == 0 {
                    state.closing.cancel();
                } else {
                    wait = wait.min(left);
                }
            }
        }
        // A crowd that came one after the other is not looked through once for each.
        let wait = Duration::from_millis(wait.max(timeout / 8).max(1));
        (!connections.open.is_empty()).then_some(wait)
    }

    fn elapsed_millis(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }

    fn lock(&self) -> MutexGuard<'_, OpenConnections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IdleConnection<'_> {
    /// Waits until something is ready; `None` where the connection is to close before.
    pub(in crate::gateway::pipeline::server) async fn wait_unless_closing<T>(
        &self,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Option<T> {
        self.state.since.store(self.all.elapsed_millis(), Ordering::Relaxed);
        let ready = poll_fn(|cx| match poll(cx) {
            Poll::Ready(ready) => Poll::Ready(Some(ready)),
            Poll::Pending => self.closing().poll(cx).map(|()| None),
        })
        .await;
        self.state.since.store(0, Ordering::Relaxed);
        ready
    }

    fn closing(&self) -> MutexGuard<'_, CancelWatch> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the connection ends with what is served on it now.
    pub(super) fn is_closing(&self) -> bool {
        self.state.closing.is_cancelled()
    }
}

impl Drop for IdleConnection<'_> {
    fn drop(&mut self) {
        self.all.lock().open.remove(&self.number);
    }
}
