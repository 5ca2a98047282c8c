//! The decision about a request, as far as it needs no credential. The run's socket and `explain` share the steps.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue, Method, Uri, header, request};

use super::headers::forwarded_headers;
use super::policy::{Connection, ConnectionPolicy};
use super::refusal::{ConnectDenial, ConnectRefusal};
use super::{AskedHead, MAX_ANNOUNCED_BYTES};
use crate::base::streamed_endpoint::{CONNECT_CERTIFICATE_PATH, CONNECT_LIST_PATH};
use crate::llm::budget::{BudgetLedger, ConnectionReservation, ConnectionReserveRequest};
use crate::tools::connection_config::AGENT_PREFIX;
use crate::tools::taint::TaintPolicy;

/// The thing that a request to the connections asks for, after the checks that need no state of the run.
pub enum ConnectAsk<'a> {
    List,
    /// The certificate of the run's tunnels.
    Certificate,
    Send(Box<CheckedConnect<'a>>),
}

/// A request that every layer allows.
pub struct CheckedConnect<'a> {
    pub connection: &'a Connection,
    /// The rule that allows the request.
    pub rule: Arc<str>,
    /// The address at the connection's server.
    pub uri: Uri,
    /// The headers that are sent, without the ones that a credential adds.
    pub headers: HeaderMap,
}

/// Checks a request, as far as it needs no state of the run. `length` is the announced length of its body. The function
/// has no side effect, so `explain` gives the result of a real request.
///
/// # Errors
/// Returns the first check or layer that refuses the request.
pub fn check_request<'a>(
    policy: &'a ConnectionPolicy,
    AskedHead { head, tunnel }: AskedHead<'_>,
    length: Option<u64>,
) -> Result<ConnectAsk<'a>, ConnectRefusal> {
    let Some((name, path)) = policy.find_target(head, tunnel)? else {
        return match_own_answer(policy, head);
    };
    let query = head.uri.query();
    let (connection, rule) = policy.check_request(name, head.method.as_str(), (path, query))?;
    // The very headers that are checked are sent.
    let has_credential = connection.credential.is_some();
    let mut headers = forwarded_headers(&head.headers, &connection.headers, has_credential);
    // The client of the connection announces no length for a body that is empty. Servers such as S3 demand it of these
    // methods (RFC 9110, section 8.6).
    if length == Some(0) && matches!(head.method, Method::POST | Method::PUT | Method::PATCH) {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    connection.check_signing((&head.headers, &headers), (path, query), length)?;
    let uri = connection.server_uri(path, query);
    let uri = uri.ok_or(ConnectRefusal::AmbiguousPath("cannot be sent"))?;
    Ok(ConnectAsk::Send(Box::new(CheckedConnect { connection, rule, uri, headers })))
}

/// Reads a request that goes to no server.
fn match_own_answer<'a>(
    policy: &ConnectionPolicy,
    head: &request::Parts,
) -> Result<ConnectAsk<'a>, ConnectRefusal> {
    let has_tunnels = policy.tunnelled_connections().next().is_some();
    match head.uri.path() {
        CONNECT_LIST_PATH if head.method == Method::GET => Ok(ConnectAsk::List),
        CONNECT_CERTIFICATE_PATH if head.method == Method::GET && has_tunnels => {
            Ok(ConnectAsk::Certificate)
        }
        _ => Err(ConnectRefusal::NotServed),
    }
}

/// Reserves the budget of a request, and asks the rules about what the run has seen.
///
/// # Errors
/// Returns the limit or the rule that prevents the request.
pub fn reserve_request(
    ledger: &Arc<BudgetLedger>,
    taint: &TaintPolicy,
    (connection, announced_bytes): (&Connection, u64),
) -> Result<ConnectionReservation, ConnectRefusal> {
    let reservation = ledger.reserve_connection_request(&ConnectionReserveRequest {
        connection: &connection.name,
        price: connection.price,
        announced_bytes: announced_bytes.min(MAX_ANNOUNCED_BYTES),
        limits: connection.limits,
    })?;
    // This request has its place, so one that is admitted later sees it.
    let name = format!("{AGENT_PREFIX}{}", connection.name);
    if let Some((rule, _)) = taint.judge_call(&name, (ledger, true)) {
        reservation.release_unspent();
        let (layer, rule) = ("connection", Arc::clone(rule));
        return Err(ConnectRefusal::Denied(ConnectDenial { layer, rule }));
    }
    Ok(reservation)
}
