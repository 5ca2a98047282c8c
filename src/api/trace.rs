//! Each request has an id, which is in its answer and in the log.

use std::time::Instant;

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument;
use uuid::Uuid;

/// Names the request, and logs how it was answered. A stream is logged when it begins.
pub(super) async fn trace(request: Request, next: Next) -> Response {
    let id = Uuid::now_v7().to_string();
    let span = tracing::info_span!("request", id);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let begun = Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    let status = response.status().as_u16();
    let elapsed_ms = begun.elapsed().as_millis();
    span.in_scope(|| tracing::debug!(%method, path, status, elapsed_ms, "answered"));
    let id = HeaderValue::from_str(&id).expect("a uuid is a valid header value");
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
