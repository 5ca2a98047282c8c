//! The response headers of `LiteLLM`, so that tests can check which headers a gateway passes on.

use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, SERVER, SET_COOKIE};
use http::{HeaderMap, HeaderName, HeaderValue};
use uuid::Uuid;

use super::script::ProviderScript;

/// Returns the headers that `LiteLLM` 1.109 adds to every answer. The request's call id is returned.
pub(super) fn litellm_headers(request: &HeaderMap) -> HeaderMap {
    let fresh = || header_value(&Uuid::now_v7().to_string());
    // A client's call id is used, as LiteLLM does; otherwise a new one is made.
    let call = request.get(&CALL_ID).cloned().unwrap_or_else(fresh);
    let mut headers = HeaderMap::with_capacity(16);
    headers.insert(SERVER, HeaderValue::from_static("uvicorn"));
    headers.insert(SET_COOKIE, HeaderValue::from_static("litellm=fake; HttpOnly; Path=/"));
    headers.insert(PROVIDER_REQUEST_ID, fresh());
    headers.insert(CALL_ID, call);
    for (name, value) in FIXED_HEADERS {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    headers
}

pub(super) fn set_json(headers: &mut HeaderMap) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
}

/// Adds the headers of a unary answer, which reports its cost.
pub(super) fn set_unary(headers: &mut HeaderMap, cost: Option<f64>) {
    set_json(headers);
    if let Some(cost) = cost {
        let cost = header_value(&python_float(cost));
        headers.insert(COST, cost.clone());
        headers.insert(COST_ORIGINAL, cost);
    }
}

/// Adds the headers of a stream. `LiteLLM` does not know a stream's cost here, and sends 0.0, which is wrong.
pub(super) fn set_stream(headers: &mut HeaderMap) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
    headers.insert(COST_ORIGINAL, HeaderValue::from_static("0.0"));
}

pub(super) fn set_error(headers: &mut HeaderMap, script: &ProviderScript) {
    if let Some(seconds) = script.retry_after {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if let Some(retry) = script.should_retry {
        headers
            .insert(SHOULD_RETRY, HeaderValue::from_static(if retry { "true" } else { "false" }));
    }
}

/// Formats a number like Python's `repr`: `2.5e-05`, where Rust would print `0.000025`.
fn python_float(number: f64) -> String {
    if number >= 1e-4 || number == 0.0 {
        return format!("{number:?}");
    }
    // Rust prints one digit of the exponent, Python at least two.
    let text = format!("{number:e}");
    match text.split_once("e-") {
        Some((digits, exponent)) => format!("{digits}e-{exponent:0>2}"),
        None => text,
    }
}

fn header_value(value: &str) -> HeaderValue {
    HeaderValue::from_str(value).expect("ids and numbers are visible ASCII")
}

const CALL_ID: HeaderName = HeaderName::from_static("x-litellm-call-id");
const COST: HeaderName = HeaderName::from_static("x-litellm-response-cost");
const COST_ORIGINAL: HeaderName = HeaderName::from_static("x-litellm-response-cost-original");
const PROVIDER_REQUEST_ID: HeaderName = HeaderName::from_static("llm_provider-x-request-id");
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// Headers with fixed values. The provider's address and the key's spend must not reach a sandbox.
const FIXED_HEADERS: [(&str, &str); 5] = [
    ("x-litellm-model-id", "5f2a7c1e9b3d4a68"),
    ("x-litellm-model-group", "fake"),
    ("x-litellm-model-api-base", "http://10.0.0.7:8091/v1"),
    ("x-litellm-key-spend", "12.345678"),
    ("x-litellm-version", "1.109.1"),
];
