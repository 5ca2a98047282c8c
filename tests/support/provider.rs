//! The fake provider, running until the test drops it.

use std::net::SocketAddr;
use std::sync::Arc;

use cogni_gateway::base::drain::Drain;
use cogni_gateway::provider::{Gate, Provider, Seen};
use tokio_util::sync::{CancellationToken, DropGuard};

/// A provider on a port of its own.
pub(crate) struct Running {
    pub(crate) addr: SocketAddr,
    pub(crate) seen: Arc<Seen>,
    pub(crate) gate: Gate,
    pub(crate) stop: CancellationToken,
    _stop: DropGuard,
}

/// Starts a provider whose every answer follows `script`, unless a request names its own.
pub(crate) async fn start(script: &str) -> Running {
    start_at(SocketAddr::from(([127, 0, 0, 1], 0)), script).await
}

/// The same, at an address of this machine.
pub(crate) async fn start_at(addr: SocketAddr, script: &str) -> Running {
    let provider = Provider::bind(addr, script.parse().unwrap()).await.unwrap();
    let stop = CancellationToken::new();
    let running = Running {
        addr: provider.addr(),
        seen: provider.seen(),
        gate: provider.gate(),
        _stop: stop.clone().drop_guard(),
        stop: stop.clone(),
    };
    Drain::default().spawn(provider.serve(stop));
    running
}
