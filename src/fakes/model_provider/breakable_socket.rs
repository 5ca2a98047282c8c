//! A connection's socket that a script can break in ways in which hyper never breaks one.

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

/// The way in which a connection ends after hyper drops it. The default is a normal close (FIN).
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
    /// Ends the connection with a reset (RST).
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
        // The writes may fail because the peer has disconnected, and such a failure does not matter.
        if self.breaker.garbage.load(Relaxed) {
            // A drop cannot wait, so that this is one write without blocking.
            let _ = self.stream.try_write(b"\x00\xffthis is not HTTP\r\n\r\n");
        }
        // With zero linger the close discards unsent data and sends an RST.
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
