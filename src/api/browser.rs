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

use super::error::Error;

/// Refuses what was not meant for this machine, and what a page of another place asks for.
pub(super) async fn keep_out(request: Request, next: Next) -> Response {
    match check(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn check(headers: &HeaderMap) -> Result<(), Error> {
    // What is no browser may say nothing.
    let mut hosts = all(headers, HOST);
    if !hosts.all(|host| host.is_some_and(is_this_machine)) {
        return Err(Error::ForeignHost);
    }
    let host = all(headers, HOST).flatten().next().unwrap_or_default();
    let is_own = |origin: &str| {
        origin.split_once("://").is_some_and(|(_, place)| place.eq_ignore_ascii_case(host))
    };
    if !all(headers, ORIGIN).all(|origin| origin.is_some_and(is_own)) {
        return Err(Error::ForeignOrigin);
    }
    Ok(())
}

/// `None` for what is no text.
fn all(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = Option<&str>> {
    headers.get_all(name).into_iter().map(|value| value.to_str().ok())
}

/// A service without grants listens on loopback addresses and unix sockets only.
fn is_this_machine(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    let address = name.parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}
