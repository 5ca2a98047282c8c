//! The connection of a call, and the body of its response, decoded as the body arrives.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hyper::body::SizeHint;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::super::chunked::ChunkedDecoder;
use super::head::{BodyFraming, ResponseHead};
use super::{UpstreamError, WorkerConnections, min_deadline};
use crate::base::alarm::Alarm;
use crate::base::time::MAX_TIME;

/// A body and its connection.
pub(in super::super) struct Http1Body {
    pub(super) stream: Option<TcpStream>,
    progress: BodyProgress,
    /// Bytes that were read from the socket and are not parsed or decoded yet.
    pub(super) rest: BytesMut,
    /// The instant at which the body must be complete.
    pub(super) deadline: Option<Instant>,
    /// The time of the last read of the body. Before the head, the time at which the call was sent.
    last_read: Instant,
    /// The alarm of the call. A stream needs one timer for its whole life.
    pub(super) alarm: Alarm,
    pub(super) worker: Arc<WorkerConnections>,
    reusable: bool,
}

#[derive(Debug)]
enum BodyProgress {
    /// The head of the response has not arrived.
    BeforeHead,
    Length(u64),
    Chunked(ChunkedDecoder),
    UntilClose,
    Complete,
}

impl Http1Body {
    /// Creates the body of a call that begins now.
    pub(super) fn new(
        worker: Arc<WorkerConnections>,
        deadline: Option<Instant>,
        begun: Instant,
    ) -> Self {
        Self {
            stream: None,
            progress: BodyProgress::BeforeHead,
            rest: BytesMut::new(),
            deadline,
            last_read: begun,
            alarm: Alarm::new(&worker.alarms),
            worker,
            reusable: false,
        }
    }

    /// Begins the body behind the head of the response.
    pub(super) fn begin_body(&mut self, head: &ResponseHead) {
        self.progress = match head.framing {
            BodyFraming::Length(0) => BodyProgress::Complete,
            BodyFraming::Length(length) => BodyProgress::Length(length),
            BodyFraming::Chunked => BodyProgress::Chunked(ChunkedDecoder::default()),
            BodyFraming::UntilClose => BodyProgress::UntilClose,
        };
        (self.last_read, self.reusable) = (Instant::now(), head.keeps_alive);
        // A body of length 0 needs no read, so its connection goes back to the pool at once.
        if self.is_end_stream() {
            self.finish_body();
        }
    }

    /// Reads once from the connection. The result is empty at the end of the stream.
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<BytesMut>> {
        match &mut self.stream {
            Some(stream) => self.worker.poll_read(stream, cx),
            None => Poll::Ready(Ok(BytesMut::new())),
        }
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
            if self.stream.is_none() || matches!(self.progress, BodyProgress::Complete) {
                return Poll::Ready(None);
            }
            match self.poll_read(cx) {
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
            BodyProgress::BeforeHead | BodyProgress::Chunked(_) | BodyProgress::UntilClose => {
                SizeHint::default()
            }
        }
    }

    /// Returns the time of the last read of the body. Before the head, it is the time at which the call was sent.
    pub(in super::super) fn last_read(&self) -> Instant {
        self.last_read
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
            BodyProgress::BeforeHead | BodyProgress::Complete => (0, true),
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
        let (idle, deadline) = (self.worker.config.idle_timeout, self.deadline);
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
