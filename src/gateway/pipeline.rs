//! The LLM data plane: one request in, one exchange recorded, one response out.
//!
//! Read [`handle_request`] first; that function is the whole pipeline. The pipeline has four parts:
//!
//! - [`request_head`], [`read_body`] and [`admission`] decide whether a request may become a call.
//! - [`upstream`](super::upstream) sends the call to the provider.
//! - [`exchange`] follows the response to its end and settles the budget.
//! - [`server`] accepts connections. Where many runs share a listener, [`run_token_auth`] finds the run
//!   of a request.
//!
//! **Invariant:** each request is settled once and recorded once, however the request ends.

pub mod admission;
pub mod audience;
pub mod auth_error;
pub mod budget_headers;
pub mod dropped_fields;
pub mod exchange;
pub mod limits;
pub mod local_response;
pub mod policy;
pub mod read_body;
pub mod registry;
pub mod rejection;
pub mod request_head;
pub mod rule;
pub mod run_token_auth;
pub mod server;
pub mod server_config;
mod tool_route;

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Request, Response};
use hyper::body::Incoming;
use tokio::sync::Semaphore;

use crate::base::cancel_watch::CancelWatch;
use crate::base::local_endpoint::LocalEndpoint;
use crate::base::task_group::TaskGroup;
use crate::gateway::run::AgentRun;
use crate::gateway::upstream::UpstreamClient;
use crate::gateway::upstream::headers::UpstreamRequestHead;
use crate::llm::request::{LlmCall, ScannedBody};
use crate::telemetry::{access_log, metrics};
use exchange::{ClientReply, EnteredCall, GatewayExchange, ReservedCall, ResponseBody};
use limits::RunCapacity;
use read_body::{IncomingRequestBody, RequestBody};
use rejection::CallRejection;
use request_head::JudgedHead;

/// The gateway of one run on one worker thread.
pub struct RunGateway {
    pub run: Arc<AgentRun>,
    pub policy: Arc<policy::SharedPolicy>,
    /// The worker's upstream connections, shared with the worker's other runs.
    pub upstream: Arc<UpstreamClient>,
    pub metrics: Arc<metrics::RunMetrics>,
    pub access_log: Arc<access_log::AccessLog>,
    /// Permits for further client connections of the run to this worker.
    pub slots: Arc<Semaphore>,
    /// The run's limits on requests in flight and on body bytes, shared by all workers.
    pub capacity: Arc<RunCapacity>,
    pub tasks: TaskGroup,
    /// The endpoint of the run's tools; `None` for a run without tools.
    pub tools: Option<Arc<dyn LocalEndpoint>>,
}

impl RunGateway {
    /// Returns a watch that reports when an operator aborts the calls that are open now.
    fn watch_abort(&self) -> Arc<CancelWatch> {
        Arc::new(CancelWatch::new(self.run.control.abort_token()))
    }
}

/// Handles one request. `pid` is the calling process, if the process is known.
///
/// Never fails: every path ends in a response and a record.
pub async fn handle_request(
    gateway: Arc<RunGateway>,
    pid: Option<u32>,
    request: Request<Incoming>,
) -> Result<Response<ResponseBody>, Infallible> {
    // No path of a call to a model begins like the tools' paths. A run without tools pays one test of a pointer.
    if let Some(tools) = &gateway.tools
        && tool_route::is_tool_path(request.uri())
    {
        let answer = tool_route::handle_tool_request(&gateway, &**tools, pid, request);
        return Ok(Box::pin(answer).await);
    }
    let (request, mut body) = IncomingRequestBody::split_request(request);
    let abort = gateway.watch_abort();
    let mut exchange = GatewayExchange::begin(Arc::clone(&gateway), abort, pid, request.method());
    let received = match receive_head(&mut exchange, request) {
        Ok(ReceivedHead::Call(call)) => receive_body(&mut exchange, call, &mut body).await,
        Ok(ReceivedHead::LocalResponse(response)) => Ok(ReceivedRequest::LocalResponse(response)),
        Err(rejection) => Err(rejection),
    };
    // The response does not wait for the rest of a refused body: a task discards the rest beside the
    // response.
    body.discard_rest(&gateway.tasks);
    let reserved = reserve_received(&mut exchange, received);
    Ok(finish_reserved(exchange, reserved).await.into_response())
}

/// The result of the first part of the pipeline, which needs only the head of a request.
enum ReceivedHead {
    /// A request that the gateway answers without the upstream.
    LocalResponse(Response<Bytes>),
    Call(EnteredHead),
}

/// The head of a call that was admitted by its head.
struct EnteredHead {
    entered: EnteredCall,
    head: UpstreamRequestHead,
}

/// The result of the parts of the pipeline that need the client's connection.
enum ReceivedRequest {
    /// A request that the gateway answers without the upstream.
    LocalResponse(Response<Bytes>),
    Call(EnteredHead, Option<ScannedBody>),
}

/// The result of the part of the pipeline that reserves the budget.
enum ReservedRequest {
    /// A request that the gateway answers without the upstream.
    LocalResponse(Response<Bytes>),
    Call(Box<ReservedCall>),
}

/// Runs the first part of the pipeline, in order: the steps that need the head.
///
/// Each step may reject the request; `?` is the only way out. Every check that needs only the head runs
/// before the body is read, so a request that cannot be admitted holds no memory for its body.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the head's memory is free before the body arrives"
)]
fn receive_head(
    exchange: &mut GatewayExchange,
    request: impl JudgedHead,
) -> Result<ReceivedHead, CallRejection> {
    let route = request.route()?;
    exchange.set_route(route, &request);
    let policy = Arc::clone(exchange.policy());
    if let Some(response) = local_response::own(exchange.gateway(), &policy, route, &request)? {
        return Ok(ReceivedHead::LocalResponse(response));
    }
    // The route and the audience are now known, so every rejection below has the shape of the client's
    // protocol.
    request.check(&policy.config)?;
    let entered = exchange.enter_call(route)?;
    // The fields that go upstream are copied. The head is not held while the body arrives.
    let mut head = UpstreamRequestHead::new(
        route,
        &request,
        &policy.config.headers,
        Arc::clone(&policy.injected_headers),
        exchange.id(),
    );
    exchange.set_traceparent(&mut head);
    Ok(ReceivedHead::Call(EnteredHead { entered, head }))
}

/// Runs the second part of the pipeline: reads and scans the body as it arrives.
async fn receive_body(
    exchange: &mut GatewayExchange,
    mut call: EnteredHead,
    body: &mut IncomingRequestBody<impl RequestBody>,
) -> Result<ReceivedRequest, CallRejection> {
    let body = match call.entered.route().method() {
        &Method::POST => Some(exchange.read_body(&mut call.entered, body).await?),
        _ => None,
    };
    Ok(ReceivedRequest::Call(call, body))
}

/// Runs the second part of the pipeline for a body that has arrived as a whole. Nothing waits, so the
/// step is no future.
fn receive_whole_body(
    exchange: &mut GatewayExchange,
    mut call: EnteredHead,
    body: Bytes,
) -> Result<ReceivedRequest, CallRejection> {
    let body = exchange.scan_whole_body(&mut call.entered, body)?;
    Ok(ReceivedRequest::Call(call, Some(body)))
}

/// Runs the third part of the pipeline: the checks of the received request, up to the reservation of its
/// budget. Nothing waits.
fn reserve_received(
    exchange: &mut GatewayExchange,
    received: Result<ReceivedRequest, CallRejection>,
) -> Result<ReservedRequest, CallRejection> {
    let (EnteredHead { entered, mut head }, body) = match received? {
        ReceivedRequest::Call(call, body) => (call, body),
        ReceivedRequest::LocalResponse(response) => {
            return Ok(ReservedRequest::LocalResponse(response));
        }
    };
    let (call, rules) = match body {
        Some(body) => exchange.call_admission().check_body(body, &mut head)?,
        None => (LlmCall::default(), vec![]),
    };
    // The box keeps the future that waits for the response small.
    Ok(ReservedRequest::Call(Box::new(exchange.reserve_call(entered, head, call, rules)?)))
}

/// Answers a request that was reserved or rejected.
///
/// The server drops this future when the client disconnects. The drop of `exchange` then settles and
/// records the call.
async fn finish_reserved(
    mut exchange: Box<GatewayExchange>,
    reserved: Result<ReservedRequest, CallRejection>,
) -> ClientReply {
    let admitted = match reserved {
        Ok(ReservedRequest::LocalResponse(response)) => {
            exchange.finish_local(&response);
            return ClientReply::own(response);
        }
        Ok(ReservedRequest::Call(call)) => exchange.admit_call(call).await,
        Err(rejection) => Err(rejection),
    };
    match admitted {
        Ok((proof, usage_chunk, call)) => exchange.send_call(proof, usage_chunk, call).await,
        Err(rejection) => exchange.finish_rejected(&rejection),
    }
}
