//! Checks of a request's head. The checks have no side effects, so the `explain` command gives the
//! result of a real call.

use http::uri::{Authority, Scheme};
use http::{HeaderMap, Method, Request, Uri, Version, header};

use super::policy::PolicyConfig;
use super::read_body;
use super::rejection::CallRejection;
use crate::gateway::upstream::headers::ClientHead;
use crate::llm::protocol::GatewayRoute;

/// The head of a request, as the server of the connection has read it.
pub trait JudgedHead: ClientHead {
    /// Returns the request's route; see [`match_route`].
    fn route(&self) -> Result<GatewayRoute, CallRejection>;

    /// Checks the fields of the head; see [`check_head`].
    fn check(&self, policy: &PolicyConfig) -> Result<(), CallRejection>;
}

impl<B> JudgedHead for Request<B> {
    fn route(&self) -> Result<GatewayRoute, CallRejection> {
        match_route(self)
    }

    fn check(&self, policy: &PolicyConfig) -> Result<(), CallRejection> {
        check_head(self, policy)
    }
}

/// Returns the served route of a request.
///
/// # Errors
/// Returns [`CallRejection::NotServed`] if no route matches, and an error if the request's form could be read in
/// two ways.
pub fn match_route<B>(request: &Request<B>) -> Result<GatewayRoute, CallRejection> {
    check_target(request)?;
    GatewayRoute::from_request_line(request.method(), request.uri().path())
        .ok_or(CallRejection::NotServed)
}

/// Checks the form of a request's target.
///
/// # Errors
/// Returns [`CallRejection::RepeatedHost`] if the request has two hosts, and [`CallRejection::NotServed`] if the target
/// could be read in two ways, or asks for another protocol.
pub fn check_target<B>(request: &Request<B>) -> Result<(), CallRejection> {
    check_host(request)?;
    if requests_upgrade(request.headers()) {
        return Err(CallRejection::NotServed);
    }
    Ok(())
}

/// Checks that a request names this machine only, and one host.
///
/// # Errors
/// Returns [`CallRejection::RepeatedHost`] if the request has two hosts, and [`CallRejection::NotServed`] if the target
/// could be read in two ways.
pub fn check_host<B>(request: &Request<B>) -> Result<(), CallRejection> {
    // HTTP/2 always names a host. The host is ignored: the configuration names the upstream's host.
    // RFC 9112, section 3.2: two hosts are two readings of one request, also if the host is ignored.
    if request.headers().get_all(header::HOST).iter().nth(1).is_some() {
        return Err(CallRejection::RepeatedHost);
    }
    let is_for_us = request.version() == Version::HTTP_2 || is_target_local(request.uri());
    if is_for_us { Ok(()) } else { Err(CallRejection::NotServed) }
}

/// Checks the fields that describe the body of a POST request.
///
/// # Errors
/// Returns an error if the body is not declared as plain JSON, or if its declared length exceeds the
/// limit.
pub fn check_head<B>(request: &Request<B>, policy: &PolicyConfig) -> Result<(), CallRejection> {
    if request.method() != Method::POST {
        return Ok(());
    }
    let content_type =
        request.headers().get(header::CONTENT_TYPE).map(header::HeaderValue::as_bytes);
    if !content_type.is_some_and(is_json) {
        return Err(CallRejection::NotJson);
    }
    if let Some(encoding) = request.headers().get(header::CONTENT_ENCODING)
        && !encoding.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        return Err(read_body::BodyReadError::Encoded("has a `content-encoding`").into());
    }
    // Without a declared length the limit is enforced when the body arrives.
    let declared = request
        .headers()
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse().ok());
    check_length(declared.unwrap_or_default(), policy)
}

/// Compares a declared body length with the policy's limit.
///
/// # Errors
/// Returns [`read_body::BodyReadError::TooLarge`] if the length exceeds the limit.
pub(super) fn check_length(declared: u64, policy: &PolicyConfig) -> Result<(), CallRejection> {
    let limit = policy.max_body_bytes;
    if declared > limit { Err(read_body::BodyReadError::TooLarge { limit }.into()) } else { Ok(()) }
}

/// Returns true if a target is a path alone, or an absolute `http` URL of this machine.
///
/// A client that is configured with the gateway's URL as its proxy sends such absolute URLs. `CONNECT`
/// has an authority and no scheme.
fn is_target_local(target: &Uri) -> bool {
    let Some(authority) = target.authority() else { return true };
    target.scheme() == Some(&Scheme::HTTP) && is_own_authority(authority)
}

fn is_own_authority(authority: &Authority) -> bool {
    let host = authority.host();
    // A target with a user name could be read in two ways, so such a target is not served.
    let has_user = authority.as_str().contains('@');
    !has_user && LOCAL_HOSTS.iter().any(|own| host.eq_ignore_ascii_case(own))
}

/// Returns true if a client requests a protocol other than `h2c`.
///
/// A client that names `h2c` only offers that protocol, as Java's client does in each of its first
/// requests. Such an offer is ignored (RFC 9110, section 7.8), and none of its headers goes upstream.
fn requests_upgrade(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::UPGRADE).iter();
    let mut protocols = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    protocols.any(|protocol| !protocol.trim_ascii().eq_ignore_ascii_case(b"h2c"))
}

/// Returns true for `application/json`, with or without parameters.
pub(super) fn is_json(content_type: &[u8]) -> bool {
    // Nearly all clients write it so.
    if content_type == b"application/json" {
        return true;
    }
    let essence = content_type.split(|byte| *byte == b';').next().unwrap_or_default();
    essence.trim_ascii().eq_ignore_ascii_case(b"application/json")
}

/// The hosts in a target that mean this machine, at any port. The port in a sandbox is not the
/// gateway's own port.
const LOCAL_HOSTS: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];
