//! A connection's socket, which a script may break in ways hyper never would.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// A TCP stream that ends as its [`ConnectionBreaker`] says.
pub(super) struct BreakableSocket {
    stream: TcpStream,
    breaker: Arc<ConnectionBreaker>,
}

/// Says how a connection shall end once hyper lets go of it. By itself: with a FIN.
#[derive(Debug, Default)]
pub(super) struct ConnectionBreaker {
    reset: AtomicBool,
    garbage: AtomicBool,
}

impl BreakableSocket {
    pub(super) fn new(stream: TcpStream, breaker: Arc<ConnectionBreaker>) -> Self {
        Self { stream, breaker }
    }
}

impl ConnectionBreaker {
    /// Ends the connection with an RST.
    pub(super) fn break_with_reset(&self) {
        self.reset.store(true, Relaxed);
    }

    /// Ends the connection with bytes that are neither a response head nor a chunk.
    pub(super) fn break_with_garbage(&self) {
        self.garbage.store(true, Relaxed);
    }
}

impl Drop for BreakableSocket {
    fn drop(&mut self) {
        // There is nobody to tell when the peer is gone already.
        if self.breaker.garbage.load(Relaxed) {
            let _ = self.stream.try_write(b"\x00\xffthis is not HTTP\r\n\r\n");
        }
        if self.breaker.reset.load(Relaxed) {
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for BreakableSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for BreakableSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
