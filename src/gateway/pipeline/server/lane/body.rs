//! The body of a request in the lane: so many bytes behind its head.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use super::LaneServer;
use crate::base::socket::ServerStream;

/// A body that is read from its connection as it is asked for.
pub(super) struct LaneBody<'a> {
    lane: &'a LaneServer,
    stream: &'a ServerStream,
    /// Read from the socket: some of the body, and what comes behind.
    received: Bytes,
    /// Bytes of the body that were not asked for yet.
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

    /// What was read and not asked for, and how many bytes of the body are left.
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
        if body.received.is_empty() {
            return Poll::Ready(Some(Err(io::ErrorKind::UnexpectedEof.into())));
        }
        let length = body.received.len().min(usize::try_from(body.left).unwrap_or(usize::MAX));
        let data = body.received.split_to(length);
        body.left -= length as u64;
        // A small body must not hold the whole buffer of the worker.
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

/// Half of what one read brings.
const COPY_BELOW_BYTES: usize = 16 * 1024;
