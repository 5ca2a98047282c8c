//! The listener of the service, on TCP or on a unix socket, and the connections until shutdown.
//!
//! A client that sends its head too slowly, or reads nothing for too long, loses its connection. Some connections
//! beyond the limit are reserved for health checks and charge notices; all others are answered with an error and
//! closed.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::SendFlags;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ApiState;
use crate::base::socket::{ServerStream, SocketAcceptor};
use crate::base::task_group::TaskGroup;
use crate::base::timestamp::is_clock_in_range;
use crate::base::unix::{self, SocketPermissions};
use crate::service::config::ListenAddress;

/// A bound listener. Dropping it removes its path, where it has one.
#[derive(Debug)]
pub enum ApiListener {
    Tcp(TcpListener),
    Unix(unix::UnixListenerGuard),
}

impl ApiListener {
    /// Binds the address of the API.
    ///
    /// # Errors
    /// Returns an error if the address cannot be bound.
    pub fn bind_listener(place: &ListenAddress) -> anyhow::Result<Self> {
        match place {
            ListenAddress::Tcp(address) => {
                let listener = TcpListener::bind(address).with_context(|| {
                    format!("`serve.listen` is `{address}`, which cannot be bound")
                })?;
                listener.set_nonblocking(true)?;
                Ok(Self::Tcp(listener))
            }
            ListenAddress::Unix(path) => {
                let owner_only = SocketPermissions { mode: 0o600, uid: None, gid: None };
                Ok(Self::Unix(unix::UnixListenerGuard::bind_socket(path, owner_only)?))
            }
        }
    }

    /// Returns the address, with the port that was chosen for port 0.
    pub fn listen_address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(_) => None,
        }
    }

    pub fn socket_path(&self) -> Option<&Path> {
        match self {
            Self::Tcp(_) => None,
            Self::Unix(listener) => Some(listener.path()),
        }
    }

    /// Serves connections until the shutdown begins. Open connections may continue until the shutdown's deadline.
    ///
    /// # Errors
    /// Returns an error if the listener cannot be registered with the runtime.
    pub async fn serve_api(&self, api: &Arc<ApiState>) -> io::Result<()> {
        let acceptor = match self {
            Self::Tcp(listener) => SocketAcceptor::new(listener.try_clone()?)?,
            Self::Unix(listener) => {
                let handle = listener.accept_handle()?;
                handle.set_nonblocking(true)?;
                SocketAcceptor::new(handle)?
            }
        };
        let (ordinary, spare) = (
            ConnectionLimiter::regular_connections(api),
            ConnectionLimiter::reserved_connections(api),
        );
        while let Some(socket) =
            api.tasks.shutdown_token().run_until_cancelled(acceptor.accept_socket()).await
        {
            let Some((way, slot)) = ordinary.try_acquire().or_else(|| spare.try_acquire()) else {
                // The send buffer of a new connection has room for these few bytes. The send fails only if the client
                // has left.
                let _ = rustix::net::send(&socket, OVERLOADED_RESPONSE, SendFlags::NOSIGNAL);
                continue;
            };
            let ours = api.tasks.clone();
            api.tasks.spawn_task(async move {
                if let Err(error) = serve_connection(socket, way, &ours).await {
                    tracing::debug!(error, "connection ended early");
                }
                drop(slot);
            });
        }
        Ok(())
    }
}

/// A limit on the connections of one kind, with the settings of each connection.
struct ConnectionLimiter {
    slots: Arc<Semaphore>,
    settings: ConnectionSettings,
}

/// The limits of a connection.
#[derive(Clone)]
struct ConnectionSettings {
    router: Router,
    /// The maximum time for the head of a request. An idle connection stays open for the same time.
    timeout: Duration,
    /// True if the connection may send another request.
    may_stay: bool,
}

impl ConnectionLimiter {
    fn regular_connections(api: &Arc<ApiState>) -> Self {
        let settings = ConnectionSettings {
            router: api.api_router(),
            timeout: api.limits.timeout,
            may_stay: true,
        };
        Self { slots: Arc::new(Semaphore::new(api.limits.connections)), settings }
    }

    /// Creates the limiter of the reserved connections: they serve health checks and reports of costs, one request
    /// each.
    fn reserved_connections(api: &Arc<ApiState>) -> Self {
        let timeout = RESERVED_REQUEST_TIMEOUT.min(api.limits.timeout);
        let settings = ConnectionSettings { router: api.health_router(), timeout, may_stay: false };
        Self { slots: Arc::new(Semaphore::new(RESERVED_CONNECTIONS)), settings }
    }

    fn try_acquire(&self) -> Option<(ConnectionSettings, OwnedSemaphorePermit)> {
        let slot = Arc::clone(&self.slots).try_acquire_owned().ok()?;
        Some((self.settings.clone(), slot))
    }
}

/// Serves one connection until it is closed.
async fn serve_connection(
    socket: OwnedFd,
    way: ConnectionSettings,
    tasks: &TaskGroup,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    // Each write is a complete response, so waiting for more bytes (Nagle's algorithm) would only delay it. The option
    // fails on a unix socket, which needs none.
    let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
    let stream = ServerStream::new(socket, WRITE_TIMEOUT)?;
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .auto_date_header(is_clock_in_range())
        .header_read_timeout(way.timeout)
        .keep_alive(way.may_stay)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(way.router));
    let mut connection = pin!(connection);
    tokio::select! {
        biased;
        done = connection.as_mut() => return Ok(done?),
        () = tasks.shutdown_token().cancelled() => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        biased;
        done = connection => Ok(done?),
        () = tasks.abort_token().cancelled() => Ok(()),
    }
}

/// The number of connections that are reserved beyond the limit. Our choice: enough for several probes, Prometheus
/// servers and callbacks of LiteLLM.
const RESERVED_CONNECTIONS: usize = 64;

/// The maximum time for a request on a reserved connection. Health checks and reports send their request at once.
const RESERVED_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum time for which a client may leave the socket full.
const WRITE_TIMEOUT: Duration = Duration::from_mins(1);

/// The answer to a connection above the limits. The service sends it without reading the request.
const OVERLOADED_RESPONSE: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\n\
    content-type: application/json\r\n\
    content-length: 100\r\n\
    retry-after: 1\r\n\
    connection: close\r\n\r\n\
    {\"error\":{\"code\":\"too_many_connections\",\"message\":\"too many connections are open; try again later\"}}";
