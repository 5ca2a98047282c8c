//! The LLM data plane: one request in, one exchange recorded, one response out.
//!
//! Read [`handle`] first; it is the whole pipeline. `request` and `body` judge a request and touch
//! nothing else; `upstream` speaks to the provider; `exchange` follows the response to its end and
//! settles; `server` accepts connections.
//!
//! **Invariant:** whatever becomes of a request, it is settled once and recorded once.

pub mod access_log;
pub mod answer;
pub mod body;
pub mod exchange;
pub mod headers;
pub mod json;
pub mod metrics;
pub mod printable;
pub mod protocol;
pub mod receive;
pub mod rejection;
pub mod request;
pub mod rope;
pub mod server;
pub mod stream;
pub mod upstream;

use std::convert::Infallible;
use std::sync::Arc;

use http::{Method, Request, Response};
use hyper::body::Incoming;

use crate::base::drain::Drain;
use crate::run::Run;
use answer::Answer;
use body::Call;
use exchange::Exchange;
use headers::{Outgoing, Overwrites};
use rejection::Rejection;
use request::Policy;
use stream::UsageChunk;
use upstream::Upstream;

/// What serves one run on one worker thread.
pub struct Gateway {
    pub run: Arc<Run>,
    pub policy: Arc<Policy>,
    pub overwrites: Arc<Overwrites>,
    /// The worker's connections; shared with the other runs that it serves.
    pub upstream: Arc<Upstream>,
    pub metrics: Arc<metrics::Run>,
    pub access_log: Arc<access_log::Log>,
    pub tasks: Drain,
}

/// Handles one request. Never fails: every path ends in a response and a record.
pub async fn handle(
    gateway: Arc<Gateway>,
    request: Request<Incoming>,
) -> Result<Response<Answer>, Infallible> {
    let mut exchange = Exchange::begin(Arc::clone(&gateway), &request);
    Ok(match serve(&gateway, &mut exchange, request).await {
        Ok(Served::Own(response)) => {
            exchange.answer(&response);
            response.map(Answer::text)
        }
        Ok(Served::Upstream(usage_chunk, response)) => {
            exchange.follow(usage_chunk, response).map(Answer::Followed)
        }
        Err(rejection) => exchange.reject(&rejection).map(Answer::text),
    })
}

/// Where a response comes from.
enum Served {
    Own(Response<String>),
    Upstream(UsageChunk, Response<upstream::Body>),
}

/// The pipeline, in order. Each step may refuse; `?` is the only way out.
async fn serve(
    gateway: &Gateway,
    exchange: &mut Exchange,
    request: Request<Incoming>,
) -> Result<Served, Rejection> {
    let route = request::route(&request)?;
    exchange.routed(route);
    if let Some(response) = answer::own(gateway, route, request.headers()) {
        return Ok(Served::Own(response));
    }
    let policy = &gateway.policy;
    request::check_head(&request, policy)?;
    let head = Outgoing::new(
        route,
        &request,
        &policy.headers,
        Arc::clone(&gateway.overwrites),
        &exchange.id,
    );
    let call = if route.method() == Method::POST {
        let (rope, document) = receive::body(request.into_body(), policy).await?;
        exchange.received(rope.len());
        body::admit(route, &policy.body, rope, &document)?
    } else {
        Call::default()
    };
    exchange.admit(route, &call).await?;
    let deadline = gateway.run.ledger.deadline().map(Into::into);
    let response =
        gateway.upstream.send(upstream::Call { head, body: call.rope, deadline }).await?;
    Ok(Served::Upstream(call.usage_chunk, response))
}
