//! The socket of one run: every connection to the socket belongs to the run.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;

use super::lane::LaneServer;
use super::stream_permit::MAX_RUN_STREAMS;
use super::{ConnectionError, ConnectionServer, HttpServerConfig, LaneMode, send_overloaded};
use crate::base::cancel_watch::CancelWatch;
use crate::base::socket::{ServerStream, SocketAcceptor};
use crate::base::unix::PeerCredentials;
use crate::gateway::pipeline::connect_tunnel::TunnelSlot;
use crate::gateway::pipeline::{ClientPeer, RunGateway, handle_request};
use crate::gateway::run::RequestId;
use crate::telemetry::audit::records;
use crate::telemetry::metrics::RefusedRequest;

/// The server of a run's listener.
struct RunSocketServer {
    gateway: Arc<RunGateway>,
    config: Arc<HttpServerConfig>,
    uids: Arc<[u32]>,
    lane: LaneServer,
    /// The permits of the socket's open HTTP/2 streams.
    streams: Arc<Semaphore>,
}

/// Serves a listener until the gateway's tasks shut down. If `uids` is not empty, only processes of
/// these users are served.
///
/// # Errors
/// Returns an error if the listener cannot be registered with the runtime.
pub async fn serve_run_socket(
    listener: UnixListener,
    gateway: Arc<RunGateway>,
    config: Arc<HttpServerConfig>,
    uids: Arc<[u32]>,
) -> io::Result<()> {
    let acceptor = SocketAcceptor::new(listener)?;
    let lane = LaneServer::new(Arc::clone(&gateway), &config);
    let streams = Arc::new(Semaphore::new(MAX_RUN_STREAMS));
    let socket = Arc::new(RunSocketServer { gateway, config, uids, lane, streams });
    tokio::select! {
        () = socket.accept_connection(&acceptor) => Ok(()),
        never = socket.lane.close_idle_connections() => match never {},
    }
}

impl RunSocketServer {
    async fn accept_connection(self: &Arc<Self>, acceptor: &SocketAcceptor) {
        let gateway = &self.gateway;
        let closing = gateway.tasks.shutdown_token();
        while let Some(socket) = closing.run_until_cancelled(acceptor.accept_socket()).await {
            // Never wait for a permit: a waiting connection would block the acceptance of all later
            // ones.
            let Ok(slot) = Arc::clone(&gateway.slots).try_acquire_owned() else {
                send_overloaded(&socket);
                gateway.metrics.record_refusal(&RefusedRequest {
                    route: None,
                    code: "too_many_connections",
                    status: 503,
                });
                continue;
            };
            // The kernel recorded the peer's credentials when the process connected.
            let (own, peer) = (Arc::clone(self), PeerCredentials::from_socket(socket.as_fd()).ok());
            gateway.tasks.spawn_task(async move {
                own.handle_connection(socket, peer).await;
                drop(slot);
            });
        }
    }

    async fn handle_connection(&self, socket: OwnedFd, peer: Option<PeerCredentials>) {
        if let Some(peer) = peer {
            self.gateway.run.audit.record_connection(peer);
        }
        let uids = &self.uids;
        // Without credentials no user is proved, so a configured list rejects the connection.
        let is_allowed = uids.is_empty() || peer.is_some_and(|peer| uids.contains(&peer.uid));
        let pid = peer.and_then(|peer| peer.pid);
        let served = if is_allowed {
            self.serve_http(socket, pid).await
        } else {
            reject_peer(socket, pid, &self.gateway, &self.config).await
        };
        if let Err(error) = served {
            tracing::debug!(error, "connection ended early");
        }
    }

    async fn serve_http(&self, socket: OwnedFd, pid: Option<u32>) -> Result<(), ConnectionError> {
        let stream = ServerStream::new(socket, self.config.write_timeout)?;
        let tasks = &self.gateway.tasks;
        let connections =
            ConnectionServer { config: &self.config, tasks, ping: None, streams: &self.streams };
        let (is_http2, stream) = match self.config.lane {
            LaneMode::On => {
                // `None` means that the lane served the connection to its end, or that a forced shutdown
                // cancelled the lane.
                let served = Box::pin(self.try_lane_first(stream, pid, &connections));
                let abort = CancelWatch::new(tasks.abort_token().clone());
                match abort.run_until_cancelled(served).await.transpose()?.flatten() {
                    Some(left) => left,
                    None => return Ok(()),
                }
            }
            LaneMode::Off => match connections.detect_http2(&stream).await? {
                Some(is_http2) => (is_http2, stream),
                None => return Ok(()),
            },
        };
        let gateway = Arc::clone(&self.gateway);
        // Only a run with connections has tunnels. HTTP/2 would carry them in streams of one connection.
        let tunnel = (gateway.tools.is_some() && !is_http2).then(TunnelSlot::default);
        let peer = ClientPeer { pid, hangup: stream.watch_hangup(), tunnel: tunnel.clone() };
        let answer = move |request| handle_request(Arc::clone(&gateway), peer.clone(), request);
        // Boxed, because most connections never reach this point.
        Box::pin(connections.serve_connection(stream, is_http2, answer)).await?;
        match tunnel.and_then(|slot| slot.take_tunnel()) {
            Some(tunnel) => Box::pin(connections.serve_tunnel(tunnel)).await,
            None => Ok(()),
        }
    }

    /// Serves a connection in the lane as long as possible. Returns the connection if hyper must
    /// continue, and true for HTTP/2.
    async fn try_lane_first(
        &self,
        stream: ServerStream,
        pid: Option<u32>,
        connections: &ConnectionServer<'_>,
    ) -> Result<Option<(bool, ServerStream)>, ConnectionError> {
        let idle = self.lane.track_connection();
        // Wait for the first byte as an idle connection; the timeout for a head starts only then.
        if idle.wait_unless_closing(|cx| stream.poll_readable(cx)).await.transpose()?.is_none() {
            return Ok(None);
        }
        match connections.detect_http2(&stream).await? {
            Some(false) => {}
            Some(true) => return Ok(Some((true, stream))),
            None => return Ok(None),
        }
        let left = self.lane.serve_connection(stream, pid, &idle).await?;
        Ok(left.map(|stream| (false, stream)))
    }
}

/// Answers a peer that may not call, whatever its request would have been, and records the refusal.
///
/// The gateway discards the peer's bytes for a moment, because a client that cannot send its request
/// does not read the response.
async fn reject_peer(
    socket: OwnedFd,
    pid: Option<u32>,
    gateway: &RunGateway,
    config: &HttpServerConfig,
) -> Result<(), ConnectionError> {
    let (code, status) = ("peer_not_allowed", 403);
    gateway.run.counts.refused.fetch_add(1, Ordering::Relaxed);
    gateway.metrics.record_refusal(&RefusedRequest { route: None, code, status });
    gateway.run.audit.record_refusal(&records::CallRefusedRecord {
        request: RequestId::new().as_str(),
        code,
        status,
        method: "-",
        route: "-",
        model: None,
        rules: &[],
        request_bytes: 0,
        exhausted: gateway.run.ledger.exhausted_token().is_cancelled(),
        pid,
    });
    let mut stream = ServerStream::new(socket, config.write_timeout)?;
    stream.write_all(FORBIDDEN_RESPONSE).await?;
    stream.shutdown().await?;
    let mut nowhere = tokio::io::sink();
    let rest = tokio::time::timeout(REJECT_LINGER, tokio::io::copy(&mut stream, &mut nowhere));
    let _ = gateway.tasks.shutdown_token().run_until_cancelled(rest).await;
    Ok(())
}

/// The longest time for which a rejected client may continue to send. Our choice: local clients send at
/// once.
const REJECT_LINGER: Duration = Duration::from_secs(1);

/// The response to a process of a user that may not call.
const FORBIDDEN_RESPONSE: &[u8] = b"HTTP/1.1 403 Forbidden\r\n\
    content-type: application/json\r\n\
    content-length: 28\r\n\
    x-should-retry: false\r\n\
    connection: close\r\n\r\n\
    {\"error\":\"peer_not_allowed\"}";
