//! The gateway's own HTTP/1.1 client: one write for a request, one frame for each read of a response.
//!
//! A read waits for data without a buffer. When data is there, the read borrows the worker's scratch buffer, decodes in
//! place and hands on one contiguous slice. An open stream that waits therefore holds no read buffer.

mod body;
mod call;
mod head;
mod request;

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::outage::LookupError;
use super::pool::UpstreamConnectionPool;
use super::{UpstreamCall, UpstreamConfig, UpstreamError, UpstreamKind};
use crate::base::alarm::TimerPool;
use crate::base::scratch::ScratchBuffer;
use crate::base::shared_resolver::SharedResolver;
pub(super) use call::Http1Call;
pub(super) use head::ResponseHead;

/// A client for plain HTTP/1.1, with the connections of one worker.
pub(super) struct Http1Client {
    worker: Arc<WorkerConnections>,
}

/// The settings and the state that the calls of one worker share.
#[derive(Debug)]
struct WorkerConnections {
    config: UpstreamConfig,
    resolver: SharedResolver,
    pool: UpstreamConnectionPool,
    scratch: ScratchBuffer,
    alarms: Arc<TimerPool>,
    /// A buffer for the text of the next request. The buffer is empty and unused between two requests.
    text: Mutex<Vec<u8>>,
}

impl Http1Client {
    pub(super) fn new(config: UpstreamConfig) -> Self {
        let pool = UpstreamConnectionPool::new(config.pool_idle_timeout);
        let (scratch, alarms, text) = (ScratchBuffer::default(), Arc::default(), Mutex::default());
        let resolver = SharedResolver::new();
        Self {
            worker: Arc::new(WorkerConnections { config, resolver, pool, scratch, alarms, text }),
        }
    }

    pub(super) async fn close_idle_connections(&self) -> Infallible {
        self.worker.pool.close_expired().await
    }

    pub(super) fn kind(&self) -> UpstreamKind {
        self.worker.config.kind
    }

    /// Begins a call, which sends itself when it is polled.
    pub(super) fn begin_call(&self, call: UpstreamCall) -> Box<Http1Call> {
        Box::new(Http1Call::new(Arc::clone(&self.worker), call))
    }
}

impl WorkerConnections {
    fn take_text(&self) -> Vec<u8> {
        std::mem::take(&mut *self.lock_text())
    }

    fn put_text(&self, text: Vec<u8>) {
        *self.lock_text() = text;
    }

    fn lock_text(&self) -> MutexGuard<'_, Vec<u8>> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads once; the result is empty at the end of the stream. The scratch buffer is taken only when there is data to
    /// read.
    fn poll_read(
        &self,
        stream: &mut TcpStream,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<BytesMut>> {
        ready!(stream.poll_read_ready(cx))?;
        self.scratch.poll_read_bytes(stream, cx)
    }

    async fn connect_with_timeout(&self) -> Result<TcpStream, UpstreamError> {
        let limit = self.config.connect_timeout;
        let target = &self.config.url;
        let connecting = self.resolve_and_connect(target.host(), target.port());
        match tokio::time::timeout(limit, connecting).await {
            Ok(connected) => connected.map_err(UpstreamError::Connect),
            Err(_elapsed) => Err(UpstreamError::ConnectTimeout(limit)),
        }
    }

    /// Resolves the name again and connects to the first address that accepts the connection.
    async fn resolve_and_connect(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let found = self.resolver.resolve_host(host, port).await;
        let addresses = found.map_err(|error| io::Error::other(LookupError(error)))?;
        let stream = TcpStream::connect(&addresses[..]).await?;
        // A request is one write, so delaying small packets would only add latency.
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

/// Returns the earlier of an instant and an optional deadline.
pub(super) fn min_deadline(a: Instant, b: Option<Instant>) -> Instant {
    b.map_or(a, |b| a.min(b))
}
