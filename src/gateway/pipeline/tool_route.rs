//! The routes of a run's tools: `/mcp` and the paths under `/mcp/` and `/tool/`, which the run's
//! [endpoint](LocalEndpoint) answers.
//!
//! The gateway reads the request within limits and holds a permit for it, like for a call to a model. The endpoint
//! decides everything else. A run without tools has no such routes.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures_util::StreamExt;
use http::{HeaderValue, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Limited, StreamBody};
use hyper::body::{Body as _, Frame, Incoming};
use serde_json::json;

use super::RunGateway;
use super::exchange::ResponseBody;
use super::limits::{OverloadError, RequestPermit, RunCapacity};
use super::logged_body::{StreamLogLine, log_response};
use super::policy::PolicyConfig;
use super::read_body::IncomingRequestBody;
use super::rejection::CallRejection;
use super::request_head;
use crate::base::local_endpoint::{
    BodyShare, EndpointAnswer, LocalEndpoint, LocalEvents, LocalReply, LocalRequest, RetryAdvice,
};
use crate::base::streamed_endpoint::StreamedBody;

/// An answer to a request, whose body is taken out of the reply.
struct ToolAnswer {
    request_bytes: u64,
    reply: LocalReply,
    body: Bytes,
}

/// The answer to a request that was read.
enum ReadAnswer {
    Reply(ToolAnswer),
    Events { request_bytes: u64, events: LocalEvents, permit: RequestPermit },
}

impl ReadAnswer {
    fn refusal(reply: LocalReply) -> Self {
        Self::Reply(ToolAnswer::refusal(reply))
    }
}

impl ToolAnswer {
    /// Converts a small reply to a request that the endpoint does not see.
    fn refusal(mut reply: LocalReply) -> Self {
        let body = mem::take(&mut reply.body).into();
        Self { request_bytes: 0, reply, body }
    }
}

/// Returns true if a path belongs to the tools.
pub fn is_tool_path(target: &Uri) -> bool {
    let path = target.path();
    path == MCP_PATH || TOOL_PREFIXES.iter().any(|prefix| path.starts_with(prefix))
}

/// Checks the head of a request to the tools. The function has no side effect, so `explain` gives the result of a real
/// request.
///
/// # Errors
/// Returns an error if the target could be read in two ways, or if a body is not declared as plain JSON within the
/// policy's limit.
pub fn check_tool_head<B>(
    request: &Request<B>,
    policy: &PolicyConfig,
) -> Result<(), CallRejection> {
    request_head::check_target(request)?;
    request_head::check_head(request, policy)
}

/// Checks the length of a whole body of a request to the tools.
///
/// # Errors
/// Returns the reply to a request whose body is too large.
pub fn check_tool_body(body: &[u8]) -> Result<(), LocalReply> {
    if body.len() > MAX_TOOL_BODY_BYTES { Err(too_large_reply()) } else { Ok(()) }
}

/// Returns the path of a route as the access log has it: without the parts that a client chooses.
fn route_template(path: &str) -> Option<&'static str> {
    match path {
        MCP_PATH => Some(MCP_PATH),
        "/tool/list" => Some("/tool/list"),
        "/tool/exec" => Some("/tool/exec"),
        _ if path.starts_with("/tool/exec/") => Some("/tool/exec/ID"),
        _ if path.starts_with("/mcp/") => Some("/mcp/SERVER"),
        _ => None,
    }
}

/// Handles one request to the tools. Never fails. The line of the access log is written when the reply is made, the last
/// event has passed, or the client has left.
pub(super) async fn handle_tool_request(
    gateway: &Arc<RunGateway>,
    endpoint: &dyn LocalEndpoint,
    pid: Option<u32>,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let (method, uri) = (request.method().clone(), route_template(request.uri().path()));
    let mut line = StreamLogLine::new(Arc::clone(gateway), method, uri, TOOL_OUTCOME);
    let ToolAnswer { request_bytes, reply, body } =
        match read_and_answer(gateway, endpoint, pid, request).await {
            Ok(ReadAnswer::Reply(answer)) => answer,
            Ok(ReadAnswer::Events { request_bytes, events, permit }) => {
                line.request_bytes.store(request_bytes, Ordering::Relaxed);
                let response = events_response(events, &gateway.capacity);
                return log_response(response, None, line, None, permit);
            }
            Err(rejection) => ToolAnswer::refusal(rejected_reply(&rejection)),
        };
    line.request_bytes.store(request_bytes, Ordering::Relaxed);
    (line.status, line.bytes) = (reply.status.as_u16(), body.len() as u64);
    line.outcome = reply.code.unwrap_or(TOOL_OUTCOME);
    into_response(&reply, body)
}

/// Reads a request within the run's limits, and lets the endpoint answer it.
async fn read_and_answer(
    gateway: &RunGateway,
    endpoint: &dyn LocalEndpoint,
    pid: Option<u32>,
    request: Request<Incoming>,
) -> Result<ReadAnswer, CallRejection> {
    let (head, body) = IncomingRequestBody::split_request(request);
    let body = body.into_discarded(&gateway.tasks);
    let policy = gateway.policy.load_full();
    check_tool_head(&head, &policy.config)?;
    // The permit is held until the reply was sent.
    let mut permit = gateway.capacity.admit_request()?;
    permit.take_bytes(if body.is_end_stream() { 0 } else { MAX_TOOL_BODY_BYTES })?;
    let read = Limited::new(body, MAX_TOOL_BODY_BYTES).collect();
    let body = match tokio::time::timeout(policy.config.body_timeout, read).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(_)) => return Ok(ReadAnswer::refusal(too_large_reply())),
        Err(_) => return Ok(ReadAnswer::refusal(timeout_reply())),
    };
    // The endpoint holds a copy of the body, which may outlast the request: a call goes on when its client leaves.
    permit.release_bytes();
    permit.take_bytes(body.len())?;
    let share: BodyShare = Arc::new(permit.take_lasting_bytes(body.len())?);
    let target = head.uri();
    let request_bytes = body.len() as u64;
    let request = LocalRequest {
        method: head.method(),
        path: target.path(),
        query: target.query(),
        headers: head.headers(),
        body: &body,
        share: &share,
        pid,
    };
    let mut reply = match endpoint.handle_request(request).await {
        EndpointAnswer::Reply(reply) => reply,
        EndpointAnswer::Events(events) => {
            return Ok(ReadAnswer::Events { request_bytes, events, permit });
        }
    };
    // If there is no room for the reply, the result of a call remains: the client can ask for it by its id.
    let body = permit.hold_reply(mem::take(&mut reply.body))?;
    Ok(ReadAnswer::Reply(ToolAnswer { request_bytes, reply, body }))
}

/// Returns the response with events, which no proxy may keep back.
fn events_response(events: LocalEvents, capacity: &Arc<RunCapacity>) -> Response<StreamedBody> {
    let capacity = Arc::clone(capacity);
    let frames = events.map(move |event| Ok(Frame::data(hold_event(&capacity, event)?)));
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Converts an event to bytes that count for the run until the client has taken them.
fn hold_event(capacity: &Arc<RunCapacity>, event: String) -> Result<Bytes, OverloadError> {
    Ok(capacity.take_bytes(event.len())?.hold_frame(event.into()))
}

/// Returns the response to a request that no endpoint sees.
pub(super) fn rejected_response(rejection: &CallRejection) -> Response<ResponseBody> {
    let ToolAnswer { reply, body, .. } = ToolAnswer::refusal(rejected_reply(rejection));
    into_response(&reply, body)
}

/// Returns the reply to a request that the endpoint does not see.
fn rejected_reply(rejection: &CallRejection) -> LocalReply {
    let status = rejection.status(crate::llm::protocol::LlmProtocol::Chat);
    error_reply(status, rejection.code(), &rejection.to_string())
}

fn too_large_reply() -> LocalReply {
    let message =
        format!("the request body broke off, or is larger than {MAX_TOOL_BODY_BYTES} bytes");
    error_reply(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", &message)
}

fn timeout_reply() -> LocalReply {
    let message = "the request body did not arrive in time";
    error_reply(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
}

fn error_reply(status: StatusCode, code: &'static str, message: &str) -> LocalReply {
    let error = json!({"type": "tool_error", "code": code, "message": message});
    let body = json!({ "error": error }).to_string();
    LocalReply { status, body, allow: None, code: Some(code), retry: RetryAdvice::None }
}

fn into_response(reply: &LocalReply, body: Bytes) -> Response<ResponseBody> {
    let has_body = !body.is_empty();
    let mut response = Response::new(ResponseBody::from_text(body));
    *response.status_mut() = reply.status;
    let headers = response.headers_mut();
    if has_body {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    if let Some(methods) = reply.allow {
        headers.insert(header::ALLOW, HeaderValue::from_static(methods));
    }
    match reply.retry {
        RetryAdvice::None => {}
        RetryAdvice::Never => {
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        RetryAdvice::After(delay) => {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(delay.as_secs().max(1)));
        }
    }
    response
}

/// The outcome in the access log of a request that no error of this gateway has ended.
const TOOL_OUTCOME: &str = "tool";

/// The beginnings of the paths of the tools.
const TOOL_PREFIXES: [&str; 2] = ["/tool/", "/mcp/"];

/// The path of the tools' endpoint for clients of MCP.
const MCP_PATH: &str = "/mcp";

/// The largest body of a request to the tools, in bytes. The endpoint has a limit of its own, which is not larger.
const MAX_TOOL_BODY_BYTES: usize = 256 * 1024;
