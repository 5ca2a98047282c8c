//! The tunnels of a run: the decision about a `CONNECT` request, the run's authority, and the bound of open tunnels.

use std::sync::Arc;

use http::request;

use super::policy::{Connection, ConnectionPolicy};
use super::refusal::ConnectRefusal;
use super::tunnel_authority::{TunnelAuthority, TunnelAuthorityError};
use super::{ConnectionParts, check_headers};
use crate::base::keyed_permits::{KeyedPermit, KeyedPermits};
use crate::base::streamed_endpoint::{OpenTunnel, TunnelRequest};
use crate::llm::budget::BudgetLedger;

/// The tunnels of one run.
pub struct RunTunnels {
    authority: TunnelAuthority,
    /// The permits of the process, with the run's name as the key.
    permits: Arc<KeyedPermits>,
    run: String,
}

impl RunTunnels {
    /// Makes the authority of a run whose connections have tunnels; `None` for a run without them.
    ///
    /// # Errors
    /// Returns an error if the authority cannot be made.
    pub fn for_run(
        policy: &ConnectionPolicy,
        run: &str,
        permits: &Arc<KeyedPermits>,
    ) -> Result<Option<Self>, TunnelAuthorityError> {
        let addresses = policy.tunnelled_connections().filter_map(|own| own.tunnel.as_ref());
        let mut hosts: Vec<_> = addresses.map(|address| Arc::clone(&address.host)).collect();
        hosts.sort_unstable();
        hosts.dedup();
        if hosts.is_empty() {
            return Ok(None);
        }
        let (permits, run) = (Arc::clone(permits), run.to_owned());
        Ok(Some(Self { authority: TunnelAuthority::new(&hosts)?, permits, run }))
    }

    /// Returns the certificate that the programs of the sandbox must trust, as PEM.
    pub(super) fn certificate_pem(&self) -> &str {
        self.authority.certificate_pem()
    }

    fn take_permit(&self) -> Result<KeyedPermit, ConnectRefusal> {
        self.permits.try_take(Some(&self.run)).ok_or(ConnectRefusal::TooManyTunnels)
    }
}

impl ConnectionParts {
    /// Decides about a tunnel. Nothing is charged or recorded for one that opens: each request in it is.
    pub(super) fn admit_tunnel(
        &self,
        request: &TunnelRequest<'_>,
    ) -> Result<OpenTunnel, ConnectRefusal> {
        // 1. The operator's switch.
        self.check_accepting()?;
        // 2. The run's time, the form of the request, and the address.
        let asked = (request.head, request.has_body);
        let connection = check_tunnel_request(&self.policy, &self.ledger, asked)?;
        // 3. The place among the open tunnels.
        let address = connection.tunnel.as_ref();
        let server = self.tunnels.as_ref().zip(address).and_then(|(tunnels, address)| {
            Some((tunnels, tunnels.authority.server_config(&address.host)?))
        });
        let (tunnels, tls) = server.ok_or(ConnectRefusal::NotServed)?;
        let permit = tunnels.take_permit()?;
        let stop = self.stop_signal();
        let stop = Box::pin(async move {
            stop.wait_stopped().await;
        });
        Ok(OpenTunnel { name: Arc::clone(&connection.name), tls, stop, permit })
    }
}

/// Decides about a `CONNECT` request, and returns the connection that its tunnel is for. The function has no side effect,
/// so `explain` gives the result of a real request.
///
/// # Errors
/// Returns the first reason against the tunnel.
pub fn check_tunnel_request<'a>(
    policy: &'a ConnectionPolicy,
    ledger: &BudgetLedger,
    (head, has_body): (&request::Parts, bool),
) -> Result<&'a Connection, ConnectRefusal> {
    ledger.check_time()?;
    check_headers(&head.headers, None)?;
    if head.headers.get_all(http::header::HOST).iter().nth(1).is_some() {
        return Err(ConnectRefusal::InvalidTunnel("names two hosts in `host`"));
    }
    if has_body {
        return Err(ConnectRefusal::InvalidTunnel("has a body"));
    }
    policy.check_tunnel(&head.uri)
}
