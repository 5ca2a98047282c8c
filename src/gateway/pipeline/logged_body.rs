//! A response's body that passes in pieces, with its line of the access log.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use http::{Method, Response, header};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};

use super::RunGateway;
use super::exchange::ResponseBody;
use super::limits::RequestPermit;
use crate::base::streamed_endpoint::StreamedBody;
use crate::gateway::run::RequestId;
use crate::telemetry::access_log::AccessLogEntry;

/// A response's body on its way to the client. Its drop writes the line of the access log.
pub(super) struct LoggedBody {
    inner: StreamedBody,
    line: StreamLogLine,
    has_ended: bool,
    /// The announced length. The server of the connection does not ask for the end behind it.
    announced: Option<u64>,
    /// The client's leaving, for a request whose body may still come.
    hangup: Option<HangupFuture>,
    _permit: RequestPermit,
}

/// The facts of a line in the access log. Its drop writes the line.
pub(super) struct StreamLogLine {
    gateway: Arc<RunGateway>,
    method: Method,
    uri: Option<&'static str>,
    started: Instant,
    /// The status that was sent. As in nginx, 499 means that the client left before.
    pub(super) status: u16,
    pub(super) bytes: u64,
    pub(super) request_bytes: Arc<AtomicU64>,
    pub(super) outcome: &'static str,
    /// The outcome of a response that has passed whole.
    whole_outcome: &'static str,
}

/// The future that ends when the client has left.
pub(super) type HangupFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Returns a response whose body writes its line of the access log. `code` is the code of an error.
pub(super) fn log_response(
    response: Response<StreamedBody>,
    code: Option<&'static str>,
    mut line: StreamLogLine,
    hangup: Option<HangupFuture>,
    permit: RequestPermit,
) -> Response<ResponseBody> {
    line.status = response.status().as_u16();
    let has_ended = response.body().is_end_stream();
    line.outcome = code.unwrap_or(if has_ended { line.whole_outcome } else { CLIENT_GONE });
    let announced = response.headers().get(header::CONTENT_LENGTH);
    let announced = announced.and_then(|length| length.to_str().ok()?.parse().ok());
    let announced = announced.or(response.body().size_hint().exact());
    let body = |inner| LoggedBody { inner, line, has_ended, announced, hangup, _permit: permit };
    response.map(|inner| ResponseBody::Streamed(body(inner).boxed_unsync()))
}

impl LoggedBody {
    fn note_end(&mut self, outcome: &'static str) {
        self.has_ended = true;
        // An error of the endpoint keeps its own code.
        if self.line.outcome == CLIENT_GONE {
            self.line.outcome = outcome;
        }
    }
}

impl Body for LoggedBody {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let whole_outcome = self.line.whole_outcome;
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        match &polled {
            Poll::Ready(None) => self.note_end(whole_outcome),
            Poll::Ready(Some(Err(_))) => self.note_end("cut_off"),
            Poll::Ready(Some(Ok(frame))) => {
                self.line.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
                if self.announced == Some(self.line.bytes) {
                    self.note_end(whole_outcome);
                }
            }
            Poll::Pending => {
                let hangup = self.hangup.as_mut();
                if hangup.is_some_and(|hangup| hangup.as_mut().poll(cx).is_ready()) {
                    self.hangup = None;
                    return Poll::Ready(Some(Err("the client has left".into())));
                }
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl StreamLogLine {
    /// Begins the line of a request that has no response yet.
    pub(super) fn new(
        gateway: Arc<RunGateway>,
        method: Method,
        uri: Option<&'static str>,
        whole_outcome: &'static str,
    ) -> Self {
        Self {
            gateway,
            method,
            uri,
            started: Instant::now(),
            status: 499,
            bytes: 0,
            request_bytes: Arc::default(),
            outcome: CLIENT_GONE,
            whole_outcome,
        }
    }
}

impl Drop for StreamLogLine {
    fn drop(&mut self) {
        self.gateway.access_log.write_entry(&AccessLogEntry {
            method: self.method.as_str(),
            uri: self.uri,
            status: self.status,
            bytes: self.bytes,
            request_bytes: self.request_bytes.load(Ordering::Relaxed),
            request_id: RequestId::new().as_str(),
            request_time: self.started.elapsed(),
            ..AccessLogEntry::without_values(SystemTime::now(), self.outcome)
        });
    }
}

/// The outcome of a response that its client has not taken whole.
const CLIENT_GONE: &str = "client_gone";
