//! The check of a request's origin, for all paths of the tools. A browser sends the `Origin` of the page that makes the
//! request, or for a plain link only its relation to the page (`Sec-Fetch-Site`). No page of another machine may call
//! the run's tools.

use http::uri::Authority;
use http::{HeaderMap, HeaderValue, header};

/// Returns true if a request has no `Origin`, or only `http` and `https` origins of this machine, at any port, and if its
/// browser does not name another site.
pub(super) fn is_origin_local(headers: &HeaderMap) -> bool {
    is_origin_known(headers, None)
}

/// Returns true if a request could be local, or if its page has this origin.
pub(super) fn is_origin_known(headers: &HeaderMap, known: Option<&str>) -> bool {
    let is_own_site = |site: &HeaderValue| OWN_SITES.contains(&site.as_bytes());
    let is_known = |origin: &HeaderValue| known.is_some_and(|known| *origin == known);
    let is_own = |origin| is_known(origin) || is_local(origin).unwrap_or(false);
    headers.get_all(header::ORIGIN).iter().all(is_own)
        && headers.get_all("sec-fetch-site").iter().all(is_own_site)
}

/// Returns `None` for a value that is not an origin.
fn is_local(origin: &HeaderValue) -> Option<bool> {
    let (scheme, place) = origin.to_str().ok()?.split_once("://")?;
    let place = place.parse::<Authority>().ok()?;
    let host = place.host();
    let has_valid_port = place.as_str() == host || place.port_u16().is_some();
    // A user in the authority makes it longer than the host and the port.
    let has_user = place.as_str().contains('@');
    let is_own = LOCAL_HOSTS.iter().any(|own| host.eq_ignore_ascii_case(own));
    Some(matches!(scheme, "http" | "https") && has_valid_port && !has_user && is_own)
}

/// The relations of a page that this machine has served, at any port, and of an address that a person has typed.
const OWN_SITES: [&[u8]; 3] = [b"same-origin", b"same-site", b"none"];

/// The hosts of an origin that mean this machine.
const LOCAL_HOSTS: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];
