//! Requests for tunnels on a run's socket: `CONNECT HOST:PORT`.
//!
//! The run's [endpoint](StreamedEndpoint) decides whether a tunnel may be opened. The answer is sent first; then the server
//! of the connection takes the tunnel out of the connection's [slot](TunnelSlot), ends TLS in it, and hands each request
//! in it to the same endpoint. So a tunnel keeps its connection's permit, and needs no task of its own.

use std::fmt::{self, Debug, Formatter};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::{Method, Request, Response, Version};
use hyper::body::{Body, Incoming};
use hyper::upgrade::OnUpgrade;

use super::connect_route::CONNECT_OUTCOME;
use super::exchange::ResponseBody;
use super::logged_body::StreamLogLine;
use super::read_body::IncomingRequestBody;
use super::tool_route::rejected_response;
use super::{ClientPeer, RunGateway};
use crate::base::streamed_endpoint::{OpenTunnel, StreamedEndpoint, TunnelRequest};

/// The place of a connection's tunnel between the answer to the client and the server of the connection.
#[derive(Clone, Default)]
pub struct TunnelSlot(Arc<Mutex<Option<OpenedTunnel>>>);

/// A tunnel whose client was told that it is open.
pub(super) struct OpenedTunnel {
    pub(super) gateway: Arc<RunGateway>,
    pub(super) endpoint: Arc<dyn StreamedEndpoint>,
    pub(super) tunnel: OpenTunnel,
    /// The stream of the connection, once the answer was sent.
    pub(super) upgrade: OnUpgrade,
    pub(super) peer: ClientPeer,
    /// The line of the access log, which is written when the tunnel ends.
    pub(super) line: StreamLogLine,
}

/// Returns true if a request asks for a tunnel in the way of HTTP/1.
pub fn asks_for_tunnel<B>(request: &Request<B>) -> bool {
    *request.method() == Method::CONNECT && request.version() <= Version::HTTP_11
}

impl TunnelSlot {
    /// Answers a request for a tunnel, and keeps the tunnel if it may be opened.
    pub(super) fn answer_request(
        &self,
        (gateway, endpoint): (Arc<RunGateway>, Arc<dyn StreamedEndpoint>),
        peer: ClientPeer,
        mut request: Request<Incoming>,
    ) -> Response<ResponseBody> {
        let mut line = StreamLogLine::new(
            Arc::clone(&gateway),
            Method::CONNECT,
            Some("HOST:PORT"),
            CONNECT_OUTCOME,
        );
        let upgrade = hyper::upgrade::on(&mut request);
        let (head, body) = IncomingRequestBody::split_request(request);
        let body = body.into_discarded(&gateway.tasks);
        // The permit is for the decision. An idle tunnel holds none; each request in it takes one.
        let _permit = match gateway.capacity.admit_request() {
            Ok(permit) => permit,
            Err(overload) => {
                let rejection = overload.into();
                let response = rejected_response(&rejection);
                (line.status, line.outcome) = (response.status().as_u16(), rejection.code());
                return response;
            }
        };
        let ((head, ()), has_body) = (head.into_parts(), !body.is_end_stream());
        let asked = TunnelRequest { head: &head, has_body, pid: peer.pid };
        match endpoint.open_tunnel(asked) {
            Ok(tunnel) => {
                (line.status, line.outcome) = (200, HANDSHAKE_OUTCOME);
                // The peer's slot is this one, which must not hold itself.
                let peer = ClientPeer { tunnel: None, ..peer };
                let opened = OpenedTunnel { gateway, endpoint, tunnel, upgrade, peer, line };
                *self.lock_tunnel() = Some(opened);
                Response::new(ResponseBody::from_text(""))
            }
            Err(reply) => {
                line.status = reply.response.status().as_u16();
                line.outcome = reply.code.unwrap_or(HANDSHAKE_OUTCOME);
                line.bytes = reply.response.body().size_hint().exact().unwrap_or_default();
                reply.response.map(ResponseBody::Streamed)
            }
        }
    }

    /// Takes the tunnel that was opened on the connection, if there is one.
    pub(super) fn take_tunnel(&self) -> Option<OpenedTunnel> {
        self.lock_tunnel().take()
    }

    fn lock_tunnel(&self) -> MutexGuard<'_, Option<OpenedTunnel>> {
        // No code under this lock panics.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Debug for TunnelSlot {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("TunnelSlot")
    }
}

/// The outcome in the access log of a tunnel whose client has not ended the handshake of TLS, because it does not trust
/// the run's authority, asks for another host, or speaks another protocol.
const HANDSHAKE_OUTCOME: &str = "tunnel_handshake_failed";
