//! A listener that many runs share: TCP, with TLS unless the operator says otherwise.

use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

use super::{Config, Connections, Ended, turn_away};
use crate::base::drain::Drain;
use crate::base::socket::{Acceptor, Stream};
use crate::base::tls;
use crate::gateway::door::{Door, Visitor};
use crate::observe::metrics::Refused;

/// What all workers of a listener share.
pub struct Shared {
    pub config: Config,
    pub door: Door,
    /// Who we are to clients, and who they must be; without it they are not encrypted.
    pub tls: Option<ArcSwap<rustls::ServerConfig>>,
    /// Open at the same time, on each worker, be they of runs or of strangers.
    pub max_connections: usize,
    /// How long a client may take for its part of TLS.
    pub handshake_timeout: Duration,
    pub tasks: Drain,
}

/// Serves a listener on one worker until the tasks are told to finish.
///
/// # Errors
/// The listener cannot be registered with the runtime.
pub async fn serve(listener: TcpListener, worker: usize, shared: Arc<Shared>) -> io::Result<()> {
    let acceptor = Acceptor::new(listener)?;
    let slots = Arc::new(Semaphore::new(shared.max_connections));
    let tasks = shared.tasks.clone();
    while let Some(socket) = tasks.closing().run_until_cancelled(acceptor.accept()).await {
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
            shared.refuse(&socket);
            continue;
        };
        let shared = Arc::clone(&shared);
        tasks.spawn(async move {
            if let Err(error) = shared.connection(socket, worker).await {
                tracing::debug!(error, "connection ended early");
            }
            drop(slot);
        });
    }
    Ok(())
}

impl Shared {
    /// Serves one connection, unless it brings no good token in time: strangers hold no place for long, and one for which its
    /// run has no place only until it has read so.
    async fn connection(self: &Arc<Self>, socket: OwnedFd, worker: usize) -> Result<(), Ended> {
        // What is written is complete; waiting for more would only delay it.
        rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
        let stream = Stream::new(socket, self.config.write_timeout)?;
        let visitor = Arc::new(Visitor::new(worker));
        let stranger = async {
            let patience = self.handshake_timeout + self.config.header_timeout;
            tokio::select! {
                () = tokio::time::sleep(patience) => {}
                () = visitor.turned_away() => tokio::time::sleep(REFUSAL_LINGER).await,
            }
            if visitor.is_known() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            done = self.converse(stream, &visitor) => done,
            () = stranger => Err("no good token in time".into()),
        }
    }

    async fn converse(
        self: &Arc<Self>,
        stream: Stream,
        visitor: &Arc<Visitor>,
    ) -> Result<(), Ended> {
        let connections =
            Connections { config: &self.config, tasks: &self.tasks, ping: Some(PING_INTERVAL) };
        let (shared, visitor) = (Arc::clone(self), Arc::clone(visitor));
        let answer = move |request| {
            let (shared, visitor) = (Arc::clone(&shared), Arc::clone(&visitor));
            async move { shared.door.handle(&visitor, request).await }
        };
        let Some(tls) = &self.tls else {
            let Some(is_http2) = connections.opens_http2(&stream).await? else { return Ok(()) };
            return connections.serve(stream, is_http2, answer).await;
        };
        // Boxed, as the stream is: the state of TLS is more than a kilobyte.
        let handshake = Box::pin(TlsAcceptor::from(tls.load_full()).accept(stream));
        let handshake = tokio::time::timeout(self.handshake_timeout, handshake);
        let Some(stream) = self.tasks.closing().run_until_cancelled(handshake).await else {
            return Ok(());
        };
        let stream = Box::new(stream??);
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(tls::HTTP2);
        connections.serve(stream, is_http2, answer).await
    }

    /// Overload answers where it can be read: inside of TLS it would take a handshake to say so.
    fn refuse(&self, socket: &OwnedFd) {
        if self.tls.is_none() {
            turn_away(socket);
        }
        let refused = Refused { route: None, code: "too_many_connections", status: 503 };
        self.door.metrics.refused(&refused);
    }
}

/// How long a connection stays open for which its run has no place: it may belong to another run, which it has to show by then.
const REFUSAL_LINGER: Duration = Duration::from_secs(1);

/// How often an HTTP/2 client over a network is asked whether it is still there; one that does not answer in 20 s
/// (hyper's default) is gone. Ours: HTTP/1.1 clients are asked for a new request as often.
const PING_INTERVAL: Duration = Duration::from_secs(30);
