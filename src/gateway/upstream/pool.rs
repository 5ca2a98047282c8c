//! The idle connections of one worker, newest first.

use std::convert::Infallible;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// A pool of connections whose last response was read completely.
#[derive(Debug)]
pub(super) struct UpstreamConnectionPool {
    idle: Mutex<Vec<IdleUpstreamConnection>>,
    idle_timeout: Duration,
    /// Notified when the pool gets its first connection.
    filled: Notify,
}

#[derive(Debug)]
struct IdleUpstreamConnection {
    stream: TcpStream,
    since: Instant,
}

impl UpstreamConnectionPool {
    pub(super) fn new(idle_timeout: Duration) -> Self {
        Self { idle: Mutex::default(), idle_timeout, filled: Notify::new() }
    }

    /// Returns the connection that was used last and is still open and silent.
    pub(super) fn take_connection(&self, now: Instant) -> Option<TcpStream> {
        let mut idle = self.lock_idle();
        while let Some(IdleUpstreamConnection { stream, since }) = idle.pop() {
            // The connection that was given back last is popped first. One that is too old or dead is closed here.
            if now.saturating_duration_since(since) < self.idle_timeout && is_reusable(&stream) {
                return Some(stream);
            }
        }
        None
    }

    /// Adds a connection that was used last at `since`.
    pub(super) fn put_connection(&self, stream: TcpStream, since: Instant) {
        let mut idle = self.lock_idle();
        // A full pool closes the connection: `stream` is dropped at the end of this function.
        if idle.len() < MAX_IDLE_CONNECTIONS {
            idle.push(IdleUpstreamConnection { stream, since });
        }
        let is_first = idle.len() == 1;
        // The lock is released before the waiting task is woken, so the task does not run into it.
        drop(idle);
        if is_first {
            self.filled.notify_one();
        }
    }

    /// Closes expired connections, as long as the caller polls this future. The future sleeps until the oldest
    /// connection expires. While the pool is empty, the future sleeps until a connection arrives.
    pub(super) async fn close_expired(&self) -> Infallible {
        loop {
            // The lock is held for this line only, never across an await.
            let oldest = self.lock_idle().iter().map(|idle| idle.since + self.idle_timeout).min();
            match oldest {
                // `notify_one` stores a permit, so a connection that arrives between the look and the wait is not
                // missed.
                None => self.filled.notified().await,
                Some(due) => {
                    sleep_until(due).await;
                    let now = Instant::now();
                    // The calls may have taken the oldest connection, so each one is checked again.
                    self.lock_idle().retain(|idle| {
                        now.saturating_duration_since(idle.since) < self.idle_timeout
                    });
                }
            }
        }
    }

    fn lock_idle(&self) -> MutexGuard<'_, Vec<IdleUpstreamConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns true if an idle connection is still open and silent. A connection that can be read was closed by its server,
/// or holds bytes that no request asked for.
fn is_reusable(stream: &TcpStream) -> bool {
    matches!(stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// The largest number of idle connections per worker. More calls at once are so rare that a new connection is
/// affordable.
const MAX_IDLE_CONNECTIONS: usize = 256;
