//! Listens on TCP or on a unix socket, and serves connections until it is told to finish.
//!
//! A client that sends its head too slowly, or reads nothing for too long, loses its connection. Of connections beyond the
//! limit some are kept for whoever asks how the service is, or reports what calls have cost; the rest is turned away with
//! an answer.

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

use super::Api;
use crate::base::drain::Drain;
use crate::base::socket::{Acceptor, Stream};
use crate::base::unix::{self, Permissions};
use crate::config::Place;

/// A bound listener. Dropping it removes its path, where it has one.
#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    Unix(unix::Listener),
}

impl Listener {
    /// # Errors
    /// It cannot be bound, and why.
    pub fn bind(place: &Place) -> anyhow::Result<Self> {
        match place {
            Place::Tcp(address) => {
                let listener = TcpListener::bind(address).with_context(|| {
                    format!("`serve.listen` is `{address}`, which cannot be bound")
                })?;
                listener.set_nonblocking(true)?;
                Ok(Self::Tcp(listener))
            }
            Place::Unix(path) => {
                let owner_only = Permissions { mode: 0o600, uid: None, gid: None };
                Ok(Self::Unix(unix::Listener::bind(path, owner_only)?))
            }
        }
    }

    /// With the port that was chosen for port 0.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(_) => None,
        }
    }

    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Tcp(_) => None,
            Self::Unix(listener) => Some(listener.path()),
        }
    }

    /// Serves until the service's tasks are told to finish; what is open then may go on until they are cut.
    ///
    /// # Errors
    /// The listener cannot be registered with the runtime.
    pub async fn serve(&self, api: &Arc<Api>) -> io::Result<()> {
        let acceptor = match self {
            Self::Tcp(listener) => Acceptor::new(listener.try_clone()?)?,
            Self::Unix(listener) => {
                let handle = listener.accept_handle()?;
                handle.set_nonblocking(true)?;
                Acceptor::new(handle)?
            }
        };
        let (ordinary, spare) = (Door::ordinary(api), Door::spare(api));
        while let Some(socket) = api.tasks.closing().run_until_cancelled(acceptor.accept()).await {
            let Some((way, slot)) = ordinary.enter().or_else(|| spare.enter()) else {
                // A new connection has room for these few bytes, or a peer that has left already.
                let _ = rustix::net::send(&socket, OVERLOADED, SendFlags::NOSIGNAL);
                continue;
            };
            let ours = api.tasks.clone();
            api.tasks.spawn(async move {
                if let Err(error) = converse(socket, way, &ours).await {
                    tracing::debug!(error, "connection ended early");
                }
                drop(slot);
            });
        }
        Ok(())
    }
}

/// So many connections at the same time, and how each is served.
struct Door {
    slots: Arc<Semaphore>,
    way: Way,
}

/// How a connection is served.
#[derive(Clone)]
struct Way {
    router: Router,
    /// For a head; an idle connection stays open as long.
    patience: Duration,
    /// Whether it may ask again.
    may_stay: bool,
}

impl Door {
    fn ordinary(api: &Arc<Api>) -> Self {
        let way = Way { router: api.router(), patience: api.limits.patience, may_stay: true };
        Self { slots: Arc::new(Semaphore::new(api.limits.connections)), way }
    }

    /// Kept for who asks how the service is, or reports costs, and does so at once.
    fn spare(api: &Arc<Api>) -> Self {
        let patience = SPARE_PATIENCE.min(api.limits.patience);
        let way = Way { router: api.vital(), patience, may_stay: false };
        Self { slots: Arc::new(Semaphore::new(SPARE)), way }
    }

    fn enter(&self) -> Option<(Way, OwnedSemaphorePermit)> {
        let slot = Arc::clone(&self.slots).try_acquire_owned().ok()?;
        Some((self.way.clone(), slot))
    }
}

/// One connection, to its end.
async fn converse(
    socket: OwnedFd,
    way: Way,
    tasks: &Drain,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    // What is written is complete; waiting for more would only delay it. A unix socket never waits.
    let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
    let stream = Stream::new(socket, WRITE_TIMEOUT)?;
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(way.patience)
        .keep_alive(way.may_stay)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(way.router));
    let mut connection = pin!(connection);
    tokio::select! {
        biased;
        done = connection.as_mut() => return Ok(done?),
        () = tasks.closing().cancelled() => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        biased;
        done = connection => Ok(done?),
        () = tasks.cut().cancelled() => Ok(()),
    }
}

/// Beyond all others. Ours: a probe, Prometheus' and LiteLLM's callback, each some times over.
const SPARE: usize = 64;

/// Who has one of them asks at once.
const SPARE_PATIENCE: Duration = Duration::from_secs(5);

/// How long a client may leave us unable to write.
const WRITE_TIMEOUT: Duration = Duration::from_mins(1);

/// The answer to a connection too many, whatever it was going to ask.
const OVERLOADED: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\n\
    content-type: application/json\r\n\
    content-length: 100\r\n\
    retry-after: 1\r\n\
    connection: close\r\n\r\n\
    {\"error\":{\"code\":\"too_many_connections\",\"message\":\"too many connections are open; try again later\"}}";
