//! Unix sockets: a listener that owns its path, and a stream that wakes only when there is something to read.

mod listener;
mod stream;

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};

use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, ReadBuf};

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

/// Reads once into what is free of a buffer, and says how much.
///
/// Clearing the buffer first, as safe code must, would touch all of it: 8 KiB of memory for each open
/// stream, most of which never see a byte.
#[expect(
    unsafe_code,
    reason = "tokio's buffer takes what is read into uninitialised memory only so"
)]
fn read(socket: &UnixStream, buffer: &mut ReadBuf<'_>) -> io::Result<usize> {
    // SAFETY: the system call only ever writes to the memory that it is given.
    let free = unsafe { buffer.unfilled_mut() };
    let length = rustix::io::read(socket, free)?.0.len();
    // SAFETY: the system call has initialised the first `length` bytes of what is free.
    unsafe { buffer.assume_init(length) };
    buffer.advance(length);
    Ok(length)
}

/// Sockets that own their descriptor.
trait Socket: AsRawFd {}

impl Socket for UnixListener {}
impl Socket for UnixStream {}
