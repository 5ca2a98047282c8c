//! The routes of a run's connections, `/connect` and the paths under `/connect/`, which the run's
//! [endpoint](StreamedEndpoint) answers while the request arrives.
//!
//! The gateway holds a permit until the response has passed, like for a call to a model, and writes the access log.
//! The endpoint decides everything else.

use std::sync::Arc;

use http::{Request, Response, Uri};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};

use super::exchange::ResponseBody;
use super::limits::RequestPermit;
use super::logged_body::{HangupFuture, StreamLogLine, log_response};
use super::read_body::IncomingRequestBody;
use super::rejection::CallRejection;
use super::request_head;
use super::tool_route::rejected_response;
use super::{ClientPeer, RunGateway};
use crate::base::streamed_endpoint::{
    CONNECT_CERTIFICATE_PATH, CONNECT_LIST_PATH, CONNECT_PATH_PREFIX, StreamedEndpoint,
    StreamedReply, StreamedRequest,
};

/// Returns true if a path belongs to the connections.
pub fn is_connect_path(target: &Uri) -> bool {
    target.path() == CONNECT_LIST_PATH || target.path().starts_with(CONNECT_PATH_PREFIX)
}

/// Returns the path of a request as the access log has it: without the parts that a client chooses.
fn route_template(target: &Uri, is_tunnelled: bool) -> &'static str {
    match target.path() {
        _ if is_tunnelled => "https://HOST/PATH",
        CONNECT_LIST_PATH => CONNECT_LIST_PATH,
        CONNECT_CERTIFICATE_PATH => CONNECT_CERTIFICATE_PATH,
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
    let mut line = StreamLogLine::new(
        Arc::clone(&gateway),
        request.method().clone(),
        Some(uri),
        CONNECT_OUTCOME,
    );
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
    line.request_bytes = request_bytes;
    log_response(response, code, line, hangup, permit)
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

/// The outcome in the access log of a request that no error of this gateway has ended.
pub(super) const CONNECT_OUTCOME: &str = "connect";

/// The memory of one request, in bytes: one piece of each body in each buffer of hyper.
const STREAM_BYTES: usize = 64 * 1024;
