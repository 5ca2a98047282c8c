//! Idle connections, newest first.

use std::convert::Infallible;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// Connections whose last response was read to its end.
#[derive(Debug)]
pub(super) struct UpstreamConnectionPool {
    idle: Mutex<Vec<IdleUpstreamConnection>>,
    idle_timeout: Duration,
    /// Told when there is one again.
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

    /// The connection used last, if it is still open and silent.
    pub(super) fn take_connection(&self) -> Option<TcpStream> {
        let now = Instant::now();
        let mut idle = self.lock_idle();
        while let Some(IdleUpstreamConnection { stream, since }) = idle.pop() {
            // The newest is the last: where its time is over, that of all others is.
            if now - since >= self.idle_timeout {
                idle.clear();
            } else if is_reusable(&stream) {
                return Some(stream);
            }
        }
        None
    }

    pub(super) fn put_connection(&self, stream: TcpStream) {
        let mut idle = self.lock_idle();
        if idle.len() < MAX_IDLE_CONNECTIONS {
            idle.push(IdleUpstreamConnection { stream, since: Instant::now() });
        }
        let is_first = idle.len() == 1;
        drop(idle);
        if is_first {
            self.filled.notify_one();
        }
    }

    /// Closes connections when their time is over, for as long as it is polled. It sleeps until the oldest is due, and for
    /// good while there is none.
    pub(super) async fn close_expired(&self) -> Infallible {
        loop {
            let oldest = self.lock_idle().first().map(|idle| idle.since + self.idle_timeout);
            match oldest {
                None => self.filled.notified().await,
                Some(due) => {
                    sleep_until(due).await;
                    let now = Instant::now();
                    self.lock_idle().retain(|idle| now - idle.since < self.idle_timeout);
                }
            }
        }
    }

    fn lock_idle(&self) -> MutexGuard<'_, Vec<IdleUpstreamConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A readable idle connection was closed by its server, or says what nobody asked for.
fn is_reusable(stream: &TcpStream) -> bool {
    matches!(stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// Per worker; more than this many calls at once is rare enough to pay for a new connection.
const MAX_IDLE_CONNECTIONS: usize = 256;
