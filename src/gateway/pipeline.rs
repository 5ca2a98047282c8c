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
pub mod connect_route;
pub mod connect_tunnel;
pub mod dropped_fields;
pub mod exchange;
pub mod limits;
pub mod local_response;
mod logged_body;
pub mod policy;
pub mod read_body;
pub mod registry;
pub mod rejection;
pub mod request_head;
pub mod rule;
pub mod run_token_auth;
pub mod server;
pub mod server_config;
pub mod tool_route;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Method, Request, Response};
use hyper::body::Incoming;
use tokio::sync::Semaphore;

use crate::base::cancel_watch::CancelWatch;
use crate::base::socket::HangupWatch;
use crate::base::task_group::TaskGroup;
use crate::gateway::run::{AgentRun, ToolEndpoints};
use crate::gateway::upstream::UpstreamClient;
use crate::gateway::upstream::headers::UpstreamRequestHead;
use crate::llm::request::{LlmCall, ScannedBody};
use crate::telemetry::{access_log, metrics};
use connect_tunnel::{TunnelSlot, asks_for_tunnel};
use exchange::{
    AdmissionAttempt, ClientReply, EnteredCall, GatewayExchange, PendingResponse, ReservedCall,
    ResponseBody, UnfundedCall,
};
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
    /// The endpoints of the run's tools and connections; `None` for a run without tools.
    pub tools: Option<ToolEndpoints>,
}

impl RunGateway {
    /// Returns a watch that reports when an operator aborts the calls that are open now.
    fn watch_abort(&self) -> Arc<CancelWatch> {
        Arc::new(CancelWatch::new(self.run.control.abort_token()))
    }
}

/// The client of a connection, as its socket tells.
#[derive(Clone, Debug)]
pub struct ClientPeer {
    /// The calling process, if the process is known.
    pub pid: Option<u32>,
    /// A watch on the connection's end.
    pub hangup: HangupWatch,
    /// The place for a tunnel on this connection; `None` if the connection can carry none.
    pub tunnel: Option<TunnelSlot>,
}

/// Handles one request.
///
/// Never fails: every path ends in a response and a record.
pub async fn handle_request(
    gateway: Arc<RunGateway>,
    peer: ClientPeer,
    request: Request<Incoming>,
) -> Result<Response<ResponseBody>, Infallible> {
    let pid = peer.pid;
    // No path of a call to a model begins like the tools' paths. A run without tools pays one test of a pointer.
    if let Some(ToolEndpoints { tools, connections }) = &gateway.tools {
        if let Some(slot) = peer.tunnel.as_ref().filter(|_| asks_for_tunnel(&request)) {
            let (slot, own) = (slot.clone(), Arc::clone(&gateway));
            return Ok(slot.answer_request((own, Arc::clone(connections)), peer, request));
        }
        if tool_route::is_tool_path(request.uri()) {
            let answer = tool_route::handle_tool_request(&gateway, &**tools, pid, request);
            return Ok(Box::pin(answer).await);
        }
        if connect_route::is_connect_path(request.uri()) {
            let (connections, own) = (Arc::clone(connections), Arc::clone(&gateway));
            let answer =
                connect_route::handle_connect_request(own, connections, peer, request, None);
            return Ok(Box::pin(answer).await);
        }
    }
    let (request, mut body) = IncomingRequestBody::split_request(request);
    let (policy, abort) = (gateway.policy.load_full(), gateway.watch_abort());
    let (own, method) = (Arc::clone(&gateway), request.method());
    let mut exchange = GatewayExchange::begin(own, policy, abort, pid, method);
    let received = match receive_head(&mut exchange, request) {
        Ok(ReceivedHead::Call(call)) => receive_body(&mut exchange, call, &mut body).await,
        Ok(ReceivedHead::LocalResponse(response)) => Ok(ReceivedRequest::LocalResponse(response)),
        Err(rejection) => Err(rejection),
    };
    // The response does not wait for the rest of a refused body: a task discards the rest beside the
    // response.
    body.discard_rest(&gateway.tasks);
    Ok(answer_received(exchange, received).await.into_response())
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
#[expect(clippy::large_enum_variant, reason = "a box would cost an allocation for each call")]
enum ReservedRequest {
    Call(ReservedCall),
    /// A call that a spent limit refuses, unless a person raises the limit.
    Unfunded(Box<UnfundedCall>),
}

/// The answer to a request, which may have to wait. The server drops the value when the client disconnects. The drop of
/// the exchange in it then settles and records the call.
enum PendingReply {
    /// An answer of the gateway itself; `None` after the answer was taken.
    Own(Option<ClientReply>),
    Sent(PendingResponse),
    /// A call that waits for the disk, or for a person.
    Waiting(Pin<Box<dyn Future<Output = ClientReply> + Send>>),
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
    let (gateway, policy) = (exchange.gateway(), exchange.policy());
    if let Some(response) = local_response::own(gateway, policy, route, &request)? {
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

/// Runs the third part of the pipeline: checks the received request, reserves its budget, admits it and sends it.
/// Nothing waits, except in a future that is the result.
fn answer_received(
    mut exchange: Box<GatewayExchange>,
    received: Result<ReceivedRequest, CallRejection>,
) -> PendingReply {
    let admitted = match received {
        Ok(ReceivedRequest::LocalResponse(response)) => {
            exchange.finish_local(&response);
            return PendingReply::Own(Some(ClientReply::own(response)));
        }
        Ok(ReceivedRequest::Call(call, body)) => {
            match reserve_received(&mut exchange, call, body) {
                Ok(ReservedRequest::Call(call)) => exchange.admit_at_once(call),
                Ok(ReservedRequest::Unfunded(call)) => {
                    return PendingReply::Waiting(Box::pin(answer_unfunded(exchange, call)));
                }
                Err(rejection) => AdmissionAttempt::Done(Err(rejection)),
            }
        }
        Err(rejection) => AdmissionAttempt::Done(Err(rejection)),
    };
    match admitted {
        AdmissionAttempt::Done(Ok(call)) => PendingReply::Sent(exchange.send_call(call)),
        AdmissionAttempt::Done(Err(rejection)) => {
            PendingReply::Own(Some(exchange.finish_rejected(&rejection)))
        }
        AdmissionAttempt::WaitsForDisk(call) => {
            PendingReply::Waiting(Box::pin(answer_reserved(exchange, Box::new(call))))
        }
    }
}

/// Checks a received call and reserves its budget.
fn reserve_received(
    exchange: &mut GatewayExchange,
    EnteredHead { entered, mut head }: EnteredHead,
    body: Option<ScannedBody>,
) -> Result<ReservedRequest, CallRejection> {
    let (call, rules) = match body {
        Some(body) => exchange.call_admission().check_body(body, &mut head)?,
        None => (LlmCall::default(), vec![]),
    };
    exchange.reserve_call(entered, head, call, rules)
}

/// Answers a reserved call whose admission waits for the disk.
async fn answer_reserved(
    mut exchange: Box<GatewayExchange>,
    call: Box<ReservedCall>,
) -> ClientReply {
    match exchange.admit_call(call).await {
        Ok(call) => exchange.send_call(call).await,
        Err(rejection) => exchange.finish_rejected(&rejection),
    }
}

/// Answers a call that waits for a person.
async fn answer_unfunded(
    mut exchange: Box<GatewayExchange>,
    call: Box<UnfundedCall>,
) -> ClientReply {
    match exchange.wait_for_budget(call).await {
        Ok(call) => answer_reserved(exchange, call).await,
        Err(rejection) => exchange.finish_rejected(&rejection),
    }
}

impl Future for PendingReply {
    type Output = ClientReply;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ClientReply> {
        match self.get_mut() {
            Self::Own(reply) => {
                Poll::Ready(reply.take().expect("a finished reply is not polled again"))
            }
            Self::Sent(response) => Pin::new(response).poll(cx),
            Self::Waiting(answer) => answer.as_mut().poll(cx),
        }
    }
}
