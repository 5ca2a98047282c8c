//! Calls over TLS or HTTP/2, through hyper's client.

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
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::{Instant, Sleep};

use super::{Call, Config, Error, Kind, ProviderAnswer, Scheme};
use crate::base;
use crate::base::header_lines::HeaderLines;
use crate::base::time::MAX_TIME;
use crate::upstream::headers;

/// Calls to one provider; hyper's client keeps its connections.
pub(super) struct Client {
    config: Config,
    client: legacy::Client<HttpsConnector<HttpConnector>, RequestBody>,
}

/// A body that hyper reads, with the timeouts that ours has.
pub struct Body {
    incoming: Incoming,
    alarm: Pin<Box<Sleep>>,
    idle: Duration,
    deadline: Option<Instant>,
}

type RequestBody = UnsyncBoxBody<Bytes, Infallible>;

impl Client {
    pub(super) fn new(config: Config) -> io::Result<Self> {
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(config.connect_timeout));
        let builder = HttpsConnectorBuilder::new();
        let builder = match &config.ca_file {
            Some(path) => builder.with_tls_config(trust_only(path)?),
            None => builder.with_native_roots()?,
        };
        let connector = builder.https_or_http().enable_all_versions().wrap_connector(connector);
        let client = legacy::Client::builder(TokioExecutor::new())
            .pool_idle_timeout(config.pool_idle_timeout)
            .pool_timer(TokioTimer::new())
            .http2_only(config.url.scheme() == Scheme::H2c)
            // Only what hyper hands back unsent, because the idle connection was closed.
            .retry_canceled_requests(true)
            .build(connector);
        Ok(Self { config, client })
    }

    pub(super) fn kind(&self) -> Kind {
        self.config.kind
    }

    pub(super) async fn send(&self, call: Call) -> Result<ProviderAnswer, Error> {
        let deadline = call.deadline;
        let limit = self.config.first_byte_timeout;
        let until = super::http1::earlier(Instant::now() + limit.min(MAX_TIME), deadline);
        let length = call.body.len();
        let mut request = call.head.request(&self.config.url, length);
        *request.body_mut() = Some(call.body.into_rope());
        let request = request.map(|body| body.unwrap_or_default().boxed_unsync());
        let response = match tokio::time::timeout_at(until, self.client.request(request)).await {
            Ok(response) => response.map_err(failure)?,
            Err(_elapsed) if deadline == Some(until) => return Err(Error::Deadline),
            Err(_elapsed) => return Err(Error::FirstByteTimeout(limit)),
        };
        Ok(self.answer(response, deadline))
    }

    fn answer(&self, response: Response<Incoming>, deadline: Option<Instant>) -> ProviderAnswer {
        let (head, incoming) = response.into_parts();
        let mut fields = HeaderLines::default();
        for (name, value) in &head.headers {
            if let Some(name) = headers::keeps(name.as_str()) {
                fields.push(name, value.as_bytes());
            }
        }
        let idle = self.config.idle_timeout.min(MAX_TIME);
        let due = super::http1::earlier(Instant::now() + idle, deadline);
        let alarm = Box::pin(tokio::time::sleep_until(due));
        let body = Body { incoming, alarm, idle, deadline };
        let body = super::Body::Tls(Box::new(body));
        ProviderAnswer { status: head.status, fields, body }
    }
}

impl Body {
    pub(super) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Error>>> {
        while let Poll::Ready(frame) = Pin::new(&mut self.incoming).poll_frame(cx) {
            match frame {
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    let due = super::http1::earlier(Instant::now() + self.idle, self.deadline);
                    self.alarm.as_mut().reset(due);
                    return Poll::Ready(Some(Ok(data)));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(Error::Hyper(error.into())))),
                None => return Poll::Ready(None),
            }
        }
        ready!(self.alarm.as_mut().poll(cx));
        let is_deadline = self.deadline.is_some_and(|deadline| deadline <= Instant::now());
        let error = if is_deadline { Error::Deadline } else { Error::IdleTimeout(self.idle) };
        Poll::Ready(Some(Err(error)))
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

/// A client configuration that trusts the authorities in one PEM file and no others.
fn trust_only(path: &Path) -> io::Result<rustls::ClientConfig> {
    let roots = base::tls::authorities(path).map_err(io::Error::other)?;
    Ok(rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

fn failure(error: legacy::Error) -> Error {
    if error.is_connect() {
        Error::Connect(io::Error::other(error))
    } else {
        Error::Hyper(error.into())
    }
}
