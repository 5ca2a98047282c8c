//! Serves the tunnels of a run: TLS ends here, and the requests in a tunnel go to the run's connections.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio_rustls::TlsAcceptor;

use super::{ConnectionError, ConnectionServer};
use crate::base::streamed_endpoint::OpenTunnel;
use crate::gateway::pipeline::connect_route::handle_connect_request;
use crate::gateway::pipeline::connect_tunnel::OpenedTunnel;

impl ConnectionServer<'_> {
    /// Serves a tunnel until its client leaves or is idle for too long, or the run or the process ends.
    pub(super) async fn serve_tunnel(&self, opened: OpenedTunnel) -> Result<(), ConnectionError> {
        let OpenedTunnel { gateway, endpoint, tunnel, upgrade, peer, mut line } = opened;
        let OpenTunnel { name, tls, stop, permit } = tunnel;
        // The end of the run ends the tunnel like a shutdown: open requests end by themselves, and no new one begins.
        let tasks = self.tasks.child_group();
        let connections = ConnectionServer { tasks: &tasks, ..*self };
        let serving = async {
            // 1. The handshake, which may take as long as a head. Boxed, because the state of TLS is more than a kilobyte.
            let handshake = Box::pin(async {
                let stream = TokioIo::new(upgrade.await?);
                Ok::<_, ConnectionError>(Box::new(TlsAcceptor::from(tls).accept(stream).await?))
            });
            let handshake = tokio::time::timeout(self.config.header_timeout, handshake);
            let shaken = tasks.shutdown_token().run_until_cancelled(handshake).await;
            let Some(stream) = shaken else { return Ok(()) };
            let stream = stream??;
            // 2. The requests. Each of them is admitted, charged and recorded by itself.
            line.outcome = TUNNEL_OUTCOME;
            let answer = move |request| {
                let (gateway, endpoint) = (Arc::clone(&gateway), Arc::clone(&endpoint));
                let (peer, tunnel) = (peer.clone(), Some(Arc::clone(&name)));
                async move {
                    let answer = handle_connect_request(gateway, endpoint, peer, request, tunnel);
                    Ok::<_, Infallible>(Box::pin(answer).await)
                }
            };
            connections.serve_connection(stream, false, answer).await
        };
        let stopped = async {
            stop.await;
            tasks.shutdown_token().cancel();
            tokio::time::sleep(STOP_LINGER).await;
        };
        let served = tokio::select! {
            biased;
            served = serving => served,
            () = stopped => Ok(()),
        };
        drop(permit);
        served
    }
}

/// The time that open requests have for their ends when the run has ended. Our choice: they end at once.
const STOP_LINGER: Duration = Duration::from_secs(1);

/// The outcome in the access log of a tunnel that has carried requests, or could have.
const TUNNEL_OUTCOME: &str = "tunnel";
