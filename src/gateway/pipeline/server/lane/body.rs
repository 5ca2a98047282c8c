//! The body of a request in the lane: a known number of bytes behind the head.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use super::LaneServer;
use crate::base::socket::ServerStream;

/// A body that is read from its connection as the pipeline polls for it.
pub(super) struct LaneBody<'a> {
    lane: &'a LaneServer,
    stream: &'a ServerStream,
    /// Bytes that were read from the socket: a part of the body, and bytes of the next request.
    received: Bytes,
    /// The bytes of the body that the pipeline has not polled yet.
    left: u64,
}

impl<'a> LaneBody<'a> {
    pub(super) fn new(
        lane: &'a LaneServer,
        stream: &'a ServerStream,
        received: Bytes,
        length: u64,
    ) -> Self {
        Self { lane, stream, received, left: length }
    }

    /// Returns the whole body, if all of it has been read from the socket.
    ///
    /// The result is a part of the read buffer that the listener's connections share. A call must release
    /// that buffer before the call waits ([`SplicedBytes::release_read_buffer`]).
    ///
    /// [`SplicedBytes::release_read_buffer`]: crate::base::rope::SplicedBytes::release_read_buffer
    pub(super) fn take_whole(&mut self) -> Option<Bytes> {
        let length = usize::try_from(self.left).ok()?;
        if self.received.len() < length {
            return None;
        }
        self.left = 0;
        Some(self.received.split_to(length))
    }

    /// Returns the bytes that were read and not polled, and the number of bytes that remain of the
    /// body.
    pub(super) fn into_parts(self) -> (Bytes, u64) {
        (self.received, self.left)
    }
}

impl Body for LaneBody<'_> {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let body = self.get_mut();
        if body.left == 0 {
            return Poll::Ready(None);
        }
        if body.received.is_empty() {
            body.received = ready!(body.lane.poll_receive(body.stream, cx))?;
        }
        // An empty read is the end of the stream: the client left in the middle of the body.
        if body.received.is_empty() {
            return Poll::Ready(Some(Err(io::ErrorKind::UnexpectedEof.into())));
        }
        // A read may contain the beginning of the next request; that part stays in `received`.
        let length = body.received.len().min(usize::try_from(body.left).unwrap_or(usize::MAX));
        let data = body.received.split_to(length);
        body.left -= length as u64;
        // A small body must not keep the worker's whole read buffer in use.
        let data = if length < COPY_BELOW_BYTES { Bytes::copy_from_slice(&data) } else { data };
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// The largest piece, in bytes, that is copied: half of the size of one read.
const COPY_BELOW_BYTES: usize = 16 * 1024;
