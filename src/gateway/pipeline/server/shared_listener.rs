//! A listener that many runs share: TCP, with TLS unless the operator says otherwise.

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

/// What all workers of a listener share.
pub struct SharedListener {
    pub config: HttpServerConfig,
    pub door: RunTokenAuth,
    /// Who we are to clients, and who they must be; without it they are not encrypted.
    pub tls: Option<ArcSwap<rustls::ServerConfig>>,
    /// Open at the same time, on each worker, be they of runs or of strangers.
    pub max_connections: usize,
    /// How long a client may take for its part of TLS.
    pub handshake_timeout: Duration,
    pub tasks: TaskGroup,
}

/// Serves a listener on one worker until the tasks are told to finish.
///
/// # Errors
/// The listener cannot be registered with the runtime.
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
    /// Serves one connection, unless it brings no good token in time: strangers hold no place for long, and one for which its
    /// run has no place only until it has read so.
    async fn handle_connection(
        self: &Arc<Self>,
        socket: OwnedFd,
        worker: usize,
    ) -> Result<(), ConnectionError> {
        // What is written is complete; waiting for more would only delay it.
        rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
        let stream = ServerStream::new(socket, self.config.write_timeout)?;
        let visitor = Arc::new(ConnectionState::new(worker));
        let stranger = async {
            let patience = self.handshake_timeout + self.config.header_timeout;
            tokio::select! {
                () = tokio::time::sleep(patience) => {}
                () = visitor.turned_away() => tokio::time::sleep(REFUSAL_LINGER).await,
            }
            if visitor.is_authenticated() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            done = self.serve_http(stream, &visitor) => done,
            () = stranger => Err("no good token in time".into()),
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
        };
        let (shared, visitor) = (Arc::clone(self), Arc::clone(visitor));
        let answer = move |request| {
            let (shared, visitor) = (Arc::clone(&shared), Arc::clone(&visitor));
            async move { shared.door.handle_request(&visitor, request).await }
        };
        let Some(tls) = &self.tls else {
            let Some(is_http2) = connections.detect_http2(&stream).await? else { return Ok(()) };
            return connections.serve_connection(stream, is_http2, answer).await;
        };
        // Boxed, as the stream is: the state of TLS is more than a kilobyte.
        let handshake = Box::pin(TlsAcceptor::from(tls.load_full()).accept(stream));
        let handshake = tokio::time::timeout(self.handshake_timeout, handshake);
        let Some(stream) = self.tasks.shutdown_token().run_until_cancelled(handshake).await else {
            return Ok(());
        };
        let stream = Box::new(stream??);
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(tls::ALPN_HTTP2);
        connections.serve_connection(stream, is_http2, answer).await
    }

    /// Overload answers where it can be read: inside of TLS it would take a handshake to say so.
    fn reject_overloaded(&self, socket: &OwnedFd) {
        if self.tls.is_none() {
            send_overloaded(socket);
        }
        let refused = RefusedRequest { route: None, code: "too_many_connections", status: 503 };
        self.door.metrics.record_refusal(&refused);
    }
}

/// How long a connection stays open for which its run has no place: it may belong to another run, which it has to show by then.
const REFUSAL_LINGER: Duration = Duration::from_secs(1);

/// How often an HTTP/2 client over a network is asked whether it is still there; one that does not answer in 20 s
/// (hyper's default) is gone. Ours: HTTP/1.1 clients are asked for a new request as often.
const HTTP2_PING_INTERVAL: Duration = Duration::from_secs(30);
