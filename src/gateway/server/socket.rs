//! One run's socket: whoever connects belongs to the run.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::AsyncWriteExt;

use super::{Config, Connections, Ended, turn_away};
use crate::audit::record;
use crate::base::socket::{Acceptor, Stream};
use crate::base::unix::Peer;
use crate::gateway::{Gateway, handle};
use crate::observe::metrics::Refused;
use crate::run::RequestId;

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
    let tasks = gateway.tasks.clone();
    while let Some(socket) = tasks.closing().run_until_cancelled(acceptor.accept()).await {
        let Ok(slot) = Arc::clone(&gateway.slots).try_acquire_owned() else {
            turn_away(&socket);
            gateway.metrics.refused(&Refused {
                route: None,
                code: "too_many_connections",
                status: 503,
            });
            continue;
        };
        let (gateway, config) = (Arc::clone(&gateway), Arc::clone(&config));
        let peer = Peer::of(socket.as_fd()).ok();
        let is_allowed = uids.is_empty() || peer.is_some_and(|peer| uids.contains(&peer.uid));
        tasks.spawn(async move {
            if let Some(peer) = peer {
                gateway.run.audit.opened(peer);
            }
            let pid = peer.and_then(|peer| peer.pid);
            let served = if is_allowed {
                connection(socket, pid, gateway, &config).await
            } else {
                send_away(socket, pid, &gateway, &config).await
            };
            if let Err(error) = served {
                tracing::debug!(error, "connection ended early");
            }
            drop(slot);
        });
    }
    Ok(())
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

async fn connection(
    socket: OwnedFd,
    pid: Option<u32>,
    gateway: Arc<Gateway>,
    config: &Config,
) -> Result<(), Ended> {
    let stream = Stream::new(socket, config.write_timeout)?;
    let tasks = gateway.tasks.clone();
    let connections = Connections { config, tasks: &tasks, ping: None };
    let Some(is_http2) = connections.opens_http2(&stream).await? else { return Ok(()) };
    let answer = move |request| handle(Arc::clone(&gateway), pid, request);
    connections.serve(stream, is_http2, answer).await
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
