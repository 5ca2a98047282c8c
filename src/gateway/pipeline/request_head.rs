//! Admission of a request's head: pure, so that what is explained is what is done.

use http::uri::{Authority, Scheme};
use http::{HeaderMap, Method, Request, Uri, Version, header};

use super::policy::PolicyConfig;
use super::read_body;
use super::rejection::CallRejection;
use crate::gateway::upstream::headers::ClientHead;
use crate::llm::protocol::GatewayRoute;

/// The head of a request, as the server of its connection has read it.
pub trait JudgedHead: ClientHead {
    /// See [`route`].
    fn route(&self) -> Result<GatewayRoute, CallRejection>;

    /// See [`check_head`].
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

/// The served route of a request.
///
/// # Errors
/// The request is for nothing that is served, or in a form that could be read in two ways.
pub fn match_route<B>(request: &Request<B>) -> Result<GatewayRoute, CallRejection> {
    // HTTP/2 always names a host; the upstream's comes from configuration all the same.
    let is_for_us = request.version() == Version::HTTP_2 || is_target_local(request.uri());
    if !is_for_us || requests_upgrade(request.headers()) {
        return Err(CallRejection::NotServed);
    }
    GatewayRoute::from_request_line(request.method(), request.uri().path())
        .ok_or(CallRejection::NotServed)
}

/// # Errors
/// A body that is not JSON, or too long to be worth reading.
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
    let declared = request
        .headers()
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse().ok());
    check_length(declared.unwrap_or_default(), policy)
}

/// # Errors
/// A body too long to be worth reading.
pub(super) fn check_length(declared: u64, policy: &PolicyConfig) -> Result<(), CallRejection> {
    let limit = policy.max_body_bytes;
    if declared > limit { Err(read_body::BodyReadError::TooLarge { limit }.into()) } else { Ok(()) }
}

/// Whether a target is a path alone, or an absolute URL of this machine: a client takes us for the proxy of the URL it was
/// given, which is ours. `CONNECT` has an authority and no scheme.
fn is_target_local(target: &Uri) -> bool {
    let Some(authority) = target.authority() else { return true };
    target.scheme() == Some(&Scheme::HTTP) && is_own_authority(authority)
}

fn is_own_authority(authority: &Authority) -> bool {
    let host = authority.host();
    let has_user = authority.as_str().contains('@');
    !has_user && LOCAL_HOSTS.iter().any(|own| host.eq_ignore_ascii_case(own))
}

/// Whether a client asks for another protocol. It only offers `h2c`, as Java's client does in each of its first requests:
/// such an offer is ignored (RFC 9110, section 7.8), and none of its headers goes upstream.
fn requests_upgrade(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::UPGRADE).iter();
    let mut protocols = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    protocols.any(|protocol| !protocol.trim_ascii().eq_ignore_ascii_case(b"h2c"))
}

/// `application/json`, with or without parameters.
pub(super) fn is_json(content_type: &[u8]) -> bool {
    let essence = content_type.split(|byte| *byte == b';').next().unwrap_or_default();
    essence.trim_ascii().eq_ignore_ascii_case(b"application/json")
}

/// Hosts in a target that are this machine, at any port: a sandbox's port is not the one that we listen at.
const LOCAL_HOSTS: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];
