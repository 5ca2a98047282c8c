//! Connected and listening sockets of any kind, registered for what is waited for and for no more.

mod acceptor;
mod stream;

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, ReadBuf};

pub use acceptor::SocketAcceptor;
pub use stream::ServerStream;

/// Registers a socket with the runtime, for one interest only.
#[expect(
    unsafe_code,
    reason = "tokio offers registration for one interest only as an unsafe function"
)]
fn register_socket(socket: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names the same descriptor for as long as it lives, and `AsyncFd` takes it by
    // value, so the registration cannot outlast it.
    Ok(unsafe { AsyncFd::register_with_interest(socket, interest) }?)
}

/// Reads once into what is free of a buffer, and says how much.
///
/// Clearing the buffer first, as safe code must, would touch all of it: 8 KiB of memory for each open
/// stream, most of which never see a byte.
#[expect(
    unsafe_code,
    reason = "tokio's buffer takes what is read into uninitialised memory only so"
)]
fn read_socket(socket: &OwnedFd, buffer: &mut ReadBuf<'_>) -> io::Result<usize> {
    // SAFETY: the system call only ever writes to the memory that it is given.
    let free = unsafe { buffer.unfilled_mut() };
    let length = rustix::io::read(socket, free)?.0.len();
    // SAFETY: the system call has initialised the first `length` bytes of what is free.
    unsafe { buffer.assume_init(length) };
    buffer.advance(length);
    Ok(length)
}
