//! The checks of a strict provider: it refuses a request that OpenAI or Anthropic would refuse, with their status, kind
//! of error and kind of message.
//!
//! The fake provider takes anything otherwise, so that a test would not notice what a gateway drops or leaves. The
//! formats of the bodies are tables, one for each provider; rules that span several fields are functions.

mod anthropic;
mod anthropic_betas;
mod body_format;
mod openai;
mod openai_conversation;
mod refusal;

use http::HeaderMap;
use serde_json::Value;

use super::protocol::ProviderProtocol;
use super::route::ProviderRoute;

pub(super) use refusal::ProviderRefusal;

/// Returns the refusal of the provider that serves the route.
pub(super) fn check_request(
    route: ProviderRoute,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<(), ProviderRefusal> {
    let (is_anthropic, object) = match route {
        ProviderRoute::Turn(ProviderProtocol::Chat) => (false, Some("chat")),
        ProviderRoute::Turn(ProviderProtocol::Completions) => (false, Some("completions")),
        ProviderRoute::Turn(ProviderProtocol::Responses) => (false, Some("responses")),
        ProviderRoute::Embeddings => (false, Some("embeddings")),
        ProviderRoute::Turn(ProviderProtocol::Messages) => (true, Some("messages")),
        ProviderRoute::CountTokens => (true, Some("count_tokens")),
        // Anthropic's clients send this header on every request.
        ProviderRoute::Models | ProviderRoute::Model => {
            (headers.contains_key(ANTHROPIC_VERSION), None)
        }
    };
    if is_anthropic {
        anthropic::check_headers(headers)?;
    } else {
        openai::check_headers(headers)?;
    }
    let Some(object) = object else { return Ok(()) };
    match (serde_json::from_slice(body), is_anthropic) {
        (Ok(Value::Object(body)), true) => anthropic::check_body(object, &body, headers),
        (Ok(Value::Object(body)), false) => openai::check_body(object, &body),
        (_, true) => Err(anthropic::unreadable_body()),
        (_, false) => Err(openai::unreadable_body()),
    }
}

const ANTHROPIC_VERSION: &str = "anthropic-version";
