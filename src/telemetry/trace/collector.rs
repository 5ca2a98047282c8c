//! The client of an OpenTelemetry collector, over HTTP.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::uri::Scheme;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Uri};
use http_body_util::{BodyExt, Collected, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::rt::TokioExecutor;
use percent_encoding::percent_decode_str;
use rustls::{ClientConfig, RootCertStore};
use serde::{Deserialize, Deserializer};
use tokio::time::timeout;

use super::otlp::{self, ExportRequestBuilder};
use super::{QueuedSpan, TracingConfig};
use crate::base::interim_limit::InterimLimitConnector;
use crate::base::secret::SecretString;
use crate::base::shared_resolver::{SharedLookupConnector, SharedResolver};

/// A collector's URL, including `/v1/traces`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectorUrl(Uri);

/// The headers of each request to the collector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CollectorHeaders(HeaderMap);

/// A collector, and the constant part of each request to it.
#[derive(Debug)]
pub(super) struct CollectorClient {
    address: Uri,
    headers: HeaderMap,
    frame: ExportRequestBuilder,
    client:
        legacy::Client<InterimLimitConnector<HttpsConnector<SharedLookupConnector>>, Full<Bytes>>,
    /// True if the collector did not take the last batch.
    is_failing: bool,
}

/// An error for a text that is no valid URL of a collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("give a URL, such as http://collector:4318")]
pub struct CollectorUrlError;

impl CollectorClient {
    pub(super) fn new(
        CollectorUrl(address): &CollectorUrl,
        config: &TracingConfig,
    ) -> io::Result<Self> {
        let connector = SharedResolver::connector();
        let builder = HttpsConnectorBuilder::new();
        let builder = if address.scheme() == Some(&Scheme::HTTPS) {
            builder.with_native_roots()?
        } else {
            // Plain HTTP needs no certificate authorities, and an image may have none. Loading them would fail there.
            let none = RootCertStore::empty();
            let config = ClientConfig::builder().with_root_certificates(none);
            builder.with_tls_config(config.with_no_client_auth())
        };
        let connector = builder.https_or_http().enable_http1().wrap_connector(connector);
        let connector = InterimLimitConnector::new(connector);
        // The configuration was checked before, so the default is never used.
        let CollectorHeaders(mut headers) =
            CollectorHeaders::parse_headers(&config.otlp_headers).unwrap_or_default();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        Ok(Self {
            address: address.clone(),
            headers,
            frame: ExportRequestBuilder::new(&config.service_name),
            client: legacy::Client::builder(TokioExecutor::new()).build(connector),
            is_failing: false,
        })
    }

    /// Sends a batch once, and returns the number of spans that the collector took. A failure is logged when it begins,
    /// and not for each batch.
    pub(super) async fn send_batch(
        &mut self,
        spans: impl ExactSizeIterator<Item = QueuedSpan>,
    ) -> usize {
        let count = spans.len();
        let sent = self.post_batch(self.frame.encode_request(spans)).await;
        match &sent {
            Ok(_) if self.is_failing => tracing::info!("the collector takes spans again"),
            Err(error) if !self.is_failing => {
                tracing::warn!(collector = %self.address, "spans are lost: {error:#}");
            }
            _ => (),
        }
        self.is_failing = sent.is_err();
        sent.map_or(0, |refused| count.saturating_sub(refused))
    }

    /// Posts a batch, and returns the number of spans that the collector rejected.
    async fn post_batch(&self, body: Vec<u8>) -> anyhow::Result<usize> {
        let mut request = Request::post(self.address.clone()).body(Full::from(body))?;
        request.headers_mut().clone_from(&self.headers);
        // One timeout covers connecting, the request and the response, because the thread sends one batch at a time.
        let answer = timeout(REQUEST_TIMEOUT, async {
            let response = self.client.request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await;
            // A broken body is no failure: the status has decided, and the body only counts rejected spans.
            anyhow::Ok((status, body.map(Collected::to_bytes).unwrap_or_default()))
        });
        let (status, body) = answer.await.context("the collector does not answer")??;
        if !status.is_success() {
            bail!("the collector answers {status}");
        }
        Ok(otlp::rejected_spans(&body))
    }
}

impl CollectorHeaders {
    /// Parses `name=value,…` in the format of OpenTelemetry's variable, with percent-encoded values.
    ///
    /// # Errors
    /// Returns an error if the text does not have that format. The error does not contain the text.
    pub fn parse_headers(given: &SecretString) -> anyhow::Result<Self> {
        let mut headers = HeaderMap::new();
        for pair in given.expose_secret().split(',').filter(|pair| !pair.trim().is_empty()) {
            let read = pair.split_once('=').and_then(|(name, value)| {
                let name = HeaderName::from_bytes(name.trim().as_bytes()).ok()?;
                let mut value =
                    HeaderValue::from_bytes(&Cow::from(percent_decode_str(value.trim()))).ok()?;
                // These headers usually carry a token, which debug output must not show.
                value.set_sensitive(true);
                Some((name, value))
            });
            let (name, value) = read.context(
                "`OTEL_EXPORTER_OTLP_HEADERS` is not valid; give name=value pairs with commas between them",
            )?;
            headers.append(name, value);
        }
        Ok(Self(headers))
    }
}

impl FromStr for CollectorUrl {
    type Err = CollectorUrlError;

    fn from_str(given: &str) -> Result<Self, CollectorUrlError> {
        let base = given.trim_end_matches('/');
        let url = if base.ends_with(OTLP_TRACES_PATH) {
            base.to_owned()
        } else {
            format!("{base}{OTLP_TRACES_PATH}")
        };
        let url: Uri = url.parse().map_err(|_| CollectorUrlError)?;
        let is_http = matches!(url.scheme_str(), Some("http" | "https"));
        // A user name or password before an `@` would appear in the logs.
        let is_plain = url.authority().is_some_and(|authority| !authority.as_str().contains('@'));
        if is_http && is_plain && url.query().is_none() {
            Ok(Self(url))
        } else {
            Err(CollectorUrlError)
        }
    }
}

impl<'de> Deserialize<'de> for CollectorUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl fmt::Display for CollectorUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The path of OTLP over HTTP for traces.
const OTLP_TRACES_PATH: &str = "/v1/traces";

/// The longest time for one request, including the connection. The value is OpenTelemetry's default.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The largest response that is read, in bytes. The response only reports rejected spans, which is short.
const MAX_RESPONSE_BYTES: usize = 64 * 1024;
