//! Admission of a request's head: pure, so that what is explained is what is done.

use std::time::Duration;

use http::{HeaderMap, Method, Request, Version, header};
use serde::Deserialize;

use super::body;
use super::headers;
use super::protocol::Route;
use super::receive;
use super::rejection::Rejection;

/// What a run's requests may be and do.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    pub headers: headers::Config,
    pub body: body::Policy,
    /// Largest request body.
    pub max_body_bytes: u64,
    /// How long a client may take to send its body.
    #[serde(with = "humantime_serde")]
    pub body_timeout: Duration,
    /// What happens to the upstream's answer when the client has left.
    pub on_client_gone: OnClientGone,
}

/// What happens to a call whose client has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnClientGone {
    /// The upstream call is closed at once, and charged by estimate.
    #[default]
    Cancel,
    /// The rest is read and thrown away, within bounds, to learn the true usage.
    Drain,
}

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
pub fn check_head<B>(request: &Request<B>, policy: &Policy) -> Result<(), Rejection> {
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
fn is_json(content_type: &[u8]) -> bool {
    let essence = content_type.split(|byte| *byte == b';').next().unwrap_or_default();
    essence.trim_ascii().eq_ignore_ascii_case(b"application/json")
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            headers: headers::Config::default(),
            body: body::Policy::default(),
            // SPEC G5.
            max_body_bytes: 32 * 1024 * 1024,
            body_timeout: Duration::from_mins(1),
            on_client_gone: OnClientGone::default(),
        }
    }
}
