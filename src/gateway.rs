//! The LLM data plane: one request in, one exchange recorded, one response out.
//!
//! Read [`handle`] first; it is the whole pipeline. `request` and `body` judge a request and touch
//! nothing else; `upstream` speaks to the provider; `exchange` follows the response to its end and
//! settles; `server` accepts connections, and `door` finds the run of a request where many share one.
//!
//! **Invariant:** whatever becomes of a request, it is settled once and recorded once.

pub mod admission;
pub mod answer;
pub mod audience;
pub mod budget_headers;
pub mod door;
pub mod dropped_fields;
pub mod exchange;
pub mod limits;
pub mod policy;
pub mod receive;
pub mod registry;
pub mod rejection;
pub mod request;
pub mod rule;
pub mod server;

use std::convert::Infallible;
use std::sync::Arc;

use http::{Method, Request, Response};
use hyper::body::Incoming;
use tokio::sync::Semaphore;

use crate::base::drain::Drain;
use crate::body::{Body, Call};
use crate::observe::{access_log, metrics};
use crate::protocol::Route;
use crate::run::Run;
use crate::stream::UsageChunk;
use crate::upstream::headers::Outgoing;
use crate::upstream::{self, Upstream};
use answer::{Answer, ClientReply};
use exchange::Exchange;
use limits::RunCapacity;
use receive::{Arriving, RequestBody};
use rejection::Rejection;
use request::JudgedHead;

/// What serves one run on one worker thread.
pub struct Gateway {
    pub run: Arc<Run>,
    pub policy: Arc<policy::Live>,
    /// The worker's connections; shared with the other runs that it serves.
    pub upstream: Arc<Upstream>,
    pub metrics: Arc<metrics::Run>,
    pub access_log: Arc<access_log::Log>,
    /// Connections that the run may still open to the worker.
    pub slots: Arc<Semaphore>,
    /// What the run's requests may hold at one time, on all workers.
    pub capacity: Arc<RunCapacity>,
    pub tasks: Drain,
}

/// Handles one request, of the process `pid` where that is known. Never fails: every path ends in a response and a record.
pub async fn handle(
    gateway: Arc<Gateway>,
    pid: Option<u32>,
    request: Request<Incoming>,
) -> Result<Response<Answer>, Infallible> {
    let (request, mut body) = Arriving::split(request);
    let mut exchange = Exchange::begin(Arc::clone(&gateway), pid, request.method());
    let received = receive(&mut exchange, request, &mut body).await;
    body.discard(&gateway.tasks);
    Ok(respond(exchange, received).await.into_response())
}

/// A request whose body has been read, if it has one.
enum Received {
    /// Its answer is our own.
    Own(Response<String>),
    Call(Route, Outgoing, Option<Body>),
}

/// The first part of the pipeline, in order: what needs the client. Each step may refuse; `?` is the only way out.
///
/// All that can be judged by the head is judged before the body is read: what cannot be admitted holds no memory.
async fn receive(
    exchange: &mut Exchange,
    request: impl JudgedHead,
    body: &mut Arriving<impl RequestBody>,
) -> Result<Received, Rejection> {
    let route = request.route()?;
    exchange.routed(route, &request);
    let policy = Arc::clone(&exchange.policy);
    if let Some(response) = answer::own(exchange.gateway(), &policy, route, &request) {
        return Ok(Received::Own(response));
    }
    request.check(&policy.config)?;
    exchange.enter(route)?;
    let mut head = Outgoing::new(
        route,
        &request,
        &policy.config.headers,
        Arc::clone(&policy.overwrites),
        &exchange.id,
    );
    exchange.trace(&mut head);
    drop(request);
    let body = match route.method() {
        &Method::POST => Some(exchange.receive(route, body).await?),
        _ => None,
    };
    Ok(Received::Call(route, head, body))
}

/// Answers a request that was received, or refused.
///
/// Dropping the future is what becomes of a call whose client has left.
async fn respond(
    mut exchange: Box<Exchange>,
    received: Result<Received, Rejection>,
) -> ClientReply {
    let admitted = match received {
        Ok(Received::Own(response)) => {
            exchange.answer(&response);
            return ClientReply::own(response);
        }
        Ok(Received::Call(route, head, body)) => admit(&mut exchange, route, head, body).await,
        Err(rejection) => Err(rejection),
    };
    match admitted {
        Ok((usage_chunk, call)) => exchange.send(usage_chunk, call).await,
        Err(rejection) => exchange.reject(&rejection),
    }
}

/// The second part of the pipeline: what needs only the request.
async fn admit(
    exchange: &mut Exchange,
    route: Route,
    mut head: Outgoing,
    body: Option<Body>,
) -> Result<(UsageChunk, upstream::Call), Rejection> {
    let mut call = match body {
        Some(body) => {
            let (call, rules) = exchange.admission().judge(body, &mut head)?;
            exchange.ruled(rules);
            call
        }
        None => Call::default(),
    };
    exchange.admit(route, &mut call).await?;
    let deadline = exchange.gateway().run.ledger.deadline().map(Into::into);
    let usage_chunk = call.usage_chunk;
    Ok((usage_chunk, upstream::Call { head, body: call.into_spliced(), deadline }))
}
