//! Unix sockets: a listener that owns its path, and who is at the other end of a connection.

mod listener;
mod peer;

pub use listener::{Error, Listener, MAX_PATH_BYTES, Permissions};
pub use peer::Peer;
