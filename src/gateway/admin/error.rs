//! The errors that an operator receives when a request cannot be done.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::base::json::JsonError;
use crate::base::serde_words::JsonInputError;

/// The reason why an operator's request was not done. Operators are trusted, so the message hides nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum AdminError {
    #[error("run `{0}` is not open; `cogni-gateway admin runs` (`GET /runs`) lists those that are")]
    NoSuchRun(String),
    #[error("run `{0}` is ending and cannot be opened again")]
    RunEnding(String),
    #[error("the body cannot be used: {0}")]
    InvalidBody(JsonInputError),
    #[error("the body cannot be used: {0}")]
    AmbiguousBody(JsonError),
    /// The change was rejected, and nothing has changed.
    #[error("{0:#}")]
    Refused(anyhow::Error),
}

impl AdminError {
    fn status_and_code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::NoSuchRun(_) => (StatusCode::NOT_FOUND, "no_such_run"),
            Self::RunEnding(_) => (StatusCode::CONFLICT, "run_is_ending"),
            Self::InvalidBody(_) | Self::AmbiguousBody(_) => (StatusCode::BAD_REQUEST, "invalid"),
            Self::Refused(_) => (StatusCode::UNPROCESSABLE_ENTITY, "refused"),
        }
    }
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        let (status, code) = self.status_and_code();
        (status, Json(json!({"error": {"code": code, "message": self.to_string()}})))
            .into_response()
    }
}
