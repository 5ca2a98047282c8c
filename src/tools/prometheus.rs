//! A read-only client of one Prometheus server, for the tool `core__metrics_query`.
//!
//! **Invariant:** only the configured server is asked, only with GET, and only at the two paths of queries. The client
//! follows no redirect.

use std::sync::Arc;

use bytes::Bytes;
use http::uri::{PathAndQuery, Uri};
use http::{Request, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::config::{PrometheusConfig, ToolConfigError};
use super::http_connector::{ServerConnector, build_client, parse_server_url};
use super::program_error::ToolProgramError;
use crate::base::log_line_limiter::LogLineLimiter;
use crate::base::url_component::encode_url_component;

/// A client of one server.
#[derive(Clone, Debug)]
pub struct PrometheusClient {
    /// The server's address, without a slash at its end.
    base: String,
    client: legacy::Client<ServerConnector, Empty<Bytes>>,
    failure_lines: Arc<LogLineLimiter>,
}

/// The answer of the server.
#[derive(Deserialize)]
struct QueryAnswer<'a> {
    status: String,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    error: Option<String>,
}

impl PrometheusClient {
    /// Creates a client.
    ///
    /// # Errors
    /// Returns an error if the address is not an `http` or `https` URL, or if the system has no authorities for `https`.
    pub fn new(config: &PrometheusConfig) -> Result<Self, ToolConfigError> {
        let wrong = |problem: &str| ToolConfigError::new("metrics.url", problem);
        let (_, connector) = parse_server_url(&config.url).map_err(wrong)?;
        let client = build_client(connector);
        Ok(Self {
            base: config.url.trim_end_matches('/').to_owned(),
            client,
            failure_lines: Arc::default(),
        })
    }

    /// Evaluates a query, and returns the server's `data` as JSON.
    ///
    /// # Errors
    /// Returns an error if the server does not answer, refuses the query, or sends more than `max_bytes`.
    pub async fn run_query(
        &self,
        arguments: &Map<String, Value>,
        max_bytes: usize,
    ) -> Result<String, ToolProgramError> {
        let uri = self.query_uri(arguments)?;
        let request = Request::get(uri)
            .header(header::ACCEPT, "application/json")
            .body(Empty::new())
            .map_err(|_| ToolProgramError::failed("the query cannot be sent"))?;
        // The error of a connection names addresses of the host's network, so the client does not see it.
        let response = self.client.request(request).await.map_err(|error| {
            if let Some(more) = self.failure_lines.count_event("unreachable") {
                tracing::warn!(%error, more, "the metrics server does not answer");
            }
            ToolProgramError::failed("the metrics server does not answer")
        })?;
        let body = Limited::new(response.into_body(), max_bytes + MAX_ENVELOPE_BYTES);
        let body = body.collect().await.map_err(|error| {
            if error.is::<http_body_util::LengthLimitError>() {
                ToolProgramError::too_large(max_bytes)
            } else {
                ToolProgramError::failed("the metrics server broke its answer off")
            }
        })?;
        let body = body.to_bytes();
        let answer: QueryAnswer<'_> = serde_json::from_slice(&body)
            .map_err(|_| ToolProgramError::failed("the metrics server's answer is not JSON"))?;
        match answer {
            QueryAnswer { data: Some(data), status, .. } if status == "success" => {
                Ok(data.get().to_owned())
            }
            QueryAnswer { error, .. } => {
                let error = error.unwrap_or_default();
                let end = error.floor_char_boundary(MAX_ERROR_BYTES);
                let error = &error[..end];
                Err(ToolProgramError::failed(format!("the metrics server refuses: {error}")))
            }
        }
    }

    fn query_uri(&self, arguments: &Map<String, Value>) -> Result<Uri, ToolProgramError> {
        let text = |name: &str| arguments.get(name).and_then(Value::as_str);
        let is_range = text("start").is_some() || text("end").is_some() || text("step").is_some();
        let names: &[&str] =
            if is_range { &["query", "start", "end", "step"] } else { &["query", "time"] };
        if is_range && names.iter().any(|name| text(name).is_none()) {
            return Err(ToolProgramError::failed("a range needs `start`, `end` and `step`"));
        }
        let path = if is_range { "query_range" } else { "query" };
        let mut uri = format!("{}/api/v1/{path}?limit={MAX_SERIES}", self.base);
        for name in names {
            if let Some(value) = text(name) {
                uri.push('&');
                uri.push_str(name);
                uri.push('=');
                uri.extend(encode_url_component(value));
            }
        }
        // The check of the path makes sure that no argument has left the query.
        let uri: Uri =
            uri.parse().map_err(|_| ToolProgramError::failed("the query cannot be sent"))?;
        let is_query = uri
            .path_and_query()
            .map(PathAndQuery::path)
            .is_some_and(|sent| sent.ends_with(&format!("/api/v1/{path}")));
        if is_query { Ok(uri) } else { Err(ToolProgramError::failed("the query cannot be sent")) }
    }
}

/// The bytes of an answer around its `data`: status, warnings and notes.
const MAX_ENVELOPE_BYTES: usize = 16 * 1024;

/// The most series of an answer. Prometheus cuts the rest off.
const MAX_SERIES: u32 = 1000;

/// The longest error of the server that the client sees, in bytes.
const MAX_ERROR_BYTES: usize = 512;
