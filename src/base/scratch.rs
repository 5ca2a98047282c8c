//! A read buffer that the connections of one worker share.

use std::io;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use tokio::io::AsyncRead;
use tokio_util::io::poll_read_buf;

/// A buffer that a reader borrows when it has something to read. A connection that waits holds no buffer.
#[derive(Debug, Default)]
pub struct ScratchBuffer(Mutex<BytesMut>);

impl ScratchBuffer {
    /// Reads once, and returns the bytes; none at the end of the stream. The caller must have seen that the reader is
    /// ready.
    ///
    /// # Errors
    /// Returns an error if the reader failed.
    pub fn poll_read_bytes(
        &self,
        reader: &mut (impl AsyncRead + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<BytesMut>> {
        let mut scratch = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The memory is free again when all earlier results are dropped, which is nearly always the case.
        if !scratch.try_reclaim(SCRATCH_BYTES) {
            *scratch = BytesMut::with_capacity(SCRATCH_BYTES);
        }
        ready!(poll_read_buf(Pin::new(reader), cx, &mut *scratch))?;
        Poll::Ready(Ok(scratch.split()))
    }

    /// Frees the buffer until the next read.
    pub fn release_buffer(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = BytesMut::new();
    }
}

/// The size of one read, in bytes. Our choice: a larger buffer was not faster on fast streams.
const SCRATCH_BYTES: usize = 32 * 1024;
