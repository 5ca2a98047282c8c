//! Authentication on a listener that runs share: a request's token, and nothing else, selects the
//! request's run.
//!
//! **Invariant:** each request is judged by its own token, whatever arrived on the connection before.
//!
//! **Invariant:** a rejected client learns the code of the rejection and nothing more. The client does
//! not learn which keys exist or, without a valid signature, which runs exist.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::auth_error::AuthError;
use super::exchange::{GatewayExchange, ResponseBody, ResponseBodyError};
use super::read_body::IncomingRequestBody;
use super::registry::GatewayRegistry;
use super::rejection::CallRejection;
use super::{ClientPeer, RunGateway, handle_request, request_head};
use crate::base::socket::HangupWatch;
use crate::base::task_group::TaskGroup;
use crate::gateway::run::RequestId;
use crate::gateway::run::token::{self, RunTokenKeys};
use crate::llm::protocol::{GatewayRoute, LlmProtocol};
use crate::telemetry::access_log::{self, AccessLogEntry};
use crate::telemetry::metrics::{self, MetricsRegistry};

/// The authentication of a shared listener. All workers use one value.
pub struct RunTokenAuth {
    pub keys: ArcSwap<RunTokenKeys>,
    pub runs: Arc<GatewayRegistry>,
    pub metrics: Arc<MetricsRegistry>,
    /// The access log for requests that belong to no run.
    pub access_log: access_log::AccessLog,
    pub tasks: TaskGroup,
}

/// The state of one client connection.
pub struct ConnectionState {
    worker: usize,
    hangup: HangupWatch,
    /// Permits for the connection, one of each run whose valid token the connection has shown.
    permits: Mutex<Vec<OwnedSemaphorePermit>>,
    /// Notified when a run had no permit left for the connection.
    turned_away: Notify,
}

/// A response on a shared listener. The end of the response's run waits for the response.
pub struct TrackedBody {
    answer: ResponseBody,
    /// The count of this call among the run's tasks. `None` if the response belongs to no run.
    _call: Option<TaskTrackerToken>,
}

/// A rejected request and, if known, the run that the rejection is recorded for.
struct AuthFailure {
    why: AuthError,
    run: Option<Arc<RunGateway>>,
}

impl RunTokenAuth {
    /// Handles one request of a connection. Like [`handle_request`], this function never fails.
    pub async fn handle_request(
        &self,
        visitor: &ConnectionState,
        request: Request<Incoming>,
    ) -> Result<Response<TrackedBody>, Infallible> {
        // 1. The token selects the run.
        // 2. The connection takes one of the run's permits, once.
        // 3. The call counts as a task of the run, so the run's end waits for the call.
        let found = self.authenticate(visitor.worker, request.headers()).and_then(|gateway| {
            if !visitor.try_join_run(&gateway) {
                visitor.turned_away.notify_one();
                return Err(AuthFailure { why: AuthError::TooManyConnections, run: Some(gateway) });
            }
            let call = gateway.tasks.track_work();
            call.map(|call| (gateway, call)).ok_or(AuthError::RunClosing.into())
        });
        match found {
            Ok((gateway, call)) => {
                // Boxed, because a shared listener has many connections, and most of them have no call
                // most of the time.
                let Ok(response) = Box::pin(handle_request(gateway, visitor.peer(), request)).await;
                Ok(response.map(|answer| TrackedBody { answer, _call: Some(call) }))
            }
            Err(refused) => {
                let (request, body) = IncomingRequestBody::split_request(request);
                body.discard_rest(&self.tasks);
                let response = self.reject_request(refused, &request);
                Ok(response.map(|answer| TrackedBody { answer, _call: None }))
            }
        }
    }

    fn authenticate(
        &self,
        worker: usize,
        headers: &HeaderMap,
    ) -> Result<Arc<RunGateway>, AuthFailure> {
        // Check the signature first: only signed claims may select a run, even for the record of the
        // rejection.
        let claims = self
            .keys
            .load()
            .verify_signature(extract_run_token(headers)?)
            .map_err(|_| AuthError::Invalid)?;
        let run = self.runs.find_run(&claims.run).and_then(|run| run.get(worker).cloned());
        match claims.check_validity_period(SystemTime::now()) {
            Ok(()) => run.ok_or(AuthError::UnknownRun.into()),
            // The signature is valid, so these rejections may be recorded for the token's run.
            Err(token::RunTokenError::Expired) => Err(AuthFailure { why: AuthError::Expired, run }),
            Err(_) => Err(AuthFailure { why: AuthError::Invalid, run }),
        }
    }

    /// Answers a rejected request. A rejection whose run is known is recorded for that run.
    fn reject_request(
        &self,
        refused: AuthFailure,
        request: &Request<()>,
    ) -> Response<ResponseBody> {
        let (begun, route) = (Instant::now(), request_head::match_route(request).ok());
        // A load balancer has no token. A wrong run token is still rejected, even on the health route.
        if refused.why == AuthError::Missing && route == Some(GatewayRoute::Health) {
            return anonymous_health().map(ResponseBody::from_text);
        }
        let rejection = CallRejection::Unauthenticated(refused.why);
        // Count the rejection like a call, because nothing may be recorded for a run after its end.
        let run = refused.run.and_then(|run| run.tasks.track_work().map(|call| (run, call)));
        if let Some((gateway, _call)) = run {
            // The exchange is dropped at `finish_rejected`, which writes the audit record, the metrics
            // and the access log.
            let abort = gateway.watch_abort();
            let policy = gateway.policy.load_full();
            let mut exchange =
                GatewayExchange::begin(gateway, policy, abort, None, request.method());
            if let Some(route) = route {
                exchange.set_route(route, request);
            }
            return exchange.finish_rejected(&rejection).into_response();
        }
        let response =
            rejection.to_response(route.map_or(LlmProtocol::Chat, GatewayRoute::protocol));
        let (code, status) = (rejection.code(), response.status().as_u16());
        self.metrics.record_refusal(&metrics::RefusedRequest { route, code, status });
        self.access_log.write_entry(&AccessLogEntry {
            method: request.method().as_str(),
            uri: route.map(GatewayRoute::path),
            status,
            bytes: response.body().len() as u64,
            request_id: RequestId::new().as_str(),
            request_time: begun.elapsed(),
            ..AccessLogEntry::without_values(SystemTime::now(), code)
        });
        response.map(ResponseBody::from_text)
    }
}

impl ConnectionState {
    /// Creates the state of a connection on `worker`. `hangup` watches the connection's end.
    pub fn new(worker: usize, hangup: HangupWatch) -> Self {
        Self { worker, hangup, permits: Mutex::default(), turned_away: Notify::new() }
    }

    /// Returns the client. A client over a network has no process that is known here.
    fn peer(&self) -> ClientPeer {
        // The token of each request tells the run, and a tunnel would carry requests without one.
        ClientPeer { pid: None, hangup: self.hangup.clone(), tunnel: None }
    }

    /// Returns true if the connection has shown a valid token and holds a permit of its run.
    pub fn is_authenticated(&self) -> bool {
        !self.lock_permits().is_empty()
    }

    /// Returns once a run had no permit left for the connection.
    pub async fn turned_away(&self) {
        self.turned_away.notified().await;
    }

    /// Counts the connection once among the run's connections. Returns false if the run has no permit
    /// left.
    fn try_join_run(&self, gateway: &RunGateway) -> bool {
        let mut places = self.lock_permits();
        // A semaphore's address identifies its run, so the connection takes no second permit of the
        // same run.
        if places.iter().any(|place| Arc::ptr_eq(place.semaphore(), &gateway.slots)) {
            return true;
        }
        let place = Arc::clone(&gateway.slots).try_acquire_owned();
        place.map(|place| places.push(place)).is_ok()
    }

    fn lock_permits(&self) -> MutexGuard<'_, Vec<OwnedSemaphorePermit>> {
        self.permits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<AuthError> for AuthFailure {
    fn from(why: AuthError) -> Self {
        Self { why, run: None }
    }
}

impl Body for TrackedBody {
    type Data = Bytes;
    type Error = ResponseBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        Pin::new(&mut self.answer).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.answer.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.answer.size_hint()
    }
}

/// Returns the run token that the client sends as its API key, in the header of either protocol.
fn extract_run_token(headers: &HeaderMap) -> Result<&str, AuthError> {
    let mut found = None;
    for key in api_keys(headers).filter(|key| key.starts_with(token::TOKEN_PREFIX)) {
        if found.is_some_and(|other| other != key) {
            // Two different tokens are ambiguous, and the gateway must not guess which run pays.
            return Err(AuthError::Invalid);
        }
        found = Some(key);
    }
    found.ok_or(AuthError::Missing)
}

/// Returns all API keys of a request. OpenAI's clients send the key as `Bearer`, Anthropic's as
/// `x-api-key`, and some clients send both.
fn api_keys(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let bearers = headers.get_all(header::AUTHORIZATION).iter().filter_map(|value| {
        let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    bearers.chain(headers.get_all(API_KEY_HEADER).iter().filter_map(|value| value.to_str().ok()))
}

/// Returns the health response for load balancers, which have no token. The response names no run.
fn anonymous_health() -> Response<String> {
    let mut response = Response::new(r#"{"status":"ok"}"#.to_owned());
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

const API_KEY_HEADER: &str = "x-api-key";
