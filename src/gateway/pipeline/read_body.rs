//! Receives a request's body and checks it on arrival, or discards the body.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode, Version, header};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::limits::{OverloadError, RequestPermit};
use super::policy::PolicyConfig;
use crate::base::json::JsonError;
use crate::base::task_group::TaskGroup;
use crate::base::time::timeout_unless_ready;
use crate::llm::protocol::GatewayRoute;
use crate::llm::request::{BodyReader, ScannedBody};

type BoxedBodyError = Box<dyn std::error::Error + Send + Sync>;

/// A reason why a body could not be received.
#[derive(Debug, thiserror::Error)]
pub enum BodyReadError {
    #[error("the request body is larger than the limit of {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("the request body {0}; send plain JSON in UTF-8")]
    Encoded(&'static str),
    #[error("the request body did not arrive within {}", humantime::format_duration(*.0))]
    Timeout(Duration),
    #[error("the request body is not acceptable JSON: {0}")]
    Json(#[from] JsonError),
    #[error("the request body broke off")]
    Interrupted(#[source] BoxedBodyError),
    #[error(transparent)]
    Overload(#[from] OverloadError),
}

/// The body of a request, as the server of the connection reads it.
pub trait RequestBody: Body<Data = Bytes, Error: Into<BoxedBodyError>> + Unpin {}

impl<B: Body<Data = Bytes, Error: Into<BoxedBodyError>> + Unpin> RequestBody for B {}

/// A request's body that is still arriving.
pub struct IncomingRequestBody<B> {
    body: B,
    /// True for HTTP/1.0 and 1.1. An HTTP/2 stream can be closed on its own, with a code that gives the
    /// reason.
    is_http1: bool,
    /// True if the client sends the whole body before the client reads a response.
    must_be_read: bool,
}

impl<B: RequestBody> IncomingRequestBody<B> {
    /// Splits a request into its head and its body.
    pub fn split_request(request: Request<B>) -> (Request<()>, Self) {
        let (head, body) = request.into_parts();
        let head = Request::from_parts(head, ());
        let is_http1 = head.version() <= Version::HTTP_11;
        let must_be_read = is_http1 && !body.is_end_stream() && !expects_continue(head.headers());
        (head, Self { body, is_http1, must_be_read })
    }

    /// Creates the body of an HTTP/1.1 request whose client sends the body without `expect:
    /// 100-continue`.
    pub fn new(body: B) -> Self {
        let must_be_read = !body.is_end_stream();
        Self { body, is_http1: true, must_be_read }
    }

    /// Reads and scans the body. The result keeps the frames in which the body arrived.
    ///
    /// # Errors
    /// Returns an error if the body is not acceptable, did not arrive in time, or exceeds a limit.
    pub async fn read_body(
        &mut self,
        route: GatewayRoute,
        policy: &PolicyConfig,
        permit: &mut RequestPermit,
    ) -> Result<ScannedBody, BodyReadError> {
        let limit = policy.body_timeout;
        // A client that waits for `100 Continue` receives that response with the first read, and then
        // sends its body.
        self.must_be_read = self.is_http1;
        let received = timeout_unless_ready(limit, self.read_frames(route, policy, permit)).await;
        let received = received.unwrap_or(Err(BodyReadError::Timeout(limit)));
        // After these results nothing is left to read, or the client does not send. After any other
        // error the client is still sending.
        if let Ok(_) | Err(BodyReadError::Timeout(_) | BodyReadError::Interrupted(_)) = &received {
            self.must_be_read = false;
        }
        received
    }

    async fn read_frames(
        &mut self,
        route: GatewayRoute,
        policy: &PolicyConfig,
        permit: &mut RequestPermit,
    ) -> Result<ScannedBody, BodyReadError> {
        let mut reader = None;
        while let Some(frame) = self.body.frame().await {
            let frame = frame.map_err(|error| BodyReadError::Interrupted(error.into()))?;
            let Ok(data) = frame.into_data() else { continue };
            // A body in one frame is scanned in place, without a reader.
            if reader.is_none() && self.body.is_end_stream() {
                return scan_whole_body(route, data, policy, permit);
            }
            // Account for the bytes before anything stores them.
            permit.take_bytes(data.len())?;
            if reader.is_none() {
                check_start(&data)?;
            }
            push_frame(reader.get_or_insert_with(|| BodyReader::new(route)), data, policy)?;
        }
        Ok(reader.unwrap_or_else(|| BodyReader::new(route)).finish_body()?)
    }

    /// Returns the body, and true if the rest must be read with [`discard_rest_of_body`].
    pub fn into_unread_body(self) -> (B, bool) {
        (self.body, self.must_be_read)
    }
}

impl IncomingRequestBody<Incoming> {
    /// Returns the body for an endpoint that reads it while it answers, or not at all. The drop discards the rest.
    pub(super) fn into_discarded(self, tasks: &TaskGroup) -> DiscardedBody {
        DiscardedBody { unread: Some(self), tasks: tasks.clone() }
    }

    /// Discards the rest of the body in a task, beside the response.
    pub fn discard_rest(self, tasks: &TaskGroup) {
        let (mut body, must_be_read) = self.into_unread_body();
        if must_be_read && !body.is_end_stream() {
            let own = tasks.clone();
            tasks.spawn_task(async move { discard_rest_of_body(&mut body, &own).await });
        }
    }
}

/// A request's body whose drop discards what was not read, in a task beside the response.
pub(super) struct DiscardedBody {
    /// The body; `None` while it is dropped.
    unread: Option<IncomingRequestBody<Incoming>>,
    tasks: TaskGroup,
}

impl Body for DiscardedBody {
    type Data = Bytes;
    type Error = BoxedBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxedBodyError>>> {
        let Some(unread) = &mut self.unread else { return Poll::Ready(None) };
        let polled = Pin::new(&mut unread.body).poll_frame(cx);
        // A client that waits for `100 Continue` receives that response with the first read. Behind the end and an error
        // nothing is left to read.
        let is_open = matches!(polled, Poll::Pending | Poll::Ready(Some(Ok(_))));
        unread.must_be_read = unread.is_http1 && is_open;
        polled.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.unread.as_ref().is_none_or(|unread| unread.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.unread.as_ref().map(|unread| unread.body.size_hint()).unwrap_or_default()
    }
}

impl Drop for DiscardedBody {
    fn drop(&mut self) {
        // A runtime that ends drops its tasks, and begins no other.
        if let (Some(unread), Ok(_)) = (self.unread.take(), Handle::try_current()) {
            unread.discard_rest(&self.tasks);
        }
    }
}

/// Discards the rest of a body, within limits.
///
/// A client that cannot finish sending its request sees a broken pipe and never reads the response.
pub async fn discard_rest_of_body(body: &mut impl RequestBody, tasks: &TaskGroup) {
    let read = timeout(MAX_DISCARD_TIME, read_to_end(body));
    tasks.shutdown_token().run_until_cancelled(read).await;
}

async fn read_to_end(body: &mut impl RequestBody) {
    let mut left = MAX_DISCARD_BYTES;
    while let Ok(Some(Ok(frame))) = timeout(MAX_DISCARD_SILENCE, body.frame()).await {
        left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
        if left == 0 {
            return;
        }
    }
}

/// Returns true if the client sends its body only after `100 Continue`. Such a client reads an error
/// response instead.
fn expects_continue(headers: &HeaderMap) -> bool {
    let expect = headers.get(header::EXPECT);
    expect.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// Accounts for a body that has arrived as a whole, and scans the body.
///
/// # Errors
/// Returns an error if the body is not acceptable or exceeds a limit.
pub(super) fn scan_whole_body(
    route: GatewayRoute,
    body: Bytes,
    policy: &PolicyConfig,
    permit: &mut RequestPermit,
) -> Result<ScannedBody, BodyReadError> {
    // Account for the bytes before anything stores them.
    permit.take_bytes(body.len())?;
    parse_body(route, body, policy)
}

/// Scans a body that has arrived completely.
///
/// # Errors
/// Returns an error if the body is encoded, is too large or is not acceptable JSON.
pub fn parse_body(
    route: GatewayRoute,
    body: Bytes,
    policy: &PolicyConfig,
) -> Result<ScannedBody, BodyReadError> {
    check_start(&body)?;
    check_length(body.len() as u64, policy)?;
    Ok(ScannedBody::scan_frame(route, body)?)
}

/// Rejects the encodings that some clients send instead of plain JSON, detected by the first bytes.
fn check_start(body: &[u8]) -> Result<(), BodyReadError> {
    match body {
        [0xef, 0xbb, 0xbf, ..] => Err(BodyReadError::Encoded("begins with a byte order mark")),
        [0xfe, 0xff, ..] | [0xff, 0xfe, ..] => Err(BodyReadError::Encoded("is UTF-16")),
        [0x1f, 0x8b, ..] => Err(BodyReadError::Encoded("is compressed")),
        _ => Ok(()),
    }
}

fn push_frame(
    reader: &mut BodyReader,
    data: Bytes,
    policy: &PolicyConfig,
) -> Result<(), BodyReadError> {
    check_length(reader.len() + data.len() as u64, policy)?;
    Ok(reader.push(data)?)
}

fn check_length(length: u64, policy: &PolicyConfig) -> Result<(), BodyReadError> {
    let limit = policy.max_body_bytes;
    if length > limit { Err(BodyReadError::TooLarge { limit }) } else { Ok(()) }
}

impl BodyReadError {
    pub fn code(&self) -> &'static str {
        match self {
            Self::TooLarge { .. } => "request_too_large",
            Self::Encoded(_) => "unsupported_media_type",
            Self::Timeout(_) => "request_timeout",
            Self::Json(invalid) => invalid.code(),
            Self::Interrupted(_) => "client_gone",
            Self::Overload(overload) => overload.code(),
        }
    }

    pub fn status(&self) -> StatusCode {
        match self {
            Self::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Encoded(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Timeout(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Json(_) | Self::Interrupted(_) => StatusCode::BAD_REQUEST,
            Self::Overload(overload) => overload.status(),
        }
    }
}

/// The most bytes of a refused body that are read: four times the largest body of the default policy.
const MAX_DISCARD_BYTES: usize = 200 * 1024 * 1024;

/// The longest time for which a refused body is read, the same as nginx's `lingering_time`.
const MAX_DISCARD_TIME: Duration = Duration::from_secs(30);
/// The longest silence of a client whose refused body is read. Our choice: local clients send at once.
const MAX_DISCARD_SILENCE: Duration = Duration::from_secs(2);
