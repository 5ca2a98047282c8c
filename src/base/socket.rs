//! Connected and listening sockets of any kind. Each is registered with the runtime only for the events that a task
//! waits for.

mod acceptor;
mod hangup_watch;
mod stream;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::net::RecvFlags;
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, ReadBuf};

pub use acceptor::SocketAcceptor;
pub use hangup_watch::HangupWatch;
pub use stream::ServerStream;

/// A value that keeps a descriptor open for as long as it lives.
trait SocketOwner: AsRawFd {}

impl SocketOwner for OwnedFd {}

impl SocketOwner for Arc<OwnedFd> {}

/// Registers a socket with the runtime for one interest.
#[expect(
    unsafe_code,
    reason = "tokio offers registration for one interest only as an unsafe function"
)]
fn register_socket<T: SocketOwner>(socket: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: an `OwnedFd` names the same descriptor for as long as it lives, and `AsyncFd` takes it or a share of it by
    // value, so the registration cannot outlast it.
    Ok(unsafe { AsyncFd::register_with_interest(socket, interest) }?)
}

/// Reads once into the free part of a buffer, and returns the number of bytes.
///
/// Safe code would have to clear the buffer first, and so touch all of it: 8 KiB of memory for each open stream, most
/// of which never see a byte.
#[expect(
    unsafe_code,
    reason = "tokio's buffer takes what is read into uninitialised memory only so"
)]
fn read_socket(socket: &OwnedFd, buffer: &mut ReadBuf<'_>) -> io::Result<usize> {
    // SAFETY: the system call only ever writes to the memory that it is given.
    let free = unsafe { buffer.unfilled_mut() };
    // `recv` costs less than `read`, which goes through the layer of files.
    let length = rustix::net::recv(socket, free, RecvFlags::empty())?.0.0.len();
    // SAFETY: the system call has initialised the first `length` bytes of the free part.
    unsafe { buffer.assume_init(length) };
    buffer.advance(length);
    Ok(length)
}
