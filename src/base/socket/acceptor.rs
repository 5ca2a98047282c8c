//! Accepts connections from a listening socket.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::SocketFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::register_socket;

/// A bound socket that accepts connections within a runtime.
#[derive(Debug)]
pub struct SocketAcceptor(AsyncFd<OwnedFd>);

impl SocketAcceptor {
    /// Registers a listening, non-blocking socket.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be registered with the runtime.
    pub fn new(socket: impl Into<OwnedFd>) -> io::Result<Self> {
        register_socket(socket.into(), Interest::READABLE).map(Self)
    }

    /// Accepts the next connection as a non-blocking socket. After an error, such as no free descriptors, it pauses and
    /// tries again.
    pub async fn accept_socket(&self) -> OwnedFd {
        let accept = |socket: &OwnedFd| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            rustix::net::accept_with(socket, flags).map_err(io::Error::from)
        };
        loop {
            match self.0.async_io(Interest::READABLE, accept).await {
                Ok(stream) => return stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }
}

/// The pause after a failed accept. Our choice: other connections may end in this time, and a client does not notice
/// it.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
