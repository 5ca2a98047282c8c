//! The answers to requests: the route, the waits and failures before the head, and the start of the playback.

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Method, Request, Response, StatusCode, Version};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::answer::ScriptedAnswer;
use super::breakable_socket::ConnectionBreaker;
use super::generated_body::{BodyAbortedError, GeneratedBody};
use super::playback::{self, FaultPlan, FrameWriter};
use super::protocol::ProviderProtocol;
use super::provider_request::ProviderRequest;
use super::request_log::{AnswerEnd, MAX_KEPT_REQUESTS, ProviderRequestLog, RequestLogGuard};
use super::route::{MODEL_PATH, ProviderRoute};
use super::script::{FaultKind, ProviderScript};
use super::{embeddings, headers, strict};
use crate::base::response_gate::ResponseGate;

/// The data that all connections share.
#[derive(Debug)]
pub(super) struct ProviderShared {
    pub(super) script: ProviderScript,
    /// True if the provider refuses what the real providers refuse.
    pub(super) is_strict: bool,
    pub(super) seen: Arc<ProviderRequestLog>,
    pub(super) gate: ResponseGate,
}

/// A request that is being answered.
struct ProviderCall<'a> {
    shared: &'a ProviderShared,
    breaker: Option<Arc<ConnectionBreaker>>,
    ticket: RequestLogGuard,
    /// The headers of the response.
    headers: HeaderMap,
}

/// Answers one request. An error means that the connection is to be broken.
pub(super) async fn handle(
    shared: &ProviderShared,
    breaker: &Arc<ConnectionBreaker>,
    request: Request<Incoming>,
) -> Result<Response<GeneratedBody>, BodyAbortedError> {
    let (head, body) = request.into_parts();
    // The control routes come first: they are not part of what a test observes.
    if let Some(answer) = control_response(shared, &head) {
        return Ok(answer);
    }
    let call = ProviderCall {
        // Over HTTP/2 a broken connection would break other answers too.
        breaker: (head.version != Version::HTTP_2).then(|| breaker.clone()),
        headers: headers::litellm_headers(&head.headers),
        ticket: shared.seen.track_request(head),
        shared,
    };
    // A body that breaks off means that the client has disconnected. The guard records that when it is dropped.
    let body = Limited::new(body, MAX_BODY_BYTES).collect().await.map_err(|_| BodyAbortedError)?;
    call.respond(body.to_bytes()).await
}

/// Answers the provider's own routes, which are neither scripted nor recorded.
fn control_response(shared: &ProviderShared, head: &Parts) -> Option<Response<GeneratedBody>> {
    let body = match (&head.method, head.uri.path()) {
        (&Method::GET, "/health") => json!({ "status": "ok" }),
        (&Method::GET, "/_seen") => shared.seen.summary_json(requested_count(head.uri.query())),
        (&Method::DELETE, "/_seen") => {
            shared.seen.clear();
            json!({})
        }
        (&Method::POST, "/_gate") => {
            // The count is taken before the gate opens, so that a test sees how many have waited.
            let waiting = shared.gate.waiting_answers();
            shared.gate.allow_answers(1);
            json!({ "waiting": waiting })
        }
        _ => return None,
    };
    Some(json_response(StatusCode::OK, HeaderMap::new(), &body))
}

/// Returns the number in `last=N`.
fn requested_count(query: Option<&str>) -> usize {
    query.and_then(|query| query.strip_prefix("last=")?.parse().ok()).unwrap_or(MAX_KEPT_REQUESTS)
}

impl ProviderCall<'_> {
    async fn respond(self, body: Bytes) -> Result<Response<GeneratedBody>, BodyAbortedError> {
        self.ticket.set_body(&body);
        let head = self.ticket.head();
        let route = match ProviderRoute::match_route(&head.method, head.uri.path()) {
            Ok(route) => route,
            // The format is that of FastAPI, on which LiteLLM is built.
            Err(status) => {
                let detail = status.canonical_reason();
                return Ok(self.refusal_response(status, &json!({ "detail": detail })));
            }
        };
        if self.shared.is_strict {
            let headers = &self.ticket.head().headers;
            if let Err(refusal) = strict::check_request(route, headers, &body) {
                return Ok(self.refusal_response(refusal.status, &refusal.body));
            }
        }
        match self.parse_request(&body, route) {
            Ok((ask, script)) => self.play_answer(route, &ask, script).await,
            Err(message) => {
                let status = StatusCode::BAD_REQUEST;
                Ok(self.refusal_response(status, &route.protocol().error_body(status, &message)))
            }
        }
    }

    /// Parses the request and its script, or returns the error of either.
    fn parse_request<'b>(
        &self,
        body: &'b Bytes,
        route: ProviderRoute,
    ) -> Result<(ProviderRequest<'b>, ProviderScript), String> {
        let ask = match route {
            ProviderRoute::Models | ProviderRoute::Model => ProviderRequest::default(),
            _ => ProviderRequest::parse(body)
                .map_err(|error| format!("the body cannot be read: {error}"))?,
        };
        let mut script = ask
            .resolve_script(&self.shared.script)
            .map_err(|error| format!("the model's script cannot be read: {error}"))?;
        route.drop_unsupported(&mut script);
        // A real model calls only the tools that it is offered.
        if self.shared.is_strict {
            script.tool = script.tool.filter(|name| ask.offers_tool(name));
        }
        Ok((ask, script))
    }

    /// Plays the script's part before the head, and then builds the response.
    async fn play_answer(
        self,
        route: ProviderRoute,
        ask: &ProviderRequest<'_>,
        script: ProviderScript,
    ) -> Result<Response<GeneratedBody>, BodyAbortedError> {
        let answer = ScriptedAnswer::new(ask, script);
        // Only a turn can be streamed; the other routes ignore the field.
        let streamed = match route {
            ProviderRoute::Turn(protocol) => Some(protocol).filter(|_| ask.is_streaming()),
            _ => None,
        };
        let chunks = streamed.map(|_| answer.chunks);
        let (gate, breaker) = (self.shared.gate.clone(), self.breaker.clone());
        // 1. The plan is made before the first wait, because a failure may come before the head.
        let fault_plan = FaultPlan::new(&answer.script, chunks, gate, breaker);
        if !answer.script.first_byte.is_zero() {
            tokio::time::sleep(answer.script.first_byte).await;
        }
        // 2. Waits and failures before the head.
        let status = match fault_plan.apply_before_head().await {
            Ok(()) => answer.script.status,
            Err(FaultKind::Error) => 500,
            Err(_) => {
                self.ticket.set_end(AnswerEnd::Broken);
                return Err(BodyAbortedError);
            }
        };
        let status = StatusCode::from_u16(status).expect("a script has 200 or 400 to 599");
        // 3. An error status has no scripted body.
        Ok(match streamed {
            _ if status != StatusCode::OK => {
                self.error_response(status, route.protocol(), &answer.script)
            }
            Some(protocol) => self.stream_response(protocol, answer, fault_plan),
            None => self.unary_response(route, ask, &answer, fault_plan),
        })
    }

    fn stream_response(
        mut self,
        protocol: ProviderProtocol,
        answer: ScriptedAnswer,
        fault_plan: FaultPlan,
    ) -> Response<GeneratedBody> {
        headers::set_stream(&mut self.headers);
        self.ticket.set_status(StatusCode::OK);
        let ticket = self.ticket;
        let body = GeneratedBody::from_writer(None, |writer| {
            let out = FrameWriter::new(writer, &answer.script);
            playback::play_stream(protocol, answer, fault_plan, out, ticket)
        });
        build_response(StatusCode::OK, self.headers, body)
    }

    fn unary_response(
        mut self,
        route: ProviderRoute,
        ask: &ProviderRequest<'_>,
        answer: &ScriptedAnswer,
        fault_plan: FaultPlan,
    ) -> Response<GeneratedBody> {
        let body = match route {
            ProviderRoute::Turn(protocol) => protocol.unary_body(answer),
            ProviderRoute::CountTokens => json!({ "input_tokens": answer.input }),
            ProviderRoute::Embeddings => embeddings::embeddings_response(ask, &answer.script),
            ProviderRoute::Models => model_list_json(self.ticket.head()),
            ProviderRoute::Model => {
                let head = self.ticket.head();
                let name = head.uri.path().strip_prefix(MODEL_PATH).unwrap_or_default();
                model_json(name, head)
            }
        };
        headers::set_unary(&mut self.headers, route.is_billed().then(|| answer.cost_dollars()));
        self.ticket.set_status(StatusCode::OK);
        let bytes = Bytes::from(body.to_string());
        let ticket = self.ticket;
        let body = GeneratedBody::from_writer(Some(bytes.len() as u64), |writer| {
            playback::play_unary(
                bytes,
                fault_plan,
                FrameWriter::new(writer, &answer.script),
                ticket,
            )
        });
        build_response(StatusCode::OK, self.headers, body)
    }

    /// Builds the answer with the script's error status.
    fn error_response(
        mut self,
        status: StatusCode,
        protocol: ProviderProtocol,
        script: &ProviderScript,
    ) -> Response<GeneratedBody> {
        headers::set_error(&mut self.headers, script);
        let message = format!("the fake provider answers {status}, as its script says");
        self.refusal_response(status, &protocol.error_body(status, &message))
    }

    fn refusal_response(self, status: StatusCode, body: &Value) -> Response<GeneratedBody> {
        self.ticket.set_status(status);
        // A refusal is complete at once: no script plays after it.
        self.ticket.set_end(AnswerEnd::Completed);
        json_response(status, self.headers, body)
    }
}

/// Returns the list of models, in Anthropic's format for Anthropic's clients.
fn model_list_json(request: &Parts) -> Value {
    if is_anthropic_client(request) {
        return json!({
            "data": MODEL_NAMES.iter().map(|id| model_json(id, request)).collect::<Vec<_>>(),
            "first_id": MODEL_NAMES[0],
            "last_id": MODEL_NAMES[MODEL_NAMES.len() - 1],
            "has_more": false,
        });
    }
    let models: Vec<_> = MODEL_NAMES.iter().map(|id| model_json(id, request)).collect();
    json!({ "object": "list", "data": models })
}

fn model_json(id: &str, request: &Parts) -> Value {
    if is_anthropic_client(request) {
        return json!({
            "type": "model",
            "id": id,
            "display_name": id,
            "created_at": "2026-01-01T00:00:00Z",
        });
    }
    json!({ "id": id, "object": "model", "created": 1, "owned_by": "fake" })
}

/// Returns true for Anthropic's clients, which send this header on every request.
fn is_anthropic_client(request: &Parts) -> bool {
    request.headers.contains_key("anthropic-version")
}

fn json_response(
    status: StatusCode,
    mut headers: HeaderMap,
    body: &Value,
) -> Response<GeneratedBody> {
    headers::set_json(&mut headers);
    build_response(status, headers, GeneratedBody::from_bytes(Bytes::from(body.to_string())))
}

fn build_response(
    status: StatusCode,
    headers: HeaderMap,
    body: GeneratedBody,
) -> Response<GeneratedBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// The models that `GET /v1/models` lists. The provider has a model of every other name, too.
const MODEL_NAMES: [&str; 2] = ["fake-small", "fake-large"];
/// The maximum size of a body: twice the gateway's default.
const MAX_BODY_BYTES: usize = 64 << 20;
