//! Where no grant is asked for: nobody is served whom a page in a browser has brought here.
//!
//! Any page may have its visitor's browser connect to this machine: under a name of the page's own that leads here (DNS
//! rebinding), or blindly, as forms do. A browser tells both: the name in `Host`, the page in `Origin`. With grants there
//! is nothing to keep out: no page has a token.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::header::{HOST, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::error::ApiError;

/// Refuses what was not meant for this machine, and what a page of another place asks for.
pub(super) async fn reject_cross_origin(request: Request, next: Next) -> Response {
    match check_origin(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn check_origin(headers: &HeaderMap) -> Result<(), ApiError> {
    // What is no browser may say nothing.
    let mut hosts = header_values(headers, HOST);
    if !hosts.all(|host| host.is_some_and(is_loopback_host)) {
        return Err(ApiError::ForeignHost);
    }
    let host = header_values(headers, HOST).flatten().next().unwrap_or_default();
    let is_own = |origin: &str| {
        origin.split_once("://").is_some_and(|(_, place)| place.eq_ignore_ascii_case(host))
    };
    if !header_values(headers, ORIGIN).all(|origin| origin.is_some_and(is_own)) {
        return Err(ApiError::ForeignOrigin);
    }
    Ok(())
}

/// `None` for what is no text.
fn header_values(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = Option<&str>> {
    headers.get_all(name).into_iter().map(|value| value.to_str().ok())
}

/// A service without grants listens on loopback addresses and unix sockets only.
fn is_loopback_host(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    let address = name.parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}
