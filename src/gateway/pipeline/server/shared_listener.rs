//! A listener that many runs share: TCP, with TLS unless the operator disables TLS.

use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

use super::{ConnectionError, ConnectionServer, HttpServerConfig, send_overloaded};
use crate::base::socket::{ServerStream, SocketAcceptor};
use crate::base::task_group::TaskGroup;
use crate::base::tls;
use crate::gateway::pipeline::run_token_auth::{ConnectionState, RunTokenAuth};
use crate::telemetry::metrics::RefusedRequest;

/// The state that all workers of a listener share.
pub struct SharedListener {
    pub config: HttpServerConfig,
    pub auth: RunTokenAuth,
    /// The gateway's certificate and the requirements on client certificates. Without this value
    /// connections are not encrypted.
    pub tls: Option<ArcSwap<rustls::ServerConfig>>,
    /// The most open connections on each worker, authenticated or not.
    pub max_connections: usize,
    /// The longest time that a client may take for its part of the TLS handshake.
    pub handshake_timeout: Duration,
    pub tasks: TaskGroup,
    /// The permits of the listener's open HTTP/2 streams.
    pub streams: Arc<Semaphore>,
}

/// Serves a listener on one worker until the tasks shut down.
///
/// # Errors
/// Returns an error if the listener cannot be registered with the runtime.
pub async fn serve_shared_listener(
    listener: TcpListener,
    worker: usize,
    shared: Arc<SharedListener>,
) -> io::Result<()> {
    let acceptor = SocketAcceptor::new(listener)?;
    let slots = Arc::new(Semaphore::new(shared.max_connections));
    let tasks = shared.tasks.clone();
    while let Some(socket) =
        tasks.shutdown_token().run_until_cancelled(acceptor.accept_socket()).await
    {
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
            shared.reject_overloaded(&socket);
            continue;
        };
        let shared = Arc::clone(&shared);
        tasks.spawn_task(async move {
            if let Err(error) = shared.handle_connection(socket, worker).await {
                tracing::debug!(error, "connection ended early");
            }
            drop(slot);
        });
    }
    Ok(())
}

impl SharedListener {
    /// Serves one connection, and closes the connection if it brings no valid token in time.
    ///
    /// So unauthenticated clients hold no connection for long. A client whose run has no free permit
    /// keeps its connection only long enough to read the refusal.
    async fn handle_connection(
        self: &Arc<Self>,
        socket: OwnedFd,
        worker: usize,
    ) -> Result<(), ConnectionError> {
        // Every write is a complete message, so a delay by Nagle's algorithm gains nothing.
        rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
        let stream = ServerStream::new(socket, self.config.write_timeout)?;
        let visitor = Arc::new(ConnectionState::new(worker, stream.watch_hangup()));
        // This future ends only if the connection must be closed:
        // 1. Wait until the time for the handshake and the first head is over, or until a run has
        //    refused the connection.
        // 2. If a request has shown a valid token by then, the connection may stay: never end.
        let stranger = async {
            let token_timeout = self.handshake_timeout + self.config.header_timeout;
            tokio::select! {
                () = tokio::time::sleep(token_timeout) => {}
                () = visitor.turned_away() => tokio::time::sleep(REFUSAL_LINGER).await,
            }
            if visitor.is_authenticated() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            done = self.serve_http(stream, &visitor) => done,
            () = stranger => Err("no valid run token arrived in time".into()),
        }
    }

    async fn serve_http(
        self: &Arc<Self>,
        stream: ServerStream,
        visitor: &Arc<ConnectionState>,
    ) -> Result<(), ConnectionError> {
        let connections = ConnectionServer {
            config: &self.config,
            tasks: &self.tasks,
            ping: Some(HTTP2_PING_INTERVAL),
            streams: &self.streams,
        };
        let (shared, visitor) = (Arc::clone(self), Arc::clone(visitor));
        let answer = move |request| {
            let (shared, visitor) = (Arc::clone(&shared), Arc::clone(&visitor));
            async move { shared.auth.handle_request(&visitor, request).await }
        };
        let Some(tls) = &self.tls else {
            let Some(is_http2) = connections.detect_http2(&stream).await? else { return Ok(()) };
            return connections.serve_connection(stream, is_http2, answer).await;
        };
        // Boxed, like the stream: the state of TLS is more than a kilobyte.
        let handshake = Box::pin(TlsAcceptor::from(tls.load_full()).accept(stream));
        let handshake = tokio::time::timeout(self.handshake_timeout, handshake);
        let Some(stream) = self.tasks.shutdown_token().run_until_cancelled(handshake).await else {
            return Ok(());
        };
        let stream = Box::new(stream??);
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(tls::ALPN_HTTP2);
        connections.serve_connection(stream, is_http2, answer).await
    }

    /// Answers an excess connection, if the listener is not encrypted. Inside of TLS an answer would
    /// need a handshake.
    fn reject_overloaded(&self, socket: &OwnedFd) {
        if self.tls.is_none() {
            send_overloaded(socket);
        }
        let refused = RefusedRequest { route: None, code: "too_many_connections", status: 503 };
        self.auth.metrics.record_refusal(&refused);
    }
}

/// The time for which a connection stays open after its run had no free permit. The client may show the
/// token of another run within this time. Our choice.
const REFUSAL_LINGER: Duration = Duration::from_secs(1);

/// The interval of the pings to an HTTP/2 client over a network. A client that does not answer within
/// 20 s (hyper's default) is disconnected. Our choice: the default time after which an idle HTTP/1.1
/// connection is closed.
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(30);
