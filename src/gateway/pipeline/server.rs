//! Accepts connections, serves them, and drains them at shutdown.
//!
//! Two kinds of listener: [`run_socket`] is one run's, which the socket stands for; [`shared_listener`] is many
//! runs', told apart by the tokens of their requests. A connection is served alike on both.

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

/// Limits of a run's connections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HttpServerConfig {
    /// Open at the same time, for each run on each worker; further ones are answered with 503.
    pub max_connections: usize,
    /// How long a client may take to send the head of a request.
    #[serde(with = "humantime_serde")]
    pub header_timeout: Duration,
    /// How long a client may leave us unable to write.
    #[serde(with = "humantime_serde")]
    pub write_timeout: Duration,
    /// Bytes read ahead or not yet written, for each connection.
    pub buffer_bytes: usize,
    /// Header fields of one request.
    pub max_headers: usize,
    /// In flight at the same time, for each run: HTTP/2 streams count, and calls that are drained; further ones
    /// are answered with 429.
    pub max_requests: u64,
    /// Bytes of request bodies that each run holds at the same time.
    pub max_run_body_bytes: u64,
    /// Bytes of request bodies that all runs hold at the same time; without it, 512 MiB or a quarter of the memory.
    pub max_process_body_bytes: Option<u64>,
    /// Who serves plain calls on a run's socket.
    pub lane: LaneMode,
}

/// The server of plain calls on a run's socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaneMode {
    /// A loop of our own, in front of hyper.
    On,
    /// hyper, as of all else.
    #[default]
    Off,
}

/// A limit that leaves nothing to serve with, or for which there is no room.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`server.{name}` is `{given}`; give {least} to {most}")]
pub struct HttpServerConfigError {
    name: &'static str,
    given: u64,
    least: u64,
    most: u64,
}

/// Why a connection ended early. Nobody is told but the log.
type ConnectionError = Box<dyn Error + Send + Sync>;

/// How the connections of a listener are served.
struct ConnectionServer<'a> {
    config: &'a HttpServerConfig,
    tasks: &'a TaskGroup,
    /// How often an HTTP/2 client is asked whether it is still there.
    ping: Option<Duration>,
}

impl ConnectionServer<'_> {
    /// Tells which protocol a client speaks, waiting for no longer than it may take for a head; `None` if
    /// we are told to finish before.
    async fn detect_http2(&self, stream: &ServerStream) -> Result<Option<bool>, ConnectionError> {
        let opening = tokio::time::timeout(self.config.header_timeout, stream.peek_http2_preface());
        match self.tasks.shutdown_token().run_until_cancelled(opening).await {
            Some(is_http2) => Ok(Some(is_http2??)),
            None => Ok(None),
        }
    }

    /// Serves a connection to its end, each request by `answer`.
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

/// Overload answers: who waits without knowing why hangs, who is told tries again.
fn send_overloaded(socket: &OwnedFd) {
    // A new connection has room for these few bytes, or a peer that has left already.
    let _ = rustix::net::send(socket, OVERLOADED_RESPONSE, SendFlags::NOSIGNAL);
}

/// Serves a connection to its end: its own, the end of its last exchange, or the end of our patience.
async fn serve_until_shutdown<C>(
    mut connection: Pin<&mut C>,
    tasks: &TaskGroup,
) -> Result<(), C::Error>
where
    C: GracefulConnection,
{
    tokio::select! {
        biased;
        done = connection.as_mut() => return done,
        () = tasks.shutdown_token().cancelled() => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        biased;
        done = connection => done,
        () = tasks.abort_token().cancelled() => Ok(()),
    }
}

impl HttpServerConfig {
    /// # Errors
    /// The first limit that is too low or too high.
    pub fn validate(&self) -> Result<(), HttpServerConfigError> {
        let limits = [
            ("max_connections", self.max_connections as u64, 1, MAX_COUNT),
            ("buffer_bytes", self.buffer_bytes as u64, MIN_BUFFER_BYTES, MAX_BUFFER_BYTES),
            ("max_headers", self.max_headers as u64, 1, MAX_HEADERS),
            ("max_requests", self.max_requests, 1, MAX_COUNT),
            ("max_run_body_bytes", self.max_run_body_bytes, MIN_BODY_BYTES, MAX_BODY_BYTES),
            ("max_process_body_bytes", self.process_body_bytes(), MIN_BODY_BYTES, MAX_BODY_BYTES),
        ];
        let invalid =
            limits.into_iter().find(|(_, given, least, most)| !(least..=most).contains(&given));
        invalid.map_or(Ok(()), |(name, given, least, most)| {
            Err(HttpServerConfigError { name, given, least, most })
        })
    }
}

impl HttpServerConfig {
    /// Bytes of request bodies that all runs together may hold.
    pub fn process_body_bytes(&self) -> u64 {
        self.max_process_body_bytes.unwrap_or_else(|| {
            let quarter =
                memory::available_memory().map_or(DEFAULT_PROCESS_BODY_BYTES, |bytes| bytes / 4);
            // The largest body that is allowed by default must fit.
            quarter.clamp(MIN_PROCESS_BODY_BYTES, DEFAULT_PROCESS_BODY_BYTES)
        })
    }
}

impl Default for HttpServerConfig {
    fn default() -> Self {
        Self {
            // An agent opens a handful; this is for those that fan out.
            max_connections: 1024,
            header_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_mins(1),
            buffer_bytes: 64 * 1024,
            // hyper's own default.
            max_headers: 100,
            // As many as connections.
            max_requests: 1024,
            // Two of the largest bodies.
            max_run_body_bytes: 100 * 1024 * 1024,
            max_process_body_bytes: None,
            lane: LaneMode::default(),
        }
    }
}

/// Connections and requests, as of a service's: more than a machine has descriptors, and what a semaphore can count.
pub const MAX_COUNT: u64 = 1_000_000;

/// hyper's own minimum; with less it panics. Above 4 GiB it does, too, in HTTP/2.
const MIN_BUFFER_BYTES: u64 = 8192;
const MAX_BUFFER_BYTES: u64 = 16 * 1024 * 1024;

/// hyper makes room for all of them for each head that it reads, and panics above 32,768.
const MAX_HEADERS: u64 = 4096;

/// hyper's default for HTTP/1.1 is bounded by the buffer; this is the same bound for HTTP/2.
const MAX_HTTP2_HEAD_BYTES: u32 = 64 * 1024;

/// Requests at the same time on one HTTP/2 connection; further ones wait in the client. The least that RFC 9113
/// recommends is 100.
const MAX_HTTP2_STREAMS: u32 = 128;

/// One read of a body must fit.
const MIN_BODY_BYTES: u64 = 64 * 1024;

/// More than a machine has memory: no sum of such bounds overflows.
const MAX_BODY_BYTES: u64 = 1 << 48;

/// Bytes of request bodies of all runs, on a machine that has four times as many.
const DEFAULT_PROCESS_BODY_BYTES: u64 = 512 * 1024 * 1024;
const MIN_PROCESS_BODY_BYTES: u64 = 50 * 1024 * 1024;

/// The answer to a connection too many, whatever it was going to ask.
const OVERLOADED_RESPONSE: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\n\
    content-type: application/json\r\n\
    content-length: 32\r\n\
    retry-after: 1\r\n\
    connection: close\r\n\r\n\
    {\"error\":\"too_many_connections\"}";
