//! The log line and the count of each request. The request's id is in the answer and in the log. The log line of a
//! request about a run names the run.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument;
use tracing::field::Empty;
use uuid::Uuid;

use super::ApiState;

/// Gives the request an id, and logs its grant, its status and its duration. A stream is logged when it begins.
pub(super) async fn log_request(
    State(api): State<Arc<ApiState>>,
    request: Request,
    next: Next,
) -> Response {
    let id = Uuid::now_v7().to_string();
    // The extractor that checks the grant fills in `grant`, and a handler fills in `run` by `name_run`.
    let span = tracing::info_span!("request", id, grant = Empty, run = Empty);
    let route = request.extensions().get::<MatchedPath>().cloned();
    let route = route.as_ref().map_or("-", MatchedPath::as_str);
    let method = request.method().clone();
    let path: String = request.uri().path().chars().take(MAX_LOGGED_PATH_BYTES).collect();
    let begun = Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    let status = response.status().as_u16();
    // A `u128` would be logged as a text in JSON.
    let elapsed_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    span.in_scope(|| match route {
        // Probes request these paths every few seconds.
        "/healthz" | "/readyz" => tracing::debug!(%method, path, status, elapsed_ms, "answered"),
        _ => tracing::info!(%method, path, status, elapsed_ms, "answered"),
    });
    api.metrics.record_api_request(route, status);
    let id = HeaderValue::from_str(&id).expect("a uuid is a valid header value");
    response.headers_mut().insert(REQUEST_ID_HEADER, id);
    response
}

/// Names the run that the current request is about, for the request's log line.
pub(super) fn name_run(run: &str) {
    tracing::Span::current().record("run", run);
}

const REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// The largest part of a path in the log, in bytes. All paths of this API are shorter.
const MAX_LOGGED_PATH_BYTES: usize = 256;
