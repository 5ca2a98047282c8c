//! Accepts connections on one run's socket, serves them, and drains them at shutdown.

use std::error::Error;
use std::io::{self, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulConnection;
use serde::Deserialize;
use tokio::sync::Semaphore;

use super::metrics::Refused;
use super::{Gateway, handle};
use crate::base::drain::Drain;
use crate::base::unix::{Acceptor, Stream};

/// Limits of the connections to one run's socket.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Open at the same time, on each worker; further ones are answered with 503 and closed.
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
}

/// A limit that leaves nothing to serve with.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`server.{name}` is `{given}`; give at least {least}")]
pub struct Invalid {
    name: &'static str,
    given: usize,
    least: usize,
}

/// Serves a listener until the gateway's tasks are told to finish.
///
/// # Errors
/// The listener cannot be registered with the runtime.
pub async fn serve(
    listener: UnixListener,
    gateway: Arc<Gateway>,
    config: Arc<Config>,
) -> io::Result<()> {
    let acceptor = Acceptor::new(listener)?;
    let slots = Arc::new(Semaphore::new(config.max_connections));
    let tasks = gateway.tasks.clone();
    while let Some(stream) = tasks.closing().run_until_cancelled(acceptor.accept()).await {
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
            turn_away(&stream, &gateway);
            continue;
        };
        let (gateway, config) = (Arc::clone(&gateway), Arc::clone(&config));
        tasks.spawn(async move {
            if let Err(error) = connection(stream, gateway, &config).await {
                tracing::debug!(error, "connection ended early");
            }
            drop(slot);
        });
    }
    Ok(())
}

/// Overload answers: who waits without knowing why hangs, who is told tries again.
fn turn_away(mut stream: &UnixStream, gateway: &Gateway) {
    // A new connection has room for these few bytes, or a peer that has left already.
    let _ = stream.write(OVERLOADED);
    gateway.metrics.refused(&Refused { route: None, code: "too_many_connections", status: 503 });
}

async fn connection(
    stream: UnixStream,
    gateway: Arc<Gateway>,
    config: &Config,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let stream = Stream::new(stream, config.write_timeout)?;
    let tasks = gateway.tasks.clone();
    let opening = tokio::time::timeout(config.header_timeout, stream.opens_http2());
    let Some(is_http2) = tasks.closing().run_until_cancelled(opening).await else { return Ok(()) };
    let is_http2 = is_http2??;
    let (stream, timer) = (TokioIo::new(stream), TokioTimer::new());
    let service = service_fn(move |request| handle(Arc::clone(&gateway), request));
    if is_http2 {
        let mut http2 = http2::Builder::new(tasks.clone());
        http2
            .timer(timer)
            .max_header_list_size(MAX_HTTP2_HEAD_BYTES)
            .max_send_buf_size(config.buffer_bytes);
        let connection = http2.serve_connection(stream, service);
        return until_told(pin!(connection), &tasks).await.map_err(Into::into);
    }
    let mut http1 = http1::Builder::new();
    http1.timer(timer).header_read_timeout(config.header_timeout);
    http1.max_buf_size(config.buffer_bytes).max_headers(config.max_headers);
    let connection = http1.serve_connection(stream, service);
    until_told(pin!(connection), &tasks).await.map_err(Into::into)
}

/// Serves a connection to its end: its own, the end of its last exchange, or the end of our patience.
async fn until_told<C>(mut connection: Pin<&mut C>, tasks: &Drain) -> Result<(), C::Error>
where
    C: GracefulConnection,
{
    tokio::select! {
        biased;
        done = connection.as_mut() => return done,
        () = tasks.closing().cancelled() => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        biased;
        done = connection => done,
        () = tasks.cut().cancelled() => Ok(()),
    }
}

impl Config {
    /// # Errors
    /// The first limit that is too low.
    pub fn check(&self) -> Result<(), Invalid> {
        let limits = [
            ("max_connections", self.max_connections, 1),
            ("buffer_bytes", self.buffer_bytes, MIN_BUFFER_BYTES),
            ("max_headers", self.max_headers, 1),
        ];
        let low = limits.into_iter().find(|(_, given, least)| given < least);
        low.map_or(Ok(()), |(name, given, least)| Err(Invalid { name, given, least }))
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            // An agent opens a handful; this is for those that fan out.
            max_connections: 1024,
            header_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_mins(1),
            buffer_bytes: 64 * 1024,
            // hyper's own default.
            max_headers: 100,
        }
    }
}

/// hyper's own minimum; with less it panics.
const MIN_BUFFER_BYTES: usize = 8192;

/// hyper's default for HTTP/1.1 is bounded by the buffer; this is the same bound for HTTP/2.
const MAX_HTTP2_HEAD_BYTES: u32 = 64 * 1024;

/// The answer to a connection too many, whatever it was going to ask.
const OVERLOADED: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\n\
    content-type: application/json\r\n\
    content-length: 32\r\n\
    retry-after: 1\r\n\
    connection: close\r\n\r\n\
    {\"error\":\"too_many_connections\"}";
