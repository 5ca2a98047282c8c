//! The body of a response, read as it arrives.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use hyper::body::SizeHint;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::super::chunked::ChunkedDecoder;
use super::head::{BodyFraming, ResponseHead};
use super::{UpstreamError, WorkerConnections, min_deadline};
use crate::base::alarm::Alarm;
use crate::base::time::MAX_TIME;

/// A body on its connection. Dropped before its end, it closes the connection, which cancels the call.
pub struct Http1Body {
    stream: Option<TcpStream>,
    progress: BodyProgress,
    /// Read from the socket but not decoded yet.
    rest: BytesMut,
    timing: BodyTimeouts,
    last_read: Instant,
    alarm: Alarm,
    worker: Arc<WorkerConnections>,
    reusable: bool,
}

/// How long a body may be silent, and when it must be over.
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
        if body.is_end_stream() {
            body.finish_body();
        }
        body
    }

    pub(in super::super) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        loop {
            if !self.rest.is_empty() {
                match self.decode_payload() {
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
                    self.rest = read;
                    self.last_read = Instant::now();
                }
                Poll::Ready(Err(error)) => {
                    return Poll::Ready(Some(Err(self.fail_body(UpstreamError::Io(error)))));
                }
                Poll::Pending => {
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

    /// The payload in what was read last, as one slice.
    fn decode_payload(&mut self) -> Result<Bytes, UpstreamError> {
        let mut read = std::mem::take(&mut self.rest);
        let (payload, complete) = match &mut self.progress {
            BodyProgress::Chunked(decoder) => {
                let result = decoder.decode_buffer(&mut read);
                let chunks = result.map_err(|why| self.fail_body(UpstreamError::Malformed(why)))?;
                self.reusable &= chunks.consumed == read.len();
                (chunks.payload, chunks.complete)
            }
            BodyProgress::Length(left) => {
                let payload = read.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                self.reusable &= payload == read.len();
                *left -= payload as u64;
                (payload, *left == 0)
            }
            BodyProgress::UntilClose => (read.len(), false),
            BodyProgress::Complete => (0, true),
        };
        read.truncate(payload);
        if complete {
            self.finish_body();
        }
        Ok(compact_frame(read))
    }

    fn handle_eof(&mut self) -> Result<Option<Bytes>, UpstreamError> {
        self.reusable = false;
        if matches!(self.progress, BodyProgress::UntilClose) {
            self.finish_body();
            return Ok(None);
        }
        Err(self.fail_body(UpstreamError::Closed))
    }

    /// Ready with the reason when the upstream has been silent for too long.
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

    fn finish_body(&mut self) {
        self.progress = BodyProgress::Complete;
        if let Some(stream) = self.stream.take().filter(|_| self.reusable && self.rest.is_empty()) {
            self.worker.pool.put_connection(stream);
        }
    }

    fn fail_body(&mut self, error: UpstreamError) -> UpstreamError {
        self.stream = None;
        self.progress = BodyProgress::Complete;
        error
    }
}

/// A small frame gets memory of its own size: a slow reader with a queue of them would otherwise hold
/// a whole scratch buffer for each.
fn compact_frame(payload: BytesMut) -> Bytes {
    if payload.len() < COPY_BELOW_BYTES {
        Bytes::copy_from_slice(payload.chunk())
    } else {
        payload.freeze()
    }
}

const COPY_BELOW_BYTES: usize = 4 * 1024;
