//! Accepts connections, serves them, and drains them at shutdown.
//!
//! There are two kinds of listener. A [`run_socket`] belongs to one run, so the socket identifies the
//! run. A [`shared_listener`] belongs to many runs, and the token of each request identifies the run.
//! Both kinds serve a connection in the same way.

pub mod lane;
pub mod run_socket;
pub mod shared_listener;
mod stream_permit;
mod tunnel;

use std::error::Error;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::SendFlags;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;

pub use self::stream_permit::MAX_SHARED_STREAMS;
use self::stream_permit::answer_stream;
pub use super::server_config::{HttpServerConfig, HttpServerConfigError, LaneMode, MAX_COUNT};
use crate::base::socket::ServerStream;
use crate::base::task_group::TaskGroup;
use crate::base::timestamp::is_clock_in_range;

/// An error that ended a connection early. Only the log reports this error.
type ConnectionError = Box<dyn Error + Send + Sync>;

/// The settings with which a listener serves its connections.
struct ConnectionServer<'a> {
    config: &'a HttpServerConfig,
    tasks: &'a TaskGroup,
    /// The interval of the pings to an HTTP/2 client; `None` sends no pings.
    ping: Option<Duration>,
    /// The permits of the listener's open HTTP/2 streams.
    streams: &'a Arc<Semaphore>,
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
        B: Body<Data = Bytes, Error: Into<ConnectionError>> + Unpin + Send + 'static,
        E: Into<ConnectionError> + 'static,
    {
        let Self { config, tasks, ping, streams } = *self;
        let (stream, timer) = (TokioIo::new(stream), TokioTimer::new());
        if is_http2 {
            let streams = Arc::clone(streams);
            let service = service_fn(move |request| {
                let permit = Arc::clone(&streams).try_acquire_owned();
                answer_stream(permit.map(|permit| (permit, answer(request))))
            });
            // hyper spawns tasks for HTTP/2 streams; `tasks` is the executor, so a shutdown waits for
            // them.
            let mut http2 = http2::Builder::new(tasks.clone());
            http2
                .timer(timer)
                .auto_date_header(is_clock_in_range())
                .keep_alive_interval(ping)
                .max_header_list_size(MAX_HTTP2_HEAD_BYTES)
                .max_concurrent_streams(MAX_HTTP2_STREAMS)
                .max_send_buf_size(config.buffer_bytes);
            let connection = http2.serve_connection(stream, service);
            let shut_down = http2::Connection::graceful_shutdown;
            let served = serve_until_shutdown(pin!(connection), tasks, shut_down).await;
            return served.map_err(Into::into);
        }
        let service = service_fn(answer);
        let mut http1 = http1::Builder::new();
        http1.timer(timer).header_read_timeout(config.header_timeout);
        http1.auto_date_header(is_clock_in_range());
        http1.max_buf_size(config.buffer_bytes).max_headers(config.max_headers);
        // A connection on which a tunnel was opened ends here, and the tunnel has its stream.
        let connection = http1.serve_connection(stream, service).with_upgrades();
        let shut_down = http1::UpgradeableConnection::graceful_shutdown;
        serve_until_shutdown(pin!(connection), tasks, shut_down).await.map_err(Into::into)
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
/// exchange after the start of a shutdown ends, or the shutdown is forced. `shut_down` tells the connection of a shutdown.
async fn serve_until_shutdown<C, E>(
    mut connection: Pin<&mut C>,
    tasks: &TaskGroup,
    shut_down: impl FnOnce(Pin<&mut C>),
) -> Result<(), E>
where
    C: Future<Output = Result<(), E>>,
{
    // Phase 1: serve until a shutdown begins. The connection is polled first, so a finished connection
    // wins.
    tokio::select! {
        biased;
        done = connection.as_mut() => return done,
        () = tasks.shutdown_token().cancelled() => shut_down(connection.as_mut()),
    }
    // Phase 2: no new requests; finish the open exchanges. A forced shutdown drops the connection and
    // its exchanges.
    tokio::select! {
        biased;
        done = connection => done,
        () = tasks.abort_token().cancelled() => Ok(()),
    }
}

/// The largest HTTP/2 head, in bytes. For HTTP/1.1 hyper's buffer bounds the head; this is the same
/// bound for HTTP/2.
const MAX_HTTP2_HEAD_BYTES: u32 = 64 * 1024;

/// The most concurrent requests on one HTTP/2 connection; further requests wait in the client. RFC 9113
/// recommends at least 100.
const MAX_HTTP2_STREAMS: u32 = 128;

/// The response to an excess connection, whatever its request would have been.
const OVERLOADED_RESPONSE: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\n\
    content-type: application/json\r\n\
    content-length: 32\r\n\
    retry-after: 1\r\n\
    connection: close\r\n\r\n\
    {\"error\":\"too_many_connections\"}";
