//! The client of the model provider: its address, its timeouts, and the calls to it.
//!
//! LiteLLM is reached over plain HTTP/1.1, which has a client of our own. hyper's client hands each chunk from task to
//! task; that costs a third of a call and 35 KiB per open stream (measured). TLS and HTTP/2 go through hyper's client,
//! because the cost of encryption dwarfs the cost of the hand-over.
//!
//! **Invariant:** the gateway sends a call again only if it is certain that no part of the call was delivered.

pub mod check;
mod chunked;
pub mod headers;
mod http1;
mod hyper_client;
pub mod models;
pub mod outage;
mod pool;
mod url;

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use hyper::body::{Frame, SizeHint};
use serde::{Deserialize, Serialize, Serializer};
use tokio::time::Instant;

use self::headers::UpstreamRequestHead;
use crate::base::header_lines::HeaderLines;
use crate::base::rope::SplicedBytes;
use crate::base::secret::SecretString;

use outage::FailureLog;
pub use url::{UpstreamScheme, UpstreamUrl};

/// The address, the credential and the timeouts of the provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UpstreamConfig {
    /// The provider's address: `host:port` (plain HTTP) or a URL.
    pub url: UpstreamUrl,
    pub kind: UpstreamKind,
    /// The credential. The value comes from the environment or from a file, never from this configuration.
    #[serde(skip)]
    pub api_key: SecretString,
    /// A PEM file of certificate authorities that the client trusts instead of the system's authorities.
    #[serde(serialize_with = "serialize_path")]
    pub ca_file: Option<PathBuf>,
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// The longest time from sending the request to the head of the response.
    #[serde(with = "humantime_serde")]
    pub first_byte_timeout: Duration,
    /// The longest time between two reads of one response.
    #[serde(with = "humantime_serde")]
    pub idle_timeout: Duration,
    /// The time after which the client closes an unused connection.
    #[serde(with = "humantime_serde")]
    pub pool_idle_timeout: Duration,
}

/// The software at the upstream's address. The kind decides which header carries the credential.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UpstreamKind {
    #[default]
    Litellm,
    Openai,
    Anthropic,
}

/// Serializes a path as text. Bytes that are not UTF-8 become replacement characters.
#[expect(clippy::ref_option, reason = "serde hands references")]
fn serialize_path<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}

impl UpstreamKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Litellm => "litellm",
            Self::Openai => "openai",
            Self::Anthropic => "anthropic",
        }
    }
}

/// One provider and the connections to the provider. Each worker thread has its own client.
pub struct UpstreamClient {
    client: UpstreamTransport,
    failures: Arc<FailureLog>,
}

enum UpstreamTransport {
    Plain(http1::Http1Client),
    Tls(Arc<hyper_client::HyperClient>),
}

/// A call that is ready to be sent: its head, its body and its deadline.
pub struct UpstreamCall {
    pub head: UpstreamRequestHead,
    pub body: SplicedBytes,
    /// The run's deadline, at which the client aborts the call.
    pub deadline: Option<Instant>,
    /// The time at which the call is sent. The timeouts begin then.
    pub begun: Instant,
}

/// The response of the provider to one call.
pub struct ProviderAnswer {
    pub status: StatusCode,
    /// The response headers that [`headers::kept_header_name`] knows, and no others.
    pub fields: HeaderLines,
    pub body: UpstreamBody,
}

/// A call whose answer has not arrived. Dropping it cancels the call.
pub enum PendingAnswer {
    /// `None` after the answer has arrived: the call is then the body of the answer.
    Plain(Option<Box<http1::Http1Call>>),
    Tls(Pin<Box<dyn Future<Output = Result<ProviderAnswer, UpstreamError>> + Send>>),
}

/// A response body. The body yields one frame per read of the socket.
pub enum UpstreamBody {
    Plain(Box<http1::Http1Call>),
    Tls(Box<hyper_client::HyperBody>),
}

#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    #[error("cannot resolve or connect to the upstream")]
    Connect(#[source] io::Error),
    #[error("no connection to the upstream within {}", humantime::format_duration(*.0))]
    ConnectTimeout(Duration),
    #[error("no response from the upstream within {}", humantime::format_duration(*.0))]
    FirstByteTimeout(Duration),
    #[error("the upstream was silent for {}", humantime::format_duration(*.0))]
    IdleTimeout(Duration),
    #[error("the run's deadline cut the call")]
    Deadline,
    #[error("the upstream closed the connection before the response was complete")]
    Closed,
    #[error("the upstream sent what is not HTTP: {0}")]
    Malformed(&'static str),
    #[error("the connection to the upstream broke")]
    Io(#[source] io::Error),
    #[error("the call over TLS or HTTP/2 failed")]
    Hyper(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl UpstreamClient {
    /// Creates a client with a failure log of its own.
    ///
    /// # Errors
    /// Returns an error if the certificate authorities cannot be read, or if there are none.
    pub fn new(config: &UpstreamConfig) -> io::Result<Self> {
        Self::sharing(config, Arc::new(FailureLog::new(&config.url)))
    }

    /// Creates the client of one of several workers. The workers share the log of failures.
    ///
    /// # Errors
    /// Returns an error if the certificate authorities cannot be read, or if there are none.
    pub fn sharing(config: &UpstreamConfig, failures: Arc<FailureLog>) -> io::Result<Self> {
        let client = match config.url.scheme() {
            UpstreamScheme::Http => {
                UpstreamTransport::Plain(http1::Http1Client::new(config.clone()))
            }
            UpstreamScheme::Https | UpstreamScheme::H2c => {
                UpstreamTransport::Tls(Arc::new(hyper_client::HyperClient::new(config.clone())?))
            }
        };
        Ok(Self { client, failures })
    }

    /// Closes connections that were idle for too long, as long as the caller polls this future. The provider would
    /// close such connections, and each holds a descriptor until then. hyper's client closes its idle connections by
    /// itself, so for TLS this future does nothing.
    pub async fn close_idle_connections(&self) -> Infallible {
        match &self.client {
            UpstreamTransport::Plain(client) => client.close_idle_connections().await,
            UpstreamTransport::Tls(_) => std::future::pending().await,
        }
    }

    /// Returns the kind of software at the upstream.
    pub fn kind(&self) -> UpstreamKind {
        match &self.client {
            UpstreamTransport::Plain(client) => client.kind(),
            UpstreamTransport::Tls(client) => client.kind(),
        }
    }

    /// Returns the log that reports failed calls to the operator.
    pub fn failures(&self) -> &FailureLog {
        &self.failures
    }

    /// Begins a call. The result sends the call when it is polled, and waits for the head of the response.
    pub fn send_call(&self, call: UpstreamCall) -> PendingAnswer {
        // Two clients, one contract: each applies the same timeouts and returns the same kind of body.
        match &self.client {
            UpstreamTransport::Plain(client) => PendingAnswer::Plain(Some(client.begin_call(call))),
            UpstreamTransport::Tls(client) => {
                let client = Arc::clone(client);
                PendingAnswer::Tls(Box::pin(async move { client.send_call(call).await }))
            }
        }
    }
}

impl UpstreamError {
    /// Returns the stable error code that clients, the audit log and the metrics show.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Connect(_) => "upstream_unreachable",
            Self::ConnectTimeout(_) => "upstream_connect_timeout",
            Self::FirstByteTimeout(_) => "upstream_first_byte_timeout",
            Self::IdleTimeout(_) => "upstream_idle_timeout",
            Self::Deadline => "deadline_exceeded",
            Self::Closed | Self::Io(_) | Self::Hyper(_) => "upstream_closed",
            Self::Malformed(_) => "upstream_malformed",
        }
    }

    /// Returns true if it is certain that nothing was delivered, and therefore that nothing was spent.
    pub fn is_certainly_undelivered(&self) -> bool {
        // Only errors before the first byte count. A timeout after that may have cost tokens.
        matches!(self, Self::Connect(_) | Self::ConnectTimeout(_))
    }
}

impl Future for PendingAnswer {
    type Output = Result<ProviderAnswer, UpstreamError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Plain(pending) => {
                let mut call = pending.take().expect("an answer is taken once");
                let Poll::Ready(head) = call.poll_head(cx) else {
                    *pending = Some(call);
                    return Poll::Pending;
                };
                let http1::ResponseHead { status, fields, .. } = head?;
                Poll::Ready(Ok(ProviderAnswer { status, fields, body: UpstreamBody::Plain(call) }))
            }
            Self::Tls(answer) => answer.as_mut().poll(cx),
        }
    }
}

impl UpstreamBody {
    /// Polls for the next bytes. They may lie in the worker's read buffer, which is free for the next read only when
    /// they are dropped. So the caller keeps a copy of bytes for which it must wait.
    pub fn poll_data(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        match self {
            Self::Plain(call) => call.body.poll_frame(cx),
            Self::Tls(body) => body.poll_frame(cx),
        }
    }

    /// Returns the time at which the bytes of the last poll arrived.
    pub fn arrival_time(&self) -> std::time::Instant {
        match self {
            Self::Plain(call) => call.body.last_read().into_std(),
            // hyper reads in a task of its own and does not tell when.
            Self::Tls(_) => std::time::Instant::now(),
        }
    }
}

impl hyper::body::Body for UpstreamBody {
    type Data = Bytes;
    type Error = UpstreamError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        let data = self.get_mut().poll_data(cx);
        data.map_ok(|data| Frame::data(own_small_frame(data)))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Plain(call) => call.body.is_end_stream(),
            // hyper's body needs one more poll to learn of its end.
            Self::Tls(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Plain(call) => call.body.size_hint(),
            Self::Tls(body) => body.size_hint(),
        }
    }
}

/// Copies a small frame into memory of its own size. A slow reader with a queue of small frames would otherwise hold a
/// whole read buffer for each.
pub fn own_small_frame(frame: Bytes) -> Bytes {
    if frame.len() < COPY_BELOW_BYTES { Bytes::copy_from_slice(&frame) } else { frame }
}

impl Default for UpstreamConfig {
    fn default() -> Self {
        Self {
            url: UpstreamUrl::default(),
            kind: UpstreamKind::default(),
            api_key: SecretString::default(),
            ca_file: None,
            connect_timeout: Duration::from_secs(5),
            // Reasoning models think for minutes before they send the first byte.
            first_byte_timeout: Duration::from_mins(10),
            idle_timeout: Duration::from_mins(5),
            // LiteLLM's server closes idle connections after 5 s. The client closes them first, so no call meets a
            // closed one.
            pool_idle_timeout: Duration::from_secs(4),
        }
    }
}

/// The size below which a frame is copied, in bytes. The value is our choice.
const COPY_BELOW_BYTES: usize = 4 * 1024;
