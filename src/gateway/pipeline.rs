//! The LLM data plane: one request in, one exchange recorded, one response out.
//!
//! Read [`handle_request`] first; it is the whole pipeline. `request` and `body` judge a request and touch
//! nothing else; `upstream` speaks to the provider; `exchange` follows the response to its end and
//! settles; `server` accepts connections, and `door` finds the run of a request where many share one.
//!
//! **Invariant:** whatever becomes of a request, it is settled once and recorded once.

pub mod admission;
pub mod audience;
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

use std::convert::Infallible;
use std::sync::Arc;

use http::{Method, Request, Response};
use hyper::body::Incoming;
use tokio::sync::Semaphore;

use crate::base::task_group::TaskGroup;
use crate::gateway::run::AgentRun;
use crate::gateway::upstream::headers::UpstreamRequestHead;
use crate::gateway::upstream::{self, UpstreamClient};
use crate::llm::protocol::GatewayRoute;
use crate::llm::request::{LlmCall, ScannedBody};
use crate::llm::response::UsageChunkMode;
use crate::telemetry::{access_log, metrics};
use exchange::GatewayExchange;
use limits::RunCapacity;
use local_response::{ClientReply, ResponseBody};
use read_body::{IncomingRequestBody, RequestBody};
use rejection::CallRejection;
use request_head::JudgedHead;

/// What serves one run on one worker thread.
pub struct RunGateway {
    pub run: Arc<AgentRun>,
    pub policy: Arc<policy::SharedPolicy>,
    /// The worker's connections; shared with the other runs that it serves.
    pub upstream: Arc<UpstreamClient>,
    pub metrics: Arc<metrics::RunMetrics>,
    pub access_log: Arc<access_log::AccessLog>,
    /// Connections that the run may still open to the worker.
    pub slots: Arc<Semaphore>,
    /// What the run's requests may hold at one time, on all workers.
    pub capacity: Arc<RunCapacity>,
    pub tasks: TaskGroup,
}

/// Handles one request, of the process `pid` where that is known. Never fails: every path ends in a response and a record.
pub async fn handle_request(
    gateway: Arc<RunGateway>,
    pid: Option<u32>,
    request: Request<Incoming>,
) -> Result<Response<ResponseBody>, Infallible> {
    let (request, mut body) = IncomingRequestBody::split_request(request);
    let mut exchange = GatewayExchange::begin(Arc::clone(&gateway), pid, request.method());
    let received = receive_request(&mut exchange, request, &mut body).await;
    body.discard_rest(&gateway.tasks);
    Ok(finish_received(exchange, received).await.into_response())
}

/// A request whose body has been read, if it has one.
enum ReceivedRequest {
    /// Its answer is our own.
    Own(Response<String>),
    Call(GatewayRoute, UpstreamRequestHead, Option<ScannedBody>),
}

/// The first part of the pipeline, in order: what needs the client. Each step may refuse; `?` is the only way out.
///
/// All that can be judged by the head is judged before the body is read: what cannot be admitted holds no memory.
async fn receive_request(
    exchange: &mut GatewayExchange,
    request: impl JudgedHead,
    body: &mut IncomingRequestBody<impl RequestBody>,
) -> Result<ReceivedRequest, CallRejection> {
    let route = request.route()?;
    exchange.set_route(route, &request);
    let policy = Arc::clone(&exchange.policy);
    if let Some(response) = local_response::own(exchange.gateway(), &policy, route, &request) {
        return Ok(ReceivedRequest::Own(response));
    }
    request.check(&policy.config)?;
    exchange.enter_call(route)?;
    let mut head = UpstreamRequestHead::new(
        route,
        &request,
        &policy.config.headers,
        Arc::clone(&policy.overwrites),
        &exchange.id,
    );
    exchange.set_traceparent(&mut head);
    drop(request);
    let body = match route.method() {
        &Method::POST => Some(exchange.read_body(route, body).await?),
        _ => None,
    };
    Ok(ReceivedRequest::Call(route, head, body))
}

/// Answers a request that was received, or refused.
///
/// Dropping the future is what becomes of a call whose client has left.
async fn finish_received(
    mut exchange: Box<GatewayExchange>,
    received: Result<ReceivedRequest, CallRejection>,
) -> ClientReply {
    let admitted = match received {
        Ok(ReceivedRequest::Own(response)) => {
            exchange.finish_local(&response);
            return ClientReply::own(response);
        }
        Ok(ReceivedRequest::Call(route, head, body)) => {
            admit_request(&mut exchange, route, head, body).await
        }
        Err(rejection) => Err(rejection),
    };
    match admitted {
        Ok((usage_chunk, call)) => exchange.send_call(usage_chunk, call).await,
        Err(rejection) => exchange.finish_rejected(&rejection),
    }
}

/// The second part of the pipeline: what needs only the request.
async fn admit_request(
    exchange: &mut GatewayExchange,
    route: GatewayRoute,
    mut head: UpstreamRequestHead,
    body: Option<ScannedBody>,
) -> Result<(UsageChunkMode, upstream::UpstreamCall), CallRejection> {
    let mut call = match body {
        Some(body) => {
            let (call, rules) = exchange.call_admission().check_body(body, &mut head)?;
            exchange.set_matched_rules(rules);
            call
        }
        None => LlmCall::default(),
    };
    exchange.admit_call(route, &mut call).await?;
    let deadline = exchange.gateway().run.ledger.deadline().map(Into::into);
    let usage_chunk = call.usage_chunk;
    Ok((usage_chunk, upstream::UpstreamCall { head, body: call.into_spliced(), deadline }))
}
