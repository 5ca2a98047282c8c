//! A call, from its request to the head of its response.
//!
//! The functions are polled instead of awaited: a call is one value with one state, and that value becomes the body of
//! the response. Futures inside futures would move the connection from one to the next, and need more memory.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use http::StatusCode;
use tokio::net::TcpStream;

use super::body::Http1Body;
use super::head::{self, ResponseHead};
use super::request::RequestBytes;
use super::{UpstreamCall, UpstreamError, WorkerConnections, min_deadline};
use crate::base::time::MAX_TIME;

/// A call on its connection. A call that is dropped before its end closes the connection, which cancels the call.
pub struct Http1Call {
    request: RequestBytes,
    progress: CallProgress,
    /// The result of writing the request; `None` while the request is being written.
    written: Option<io::Result<()>>,
    /// The number of interim responses so far.
    interim: u8,
    /// The connection, and the body of the response after its head.
    pub(in super::super) body: Http1Body,
}

/// The progress of a call up to the head of its response.
enum CallProgress {
    /// The call has no connection.
    Begun,
    Connecting(Pin<Box<dyn Future<Output = Result<TcpStream, UpstreamError>> + Send>>),
    /// The call has a connection. `was_idle` is true if the connection comes from the pool.
    Connected {
        was_idle: bool,
    },
}

impl Http1Call {
    /// Creates a call. The head and a short body are copied into the request's text at once. Nothing is sent before the
    /// first poll.
    pub(super) fn new(worker: Arc<WorkerConnections>, call: UpstreamCall) -> Self {
        let UpstreamCall { head, body, deadline, begun } = call;
        Self {
            request: RequestBytes::new(&worker, &head, body),
            progress: CallProgress::Begun,
            written: None,
            interim: 0,
            body: Http1Body::new(worker, deadline, begun),
        }
    }

    /// Sends the call and polls for the head of its response. After a head, the body is polled.
    pub(in super::super) fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<ResponseHead, UpstreamError>> {
        // The answer is polled first: an answer that is ready wins over a timer that rang at the same time.
        if let Poll::Ready(head) = self.poll_exchange(cx) {
            // A request that the server has not read to its end is of no use any more.
            self.request.discard(&self.body.worker);
            return Poll::Ready(head.inspect(|head| self.body.begin_body(head)));
        }
        // The call is pending, so the alarm wakes this task at the limit. The earlier of the two limits counts.
        // `MAX_TIME` keeps the sum from overflowing.
        let limit = self.body.worker.config.first_byte_timeout;
        let deadline = self.body.deadline;
        let until = min_deadline(self.body.last_read() + limit.min(MAX_TIME), deadline);
        ready!(self.body.alarm.poll(until, cx));
        Poll::Ready(Err(if deadline == Some(until) {
            UpstreamError::Deadline
        } else {
            UpstreamError::FirstByteTimeout(limit)
        }))
    }

    /// Sends the request on an idle connection or on a new one. If an idle connection proves dead before it took a byte
    /// of the request, the client sends the request on a new connection.
    fn poll_exchange(&mut self, cx: &mut Context<'_>) -> Poll<Result<ResponseHead, UpstreamError>> {
        loop {
            let was_idle = match &mut self.progress {
                CallProgress::Begun => {
                    let idle = self.body.worker.pool.take_connection(self.body.last_read());
                    self.progress = match idle {
                        None => self.connect(),
                        idle => {
                            self.body.stream = idle;
                            CallProgress::Connected { was_idle: true }
                        }
                    };
                    continue;
                }
                CallProgress::Connecting(connection) => {
                    self.body.stream = Some(ready!(connection.as_mut().poll(cx))?);
                    self.progress = CallProgress::Connected { was_idle: false };
                    continue;
                }
                CallProgress::Connected { was_idle } => *was_idle,
            };
            match ready!(self.poll_response(cx)) {
                // The server closed the idle connection, and the kernel took no byte. Sending again cannot charge
                // twice. The next connection is new, so the loop ends.
                Err(_dead) if was_idle && !self.request.is_begun() => {
                    (self.body.stream, self.body.rest) = (None, BytesMut::new());
                    self.progress = self.connect();
                }
                response => return Poll::Ready(response),
            }
        }
    }

    fn connect(&self) -> CallProgress {
        let worker = Arc::clone(&self.body.worker);
        CallProgress::Connecting(Box::pin(async move { worker.connect_with_timeout().await }))
    }

    /// Writes the request and reads the head of the response, which may come before the request is fully sent.
    fn poll_response(&mut self, cx: &mut Context<'_>) -> Poll<Result<ResponseHead, UpstreamError>> {
        // Reading runs beside writing: a server may refuse a long request early and stop reading it. Writing is polled
        // first. The usual order is the request, then the response.
        if self.written.is_none()
            && let Some(stream) = &mut self.body.stream
            && let Poll::Ready(written) = self.request.poll_write(stream, &self.body.worker, cx)
        {
            self.written = Some(written);
        }
        // Writing may have failed. In that case, too, the server may still have sent a response.
        let read = ready!(self.poll_read_head(cx));
        Poll::Ready(match (read, self.written.take()) {
            (Ok(mut head), written) => {
                // A server that did not read the whole request cannot be used again: the rest would be taken for a new
                // request.
                head.keeps_alive &= matches!(written, Some(Ok(())));
                Ok(head)
            }
            // Both directions failed. The write error is the cause, the read error its consequence.
            (Err(_), Some(Err(write_error))) => Err(UpstreamError::Io(write_error)),
            (Err(read_error), _) => Err(read_error),
        })
    }

    /// Reads the head of the response. The bytes behind the head stay in the body's `rest`.
    fn poll_read_head(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<ResponseHead, UpstreamError>> {
        loop {
            let seen = &mut self.body.rest;
            // Bytes behind an interim response are parsed before the next read.
            let parsed = if seen.is_empty() { Ok(None) } else { head::parse_head(seen) };
            if let Some((head, length)) = parsed.map_err(UpstreamError::Malformed)? {
                seen.advance(length);
                // The client never asks for another protocol, so the bytes that follow would not be HTTP.
                if head.status == StatusCode::SWITCHING_PROTOCOLS {
                    return fail("the protocol was switched, unasked");
                }
                if !head.status.is_informational() {
                    return Poll::Ready(Ok(head));
                }
                self.interim += 1;
                if self.interim > MAX_INTERIM_RESPONSES {
                    return fail("too many interim responses");
                }
                continue;
            }
            if seen.len() > head::MAX_HEAD_BYTES {
                return fail("the head is too large");
            }
            let chunk = ready!(self.body.poll_read(cx)).map_err(UpstreamError::Io)?;
            if chunk.is_empty() {
                return Poll::Ready(Err(UpstreamError::Closed));
            }
            // The first read is used without a copy. A head in several reads is rare and is joined.
            let seen = &mut self.body.rest;
            if seen.is_empty() { *seen = chunk } else { seen.extend_from_slice(&chunk) }
        }
    }
}

impl Drop for Http1Call {
    fn drop(&mut self) {
        self.request.discard(&self.body.worker);
    }
}

fn fail(why: &'static str) -> Poll<Result<ResponseHead, UpstreamError>> {
    Poll::Ready(Err(UpstreamError::Malformed(why)))
}

/// The largest number of interim responses (`100 Continue`, `103 Early Hints`) that a call skips. The value is our
/// choice.
const MAX_INTERIM_RESPONSES: u8 = 8;
