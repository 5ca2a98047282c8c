//! Idle connections, newest first.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::Instant;

/// Connections whose last response was read to its end.
#[derive(Debug)]
pub(super) struct Pool {
    idle: Mutex<Vec<Idle>>,
    idle_timeout: Duration,
}

#[derive(Debug)]
struct Idle {
    stream: TcpStream,
    since: Instant,
}

impl Pool {
    pub(super) fn new(idle_timeout: Duration) -> Self {
        Self { idle: Mutex::default(), idle_timeout }
    }

    /// The connection used last, if it is still open and silent.
    pub(super) fn take(&self) -> Option<TcpStream> {
        let now = Instant::now();
        let mut idle = self.idle();
        idle.retain(|idle| now - idle.since < self.idle_timeout);
        while let Some(Idle { stream, .. }) = idle.pop() {
            if is_open_and_silent(&stream) {
                return Some(stream);
            }
        }
        None
    }

    pub(super) fn put(&self, stream: TcpStream) {
        let mut idle = self.idle();
        if idle.len() < MAX_IDLE {
            idle.push(Idle { stream, since: Instant::now() });
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A readable idle connection was closed by its server, or says what nobody asked for.
fn is_open_and_silent(stream: &TcpStream) -> bool {
    matches!(stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// Per worker; more than this many calls at once is rare enough to pay for a new connection.
const MAX_IDLE: usize = 256;
