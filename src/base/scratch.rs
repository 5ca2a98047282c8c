//! A read buffer that the connections of one worker share.

use std::io;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use tokio::io::AsyncRead;
use tokio_util::io::poll_read_buf;

/// A buffer that a reader borrows once it has something to read: a connection that waits holds none.
#[derive(Debug, Default)]
pub struct ScratchBuffer(Mutex<BytesMut>);

impl ScratchBuffer {
    /// Reads once, and returns what was read; nothing at the end. The caller has seen that the reader is ready.
    ///
    /// # Errors
    /// Returns an error if the reader failed.
    pub fn poll_read_bytes(
        &self,
        reader: &mut (impl AsyncRead + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<BytesMut>> {
        let mut scratch = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Free again as soon as what was cut from it is dropped, which is nearly always.
        if !scratch.try_reclaim(SCRATCH_BYTES) {
            *scratch = BytesMut::with_capacity(SCRATCH_BYTES);
        }
        ready!(poll_read_buf(Pin::new(reader), cx, &mut *scratch))?;
        Poll::Ready(Ok(scratch.split()))
    }

    /// Gives the buffer back, until there is something to read again.
    pub fn release_buffer(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = BytesMut::new();
    }
}

/// One read's worth; a larger buffer gained nothing on fast streams.
const SCRATCH_BYTES: usize = 32 * 1024;
