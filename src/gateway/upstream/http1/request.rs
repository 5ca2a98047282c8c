//! The bytes of a request on their way to the upstream.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;
use tokio_util::io::poll_write_buf;

use super::WorkerConnections;
use crate::base::rope::{ByteRope, SplicedBytes};
use crate::gateway::upstream::headers::UpstreamRequestHead;

/// A request that is being sent. A short request is one text in the worker's buffer; a long request is a list of
/// pieces.
#[derive(Debug)]
pub(super) struct RequestBytes {
    text: Vec<u8>,
    /// The number of bytes of `text` that are written.
    written: usize,
    /// True if the kernel has taken a byte.
    is_begun: bool,
    /// Boxed, because few requests are long.
    pieces: Option<Box<ByteRope>>,
}

impl RequestBytes {
    pub(super) fn new(
        worker: &WorkerConnections,
        head: &UpstreamRequestHead,
        body: SplicedBytes,
    ) -> Self {
        let length = body.len();
        // The buffer is taken, not locked: two requests at once get a buffer each, and the lock is never held while a
        // request waits.
        let mut text = worker.take_text();
        head.write_http1(length, &mut text);
        if length <= JOINED_BYTES {
            body.append_to(&mut text);
            return Self { text, written: 0, is_begun: false, pieces: None };
        }
        let mut pieces = ByteRope::from(Bytes::from(text));
        for piece in body.into_rope().into_pieces() {
            pieces.push(piece);
        }
        let pieces = Some(Box::new(pieces));
        Self { text: Vec::new(), written: 0, is_begun: false, pieces }
    }

    /// Returns true if the kernel has taken a byte of the request.
    pub(super) fn is_begun(&self) -> bool {
        self.is_begun
    }

    /// Writes the whole request. Pieces that are written are freed at once.
    pub(super) fn poll_write(
        &mut self,
        stream: &mut TcpStream,
        worker: &WorkerConnections,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while self.written < self.text.len() {
            let unwritten = &self.text[self.written..];
            match ready!(Pin::new(&mut *stream).poll_write(cx, unwritten))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => {
                    self.written += written;
                    self.is_begun = true;
                }
            }
        }
        // The text is written, so the next request can use the buffer while this call waits for its response.
        self.release_text(worker);
        while let Some(pieces) = self.pieces.as_mut().filter(Buf::has_remaining) {
            if ready!(poll_write_buf(Pin::new(&mut *stream), cx, &mut **pieces))? == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.is_begun = true;
        }
        Poll::Ready(Ok(()))
    }

    /// Frees the bytes, written or not.
    pub(super) fn discard(&mut self, worker: &WorkerConnections) {
        self.release_text(worker);
        self.pieces = None;
    }

    /// Gives the text buffer back to the worker, unless the buffer has grown too large.
    fn release_text(&mut self, worker: &WorkerConnections) {
        let mut text = std::mem::take(&mut self.text);
        self.written = 0;
        text.clear();
        // Capacity 0 means that the buffer was given back before or became the first piece.
        if (1..=KEPT_BYTES).contains(&text.capacity()) {
            worker.put_text(text);
        }
    }
}

/// The size up to which a body is copied behind its head, in bytes. Up to this size, a copy is cheaper than a piece of
/// its own in the system call.
const JOINED_BYTES: u64 = 16 * 1024;

/// The largest capacity of the buffer that the worker keeps between two requests, in bytes.
const KEPT_BYTES: usize = 32 * 1024;
