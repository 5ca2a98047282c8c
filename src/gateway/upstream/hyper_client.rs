//! The client for calls over TLS or HTTP/2, built on hyper's client.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Body as _, Incoming, SizeHint};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::{Instant, Sleep};

use super::{
    ProviderAnswer, UpstreamCall, UpstreamConfig, UpstreamError, UpstreamKind, UpstreamScheme,
};
use crate::base;
use crate::base::header_lines::HeaderLines;
use crate::base::interim_limit::InterimLimitConnector;
use crate::base::shared_resolver::{SharedLookupConnector, SharedResolver};
use crate::base::time::MAX_TIME;
use crate::gateway::upstream::headers;

/// A client for one provider. hyper's client holds the connections.
pub(super) struct HyperClient {
    config: UpstreamConfig,
    client: legacy::Client<
        InterimLimitConnector<HttpsConnector<SharedLookupConnector>>,
        HyperRequestBody,
    >,
}

/// A body that hyper reads, with the same timeouts as the body of the plain client.
pub struct HyperBody {
    incoming: Incoming,
    alarm: Pin<Box<Sleep>>,
    idle: Duration,
    deadline: Option<Instant>,
}

type HyperRequestBody = UnsyncBoxBody<Bytes, Infallible>;

impl HyperClient {
    pub(super) fn new(config: UpstreamConfig) -> io::Result<Self> {
        let mut connector = SharedResolver::connector();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(config.connect_timeout));
        let builder = HttpsConnectorBuilder::new();
        let builder = match &config.ca_file {
            Some(path) => builder.with_tls_config(tls_config_with_ca(path)?),
            None => builder.with_native_roots()?,
        };
        let connector = builder.https_or_http().enable_all_versions().wrap_connector(connector);
        let connector = InterimLimitConnector::new(connector);
        let client = legacy::Client::builder(TokioExecutor::new())
            .pool_idle_timeout(config.pool_idle_timeout)
            .pool_timer(TokioTimer::new())
            .http2_only(config.url.scheme() == UpstreamScheme::H2c)
            // Resends only a request that hyper returns unsent, because the server had closed the idle connection.
            .retry_canceled_requests(true)
            .build(connector);
        Ok(Self { config, client })
    }

    pub(super) fn kind(&self) -> UpstreamKind {
        self.config.kind
    }

    pub(super) async fn send_call(
        &self,
        call: UpstreamCall,
    ) -> Result<ProviderAnswer, UpstreamError> {
        let deadline = call.deadline;
        let limit = self.config.first_byte_timeout;
        let until = super::http1::min_deadline(call.begun + limit.min(MAX_TIME), deadline);
        let length = call.body.len();
        let mut request = call.head.to_hyper_request(&self.config.url, length);
        let mut body = call.body;
        // hyper holds the body until there is a connection.
        body.release_read_buffer();
        *request.body_mut() = Some(body.into_rope());
        let request = request.map(|body| body.unwrap_or_default().boxed_unsync());
        let response = match tokio::time::timeout_at(until, self.client.request(request)).await {
            // Connecting counts toward this limit, too. hyper's connector also has the timeout for connecting alone.
            Ok(response) => response.map_err(map_hyper_error)?,
            // `until` is the earlier of the two limits. Equal to the deadline, it means that the run's time is up.
            Err(_elapsed) if deadline == Some(until) => return Err(UpstreamError::Deadline),
            Err(_elapsed) => return Err(UpstreamError::FirstByteTimeout(limit)),
        };
        Ok(self.wrap_response(response, deadline))
    }

    fn wrap_response(
        &self,
        response: Response<Incoming>,
        deadline: Option<Instant>,
    ) -> ProviderAnswer {
        let (head, incoming) = response.into_parts();
        let mut fields = HeaderLines::default();
        // Only known headers are copied, as in the plain client.
        for (name, value) in &head.headers {
            if let Some(name) = headers::kept_header_name(name.as_str()) {
                fields.push(name, value.as_bytes());
            }
        }
        let idle = self.config.idle_timeout.min(MAX_TIME);
        let due = super::http1::min_deadline(Instant::now() + idle, deadline);
        let alarm = Box::pin(tokio::time::sleep_until(due));
        let body = HyperBody { incoming, alarm, idle, deadline };
        let body = super::UpstreamBody::Tls(Box::new(body));
        ProviderAnswer { status: head.status, fields, body }
    }
}

impl HyperBody {
    pub(super) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        // Frames that are ready are taken before the alarm is polled: data wins over a timer.
        while let Poll::Ready(frame) = Pin::new(&mut self.incoming).poll_frame(cx) {
            match frame {
                Some(Ok(frame)) => {
                    // Trailers are skipped: the loop polls for the next frame.
                    let Ok(data) = frame.into_data() else { continue };
                    let due = super::http1::min_deadline(Instant::now() + self.idle, self.deadline);
                    self.alarm.as_mut().reset(due);
                    return Poll::Ready(Some(Ok(data)));
                }
                Some(Err(error)) => {
                    return Poll::Ready(Some(Err(UpstreamError::Hyper(error.into()))));
                }
                None => return Poll::Ready(None),
            }
        }
        // The body is pending. Polling the alarm registers this task's waker with the timer.
        ready!(self.alarm.as_mut().poll(cx));
        // The alarm was set to the earlier of two instants; the clock decides which of them has come.
        let is_deadline = self.deadline.is_some_and(|deadline| deadline <= Instant::now());
        let error = if is_deadline {
            UpstreamError::Deadline
        } else {
            UpstreamError::IdleTimeout(self.idle)
        };
        Poll::Ready(Some(Err(error)))
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

/// Makes a TLS configuration that trusts the authorities in one PEM file and no others.
fn tls_config_with_ca(path: &Path) -> io::Result<rustls::ClientConfig> {
    let roots = base::tls::load_root_store(path).map_err(io::Error::other)?;
    Ok(rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

fn map_hyper_error(error: legacy::Error) -> UpstreamError {
    // A failed connect proves that nothing was sent. Everything later may have cost tokens.
    if error.is_connect() {
        UpstreamError::Connect(io::Error::other(error))
    } else {
        UpstreamError::Hyper(error.into())
    }
}
