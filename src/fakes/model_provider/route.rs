//! The routes of the fake provider.

use http::{Method, StatusCode};

use super::protocol::ProviderProtocol;
use super::script::ProviderScript;

/// The routes that are scripted and recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProviderRoute {
    Turn(ProviderProtocol),
    CountTokens,
    Embeddings,
    Models,
    Model,
}

impl ProviderRoute {
    pub(super) fn match_route(method: &Method, path: &str) -> Result<Self, StatusCode> {
        let (route, served) = match path {
            "/v1/chat/completions" => (Self::Turn(ProviderProtocol::Chat), Method::POST),
            "/v1/completions" => (Self::Turn(ProviderProtocol::Completions), Method::POST),
            "/v1/responses" => (Self::Turn(ProviderProtocol::Responses), Method::POST),
            "/v1/messages" => (Self::Turn(ProviderProtocol::Messages), Method::POST),
            "/v1/messages/count_tokens" => (Self::CountTokens, Method::POST),
            "/v1/embeddings" => (Self::Embeddings, Method::POST),
            "/v1/models" => (Self::Models, Method::GET),
            _ if path.starts_with(MODEL_PATH) => (Self::Model, Method::GET),
            _ => return Err(StatusCode::NOT_FOUND),
        };
        if *method == served { Ok(route) } else { Err(StatusCode::METHOD_NOT_ALLOWED) }
    }

    pub(super) fn protocol(self) -> ProviderProtocol {
        match self {
            Self::Turn(protocol) => protocol,
            Self::CountTokens => ProviderProtocol::Messages,
            Self::Embeddings | Self::Models | Self::Model => ProviderProtocol::Chat,
        }
    }

    pub(super) fn is_billed(self) -> bool {
        matches!(self, Self::Turn(_) | Self::Embeddings)
    }

    /// Removes options that the route does not have.
    pub(super) fn drop_unsupported(self, script: &mut ProviderScript) {
        match self {
            Self::Turn(ProviderProtocol::Completions) => script.tool = None,
            Self::Turn(_) => (),
            _ => script.output = Some(0),
        }
    }
}

/// The beginning of the path of one model. The model's name follows, and may contain slashes.
pub(super) const MODEL_PATH: &str = "/v1/models/";
