//! What an operator is told when something cannot be done.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::base::json::Invalid;
use crate::base::serde_words::JsonError;

/// Why a request of an operator was not done. Operators are trusted with every word of it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("run `{0}` is not open; `cogni-gateway admin runs` (`GET /runs`) lists those that are")]
    NoSuchRun(String),
    #[error("run `{0}` is ending, which cannot be taken back")]
    Ending(String),
    #[error("the body cannot be used: {0}")]
    Invalid(JsonError),
    #[error("the body cannot be used: {0}")]
    Ambiguous(Invalid),
    /// Nothing has changed.
    #[error("{0:#}")]
    Refused(anyhow::Error),
}

impl Error {
    fn code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::NoSuchRun(_) => (StatusCode::NOT_FOUND, "no_such_run"),
            Self::Ending(_) => (StatusCode::CONFLICT, "run_is_ending"),
            Self::Invalid(_) | Self::Ambiguous(_) => (StatusCode::BAD_REQUEST, "invalid"),
            Self::Refused(_) => (StatusCode::UNPROCESSABLE_ENTITY, "refused"),
        }
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let (status, code) = self.code();
        (status, Json(json!({"error": {"code": code, "message": self.to_string()}})))
            .into_response()
    }
}
