//! One run's socket: whoever connects belongs to the run.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::AsyncWriteExt;

use super::lane::Lane;
use super::{Config, Connections, Ended, LaneMode, turn_away};
use crate::audit::record;
use crate::base::socket::{Acceptor, Stream};
use crate::base::unix::Peer;
use crate::gateway::{Gateway, handle};
use crate::observe::metrics::Refused;
use crate::run::RequestId;

/// A run's listener.
struct RunSocket {
    gateway: Arc<Gateway>,
    config: Arc<Config>,
    uids: Arc<[u32]>,
    lane: Lane,
}

/// Serves a listener until the gateway's tasks are told to finish. Where `uids` names any, only their
/// processes are served.
///
/// # Errors
/// The listener cannot be registered with the runtime.
pub async fn serve(
    listener: UnixListener,
    gateway: Arc<Gateway>,
    config: Arc<Config>,
    uids: Arc<[u32]>,
) -> io::Result<()> {
    let acceptor = Acceptor::new(listener)?;
    let lane = Lane::new(Arc::clone(&gateway), &config);
    let socket = Arc::new(RunSocket { gateway, config, uids, lane });
    tokio::select! {
        () = socket.accept(&acceptor) => Ok(()),
        never = socket.lane.close_idle() => match never {},
    }
}

impl RunSocket {
    async fn accept(self: &Arc<Self>, acceptor: &Acceptor) {
        let gateway = &self.gateway;
        let closing = gateway.tasks.closing();
        while let Some(socket) = closing.run_until_cancelled(acceptor.accept()).await {
            let Ok(slot) = Arc::clone(&gateway.slots).try_acquire_owned() else {
                turn_away(&socket);
                gateway.metrics.refused(&Refused {
                    route: None,
                    code: "too_many_connections",
                    status: 503,
                });
                continue;
            };
            let (own, peer) = (Arc::clone(self), Peer::of(socket.as_fd()).ok());
            gateway.tasks.spawn(async move {
                own.connection(socket, peer).await;
                drop(slot);
            });
        }
    }

    async fn connection(&self, socket: OwnedFd, peer: Option<Peer>) {
        if let Some(peer) = peer {
            self.gateway.run.audit.opened(peer);
        }
        let uids = &self.uids;
        let is_allowed = uids.is_empty() || peer.is_some_and(|peer| uids.contains(&peer.uid));
        let pid = peer.and_then(|peer| peer.pid);
        let served = if is_allowed {
            self.converse(socket, pid).await
        } else {
            send_away(socket, pid, &self.gateway, &self.config).await
        };
        if let Err(error) = served {
            tracing::debug!(error, "connection ended early");
        }
    }

    async fn converse(&self, socket: OwnedFd, pid: Option<u32>) -> Result<(), Ended> {
        let stream = Stream::new(socket, self.config.write_timeout)?;
        let tasks = &self.gateway.tasks;
        let connections = Connections { config: &self.config, tasks, ping: None };
        let (is_http2, stream) = match self.config.lane {
            LaneMode::On => {
                let served = Box::pin(self.lane_first(stream, pid, &connections));
                match tasks.cut().run_until_cancelled(served).await.transpose()?.flatten() {
                    Some(left) => left,
                    None => return Ok(()),
                }
            }
            LaneMode::Off => match connections.opens_http2(&stream).await? {
                Some(is_http2) => (is_http2, stream),
                None => return Ok(()),
            },
        };
        let gateway = Arc::clone(&self.gateway);
        let answer = move |request| handle(Arc::clone(&gateway), pid, request);
        // Boxed: most connections never need it.
        Box::pin(connections.serve(stream, is_http2, answer)).await
    }

    /// Serves a connection in the lane for as long as it goes; returns what is left for hyper, and whether it speaks
    /// HTTP/2.
    async fn lane_first(
        &self,
        stream: Stream,
        pid: Option<u32>,
        connections: &Connections<'_>,
    ) -> Result<Option<(bool, Stream)>, Ended> {
        let idle = self.lane.enter();
        if idle.wait(|cx| stream.poll_readable(cx)).await.transpose()?.is_none() {
            return Ok(None);
        }
        match connections.opens_http2(&stream).await? {
            Some(false) => {}
            Some(true) => return Ok(Some((true, stream))),
            None => return Ok(None),
        }
        let left = self.lane.serve(stream, pid, &idle).await?;
        Ok(left.map(|stream| (false, stream)))
    }
}

/// Who may not call is told so, whatever it was going to ask, and recorded.
///
/// What it sends is thrown away for a moment: a client that cannot send its request does not look for an
/// answer.
async fn send_away(
    socket: OwnedFd,
    pid: Option<u32>,
    gateway: &Gateway,
    config: &Config,
) -> Result<(), Ended> {
    let (code, status) = ("peer_not_allowed", 403);
    gateway.run.counts.refused.fetch_add(1, Ordering::Relaxed);
    gateway.metrics.refused(&Refused { route: None, code, status });
    gateway.run.audit.refused(&record::Refused {
        request: RequestId::new().as_str(),
        code,
        status,
        method: "-",
        route: "-",
        model: None,
        rules: &[],
        request_bytes: 0,
        exhausted: gateway.run.ledger.exhausted().is_cancelled(),
        pid,
    });
    let mut stream = Stream::new(socket, config.write_timeout)?;
    stream.write_all(NOT_ALLOWED).await?;
    stream.shutdown().await?;
    let mut nowhere = tokio::io::sink();
    let rest = tokio::time::timeout(LINGER, tokio::io::copy(&mut stream, &mut nowhere));
    let _ = gateway.tasks.closing().run_until_cancelled(rest).await;
    Ok(())
}

/// How long a client that is sent away may go on sending. Ours: local clients send at once.
const LINGER: Duration = Duration::from_secs(1);

/// The answer to a process of a user that may not call.
const NOT_ALLOWED: &[u8] = b"HTTP/1.1 403 Forbidden\r\n\
    content-type: application/json\r\n\
    content-length: 28\r\n\
    x-should-retry: false\r\n\
    connection: close\r\n\r\n\
    {\"error\":\"peer_not_allowed\"}";
