//! The body of a response, decoded as the body arrives.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::body::SizeHint;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::super::chunked::ChunkedDecoder;
use super::head::{BodyFraming, ResponseHead};
use super::{UpstreamError, WorkerConnections, min_deadline};
use crate::base::alarm::Alarm;
use crate::base::time::MAX_TIME;

/// A body and its connection. A body that is dropped before its end closes the connection, which cancels the call.
pub struct Http1Body {
    stream: Option<TcpStream>,
    progress: BodyProgress,
    /// Bytes that were read from the socket and are not decoded yet.
    rest: BytesMut,
    timing: BodyTimeouts,
    last_read: Instant,
    alarm: Alarm,
    worker: Arc<WorkerConnections>,
    reusable: bool,
}

/// The longest silence of a body, and the instant at which the body must be complete.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodyTimeouts {
    pub(super) idle: Duration,
    pub(super) deadline: Option<Instant>,
}

#[derive(Debug)]
enum BodyProgress {
    Length(u64),
    Chunked(ChunkedDecoder),
    UntilClose,
    Complete,
}

impl Http1Body {
    pub(super) fn new(
        (stream, rest): (TcpStream, BytesMut),
        head: &ResponseHead,
        timing: BodyTimeouts,
        alarm: Alarm,
        worker: Arc<WorkerConnections>,
    ) -> Self {
        let progress = match head.framing {
            BodyFraming::Length(0) => BodyProgress::Complete,
            BodyFraming::Length(length) => BodyProgress::Length(length),
            BodyFraming::Chunked => BodyProgress::Chunked(ChunkedDecoder::default()),
            BodyFraming::UntilClose => BodyProgress::UntilClose,
        };
        let (last_read, reusable) = (Instant::now(), head.keeps_alive);
        let stream = Some(stream);
        let mut body = Self { stream, progress, rest, timing, last_read, alarm, worker, reusable };
        // A body of length 0 needs no read, so its connection goes back to the pool at once.
        if body.is_end_stream() {
            body.finish_body();
        }
        body
    }

    pub(in super::super) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        // Each round: 1. decode bytes that are there, 2. stop at the end, 3. read, 4. if no data came, check the
        // timeouts.
        loop {
            if !self.rest.is_empty() {
                match self.decode_payload() {
                    // The bytes were framing only. An empty frame is no progress for the reader, so the loop goes on.
                    Ok(payload) if payload.is_empty() => {}
                    frame => return Poll::Ready(Some(frame)),
                }
            }
            let Some(stream) =
                self.stream.as_mut().filter(|_| !matches!(self.progress, BodyProgress::Complete))
            else {
                return Poll::Ready(None);
            };
            match self.worker.poll_read(&mut stream.split().0, cx) {
                Poll::Ready(Ok(read)) if read.is_empty() => {
                    return Poll::Ready(self.handle_eof().transpose());
                }
                Poll::Ready(Ok(read)) => {
                    // The bytes are decoded in the next round. Any byte counts as a sign of life, framing included.
                    self.rest = read;
                    self.last_read = Instant::now();
                }
                Poll::Ready(Err(error)) => {
                    return Poll::Ready(Some(Err(self.fail_body(UpstreamError::Io(error)))));
                }
                Poll::Pending => {
                    // Polling the alarm registers this task's waker with the timer, as the read above did with the
                    // socket.
                    let error = ready!(self.poll_timeout(cx));
                    return Poll::Ready(Some(Err(self.fail_body(error))));
                }
            }
        }
    }

    pub(in super::super) fn is_end_stream(&self) -> bool {
        matches!(self.progress, BodyProgress::Complete) && self.rest.is_empty()
    }

    pub(in super::super) fn size_hint(&self) -> SizeHint {
        match self.progress {
            BodyProgress::Length(length) => SizeHint::with_exact(length),
            BodyProgress::Complete => SizeHint::with_exact(0),
            BodyProgress::Chunked(_) | BodyProgress::UntilClose => SizeHint::default(),
        }
    }

    /// Decodes the bytes of the last read and returns their payload as one slice.
    fn decode_payload(&mut self) -> Result<Bytes, UpstreamError> {
        let mut read = std::mem::take(&mut self.rest);
        let (payload, complete) = match &mut self.progress {
            BodyProgress::Chunked(decoder) => {
                let result = decoder.decode_buffer(&mut read);
                let chunks = result.map_err(|why| self.fail_body(UpstreamError::Malformed(why)))?;
                // Bytes behind the end belong to no request. A connection with such bytes is not used again.
                self.reusable &= chunks.consumed == read.len();
                (chunks.payload, chunks.complete)
            }
            BodyProgress::Length(left) => {
                let payload = read.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                self.reusable &= payload == read.len();
                *left -= payload as u64;
                (payload, *left == 0)
            }
            // The server ends such a body by closing, so the connection cannot be used again in any case.
            BodyProgress::UntilClose => (read.len(), false),
            BodyProgress::Complete => (0, true),
        };
        read.truncate(payload);
        // The connection goes back before the last frame is handed on: the next call need not wait for a slow client.
        if complete {
            self.finish_body();
        }
        Ok(read.freeze())
    }

    fn handle_eof(&mut self) -> Result<Option<Bytes>, UpstreamError> {
        // The server has closed its side. Whether that is the end of the body or an error depends on the framing.
        self.reusable = false;
        if matches!(self.progress, BodyProgress::UntilClose) {
            self.finish_body();
            return Ok(None);
        }
        Err(self.fail_body(UpstreamError::Closed))
    }

    /// Becomes ready with the error when the upstream has been silent for too long or the deadline has passed.
    fn poll_timeout(&mut self, cx: &mut Context<'_>) -> Poll<UpstreamError> {
        let BodyTimeouts { idle, deadline } = self.timing;
        let due = min_deadline(self.last_read + idle.min(MAX_TIME), deadline);
        ready!(self.alarm.poll(due, cx));
        Poll::Ready(if deadline == Some(due) {
            UpstreamError::Deadline
        } else {
            UpstreamError::IdleTimeout(idle)
        })
    }

    /// Marks the body as complete, and gives a clean connection back to the pool.
    fn finish_body(&mut self) {
        self.progress = BodyProgress::Complete;
        // `rest` must be empty: undecoded bytes would be read as the start of the next response.
        if let Some(stream) = self.stream.take().filter(|_| self.reusable && self.rest.is_empty()) {
            self.worker.pool.put_connection(stream, self.last_read);
        }
    }

    /// Closes the connection, so that no later poll reads from a broken stream, and returns the error.
    fn fail_body(&mut self, error: UpstreamError) -> UpstreamError {
        self.stream = None;
        self.progress = BodyProgress::Complete;
        error
    }
}
