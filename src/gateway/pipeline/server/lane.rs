//! Serves plain calls on a run's socket with code of our own, in front of hyper.
//!
//! A request is served here if its head came whole and can be read in one way only ([`head::parse_head`]). Anything else is
//! hyper's: it gets the bytes that were read, and keeps the connection for good. Both servers bring a request to the
//! same pipeline and poll the same body for its answer, so that what is sent, followed, cut, broken off and settled is
//! one code; only the framing of HTTP/1.1 is here a second time.
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
use crate::base::scratch::ScratchBuffer;
use crate::base::socket::ServerStream;
use crate::gateway::pipeline::exchange::GatewayExchange;
use crate::gateway::pipeline::read_body::{IncomingRequestBody, discard_rest_of_body};
use crate::gateway::pipeline::{RunGateway, finish_received, receive_request};
use body::LaneBody;
use date::HttpDateCache;
use head::LaneRequest;
use idle::IdleConnections;
use writer::{LaneResponseWriter, OutBuffer};

pub(super) use idle::IdleConnection;

/// The lane of one listener: what its connections share.
pub(super) struct LaneServer {
    gateway: Arc<RunGateway>,
    max_fields: usize,
    scratch: ScratchBuffer,
    date: HttpDateCache,
    out: OutBuffer,
    idle: IdleConnections,
}

/// A connection that is served in the lane.
struct LaneConnection<'a> {
    lane: &'a LaneServer,
    stream: ServerStream,
    pid: Option<u32>,
    idle: &'a IdleConnection<'a>,
    /// Read from the socket and not understood yet.
    received: Bytes,
}

/// Tells whether a client is still there while its answer is made.
#[derive(Default)]
struct ClientWatch {
    /// The client has sent more: whether it leaves is seen when that has been read, or when it is written to.
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

    /// Closes connections that were idle for too long, for as long as it is polled. Without connections there is no buffer.
    pub(super) async fn close_idle_connections(&self) -> Infallible {
        let release = || {
            self.scratch.release_buffer();
            self.out.release();
        };
        self.idle.close_expired(release).await
    }

    /// Takes a new connection among those that are closed where they stay idle.
    pub(super) fn track_connection(&self) -> IdleConnection<'_> {
        self.idle.track_connection(self.gateway.tasks.shutdown_token())
    }

    /// Serves a connection of HTTP/1.1; returns it where hyper has to go on.
    pub(super) async fn serve_connection(
        &self,
        stream: ServerStream,
        pid: Option<u32>,
        idle: &IdleConnection<'_>,
    ) -> io::Result<Option<ServerStream>> {
        LaneConnection { lane: self, stream, pid, idle, received: Bytes::new() }
            .serve_requests()
            .await
    }

    /// One read; empty at the end. A connection that waits holds no buffer.
    fn poll_receive(&self, stream: &ServerStream, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        ready!(stream.poll_readable(cx))?;
        let mut reader = stream;
        self.scratch.poll_read_bytes(&mut reader, cx).map_ok(bytes::BytesMut::freeze)
    }
}

impl LaneConnection<'_> {
    async fn serve_requests(mut self) -> io::Result<Option<ServerStream>> {
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
            let most = self.lane.gateway.policy.load().config.max_body_bytes;
            let Some(head) = head::parse_head(&mut self.received, self.lane.max_fields, most)
            else {
                return Ok(Some(self.stream.with_unread(self.received)));
            };
            if !self.serve_call(head).await? {
                return Ok(None);
            }
        }
    }

    /// Serves one call; says whether the connection may have another.
    ///
    /// What comes before the answer is boxed, so that a connection keeps no room for it while the answer streams.
    async fn serve_call(&mut self, head: LaneRequest) -> io::Result<bool> {
        let gateway = &self.lane.gateway;
        let received = std::mem::take(&mut self.received);
        let body = LaneBody::new(self.lane, &self.stream, received, head.length);
        let mut body = IncomingRequestBody::new(body);
        let mut exchange = GatewayExchange::begin(Arc::clone(gateway), self.pid, &Method::POST);
        let call = Box::pin(receive_request(&mut exchange, head, &mut body)).await;
        let (rest, must_be_read) = body.into_unread_body();
        let (received, left) = rest.into_parts();
        self.received = received;
        let mut watch = ClientWatch { has_spoken: !self.received.is_empty() };
        let answer = Box::pin(finish_received(exchange, call));
        let Some(answer) = watch.wait_while_connected(answer, &self.stream).await else {
            return Ok(false);
        };
        let goes_on = !self.idle.is_closing();
        let writer =
            LaneResponseWriter::new(&mut self.stream, &mut watch, answer, self.lane, goes_on);
        if !writer.write_response().await? || !goes_on {
            return Ok(false);
        }
        Ok(left == 0 || must_be_read && self.discard_body(left).await)
    }

    /// Throws away the rest of a body that was refused; says whether all of it came.
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
    /// Waits for an answer; `None` where the client leaves before.
    async fn wait_while_connected<F: Future + Unpin>(
        &mut self,
        mut answer: F,
        stream: &ServerStream,
    ) -> Option<F::Output> {
        poll_fn(|cx| match self.poll_gone(stream, cx) {
            Poll::Ready(()) => Poll::Ready(None),
            Poll::Pending => Pin::new(&mut answer).poll(cx).map(Some),
        })
        .await
    }

    /// Ready when the client has left.
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
