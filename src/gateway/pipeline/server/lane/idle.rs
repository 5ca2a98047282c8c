//! Connections that wait for a request. One sweep closes expired connections, so no connection needs
//! its own timer.

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

/// The open connections of one listener.
#[derive(Debug)]
pub(super) struct IdleConnections {
    timeout: Duration,
    /// The time from which `IdleState::since` counts.
    began: Instant,
    connections: Mutex<OpenConnections>,
    /// Notified when the first connection is added.
    filled: Notify,
}

#[derive(Debug, Default)]
struct OpenConnections {
    open: BTreeMap<u64, Arc<IdleState>>,
    next: u64,
}

#[derive(Debug)]
struct IdleState {
    /// The start of the idle time, in milliseconds since `began` plus one. Zero while a call is served.
    since: AtomicU64,
    closing: CancellationToken,
}

/// One open connection of a listener. The drop removes the connection from the sweep.
pub(in crate::gateway::pipeline::server) struct IdleConnection<'a> {
    all: &'a IdleConnections,
    number: u64,
    state: Arc<IdleState>,
    closing: CancelWatch,
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

    /// Adds a connection. The connection must close when the sweep cancels it or when `closing` is
    /// cancelled.
    pub(super) fn track_connection(&self, closing: &CancellationToken) -> IdleConnection<'_> {
        // A child token joins both reasons: the sweep cancels this token only, a shutdown cancels its
        // parent.
        let closing = closing.child_token();
        let watch = CancelWatch::new(closing.clone());
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

    /// Closes expired connections, for as long as the future is polled.
    ///
    /// The future sleeps until the first connection may expire. If there is no connection, the future
    /// calls `release` and sleeps until a connection is added.
    pub(super) async fn close_expired(&self, release: impl Fn()) -> Infallible {
        loop {
            match self.close_due() {
                None => {
                    release();
                    // A connection that was added after `close_due` has left a permit in `filled`, so
                    // this wait ends at once.
                    self.filled.notified().await;
                }
                Some(wait) => sleep(wait).await,
            }
        }
    }

    /// Closes the expired connections. Returns the time until the next check, or `None` if no
    /// connection is open.
    fn close_due(&self) -> Option<Duration> {
        let now = self.elapsed_millis();
        let timeout = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        let connections = self.lock();
        let mut wait = timeout;
        for state in connections.open.values() {
            let since = state.since.load(Ordering::Relaxed);
            // Zero means that a call is being served: such a connection never expires here.
            if since != 0 {
                let left = since.saturating_add(timeout).saturating_sub(now);
                if left == 0 {
                    state.closing.cancel();
                } else {
                    wait = wait.min(left);
                }
            }
        }
        // Connections that became idle one after another must not cause one check each, so a check
        // waits at least an eighth of the timeout.
        let wait = Duration::from_millis(wait.max(timeout / 8).max(1));
        (!connections.open.is_empty()).then_some(wait)
    }

    fn elapsed_millis(&self) -> u64 {
        // `as_millis` divides 128 bits, which takes longer than the two parts.
        let elapsed = self.began.elapsed();
        elapsed.as_secs() * 1000 + u64::from(elapsed.subsec_millis()) + 1
    }

    fn lock(&self) -> MutexGuard<'_, OpenConnections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IdleConnection<'_> {
    /// Waits until `poll` is ready. Returns `None` if the connection must close first.
    pub(in crate::gateway::pipeline::server) async fn wait_unless_closing<T>(
        &self,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Option<T> {
        self.state.since.store(self.all.elapsed_millis(), Ordering::Relaxed);
        // Bytes win over a close: a request that has arrived is still served.
        let ready = poll_fn(|cx| match poll(cx) {
            Poll::Ready(ready) => Poll::Ready(Some(ready)),
            Poll::Pending => self.closing.poll(cx).map(|()| None),
        })
        .await;
        self.state.since.store(0, Ordering::Relaxed);
        ready
    }

    /// Returns true if the connection must end after the current call.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.is_cancelled()
    }
}

impl Drop for IdleConnection<'_> {
    fn drop(&mut self) {
        self.all.lock().open.remove(&self.number);
    }
}
