//! Unix sockets: a listener that owns its path, and the process at the other end of a connection.

mod listener;
mod peer;

pub use listener::{MAX_PATH_BYTES, SocketPermissions, UnixListenerError, UnixListenerGuard};
pub use peer::PeerCredentials;
