//! The LLM data plane: one request in, one exchange recorded, one response out.
//!
//! Read [`handle_request`] first; that function is the whole pipeline. The pipeline has four parts:
//!
//! - [`request_head`], [`read_body`] and [`admission`] decide whether a request may become a call.
//! - [`upstream`] sends the call to the provider.
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

use http::{Method, Request, Response};
use hyper::body::Incoming;
use tokio::sync::Semaphore;

use crate::base::local_endpoint::LocalEndpoint;
use crate::base::task_group::TaskGroup;
use crate::gateway::run::AgentRun;
use crate::gateway::upstream::headers::UpstreamRequestHead;
use crate::gateway::upstream::{self, UpstreamClient};
use crate::llm::request::{LlmCall, ScannedBody};
use crate::llm::response::UsageChunkMode;
use crate::telemetry::{access_log, metrics};
use exchange::{AdmissionProof, EnteredCall, GatewayExchange};
use limits::RunCapacity;
use local_response::{ClientReply, ResponseBody};
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
    let mut exchange = GatewayExchange::begin(Arc::clone(&gateway), pid, request.method());
    let received = receive_request(&mut exchange, request, &mut body).await;
    // The response does not wait for the rest of a refused body: a task discards the rest beside the
    // response.
    body.discard_rest(&gateway.tasks);
    Ok(finish_received(exchange, received).await.into_response())
}

/// The result of the first part of the pipeline.
enum ReceivedRequest {
    /// A request that the gateway answers without the upstream.
    LocalResponse(Response<String>),
    Call(EnteredCall, UpstreamRequestHead, Option<ScannedBody>),
}

/// Runs the first part of the pipeline, in order: the steps that need the client's connection.
///
/// Each step may reject the request; `?` is the only way out. Every check that needs only the head runs
/// before the body is read, so a request that cannot be admitted holds no memory for its body.
async fn receive_request(
    exchange: &mut GatewayExchange,
    request: impl JudgedHead,
    body: &mut IncomingRequestBody<impl RequestBody>,
) -> Result<ReceivedRequest, CallRejection> {
    let route = request.route()?;
    exchange.set_route(route, &request);
    let policy = Arc::clone(exchange.policy());
    if let Some(response) = local_response::own(exchange.gateway(), &policy, route, &request) {
        return Ok(ReceivedRequest::LocalResponse(response));
    }
    // The route and the audience are now known, so every rejection below has the shape of the client's
    // protocol.
    request.check(&policy.config)?;
    let mut entered = exchange.enter_call(route)?;
    let mut head = UpstreamRequestHead::new(
        route,
        &request,
        &policy.config.headers,
        Arc::clone(&policy.injected_headers),
        exchange.id(),
    );
    exchange.set_traceparent(&mut head);
    // The fields that go upstream have been copied. Do not hold the head while the body arrives.
    drop(request);
    let body = match route.method() {
        &Method::POST => Some(exchange.read_body(&mut entered, body).await?),
        _ => None,
    };
    Ok(ReceivedRequest::Call(entered, head, body))
}

/// Answers a request that was received or rejected.
///
/// The server drops this future when the client disconnects. The drop of `exchange` then settles and
/// records the call.
async fn finish_received(
    mut exchange: Box<GatewayExchange>,
    received: Result<ReceivedRequest, CallRejection>,
) -> ClientReply {
    let admitted = match received {
        Ok(ReceivedRequest::LocalResponse(response)) => {
            exchange.finish_local(&response);
            return ClientReply::own(response);
        }
        Ok(ReceivedRequest::Call(entered, head, body)) => {
            admit_request(&mut exchange, entered, head, body).await
        }
        Err(rejection) => Err(rejection),
    };
    match admitted {
        Ok((proof, usage_chunk, call)) => exchange.send_call(proof, usage_chunk, call).await,
        Err(rejection) => exchange.finish_rejected(&rejection),
    }
}

/// Runs the second part of the pipeline: the steps that need only the received request.
async fn admit_request(
    exchange: &mut GatewayExchange,
    entered: EnteredCall,
    mut head: UpstreamRequestHead,
    body: Option<ScannedBody>,
) -> Result<(AdmissionProof, UsageChunkMode, upstream::UpstreamCall), CallRejection> {
    let (mut call, rules) = match body {
        Some(body) => exchange.call_admission().check_body(body, &mut head)?,
        None => (LlmCall::default(), vec![]),
    };
    let proof = exchange.admit_call(entered, &mut call, rules).await?;
    let deadline = exchange.gateway().run.ledger.deadline().map(Into::into);
    let usage_chunk = call.usage_chunk;
    let call = upstream::UpstreamCall { head, body: call.into_spliced(), deadline };
    Ok((proof, usage_chunk, call))
}
