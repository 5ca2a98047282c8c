//! Notices that a peer has left while nothing is read from it.

use std::future::pending;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::io::Interest;

use super::register_socket;

/// A watch on the end of a connection. A server that reads a request no further, because its bytes cannot go on, does not
/// see that the client has left.
#[derive(Clone, Debug)]
pub struct HangupWatch(pub(super) Arc<OwnedFd>);

impl HangupWatch {
    /// Waits until the peer has closed the connection, or its half of it. Bytes of the peer that were not read do not matter.
    pub async fn wait_hangup(self) {
        // The runtime takes a descriptor once only, and the server's own one is taken.
        let watched = self.0.try_clone().and_then(|own| register_socket(own, Interest::READABLE));
        let Ok(watched) = watched else { return pending().await };
        loop {
            let Ok(mut guard) = watched.readable().await else { return pending().await };
            if guard.ready().is_read_closed() {
                return;
            }
            // The end is an event of its own, also behind bytes that stay unread.
            guard.clear_ready();
        }
    }
}
