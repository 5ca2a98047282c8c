//! Accepts connections, serves them, and drains them at shutdown.
//!
//! There are two kinds of listener. A [`run_socket`] belongs to one run, so the socket identifies the
//! run. A [`shared_listener`] belongs to many runs, and the token of each request identifies the run.
//! Both kinds serve a connection in the same way.

pub mod lane;
pub mod run_socket;
pub mod shared_listener;

use std::error::Error;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulConnection;
use rustix::net::SendFlags;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::base::memory;
use crate::base::socket::ServerStream;
use crate::base::task_group::TaskGroup;

/// The limits of a run's connections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HttpServerConfig {
    /// The most open connections, for each run on each worker. A further connection receives a 503.
    pub max_connections: usize,
    /// The longest time that a client may take to send the head of a request.
    #[serde(with = "humantime_serde")]
    pub header_timeout: Duration,
    /// The longest time for which a client may block the gateway's writes.
    #[serde(with = "humantime_serde")]
    pub write_timeout: Duration,
    /// The most bytes that are read ahead or not yet written, for each connection.
    pub buffer_bytes: usize,
    /// The most header fields of one request.
    pub max_headers: usize,
    /// The most requests in flight, for each run. HTTP/2 streams and calls that are drained count, too.
    /// A further request receives a 429.
    pub max_requests: u64,
    /// The most bytes of request bodies that each run holds at one time.
    pub max_run_body_bytes: u64,
    /// The most bytes of request bodies that all runs hold at one time. The default is a quarter of the
    /// memory, from 50 to 512 MiB.
    pub max_process_body_bytes: Option<u64>,
    /// The server of plain calls on a run's socket.
    pub lane: LaneMode,
}

/// The server of plain calls on a run's socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaneMode {
    /// The gateway's own loop, in front of hyper.
    On,
    /// hyper, which also serves everything else.
    #[default]
    Off,
}

/// A limit that is too low to serve a request, or higher than the gateway supports.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`server.{name}` is `{value}`; give {min} to {max}")]
pub struct HttpServerConfigError {
    name: &'static str,
    value: u64,
    min: u64,
    max: u64,
}

/// An error that ended a connection early. Only the log reports this error.
type ConnectionError = Box<dyn Error + Send + Sync>;

/// The settings with which a listener serves its connections.
struct ConnectionServer<'a> {
    config: &'a HttpServerConfig,
    tasks: &'a TaskGroup,
    /// The interval of the pings to an HTTP/2 client; `None` sends no pings.
    ping: Option<Duration>,
}

impl ConnectionServer<'_> {
    /// Detects the client's protocol: true for HTTP/2. Waits at most as long as the client may take for
    /// a head.
    ///
    /// Returns `None` if a shutdown begins before the protocol is known.
    async fn detect_http2(&self, stream: &ServerStream) -> Result<Option<bool>, ConnectionError> {
        let opening = tokio::time::timeout(self.config.header_timeout, stream.peek_http2_preface());
        match self.tasks.shutdown_token().run_until_cancelled(opening).await {
            Some(is_http2) => Ok(Some(is_http2??)),
            None => Ok(None),
        }
    }

    /// Serves a connection until it ends. Each request is handled by `answer`.
    async fn serve_connection<F, B, E>(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        is_http2: bool,
        answer: impl Fn(Request<Incoming>) -> F + Send + 'static,
    ) -> Result<(), ConnectionError>
    where
        F: Future<Output = Result<Response<B>, E>> + Send + 'static,
        B: Body<Data = Bytes, Error: Into<ConnectionError>> + Send + 'static,
        E: Into<ConnectionError>,
    {
        let Self { config, tasks, ping } = *self;
        let (stream, timer, service) =
            (TokioIo::new(stream), TokioTimer::new(), service_fn(answer));
        if is_http2 {
            // hyper spawns tasks for HTTP/2 streams; `tasks` is the executor, so a shutdown waits for
            // them.
            let mut http2 = http2::Builder::new(tasks.clone());
            http2
                .timer(timer)
                .keep_alive_interval(ping)
                .max_header_list_size(MAX_HTTP2_HEAD_BYTES)
                .max_concurrent_streams(MAX_HTTP2_STREAMS)
                .max_send_buf_size(config.buffer_bytes);
            let connection = http2.serve_connection(stream, service);
            return serve_until_shutdown(pin!(connection), tasks).await.map_err(Into::into);
        }
        let mut http1 = http1::Builder::new();
        http1.timer(timer).header_read_timeout(config.header_timeout);
        http1.max_buf_size(config.buffer_bytes).max_headers(config.max_headers);
        let connection = http1.serve_connection(stream, service);
        serve_until_shutdown(pin!(connection), tasks).await.map_err(Into::into)
    }
}

/// Answers an excess connection. A client without an answer would hang; a client with an answer can
/// retry.
fn send_overloaded(socket: &OwnedFd) {
    // Send without waiting: the buffer of a new connection has room for these few bytes. If the send
    // fails, the peer has left.
    let _ = rustix::net::send(socket, OVERLOADED_RESPONSE, SendFlags::NOSIGNAL);
}

/// Serves a connection until the first of three events: the client ends the connection, the last
/// exchange after the start of a shutdown ends, or the shutdown is forced.
async fn serve_until_shutdown<C>(
    mut connection: Pin<&mut C>,
    tasks: &TaskGroup,
) -> Result<(), C::Error>
where
    C: GracefulConnection,
{
    // Phase 1: serve until a shutdown begins. The connection is polled first, so a finished connection
    // wins.
    tokio::select! {
        biased;
        done = connection.as_mut() => return done,
        () = tasks.shutdown_token().cancelled() => connection.as_mut().graceful_shutdown(),
    }
    // Phase 2: no new requests; finish the open exchanges. A forced shutdown drops the connection and
    // its exchanges.
    tokio::select! {
        biased;
        done = connection => done,
        () = tasks.abort_token().cancelled() => Ok(()),
    }
}

impl HttpServerConfig {
    /// Checks all limits.
    ///
    /// # Errors
    /// Returns the first limit that is too low or too high.
    pub fn validate(&self) -> Result<(), HttpServerConfigError> {
        let limits = [
            ("max_connections", self.max_connections as u64, 1, MAX_COUNT),
            ("buffer_bytes", self.buffer_bytes as u64, MIN_BUFFER_BYTES, MAX_BUFFER_BYTES),
            ("max_headers", self.max_headers as u64, 1, MAX_HEADERS),
            ("max_requests", self.max_requests, 1, MAX_COUNT),
            ("max_run_body_bytes", self.max_run_body_bytes, MIN_BODY_BYTES, MAX_BODY_BYTES),
            ("max_process_body_bytes", self.process_body_bytes(), MIN_BODY_BYTES, MAX_BODY_BYTES),
        ];
        let invalid = limits.into_iter().find(|(_, value, min, max)| !(min..=max).contains(&value));
        invalid.map_or(Ok(()), |(name, value, min, max)| {
            Err(HttpServerConfigError { name, value, min, max })
        })
    }
}

impl HttpServerConfig {
    /// Returns the most bytes of request bodies that all runs together may hold.
    pub fn process_body_bytes(&self) -> u64 {
        self.max_process_body_bytes.unwrap_or_else(|| {
            let quarter =
                memory::available_memory().map_or(DEFAULT_PROCESS_BODY_BYTES, |bytes| bytes / 4);
            // The largest body that the default policy allows must fit.
            quarter.clamp(MIN_PROCESS_BODY_BYTES, DEFAULT_PROCESS_BODY_BYTES)
        })
    }
}

impl Default for HttpServerConfig {
    fn default() -> Self {
        Self {
            // An agent opens a handful of connections; the limit leaves room for agents that fan out.
            max_connections: 1024,
            header_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_mins(1),
            buffer_bytes: 64 * 1024,
            // The default of hyper.
            max_headers: 100,
            // One request for each connection.
            max_requests: 1024,
            // Two of the largest bodies that the default policy allows.
            max_run_body_bytes: 100 * 1024 * 1024,
            max_process_body_bytes: None,
            lane: LaneMode::default(),
        }
    }
}

/// The upper bound for configured counts of connections and requests: more than the descriptors of a
/// machine, and within the range of a semaphore. The service's configuration has the same bound.
pub const MAX_COUNT: u64 = 1_000_000;

/// The smallest buffer of a connection, in bytes: hyper's minimum. With a smaller buffer hyper panics.
const MIN_BUFFER_BYTES: u64 = 8192;
/// The largest buffer of a connection, in bytes. Our choice: in HTTP/2, hyper panics above 4 GiB.
const MAX_BUFFER_BYTES: u64 = 16 * 1024 * 1024;

/// The upper bound for header fields. hyper allocates room for all fields for each head, and panics
/// above 32,768.
const MAX_HEADERS: u64 = 4096;

/// The largest HTTP/2 head, in bytes. For HTTP/1.1 hyper's buffer bounds the head; this is the same
/// bound for HTTP/2.
const MAX_HTTP2_HEAD_BYTES: u32 = 64 * 1024;

/// The most concurrent requests on one HTTP/2 connection; further requests wait in the client. RFC 9113
/// recommends at least 100.
const MAX_HTTP2_STREAMS: u32 = 128;

/// The smallest limit for body bytes: one read of a body must fit.
const MIN_BODY_BYTES: u64 = 64 * 1024;

/// The largest limit for body bytes: more than a machine's memory, so no sum of such limits overflows.
const MAX_BODY_BYTES: u64 = 1 << 48;

/// The body bytes of all runs, if the machine has at least four times as much memory.
const DEFAULT_PROCESS_BODY_BYTES: u64 = 512 * 1024 * 1024;
/// The smallest default for the body bytes of all runs: one body of the largest default size.
const MIN_PROCESS_BODY_BYTES: u64 = 50 * 1024 * 1024;

/// The response to an excess connection, whatever its request would have been.
const OVERLOADED_RESPONSE: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\n\
    content-type: application/json\r\n\
    content-length: 32\r\n\
    retry-after: 1\r\n\
    connection: close\r\n\r\n\
    {\"error\":\"too_many_connections\"}";
