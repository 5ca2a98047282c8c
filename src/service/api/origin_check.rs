//! A check that refuses requests of browser pages, for services that ask for no grants.
//!
//! Any web page can make its visitor's browser connect to this machine: through a name of the page's own that
//! resolves to this machine (DNS rebinding), or blindly, as HTML forms do. A browser sends both facts: the name in
//! `Host` and the page in `Origin`. A service with grants needs no such check, because a page has no token.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::header::{HOST, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::error::ApiError;

/// Middleware that refuses requests that were not meant for this machine, and requests of pages from other origins.
pub(super) async fn reject_cross_origin(request: Request, next: Next) -> Response {
    match check_origin(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Checks that `Host` names this machine and that `Origin`, if it is there, names the same host.
fn check_origin(headers: &HeaderMap) -> Result<(), ApiError> {
    // A client that is not a browser may send neither header, so an absent header passes. A header that is not text
    // is refused.
    let mut hosts = header_values(headers, HOST);
    if !hosts.all(|host| host.is_some_and(is_loopback_host)) {
        return Err(ApiError::ForeignHost);
    }
    // An origin is a scheme and an authority. The page is our own if its authority equals `Host`.
    let host = header_values(headers, HOST).flatten().next().unwrap_or_default();
    let is_own = |origin: &str| {
        origin.split_once("://").is_some_and(|(scheme, place)| {
            matches!(scheme, "http" | "https") && place.eq_ignore_ascii_case(host)
        })
    };
    if !header_values(headers, ORIGIN).all(|origin| origin.is_some_and(is_own)) {
        return Err(ApiError::ForeignOrigin);
    }
    Ok(())
}

/// Returns all values of a header, with `None` for a value that is not text.
fn header_values(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = Option<&str>> {
    headers.get_all(name).into_iter().map(|value| value.to_str().ok())
}

/// Returns true if a `Host` value names this machine: `localhost` or a loopback address. A service without grants
/// listens on loopback addresses and unix sockets only.
fn is_loopback_host(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    // An IPv6 address stands in brackets there, which its parser does not take.
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    let address = name.parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}
