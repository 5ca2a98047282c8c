//! Unix sockets: a listener that owns its path, and a stream that wakes only when there is something to read.

mod listener;
mod stream;

use std::io;
use std::os::fd::AsRawFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

pub use listener::{Acceptor, Error, Listener, Permissions};
pub use stream::Stream;

/// Registers a socket of the standard library with the runtime, for one interest only.
#[expect(
    unsafe_code,
    reason = "tokio offers registration for one interest only as an unsafe function"
)]
fn register<S: Socket>(socket: S, interest: Interest) -> io::Result<AsyncFd<S>> {
    // SAFETY: the types that are `Socket` own their descriptor and name the same one for as long as
    // they live, and `AsyncFd` takes it by value, so the registration cannot outlast it.
    Ok(unsafe { AsyncFd::register_with_interest(socket, interest) }?)
}

/// Sockets that own their descriptor.
trait Socket: AsRawFd {}

impl Socket for std::os::unix::net::UnixListener {}
impl Socket for std::os::unix::net::UnixStream {}
