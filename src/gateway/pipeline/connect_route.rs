//! The routes of a run's connections, `/connect` and the paths under `/connect/`, which the run's
//! [endpoint](StreamedEndpoint) answers while the request arrives.
//!
//! The gateway holds a permit until the response has passed, like for a call to a model, and writes the access log.
//! The endpoint decides everything else.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use http::{Method, Request, Response, Uri, header};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::exchange::ResponseBody;
use super::limits::RequestPermit;
use super::read_body::IncomingRequestBody;
use super::rejection::CallRejection;
use super::request_head;
use super::tool_route::rejected_response;
use super::{ClientPeer, RunGateway};
use crate::base::streamed_endpoint::{
    StreamedBody, StreamedEndpoint, StreamedReply, StreamedRequest,
};
use crate::gateway::run::RequestId;
use crate::telemetry::access_log::AccessLogEntry;

/// A response's body on its way to the client. Its drop writes the line of the access log.
struct ConnectBody {
    inner: StreamedBody,
    line: ConnectLogLine,
    has_ended: bool,
    /// The announced length. The server of the connection does not ask for the end behind it.
    announced: Option<u64>,
    /// The client's leaving, for a request whose body may still come.
    hangup: Option<HangupFuture>,
    _permit: RequestPermit,
}

/// The facts of a line in the access log. Its drop writes the line.
pub(super) struct ConnectLogLine {
    gateway: Arc<RunGateway>,
    method: Method,
    uri: &'static str,
    started: Instant,
    /// The status that was sent. As in nginx, 499 means that the client left before.
    pub(super) status: u16,
    pub(super) bytes: u64,
    request_bytes: Arc<AtomicU64>,
    pub(super) outcome: &'static str,
}

/// The future that ends when the client has left.
type HangupFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Returns true if a path belongs to the connections.
pub fn is_connect_path(target: &Uri) -> bool {
    target.path() == LIST_PATH || target.path().starts_with(PREFIX)
}

/// Returns the path of a request as the access log has it: without the parts that a client chooses.
fn route_template(target: &Uri, is_tunnelled: bool) -> &'static str {
    match target.path() {
        _ if is_tunnelled => "https://HOST/PATH",
        LIST_PATH => LIST_PATH,
        CERTIFICATE_PATH => CERTIFICATE_PATH,
        _ => "/connect/NAME/PATH",
    }
}

/// Handles one request over a connection. `tunnel` is the name of the tunnel that it came through. Never fails.
pub(super) async fn handle_connect_request(
    gateway: Arc<RunGateway>,
    endpoint: Arc<dyn StreamedEndpoint>,
    peer: ClientPeer,
    request: Request<Incoming>,
    tunnel: Option<Arc<str>>,
) -> Response<ResponseBody> {
    let uri = route_template(request.uri(), tunnel.is_some());
    let mut line = ConnectLogLine::new(Arc::clone(&gateway), request.method().clone(), uri);
    let ClientPeer { pid, hangup, .. } = peer;
    // The endpoint drops a body that it does not read, or not to the end, and the client is still sending.
    let (head, body) = IncomingRequestBody::split_request(request);
    let body = body.into_discarded(&gateway.tasks).boxed_unsync();
    let request = StreamedRequest { request: head.map(|()| body), pid, tunnel };
    let permit = match admit_request(&gateway, &*endpoint, &request) {
        Ok(permit) => permit,
        Err(rejection) => {
            let response = rejected_response(&rejection);
            (line.status, line.outcome) = (response.status().as_u16(), rejection.code());
            return response;
        }
    };
    // hyper sees the end of a connection only while it reads, and it does not read while the body cannot go on.
    let mut hangup: Option<HangupFuture> = (!request.request.body().is_end_stream())
        .then(|| Box::pin(hangup.wait_hangup()) as HangupFuture);
    let answering = endpoint.handle_streamed(request);
    let reply = tokio::select! {
        biased;
        reply = answering => reply,
        // The drop of the request settles it. This response finds no reader.
        () = wait_optional(&mut hangup) => return Response::new(ResponseBody::from_text("")),
    };
    let StreamedReply { response, code, request_bytes } = reply;
    line.status = response.status().as_u16();
    line.request_bytes = request_bytes;
    let has_ended = response.body().is_end_stream();
    line.outcome = code.unwrap_or(if has_ended { CONNECT_OUTCOME } else { "client_gone" });
    let announced = response.headers().get(header::CONTENT_LENGTH);
    let announced = announced.and_then(|length| length.to_str().ok()?.parse().ok());
    let announced = announced.or(response.body().size_hint().exact());
    let body = |inner| ConnectBody { inner, line, has_ended, announced, hangup, _permit: permit };
    response.map(|inner| ResponseBody::Streamed(body(inner).boxed_unsync()))
}

/// Waits for a future, or without one for ever.
async fn wait_optional(future: &mut Option<HangupFuture>) {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

fn admit_request(
    gateway: &RunGateway,
    endpoint: &dyn StreamedEndpoint,
    request: &StreamedRequest,
) -> Result<RequestPermit, CallRejection> {
    // The endpoint compares the host in a tunnel with the tunnel's own, and records what does not agree.
    if request.tunnel.is_none() {
        request_head::check_host(&request.request)?;
    }
    let mut permit = gateway.capacity.admit_request()?;
    // The bodies of both directions pass in pieces. A body that is signed is kept until then.
    let kept = usize::try_from(endpoint.kept_bytes(request)).unwrap_or(usize::MAX);
    permit.take_bytes(STREAM_BYTES.saturating_add(kept))?;
    Ok(permit)
}

impl ConnectBody {
    fn note_end(&mut self, outcome: &'static str) {
        self.has_ended = true;
        // An error of the endpoint keeps its own code.
        if self.line.outcome == "client_gone" {
            self.line.outcome = outcome;
        }
    }
}

impl Body for ConnectBody {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        match &polled {
            Poll::Ready(None) => self.note_end(CONNECT_OUTCOME),
            Poll::Ready(Some(Err(_))) => self.note_end("cut_off"),
            Poll::Ready(Some(Ok(frame))) => {
                self.line.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
                if self.announced == Some(self.line.bytes) {
                    self.note_end(CONNECT_OUTCOME);
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

impl ConnectLogLine {
    /// Begins the line of a request that has no response yet.
    pub(super) fn new(gateway: Arc<RunGateway>, method: Method, uri: &'static str) -> Self {
        Self {
            gateway,
            method,
            uri,
            started: Instant::now(),
            status: 499,
            bytes: 0,
            request_bytes: Arc::default(),
            outcome: "client_gone",
        }
    }
}

impl Drop for ConnectLogLine {
    fn drop(&mut self) {
        self.gateway.access_log.write_entry(&AccessLogEntry {
            time: SystemTime::now(),
            method: self.method.as_str(),
            uri: Some(self.uri),
            status: self.status,
            bytes: self.bytes,
            request_bytes: self.request_bytes.load(Ordering::Relaxed),
            model: None,
            request_id: RequestId::new().as_str(),
            litellm_call_id: None,
            litellm_response_cost: None,
            upstream_time: None,
            first_byte_time: None,
            request_time: self.started.elapsed(),
            usage: None,
            outcome: self.outcome,
        });
    }
}

/// The path of the list of connections.
const LIST_PATH: &str = "/connect";

/// The path of the certificate of the run's tunnels.
const CERTIFICATE_PATH: &str = "/connect/ca.pem";

/// The beginning of the paths of requests over connections.
const PREFIX: &str = "/connect/";

/// The outcome in the access log of a request that no error of this gateway has ended.
const CONNECT_OUTCOME: &str = "connect";

/// The memory of one request, in bytes: one piece of each body in each buffer of hyper.
const STREAM_BYTES: usize = 64 * 1024;
