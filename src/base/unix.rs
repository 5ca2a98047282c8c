//! Unix sockets: a listener that owns its path, and a stream that wakes only when there is something to read.

mod listener;
mod stream;

pub use listener::{Error, Listener, Permissions};
pub use stream::Stream;
