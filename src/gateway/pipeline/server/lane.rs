//! The lane: the gateway's own server for plain calls on a run's socket, in front of hyper.
//!
//! The lane serves a request if its head arrived completely and can be read in one way only
//! ([`head::parse_head`]). hyper serves everything else: hyper receives the bytes that were read, and
//! keeps the connection for good. Both servers send a request through the same pipeline and poll the
//! same body for its response. So sending, observing, aborting and settling are one code, and only the
//! framing of HTTP/1.1 exists twice.
//!
//! **Invariant:** a connection is handed to hyper between two requests, or not at all.

mod body;
mod date;
pub mod head;
mod idle;
mod writer;

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::Method;

use super::HttpServerConfig;
use crate::base::cancel_watch::CancelWatch;
use crate::base::scratch::ScratchBuffer;
use crate::base::socket::ServerStream;
use crate::gateway::pipeline::exchange::GatewayExchange;
use crate::gateway::pipeline::policy::GatewayPolicy;
use crate::gateway::pipeline::read_body::{IncomingRequestBody, discard_rest_of_body};
use crate::gateway::pipeline::{
    ReceivedHead, ReceivedRequest, RunGateway, answer_received, receive_body, receive_head,
    receive_whole_body,
};
use body::LaneBody;
use date::HttpDateCache;
use head::LaneRequest;
use idle::IdleConnections;
use writer::{LaneResponseWriter, OutBuffer};

pub(super) use idle::IdleConnection;

/// The state that the lane's connections on one listener share.
pub(super) struct LaneServer {
    gateway: Arc<RunGateway>,
    max_fields: usize,
    scratch: ScratchBuffer,
    date: HttpDateCache,
    out: OutBuffer,
    idle: IdleConnections,
}

/// A connection that the lane serves.
struct LaneConnection<'a> {
    lane: &'a LaneServer,
    stream: ServerStream,
    pid: Option<u32>,
    idle: &'a IdleConnection<'a>,
    /// Bytes that were read from the socket and not yet parsed.
    received: Bytes,
    /// The watch that reports an operator's abort of the calls.
    abort: Arc<CancelWatch>,
}

/// A watch that detects whether the client is still connected while its response is made.
#[derive(Default)]
struct ClientWatch {
    /// True once the client has sent more bytes. A disconnect is then detected only by reading those
    /// bytes or by writing.
    has_spoken: bool,
}

impl LaneServer {
    pub(super) fn new(gateway: Arc<RunGateway>, config: &HttpServerConfig) -> Self {
        Self {
            gateway,
            max_fields: config.max_headers,
            scratch: ScratchBuffer::default(),
            date: HttpDateCache::default(),
            out: OutBuffer::default(),
            idle: IdleConnections::new(config.header_timeout),
        }
    }

    /// Closes connections that were idle for too long, for as long as the future is polled. Without
    /// connections the shared buffers are freed.
    pub(super) async fn close_idle_connections(&self) -> Infallible {
        let release = || {
            self.scratch.release_buffer();
            self.out.release();
        };
        self.idle.close_expired(release).await
    }

    /// Adds a new connection to the connections that are closed if they stay idle.
    pub(super) fn track_connection(&self) -> IdleConnection<'_> {
        self.idle.track_connection(self.gateway.tasks.shutdown_token())
    }

    /// Serves an HTTP/1.1 connection. Returns the connection if hyper must continue.
    pub(super) async fn serve_connection(
        &self,
        stream: ServerStream,
        pid: Option<u32>,
        idle: &IdleConnection<'_>,
    ) -> io::Result<Option<ServerStream>> {
        let abort = self.gateway.watch_abort();
        LaneConnection { lane: self, stream, pid, idle, received: Bytes::new(), abort }
            .serve_requests()
            .await
    }

    /// Reads once. The result is empty at the end of the stream. A waiting connection holds no buffer.
    fn poll_receive(&self, stream: &ServerStream, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        // Wait first and borrow the buffer then: the buffer belongs to all connections of the listener.
        ready!(stream.poll_readable(cx))?;
        let mut reader = stream;
        self.scratch.poll_read_bytes(&mut reader, cx).map_ok(bytes::BytesMut::freeze)
    }
}

impl LaneConnection<'_> {
    async fn serve_requests(mut self) -> io::Result<Option<ServerStream>> {
        // 1. Wait for bytes, unless bytes of the next request are here already. Only this wait counts
        //    as idle time.
        // 2. Parse a head. Without a complete and plain head, hand the connection and its bytes to
        //    hyper.
        // 3. Serve the call.
        loop {
            if self.received.is_empty() {
                let next = self
                    .idle
                    .wait_unless_closing(|cx| self.lane.poll_receive(&self.stream, cx))
                    .await;
                self.received = next.transpose()?.unwrap_or_default();
                if self.received.is_empty() {
                    return Ok(None);
                }
            }
            let policy = self.lane.gateway.policy.load_full();
            let most = policy.config.max_body_bytes;
            let Some(head) = head::parse_head(&mut self.received, self.lane.max_fields, most)
            else {
                return Ok(Some(self.stream.with_unread(self.received)));
            };
            if !self.serve_call(head, policy).await? {
                return Ok(None);
            }
        }
    }

    /// Serves one call. Returns true if the connection may serve another call.
    ///
    /// The futures before the response are boxed, so that a connection does not hold their memory while
    /// the response streams.
    async fn serve_call(
        &mut self,
        head: LaneRequest,
        policy: Arc<GatewayPolicy>,
    ) -> io::Result<bool> {
        let gateway = &self.lane.gateway;
        let received = std::mem::take(&mut self.received);
        let mut body = LaneBody::new(self.lane, &self.stream, received, head.length);
        // An abort ends only the calls that were open then, so the next call needs another watch.
        if self.abort.is_cancelled() {
            self.abort = gateway.watch_abort();
        }
        let (gateway, abort) = (Arc::clone(gateway), Arc::clone(&self.abort));
        let mut exchange = GatewayExchange::begin(gateway, policy, abort, self.pid, &Method::POST);
        let head = receive_head(&mut exchange, head);
        // Most bodies have arrived with their heads. Only the others need a future.
        let whole = if let Ok(ReceivedHead::Call(_)) = head { body.take_whole() } else { None };
        let mut body = IncomingRequestBody::new(body);
        let call = match (head, whole) {
            (Ok(ReceivedHead::Call(call)), Some(whole)) => {
                receive_whole_body(&mut exchange, call, whole)
            }
            (Ok(ReceivedHead::Call(call)), None) => {
                Box::pin(receive_body(&mut exchange, call, &mut body)).await
            }
            (Ok(ReceivedHead::LocalResponse(response)), _) => {
                Ok(ReceivedRequest::LocalResponse(response))
            }
            (Err(rejection), _) => Err(rejection),
        };
        // The bytes behind the body belong to the next request.
        let (rest, must_be_read) = body.into_unread_body();
        let (received, left) = rest.into_parts();
        self.received = received;
        // Bytes of a pipelined request are here already, so the client counts as having sent more. A client
        // whose body broke off may have ended only its writing side, and gets its refusal, as from hyper.
        let has_broken_off = left > 0 && !must_be_read;
        let mut watch = ClientWatch { has_spoken: has_broken_off || !self.received.is_empty() };
        let answer = answer_received(exchange, call);
        let Some(answer) = watch.wait_while_connected(answer, &self.stream).await else {
            return Ok(false);
        };
        // Decide before the head is written: the head contains `connection: close` if the connection
        // must end.
        let goes_on = !self.idle.is_closing();
        let writer =
            LaneResponseWriter::new(&mut self.stream, &mut watch, answer, self.lane, goes_on);
        if !writer.write_response().await? || !goes_on {
            return Ok(false);
        }
        // The next head begins behind the body. So the connection can go on only if the whole body is
        // read or discarded.
        Ok(left == 0 || must_be_read && self.discard_body(left).await)
    }

    /// Discards the rest of a refused body. Returns true if the client sent all of the body.
    async fn discard_body(&mut self, left: u64) -> bool {
        let received = std::mem::take(&mut self.received);
        let mut rest = LaneBody::new(self.lane, &self.stream, received, left);
        discard_rest_of_body(&mut rest, &self.lane.gateway.tasks).await;
        let (received, left) = rest.into_parts();
        self.received = received;
        left == 0
    }
}

impl ClientWatch {
    /// Waits for a response. Returns `None` if the client disconnects first.
    async fn wait_while_connected<F: Future + Unpin>(
        &mut self,
        mut answer: F,
        stream: &ServerStream,
    ) -> Option<F::Output> {
        // Check the client first. Returning `None` drops the answer's future, which cancels the call.
        poll_fn(|cx| {
            if self.is_gone(stream) {
                return Poll::Ready(None);
            }
            match Pin::new(&mut answer).poll(cx) {
                Poll::Ready(answer) => Poll::Ready(Some(answer)),
                Poll::Pending => self.poll_gone(stream, cx).map(|()| None),
            }
        })
        .await
    }

    /// Returns true if it is known already that the client has disconnected. Unlike [`poll_gone`](Self::poll_gone),
    /// the function registers no task, so it costs little before a poll that need not wait.
    fn is_gone(&mut self, stream: &ServerStream) -> bool {
        if !self.has_spoken {
            match stream.try_peer_spoke() {
                Some(true) => self.has_spoken = true,
                Some(false) => return true,
                None => {}
            }
        }
        false
    }

    /// Returns ready if the client has disconnected.
    fn poll_gone(&mut self, stream: &ServerStream, cx: &mut Context<'_>) -> Poll<()> {
        if !self.has_spoken {
            self.has_spoken = ready!(stream.poll_peer_spoke(cx));
            if !self.has_spoken {
                return Poll::Ready(());
            }
        }
        Poll::Pending
    }
}
