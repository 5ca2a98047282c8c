//! Responses of the gateway itself to routes that need no model.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use super::RunGateway;
use super::limits::OverloadError;
use super::policy::GatewayPolicy;
use crate::gateway::upstream::headers::{ClientField, ClientHead};
use crate::llm::protocol::GatewayRoute;

/// An answer of the gateway itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LocalAnswer<'a> {
    Health,
    RunStatus,
    Models,
    Model(&'a str),
    UnknownModel(UnknownModelError),
}

/// An error for a request for a model that the run does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the run has no model `{0}`; `GET /v1/models` lists the run's models")]
pub struct UnknownModelError(String);

impl UnknownModelError {
    pub const STATUS: StatusCode = StatusCode::NOT_FOUND;
    pub const CODE: &str = "model_not_found";
}

/// Returns the response to a route that needs no model, or `None` if the upstream must answer.
///
/// The gateway answers the model list itself if the run has a list of models; otherwise the upstream
/// answers.
///
/// # Errors
/// Returns an error if the run has no room for another list of models. A health check and a status are small and always
/// answered.
pub fn own(
    gateway: &RunGateway,
    policy: &GatewayPolicy,
    route: GatewayRoute,
    request: &impl ClientHead,
) -> Result<Option<Response<Bytes>>, OverloadError> {
    let Some(answer) = match_local(policy, route, request) else { return Ok(None) };
    let names = &policy.config.body.models;
    // Anthropic's clients send this header with every request. The paths of the model list are the same
    // for both protocols, so only the header tells which shape the client expects.
    let as_anthropic = request.values(ClientField::AnthropicVersion).next().is_some();
    let mut response = Response::new(Bytes::new());
    let hold = |reply: &Value| gateway.capacity.admit_request()?.hold_reply(reply.to_string());
    *response.body_mut() = match answer {
        LocalAnswer::Health => health_json(gateway).into(),
        LocalAnswer::RunStatus => run_status_json(gateway).to_string().into(),
        LocalAnswer::Models => hold(&model_list_json(names, as_anthropic))?,
        LocalAnswer::Model(name) => hold(&model(name, as_anthropic))?,
        LocalAnswer::UnknownModel(error) => {
            *response.status_mut() = UnknownModelError::STATUS;
            hold(&no_model(&error, as_anthropic))?
        }
    };
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(Some(response))
}

/// Returns the kind of answer that the gateway itself gives to a route; `None` if the upstream must answer. The function
/// has no side effect, so `explain` gives the result of a real request.
pub fn match_local<'a>(
    policy: &'a GatewayPolicy,
    route: GatewayRoute,
    request: &impl ClientHead,
) -> Option<LocalAnswer<'a>> {
    let names = &policy.config.body.models;
    match route {
        GatewayRoute::Health => Some(LocalAnswer::Health),
        GatewayRoute::RunStatus => Some(LocalAnswer::RunStatus),
        GatewayRoute::Models if !names.is_empty() => Some(LocalAnswer::Models),
        GatewayRoute::Model if !names.is_empty() => {
            // The path has been checked byte for byte and not decoded, so the rest is the name as the
            // client wrote it.
            let requested = request.path().trim_start_matches(GatewayRoute::Model.path());
            let found = names.iter().find(|name| *name == requested);
            let unknown = || LocalAnswer::UnknownModel(UnknownModelError(requested.to_owned()));
            Some(found.map_or_else(unknown, |name| LocalAnswer::Model(name)))
        }
        _ => None,
    }
}

/// Returns the health response, byte for byte the response of the proxy that this gateway replaced:
/// scripts compare it.
fn health_json(gateway: &RunGateway) -> String {
    let run = Value::from(gateway.run.identity.run.as_str());
    format!(r#"{{"status":"ok","runId":{run}}}"#)
}

/// Returns the facts about a run that the run's agent may know.
fn run_status_json(gateway: &RunGateway) -> Value {
    let identity = &gateway.run.identity;
    json!({"runId": identity.run, "attempt": identity.attempt, "budget": gateway.run.ledger.budget_status()})
}

fn model_list_json(names: &[String], as_anthropic: bool) -> Value {
    let list: Vec<_> = names.iter().map(|name| model(name, as_anthropic)).collect();
    if as_anthropic {
        return json!({"data": list, "has_more": false, "first_id": names.first(), "last_id": names.last()});
    }
    json!({"object": "list", "data": list})
}

fn model(name: &str, as_anthropic: bool) -> Value {
    if as_anthropic {
        return json!({"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"});
    }
    json!({"id": name, "object": "model", "created": 0, "owned_by": "cogni-gateway"})
}

/// Returns the error body for a model that the run does not have.
fn no_model(error: &UnknownModelError, as_anthropic: bool) -> Value {
    let message = error.to_string();
    if as_anthropic {
        return json!({"type": "error", "error": {"type": "not_found_error", "message": message}});
    }
    json!({"error": {"message": message, "type": "invalid_request_error", "param": "model", "code": UnknownModelError::CODE}})
}
