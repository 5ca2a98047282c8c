//! Admission of a request's head: pure, so that what is explained is what is done.

use http::{HeaderMap, Method, Request, Version, header};

use super::policy::Config;
use super::receive;
use super::rejection::Rejection;
use crate::protocol::Route;

/// The served route of a request.
///
/// # Errors
/// The request is for nothing that is served, or in a form that could be read in two ways.
pub fn route<B>(request: &Request<B>) -> Result<Route, Rejection> {
    // Absolute form and CONNECT name a host; ours comes from configuration. HTTP/2 always names one.
    let names_host = request.uri().authority().is_some() && request.version() != Version::HTTP_2;
    if names_host || is_upgrade(request.headers()) {
        return Err(Rejection::NotServed);
    }
    Route::find(request.method(), request.uri().path()).ok_or(Rejection::NotServed)
}

/// # Errors
/// A body that is not JSON, or too long to be worth reading.
pub fn check_head<B>(request: &Request<B>, policy: &Config) -> Result<(), Rejection> {
    if request.method() != Method::POST {
        return Ok(());
    }
    let content_type =
        request.headers().get(header::CONTENT_TYPE).map(header::HeaderValue::as_bytes);
    if !content_type.is_some_and(is_json) {
        return Err(Rejection::NotJson);
    }
    let declared = request
        .headers()
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse().ok());
    if declared.is_some_and(|length: u64| length > policy.max_body_bytes) {
        return Err(receive::Error::TooLarge { limit: policy.max_body_bytes }.into());
    }
    Ok(())
}

fn is_upgrade(headers: &HeaderMap) -> bool {
    headers.contains_key(header::UPGRADE)
}

/// `application/json`, with or without parameters.
pub(super) fn is_json(content_type: &[u8]) -> bool {
    let essence = content_type.split(|byte| *byte == b';').next().unwrap_or_default();
    essence.trim_ascii().eq_ignore_ascii_case(b"application/json")
}
