//! A connected socket for servers that mostly write small pieces.
//!
//! The socket is registered for reading only. If it were registered for both, every piece that the peer reads would
//! raise a "writable" edge and wake the task for nothing: 3.9 system calls per piece became 3.1. Interest in writing is
//! registered only while a write is blocked.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::time::Sleep;

use super::{HangupWatch, read_socket, register_socket};

/// A stream whose writes fail when the peer reads nothing for too long.
pub struct ServerStream {
    socket: AsyncFd<Arc<OwnedFd>>,
    /// The wait for a peer that is slow to read, or to close.
    waiting: Option<Box<PeerWait>>,
    stall_timeout: Duration,
    /// Bytes that were read from the socket, and that the next reads return first.
    unread: Bytes,
    /// The number of bytes that the owner has read since its last write, or, if it has not read since, those that it had
    /// read up to that write.
    last_read: u32,
    /// True if the owner has written since its last read.
    has_written: bool,
}

/// The wait for the peer, which ends at a deadline.
enum PeerWait {
    /// A blocked write waits for room in the socket, which is registered once more for this.
    Read { writable: AsyncFd<OwnedFd>, deadline: Pin<Box<Sleep>> },
    /// An ended stream waits until the peer has closed.
    Close { deadline: Pin<Box<Sleep>> },
}

impl ServerStream {
    /// Registers an accepted, non-blocking socket. A write that is blocked for `stall_timeout` fails.
    ///
    /// The caller must be inside a runtime, which will drive the socket.
    pub fn new(socket: OwnedFd, stall_timeout: Duration) -> io::Result<Self> {
        let socket = register_socket(Arc::new(socket), Interest::READABLE)?;
        Ok(Self {
            socket,
            waiting: None,
            stall_timeout,
            unread: Bytes::new(),
            last_read: 0,
            has_written: false,
        })
    }

    /// Returns bytes to the stream that were read from it. The next reads of the owned stream return them first.
    #[must_use]
    pub fn with_unread(self, bytes: Bytes) -> Self {
        Self { unread: bytes, ..self }
    }

    /// Returns a watch on the connection's end, which also works while the stream is not read.
    pub fn watch_hangup(&self) -> HangupWatch {
        HangupWatch(Arc::clone(self.socket.get_ref()))
    }

    /// Returns ready when a read is worth an attempt: there are bytes, or the peer has closed.
    ///
    /// # Errors
    /// Returns an error if the runtime is shutting down.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.poll_read_ready(cx).map_ok(drop)
    }

    /// Reads once from the socket, as soon as it has bytes or the peer has closed.
    fn poll_receive_into(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.socket.poll_read_ready(cx))?;
            let wanted = buffer.remaining();
            match read_socket(self.socket.get_ref(), buffer) {
                Ok(length) => {
                    // A short read has emptied the socket. Another read would only return `WouldBlock`.
                    if length > 0 && length < wanted {
                        guard.clear_ready();
                    }
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => guard.clear_ready(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    /// Returns ready with true when the peer has sent bytes, which stay unread, and with false when the peer has
    /// closed.
    pub fn poll_peer_spoke(&self, cx: &mut Context<'_>) -> Poll<bool> {
        loop {
            let Ok(mut guard) = ready!(self.socket.poll_read_ready(cx)) else {
                return Poll::Ready(false);
            };
            match rustix::net::recv(self.socket.get_ref(), &mut [0; 1], RecvFlags::PEEK) {
                Ok((length, _)) => return Poll::Ready(length > 0),
                Err(rustix::io::Errno::AGAIN) => guard.clear_ready(),
                Err(rustix::io::Errno::INTR) => {}
                Err(_broken) => return Poll::Ready(false),
            }
        }
    }

    /// Returns true if the peer opens with HTTP/2 prior knowledge; waits until that is certain.
    ///
    /// The function waits for the whole preface, because hyper would wait for the rest without a time limit.
    ///
    /// # Errors
    /// Returns an error if the socket failed. A peer that closes first is found later, by the reader.
    pub async fn peek_http2_preface(&self) -> io::Result<bool> {
        let mut first = [0; HTTP2_PREFACE.len()];
        loop {
            let mut guard = self.socket.readable().await?;
            let peek = |socket: &AsyncFd<Arc<OwnedFd>>| {
                Ok(rustix::net::recv(socket.get_ref(), &mut first, RecvFlags::PEEK)?.0)
            };
            match guard.try_io(peek) {
                Ok(Ok(length)) if length == HTTP2_PREFACE.len() => {
                    return Ok(first == *HTTP2_PREFACE);
                }
                Ok(Ok(length)) if length == 0 || !HTTP2_PREFACE.starts_with(&first[..length]) => {
                    return Ok(false);
                }
                Ok(Ok(_too_short_to_tell)) => guard.clear_ready(),
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
    }

    /// Returns what [`poll_peer_spoke`](Self::poll_peer_spoke) finds, if the runtime knows of an event, and `None`
    /// otherwise. Registers no task.
    pub fn try_peer_spoke(&self) -> Option<bool> {
        let peek = |socket: &Arc<OwnedFd>| {
            Ok(rustix::net::recv(socket, &mut [0; 1], RecvFlags::PEEK)?.0 > 0)
        };
        match self.socket.try_io(Interest::READABLE, peek) {
            Err(error) if is_retried(&error) => None,
            spoke => Some(spoke.unwrap_or(false)),
        }
    }

    /// Writes once with `write`, as soon as the socket has room. Fails if the peer has stalled.
    fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        write: impl Fn(&OwnedFd) -> rustix::io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match write(self.socket.get_ref()).map_err(io::Error::from) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(self.poll_unblocked(cx))?;
                }
                done => {
                    self.waiting = None;
                    self.has_written = true;
                    return Poll::Ready(done);
                }
            }
        }
    }

    /// Counts what the owner has read since its last write, or before it.
    fn count_read(&mut self, length: usize) {
        let before = if std::mem::take(&mut self.has_written) { 0 } else { self.last_read };
        self.last_read = before.saturating_add(u32::try_from(length).unwrap_or(u32::MAX));
    }

    /// Discards what the peer sends until the peer closes, or the deadline is over.
    fn poll_discard(&self, cx: &mut Context<'_>, deadline: &mut Pin<Box<Sleep>>) -> Poll<()> {
        let mut nowhere = [MaybeUninit::uninit(); 4096];
        while deadline.as_mut().poll(cx).is_pending() {
            let mut buffer = ReadBuf::uninit(&mut nowhere);
            if ready!(self.poll_receive_into(cx, &mut buffer)).is_err()
                || buffer.filled().is_empty()
            {
                break;
            }
        }
        Poll::Ready(())
    }

    /// Returns ready when a write is worth another attempt, or with an error when the peer has stalled.
    fn poll_unblocked(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(PeerWait::Read { writable, deadline }) = self.waiting.as_deref_mut() else {
            let socket = self.socket.get_ref().try_clone()?;
            let writable = register_socket(socket, Interest::WRITABLE)?;
            let deadline = Box::pin(tokio::time::sleep(self.stall_timeout));
            self.waiting = Some(Box::new(PeerWait::Read { writable, deadline }));
            return self.poll_unblocked(cx);
        };
        // The readiness is cleared: the caller writes again, and a full socket must wait for a new event.
        if let Poll::Ready(guard) = writable.poll_write_ready(cx) {
            guard?.clear_ready();
            return Poll::Ready(Ok(()));
        }
        ready!(deadline.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer reads nothing")))
    }
}

/// Reads from the socket only, and leaves out the bytes of [`ServerStream::with_unread`].
impl AsyncRead for &ServerStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_receive_into(cx, buf)
    }
}

impl AsyncRead for ServerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.unread.is_empty() {
            let before = buf.filled().len();
            ready!(self.poll_receive_into(cx, buf))?;
            self.count_read(buf.filled().len() - before);
            return Poll::Ready(Ok(()));
        }
        let length = self.unread.len().min(buf.remaining());
        buf.put_slice(&self.unread.split_to(length));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ServerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        // `send` costs less than `write`, which goes through the layer of files.
        self.poll_write_with(cx, |socket| rustix::net::send(socket, buf, SendFlags::NOSIGNAL))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |socket| rustix::io::writev(socket, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Ends the writing side. After a large request the stream also waits until the peer has closed.
    ///
    /// A client may write once more after its last byte: Node.js 18 ends a body that did not fit into the socket's
    /// buffer with an empty write. If this side were closed by then, the client would report a broken pipe instead of
    /// the answer that it has read.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let waiting = self.waiting.take().map(|waiting| *waiting);
        let mut deadline = if let Some(PeerWait::Close { deadline }) = waiting {
            deadline
        } else {
            rustix::net::shutdown(self.socket.get_ref(), Shutdown::Write)?;
            if self.last_read < LARGE_REQUEST_BYTES {
                return Poll::Ready(Ok(()));
            }
            Box::pin(tokio::time::sleep(MAX_LINGER))
        };
        let closed = self.poll_discard(cx, &mut deadline);
        if closed.is_pending() {
            self.waiting = Some(Box::new(PeerWait::Close { deadline }));
        }
        closed.map(Ok)
    }
}

fn is_retried(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// The least size of a request whose client may still write. Smaller requests fit into the buffer of any socket.
const LARGE_REQUEST_BYTES: u32 = 64 * 1024;

/// The longest wait for a peer to close. Our choice: local clients close at once.
const MAX_LINGER: Duration = Duration::from_secs(1);

/// The first bytes of a connection with HTTP/2 prior knowledge (RFC 9113, section 3.4).
const HTTP2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
