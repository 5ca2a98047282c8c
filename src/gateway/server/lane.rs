//! Serves plain calls on a run's socket with code of our own, in front of hyper.
//!
//! A request is served here if its head came whole and can be read in one way only ([`head::read`]). Anything else is
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

use super::Config;
use crate::base::scratch::Scratch;
use crate::base::socket::Stream;
use crate::gateway::exchange::Exchange;
use crate::gateway::receive::{Arriving, read_away};
use crate::gateway::{Gateway, receive, respond};
use body::LaneBody;
use date::HttpDate;
use head::LaneRequest;
use idle::IdleConnections;
use writer::{AnswerWriter, OutBuffer};

pub(super) use idle::IdleConnection;

/// The lane of one listener: what its connections share.
pub(super) struct Lane {
    gateway: Arc<Gateway>,
    max_fields: usize,
    scratch: Scratch,
    date: HttpDate,
    out: OutBuffer,
    idle: IdleConnections,
}

/// A connection that is served in the lane.
struct LaneConnection<'a> {
    lane: &'a Lane,
    stream: Stream,
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

impl Lane {
    pub(super) fn new(gateway: Arc<Gateway>, config: &Config) -> Self {
        Self {
            gateway,
            max_fields: config.max_headers,
            scratch: Scratch::default(),
            date: HttpDate::default(),
            out: OutBuffer::default(),
            idle: IdleConnections::new(config.header_timeout),
        }
    }

    /// Closes connections that were idle for too long, for as long as it is polled. Without connections there is no buffer.
    pub(super) async fn close_idle(&self) -> Infallible {
        let release = || {
            self.scratch.release();
            self.out.release();
        };
        self.idle.close_old(release).await
    }

    /// Takes a new connection among those that are closed where they stay idle.
    pub(super) fn enter(&self) -> IdleConnection<'_> {
        self.idle.enter(self.gateway.tasks.closing())
    }

    /// Serves a connection of HTTP/1.1; returns it where hyper has to go on.
    pub(super) async fn serve(
        &self,
        stream: Stream,
        pid: Option<u32>,
        idle: &IdleConnection<'_>,
    ) -> io::Result<Option<Stream>> {
        LaneConnection { lane: self, stream, pid, idle, received: Bytes::new() }.serve().await
    }

    /// One read; empty at the end. A connection that waits holds no buffer.
    fn poll_receive(&self, stream: &Stream, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        ready!(stream.poll_readable(cx))?;
        let mut reader = stream;
        self.scratch.poll_read(&mut reader, cx).map_ok(bytes::BytesMut::freeze)
    }
}

impl LaneConnection<'_> {
    async fn serve(mut self) -> io::Result<Option<Stream>> {
        loop {
            if self.received.is_empty() {
                let next = self.idle.wait(|cx| self.lane.poll_receive(&self.stream, cx)).await;
                self.received = next.transpose()?.unwrap_or_default();
                if self.received.is_empty() {
                    return Ok(None);
                }
            }
            let most = self.lane.gateway.policy.load().config.max_body_bytes;
            let Some(head) = head::read(&mut self.received, self.lane.max_fields, most) else {
                return Ok(Some(self.stream.unread(self.received)));
            };
            if !self.call(head).await? {
                return Ok(None);
            }
        }
    }

    /// Serves one call; says whether the connection may have another.
    ///
    /// What comes before the answer is boxed, so that a connection keeps no room for it while the answer streams.
    async fn call(&mut self, head: LaneRequest) -> io::Result<bool> {
        let gateway = &self.lane.gateway;
        let received = std::mem::take(&mut self.received);
        let body = LaneBody::new(self.lane, &self.stream, received, head.length);
        let mut body = Arriving::new(body);
        let mut exchange = Exchange::begin(Arc::clone(gateway), self.pid, &Method::POST);
        let call = Box::pin(receive(&mut exchange, head, &mut body)).await;
        let (rest, must_be_read) = body.into_rest();
        let (received, left) = rest.into_parts();
        self.received = received;
        let mut watch = ClientWatch { has_spoken: !self.received.is_empty() };
        let answer = Box::pin(respond(exchange, call));
        let Some(answer) = watch.wait(answer, &self.stream).await else { return Ok(false) };
        let goes_on = !self.idle.is_closing();
        let writer = AnswerWriter::new(&mut self.stream, &mut watch, answer, self.lane, goes_on);
        if !writer.write().await? || !goes_on {
            return Ok(false);
        }
        Ok(left == 0 || must_be_read && self.read_away(left).await)
    }

    /// Throws away the rest of a body that was refused; says whether all of it came.
    async fn read_away(&mut self, left: u64) -> bool {
        let received = std::mem::take(&mut self.received);
        let mut rest = LaneBody::new(self.lane, &self.stream, received, left);
        read_away(&mut rest, &self.lane.gateway.tasks).await;
        let (received, left) = rest.into_parts();
        self.received = received;
        left == 0
    }
}

impl ClientWatch {
    /// Waits for an answer; `None` where the client leaves before.
    async fn wait<F: Future + Unpin>(
        &mut self,
        mut answer: F,
        stream: &Stream,
    ) -> Option<F::Output> {
        poll_fn(|cx| match self.poll_gone(stream, cx) {
            Poll::Ready(()) => Poll::Ready(None),
            Poll::Pending => Pin::new(&mut answer).poll(cx).map(Some),
        })
        .await
    }

    /// Ready when the client has left.
    fn poll_gone(&mut self, stream: &Stream, cx: &mut Context<'_>) -> Poll<()> {
        if !self.has_spoken {
            self.has_spoken = ready!(stream.poll_speaks(cx));
            if !self.has_spoken {
                return Poll::Ready(());
            }
        }
        Poll::Pending
    }
}
