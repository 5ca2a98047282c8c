//! The error answers of the API. Each is JSON with a code that never changes and a message for people.

use std::fmt;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::base::hidden_characters::escape_hidden;
use crate::base::{db, disk};
use crate::service::auth::{self, AccessDeniedError};
use crate::service::runs::RunStartError;

/// The reason why a request was refused or has failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    #[error(transparent)]
    AccessDenied(#[from] AccessDeniedError),
    #[error("no such path; `GET /api/v1/openapi.json` lists all paths")]
    NoSuchPath,
    #[error("this path does not take this method; the header `Allow` lists its methods")]
    MethodNotAllowed,
    #[error("there is no {0}")]
    NotFound(String),
    /// The records of the run were removed, because its grant kept too much.
    #[error(
        "the output, the result and the events of run `{0}` were removed, because later runs of its grant have filled \
         `serve.max_kept_bytes`; its row and its audit log are still there"
    )]
    RecordsRemoved(String),
    #[error("the body is not JSON: {0}")]
    InvalidJson(String),
    #[error("the body is larger than {0} bytes")]
    TooLarge(usize),
    #[error("the body's content type is not supported; send `Content-Type: {0}`")]
    UnsupportedMediaType(&'static str),
    #[error(
        "the request's host is refused: a service without grants serves only requests to `localhost` or a loopback address"
    )]
    ForeignHost,
    #[error(
        "the request's origin is refused: a service without grants serves no pages of other origins"
    )]
    ForeignOrigin,
    /// A signed request whose signature does not count.
    #[error("{0}")]
    InvalidSignature(String),
    #[error("{0}")]
    InvalidParameter(String),
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    NoSuchAgent(String),
    /// The request is well-formed, but contradicts the present state.
    #[error("{message}")]
    Conflict { code: &'static str, message: String },
    /// An error that may pass: the same request may succeed later.
    #[error("{message}")]
    Busy { code: &'static str, message: String },
    #[error("the body did not arrive in time; send it again")]
    BodyTimeout,
    #[error("too many connections are open; try again later")]
    TooManyConnections,
    #[error(
        "too many event streams: this grant may follow {0} runs at the same time; wait until one has ended"
    )]
    TooManyWatchers(usize),
    #[error(
        "too many downloads: this grant may read {0} files at the same time; wait until one has ended"
    )]
    TooManyDownloads(usize),
    /// The run would have to wait for a place, and the queue has no room.
    #[error("{0}")]
    QueueFull(String),
    /// The money of the grant is used up. `opens_after` is the time until the cap of a day opens again.
    #[error("{message}")]
    GrantBudget { message: String, opens_after: Option<Duration> },
    #[error("the disk of this service is full; try again later")]
    StorageFull,
    /// A fault of the service. The log has the reason; the caller can do nothing about it.
    #[error("the service has failed; its log has the cause under this request's id")]
    Internal,
}

/// The body of every error answer.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ErrorBody {
    /// The reason.
    error: ErrorDetail,
}

/// The reason why a request was refused or has failed.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ErrorDetail {
    /// The code for programs. Codes stay the same in later versions.
    #[schema(example = "forbidden_agent")]
    code: &'static str,
    /// The message for people: what failed, and what to do. Messages may change in later versions.
    message: String,
}

impl ApiError {
    pub(super) fn no_such_run(id: &str) -> Self {
        Self::NotFound(format!("run `{}` that this grant can see", truncate_text(id)))
    }

    pub(super) fn invalid_parameter(message: impl fmt::Display) -> Self {
        Self::InvalidParameter(message.to_string())
    }

    pub(super) fn invalid_body(message: impl fmt::Display) -> Self {
        Self::Invalid(message.to_string())
    }

    /// Returns the error for work that the service already does as often at the same time as it can.
    pub(super) fn too_busy(what: &str) -> Self {
        Self::Busy { code: "overloaded", message: format!("{what}; try again later") }
    }

    /// Returns the error for a fault of the service, and logs its cause. A full disk has an error of its own.
    pub(super) fn internal_error(error: impl Into<anyhow::Error>) -> Self {
        let error = error.into();
        tracing::error!("a request failed: {error:#}");
        if disk::is_disk_full(error.as_ref()) { Self::StorageFull } else { Self::Internal }
    }

    fn status_and_code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::AccessDenied(denied) => (denied_status(denied), denied.code()),
            Self::NoSuchPath => (StatusCode::NOT_FOUND, "no_such_path"),
            Self::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            Self::NotFound(_) => (StatusCode::NOT_FOUND, "not_found"),
            Self::RecordsRemoved(_) => (StatusCode::GONE, "records_removed"),
            Self::InvalidJson(_) => (StatusCode::BAD_REQUEST, "invalid_json"),
            Self::TooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large"),
            Self::UnsupportedMediaType(_) => {
                (StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type")
            }
            Self::ForeignHost => (StatusCode::FORBIDDEN, "forbidden_host"),
            Self::ForeignOrigin => (StatusCode::FORBIDDEN, "forbidden_origin"),
            Self::InvalidSignature(_) => (StatusCode::UNAUTHORIZED, "invalid_signature"),
            Self::InvalidParameter(_) => (StatusCode::BAD_REQUEST, "invalid_parameter"),
            Self::Invalid(_) => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_request"),
            Self::NoSuchAgent(_) => (StatusCode::UNPROCESSABLE_ENTITY, "no_such_agent"),
            Self::Conflict { code, .. } => (StatusCode::CONFLICT, code),
            Self::Busy { code, .. } => (StatusCode::SERVICE_UNAVAILABLE, code),
            Self::BodyTimeout => (StatusCode::REQUEST_TIMEOUT, "request_timeout"),
            Self::TooManyConnections => (StatusCode::SERVICE_UNAVAILABLE, "too_many_connections"),
            Self::TooManyWatchers(_) => (StatusCode::TOO_MANY_REQUESTS, "too_many_watchers"),
            Self::TooManyDownloads(_) => (StatusCode::TOO_MANY_REQUESTS, "too_many_downloads"),
            Self::QueueFull(_) => (StatusCode::TOO_MANY_REQUESTS, "queue_full"),
            Self::GrantBudget { .. } => (StatusCode::PAYMENT_REQUIRED, "grant_budget_exhausted"),
            Self::StorageFull => (StatusCode::SERVICE_UNAVAILABLE, "storage_full"),
            Self::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, code) = self.status_and_code();
        // A message may repeat a caller's text, and a reader of the message must see all of it.
        let message = escape_hidden(&self.to_string()).into_owned();
        let body = ErrorBody { error: ErrorDetail { code, message } };
        let mut response = (status, Json(body)).into_response();
        let headers = response.headers_mut();
        if status == StatusCode::UNAUTHORIZED && !matches!(self, Self::InvalidSignature(_)) {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            // A full disk and a full queue stay full for longer than a second, so the client should wait longer.
            let after = if matches!(code, "storage_full" | "queue_full") { "10" } else { "1" };
            headers.insert(RETRY_AFTER, HeaderValue::from_static(after));
        }
        if let Self::GrantBudget { opens_after: Some(after), .. } = self {
            // `as_secs` rounds down; one second more makes sure that the cap has opened when the client retries.
            headers.insert(RETRY_AFTER, HeaderValue::from(after.as_secs() + 1));
        }
        response
    }
}

impl From<db::DatabaseError> for ApiError {
    fn from(error: db::DatabaseError) -> Self {
        Self::internal_error(error)
    }
}

impl From<auth::GrantStoreError> for ApiError {
    fn from(error: auth::GrantStoreError) -> Self {
        match error {
            auth::GrantStoreError::Denied(denied) => Self::AccessDenied(denied),
            error => Self::internal_error(error),
        }
    }
}

impl From<RunStartError> for ApiError {
    fn from(refused: RunStartError) -> Self {
        let message = refused.to_string();
        match refused {
            RunStartError::Draining => Self::Busy { code: "draining", message },
            RunStartError::QueueFull(_) => Self::QueueFull(message),
            RunStartError::NoAgent(_) => Self::NoSuchAgent(message),
            RunStartError::Invalid(_) => Self::Invalid(message),
            RunStartError::Conflict(_) => Self::Conflict { code: "idempotency_conflict", message },
            RunStartError::WorkspacesFull(_) => Self::Conflict { code: "workspaces_full", message },
            RunStartError::Outbox(error) => Self::internal_error(std::io::Error::other(error)),
            RunStartError::GrantBudget(exhausted) => {
                let after = |opens: SystemTime| opens.duration_since(SystemTime::now()).ok();
                Self::GrantBudget { message, opens_after: exhausted.opens.and_then(after) }
            }
            RunStartError::Store(error) => Self::internal_error(error),
            RunStartError::Storage(error) => Self::internal_error(error),
        }
    }
}

fn denied_status(denied: &AccessDeniedError) -> StatusCode {
    match denied {
        AccessDeniedError::NoToken
        | AccessDeniedError::UnknownToken
        | AccessDeniedError::Revoked
        | AccessDeniedError::Expired => StatusCode::UNAUTHORIZED,
        _ => StatusCode::FORBIDDEN,
    }
}

/// Returns the beginning of a caller's text for an error message. No valid id is longer than 80 characters.
fn truncate_text(text: &str) -> String {
    text.chars().take(80).collect()
}
