//! Answers requests: finds the route, waits or fails before the head, hands over to the play.

use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Method, Request, Response, StatusCode, Version};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use serde_json::{Value, json};

use super::answer::Answer;
use super::ask::Ask;
use super::body::{Body, Broken};
use super::play::{self, Course, Writer};
use super::protocol::Protocol;
use super::record::{Ended, KEPT, Seen, Ticket};
use super::script::{Script, Trouble};
use super::socket::Breaker;
use super::{embeddings, headers};
use crate::base::gate::Gate;

/// What all connections share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) script: Script,
    pub(super) seen: Arc<Seen>,
    pub(super) gate: Gate,
}

/// What is served, scripted and recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Turn(Protocol),
    CountTokens,
    Embeddings,
    Models,
}

/// One request on its way to its answer.
struct Call<'a> {
    shared: &'a Shared,
    breaker: Option<Arc<Breaker>>,
    ticket: Ticket,
    /// Of the response.
    headers: HeaderMap,
}

/// Answers one request; an error is a connection to break.
pub(super) async fn handle(
    shared: &Shared,
    breaker: &Arc<Breaker>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Broken> {
    let (head, body) = request.into_parts();
    if let Some(answer) = own(shared, &head) {
        return Ok(answer);
    }
    let call = Call {
        breaker: (head.version != Version::HTTP_2).then(|| breaker.clone()),
        headers: headers::litellm(&head.headers),
        ticket: shared.seen.arrived(head),
        shared,
    };
    // A body that breaks off is a client that left: the ticket says so when it is dropped.
    let body = Limited::new(body, BODY_LIMIT).collect().await.map_err(|_| Broken)?;
    call.respond(body.to_bytes()).await
}

/// The provider's own routes: neither scripted nor recorded.
fn own(shared: &Shared, head: &Parts) -> Option<Response<Body>> {
    let body = match (&head.method, head.uri.path()) {
        (&Method::GET, "/health") => json!({ "status": "ok" }),
        (&Method::GET, "/_seen") => shared.seen.summary(last(head.uri.query())),
        (&Method::DELETE, "/_seen") => {
            shared.seen.clear();
            json!({})
        }
        (&Method::POST, "/_gate") => {
            let waiting = shared.gate.waiting();
            shared.gate.open(1);
            json!({ "waiting": waiting })
        }
        _ => return None,
    };
    Some(json_response(StatusCode::OK, HeaderMap::new(), &body))
}

/// The number in `last=N`.
fn last(query: Option<&str>) -> usize {
    query.and_then(|query| query.strip_prefix("last=")?.parse().ok()).unwrap_or(KEPT)
}

impl Call<'_> {
    async fn respond(self, body: Bytes) -> Result<Response<Body>, Broken> {
        self.ticket.body(&body);
        let head = self.ticket.head();
        let route = match Route::find(&head.method, head.uri.path()) {
            Ok(route) => route,
            // As FastAPI says it, which LiteLLM is built on.
            Err(status) => {
                let detail = status.canonical_reason();
                return Ok(self.refuse(status, &json!({ "detail": detail })));
            }
        };
        match self.read(&body, route) {
            Ok((ask, script)) => self.perform(route, &ask, script).await,
            Err(message) => {
                let status = StatusCode::BAD_REQUEST;
                Ok(self.refuse(status, &route.protocol().error(status, &message)))
            }
        }
    }

    /// What is asked, and the script that answers it; or what is wrong with either.
    fn read<'b>(&self, body: &'b Bytes, route: Route) -> Result<(Ask<'b>, Script), String> {
        let ask = match route {
            Route::Models => Ask::default(),
            _ => Ask::parse(body).map_err(|error| format!("the body cannot be read: {error}"))?,
        };
        let mut script = ask
            .script(&self.shared.script)
            .map_err(|error| format!("the model's script cannot be read: {error}"))?;
        route.restrict(&mut script);
        Ok((ask, script))
    }

    /// What the script says before the head, and then the head.
    async fn perform(
        self,
        route: Route,
        ask: &Ask<'_>,
        script: Script,
    ) -> Result<Response<Body>, Broken> {
        let answer = Answer::new(ask, script);
        let streamed = match route {
            Route::Turn(protocol) => Some(protocol).filter(|_| ask.streams()),
            _ => None,
        };
        let chunks = streamed.map(|_| answer.chunks);
        let (gate, breaker) = (self.shared.gate.clone(), self.breaker.clone());
        let course = Course::new(&answer.script, chunks, gate, breaker);
        if !answer.script.first_byte.is_zero() {
            tokio::time::sleep(answer.script.first_byte).await;
        }
        let status = match course.begin().await {
            Ok(()) => answer.script.status,
            Err(Trouble::Error) => 500,
            Err(_) => {
                self.ticket.end(Ended::Broken);
                return Err(Broken);
            }
        };
        let status = StatusCode::from_u16(status).expect("a script has 200 or 400 to 599");
        Ok(match streamed {
            _ if status != StatusCode::OK => self.fail(status, route.protocol(), &answer.script),
            Some(protocol) => self.stream(protocol, answer, course),
            None => self.unary(route, ask, &answer, course),
        })
    }

    fn stream(mut self, protocol: Protocol, answer: Answer, course: Course) -> Response<Body> {
        headers::stream(&mut self.headers);
        self.ticket.status(StatusCode::OK);
        let ticket = self.ticket;
        let body = Body::written(None, |pen| {
            let out = Writer::new(pen, &answer.script);
            play::stream(protocol, answer, course, out, ticket)
        });
        response(StatusCode::OK, self.headers, body)
    }

    fn unary(
        mut self,
        route: Route,
        ask: &Ask<'_>,
        answer: &Answer,
        course: Course,
    ) -> Response<Body> {
        let body = match route {
            Route::Turn(protocol) => protocol.unary(answer),
            Route::CountTokens => json!({ "input_tokens": answer.input }),
            Route::Embeddings => embeddings::answer(ask, &answer.script),
            Route::Models => models(&self.ticket.head().headers),
        };
        headers::unary(&mut self.headers, route.is_billed().then(|| answer.cost()));
        self.ticket.status(StatusCode::OK);
        let bytes = Bytes::from(body.to_string());
        let ticket = self.ticket;
        let body = Body::written(Some(bytes.len() as u64), |pen| {
            play::unary(bytes, course, Writer::new(pen, &answer.script), ticket)
        });
        response(StatusCode::OK, self.headers, body)
    }

    /// The error status a script asks for.
    fn fail(mut self, status: StatusCode, protocol: Protocol, script: &Script) -> Response<Body> {
        headers::error(&mut self.headers, script);
        let message = format!("the fake provider answers {status}, as its script says");
        self.refuse(status, &protocol.error(status, &message))
    }

    fn refuse(self, status: StatusCode, body: &Value) -> Response<Body> {
        self.ticket.status(status);
        self.ticket.end(Ended::Completed);
        json_response(status, self.headers, body)
    }
}

impl Route {
    fn find(method: &Method, path: &str) -> Result<Self, StatusCode> {
        let (route, served) = match path {
            "/v1/chat/completions" => (Self::Turn(Protocol::Chat), Method::POST),
            "/v1/completions" => (Self::Turn(Protocol::Completions), Method::POST),
            "/v1/responses" => (Self::Turn(Protocol::Responses), Method::POST),
            "/v1/messages" => (Self::Turn(Protocol::Messages), Method::POST),
            "/v1/messages/count_tokens" => (Self::CountTokens, Method::POST),
            "/v1/embeddings" => (Self::Embeddings, Method::POST),
            "/v1/models" => (Self::Models, Method::GET),
            // A list all the same: what counts is that it was asked.
            _ if path.starts_with("/v1/models/") => (Self::Models, Method::GET),
            _ => return Err(StatusCode::NOT_FOUND),
        };
        if *method == served { Ok(route) } else { Err(StatusCode::METHOD_NOT_ALLOWED) }
    }

    fn protocol(self) -> Protocol {
        match self {
            Self::Turn(protocol) => protocol,
            Self::CountTokens => Protocol::Messages,
            Self::Embeddings | Self::Models => Protocol::Chat,
        }
    }

    fn is_billed(self) -> bool {
        matches!(self, Self::Turn(_) | Self::Embeddings)
    }

    /// Takes out of a script what the route does not have.
    fn restrict(self, script: &mut Script) {
        match self {
            Self::Turn(Protocol::Completions) => script.tool = None,
            Self::Turn(_) => (),
            _ => script.output = Some(0),
        }
    }
}

/// The list of models, in Anthropic's shape for Anthropic's clients.
fn models(request: &HeaderMap) -> Value {
    if request.contains_key("anthropic-version") {
        let model = |id: &&str| {
            json!({
                "type": "model",
                "id": id,
                "display_name": id,
                "created_at": "2026-01-01T00:00:00Z",
            })
        };
        return json!({
            "data": MODELS.iter().map(model).collect::<Vec<_>>(),
            "first_id": MODELS[0],
            "last_id": MODELS[MODELS.len() - 1],
            "has_more": false,
        });
    }
    let model =
        |id: &&str| json!({ "id": id, "object": "model", "created": 1, "owned_by": "fake" });
    json!({ "object": "list", "data": MODELS.iter().map(model).collect::<Vec<_>>() })
}

fn json_response(status: StatusCode, mut headers: HeaderMap, body: &Value) -> Response<Body> {
    headers::json(&mut headers);
    response(status, headers, Body::full(Bytes::from(body.to_string())))
}

fn response(status: StatusCode, headers: HeaderMap, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// What `GET /v1/models` lists; any other name is answered too.
const MODELS: [&str; 2] = ["fake-small", "fake-large"];
/// Twice what the gateway lets through by default.
const BODY_LIMIT: usize = 64 << 20;
