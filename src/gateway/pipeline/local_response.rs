//! Responses of the gateway itself to routes that need no model.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use super::RunGateway;
use super::limits::OverloadError;
use super::policy::GatewayPolicy;
use crate::gateway::upstream::headers::{ClientField, ClientHead};
use crate::llm::protocol::GatewayRoute;

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
    if !is_local_route(policy, route) {
        return Ok(None);
    }
    let names = &policy.config.body.models;
    // Anthropic's clients send this header with every request. The paths of the model list are the same
    // for both protocols, so only the header tells which shape the client expects.
    let as_anthropic = request.values(ClientField::AnthropicVersion).next().is_some();
    let mut response = Response::new(Bytes::new());
    *response.body_mut() = match route {
        GatewayRoute::Health => health_json(gateway).into(),
        GatewayRoute::RunStatus => run_status_json(gateway).to_string().into(),
        GatewayRoute::Model => {
            // The path has been checked byte for byte and not decoded, so the rest is the name as the
            // client wrote it.
            let requested = request.path().trim_start_matches(GatewayRoute::Model.path());
            let found = names.iter().find(|name| *name == requested);
            if found.is_none() {
                *response.status_mut() = StatusCode::NOT_FOUND;
            }
            let reply = found.map_or_else(
                || no_model(requested, as_anthropic),
                |name| model(name, as_anthropic),
            );
            gateway.capacity.admit_request()?.hold_reply(reply.to_string())?
        }
        _ => {
            let permit = gateway.capacity.admit_request()?;
            permit.hold_reply(model_list_json(names, as_anthropic).to_string())?
        }
    };
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(Some(response))
}

/// Returns true if the gateway itself answers a route.
pub fn is_local_route(policy: &GatewayPolicy, route: GatewayRoute) -> bool {
    match route {
        GatewayRoute::Health | GatewayRoute::RunStatus => true,
        GatewayRoute::Models | GatewayRoute::Model => !policy.config.body.models.is_empty(),
        _ => false,
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
fn no_model(name: &str, as_anthropic: bool) -> Value {
    let message = format!("the run has no model `{name}`; `GET /v1/models` lists the run's models");
    if as_anthropic {
        return json!({"type": "error", "error": {"type": "not_found_error", "message": message}});
    }
    json!({"error": {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}})
}
