//! Rejections: the reasons why a request got no response from a model, in the form of the client's
//! protocol.
//!
//! This module alone decides the text that the client reads, the code in the records, and the HTTP
//! status. Measured clients obey the status before anything else: they stop at 402 and 404, and repeat
//! 429 and 5xx many times.

use std::time::Duration;

use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;

use super::audience::{Audience, ClientFamily};
use super::auth_error::AuthError;
use super::limits::OverloadError;
use super::read_body;
use super::rule;
use crate::gateway::run::control;
use crate::gateway::upstream;
use crate::llm::budget;
use crate::llm::protocol::LlmProtocol;
use crate::llm::request;
use crate::telemetry::audit::{self, records::CallOutcome};

/// A reason why a call did not begin or brought no response.
#[derive(Debug, thiserror::Error)]
pub enum CallRejection {
    #[error(transparent)]
    Unauthenticated(#[from] AuthError),
    #[error("the path is not served")]
    NotServed,
    #[error("the request has two `Host` headers; send one")]
    RepeatedHost,
    #[error("the content type is not application/json")]
    NotJson,
    #[error(transparent)]
    UnreadableBody(#[from] read_body::BodyReadError),
    #[error(transparent)]
    BodyPolicy(#[from] request::BodyPolicyError),
    #[error(transparent)]
    Overload(#[from] OverloadError),
    #[error(transparent)]
    NotAccepting(#[from] control::NotAcceptingError),
    #[error("an operator has aborted this call")]
    Aborted,
    #[error(transparent)]
    Rule(#[from] rule::RuleError),
    #[error(transparent)]
    UnknownPrice(#[from] budget::price::UnknownPriceError),
    #[error(transparent)]
    Budget(#[from] budget::BudgetError),
    #[error("the audit log cannot be written")]
    Audit(#[from] audit::AuditError),
    #[error(
        "the upstream does not accept the gateway's credential; the operator has to correct that credential"
    )]
    UpstreamAuth,
    #[error(transparent)]
    Upstream(#[from] upstream::UpstreamError),
}

impl CallRejection {
    /// Returns the stable code that the body, the records and the metrics carry.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unauthenticated(refusal) => refusal.code(),
            Self::NotServed => "not_found",
            Self::RepeatedHost => "repeated_host",
            Self::NotJson => "unsupported_media_type",
            Self::UnreadableBody(error) => error.code(),
            Self::Overload(overload) => overload.code(),
            Self::BodyPolicy(refusal) => refusal.code(),
            Self::NotAccepting(control::NotAcceptingError::Paused) => "run_paused",
            Self::NotAccepting(control::NotAcceptingError::Ended) => "run_ended",
            Self::Aborted => ABORTED_BY_OPERATOR,
            Self::Rule(refusal) => refusal.code(),
            Self::UnknownPrice(_) => "price_unknown",
            Self::Budget(refusal) => budget_error_code(refusal),
            Self::Audit(_) => "audit_unavailable",
            Self::UpstreamAuth => UPSTREAM_AUTH_CODE,
            Self::Upstream(error) => error.code(),
        }
    }

    /// Returns the status at which the client reacts correctly: stops, or retries later.
    pub fn status(&self, audience: impl Into<Audience>) -> StatusCode {
        let Audience { protocol, family } = audience.into();
        let status = self.protocol_status(protocol);
        match family {
            // The SDK repeats a 429, even the 429 of type `usage_limit_reached`, the only 429 at which
            // Codex stops.
            ClientFamily::AiSdk => self.protocol_status(match protocol {
                LlmProtocol::Responses => LlmProtocol::Chat,
                same => same,
            }),
            // LiteLLM stops at 400, 401 and 404 only.
            ClientFamily::Litellm if status.is_client_error() && self.tells_to_stop() => {
                match status {
                    StatusCode::UNAUTHORIZED | StatusCode::NOT_FOUND => status,
                    _ => StatusCode::BAD_REQUEST,
                }
            }
            ClientFamily::Standard | ClientFamily::Litellm => status,
        }
    }

    /// Returns the status that the usual clients of `protocol` obey.
    fn protocol_status(&self, protocol: LlmProtocol) -> StatusCode {
        // Codex stops at a 400 and at a 429 of type `usage_limit_reached`, and repeats every other
        // status five times.
        match (self.default_status(), protocol) {
            (StatusCode::PAYMENT_REQUIRED, LlmProtocol::Responses) => StatusCode::TOO_MANY_REQUESTS,
            (
                StatusCode::FORBIDDEN
                | StatusCode::PAYLOAD_TOO_LARGE
                | StatusCode::UNSUPPORTED_MEDIA_TYPE,
                LlmProtocol::Responses,
            ) => StatusCode::BAD_REQUEST,
            (status, _) => status,
        }
    }

    /// Returns the status that stops every client except Codex, or lets the client retry.
    fn default_status(&self) -> StatusCode {
        match self {
            Self::Unauthenticated(AuthError::RunClosing | AuthError::TooManyConnections)
            | Self::Audit(_) => StatusCode::SERVICE_UNAVAILABLE,
            // At a 503 Codex sends the call thirty times.
            Self::NotAccepting(control::NotAcceptingError::Paused) => StatusCode::TOO_MANY_REQUESTS,
            Self::Unauthenticated(_) => StatusCode::UNAUTHORIZED,
            Self::NotServed => StatusCode::NOT_FOUND,
            Self::RepeatedHost => StatusCode::BAD_REQUEST,
            Self::NotJson => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::UnreadableBody(error) => error.status(),
            Self::Overload(overload) => overload.status(),
            Self::BodyPolicy(refusal) => refusal.status(),
            Self::NotAccepting(control::NotAcceptingError::Ended)
            | Self::Aborted
            | Self::Rule(_)
            | Self::UnknownPrice(_) => StatusCode::FORBIDDEN,
            // A budget that is reserved or rate-limited becomes free again; an exhausted budget does
            // not.
            Self::Budget(_) if self.retry_after().is_some() => StatusCode::TOO_MANY_REQUESTS,
            Self::Budget(_) => StatusCode::PAYMENT_REQUIRED,
            Self::Upstream(
                upstream::UpstreamError::ConnectTimeout(_)
                | upstream::UpstreamError::FirstByteTimeout(_)
                | upstream::UpstreamError::IdleTimeout(_)
                | upstream::UpstreamError::Deadline,
            ) => StatusCode::GATEWAY_TIMEOUT,
            Self::Upstream(_) | Self::UpstreamAuth => StatusCode::BAD_GATEWAY,
        }
    }

    /// Returns the time to wait, if waiting helps.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Budget(budget::BudgetError::Rate { retry_after, .. }) => Some(*retry_after),
            Self::Unauthenticated(AuthError::RunClosing | AuthError::TooManyConnections)
            | Self::Overload(_)
            | Self::UnreadableBody(read_body::BodyReadError::Overload(_))
            | Self::Budget(
                budget::BudgetError::Concurrency { .. } | budget::BudgetError::Reserved { .. },
            ) => Some(Duration::from_secs(1)),
            Self::NotAccepting(control::NotAcceptingError::Paused) => Some(PAUSED_RETRY_AFTER),
            _ => None,
        }
    }

    /// Returns the response in the shape of the client's protocol.
    pub fn to_response(&self, audience: impl Into<Audience>) -> Response<String> {
        let audience = audience.into();
        let protocol = audience.protocol;
        let body = match (self, protocol) {
            // A path that is not served belongs to no protocol, so this error has one shape.
            (Self::NotServed, _) => json!({"error": "not_found"}),
            (_, LlmProtocol::Messages) => json!({
                "type": "error",
                "error": {"type": self.error_type(protocol), "message": self.public_message(), "code": self.code()},
            }),
            _ => json!({
                "error": {"message": self.public_message(), "type": self.error_type(protocol), "param": self.field_at_fault(), "code": self.code()},
            }),
        };
        let mut response = Response::new(body.to_string());
        *response.status_mut() = self.status(audience);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if self.status(audience) == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        match self.retry_after() {
            Some(wait) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(ceil_seconds(wait)));
            }
            // The SDKs of OpenAI and Anthropic obey this header before the status.
            None if self.tells_to_stop() => {
                headers.insert("x-should-retry", HeaderValue::from_static("false"));
            }
            None => {}
        }
        response
    }

    /// Returns the text that the client may read: the client's own mistake in full, failures of the
    /// gateway and the upstream in general terms.
    fn public_message(&self) -> String {
        self.to_string()
    }

    /// Returns the request's field at fault, if one field is at fault.
    fn field_at_fault(&self) -> Option<&str> {
        match self {
            Self::BodyPolicy(refusal) => Some(refusal.field_at_fault()),
            Self::UnknownPrice(_) => Some("model"),
            _ => None,
        }
    }

    /// Returns true if the gateway would reject the same request again.
    fn is_permanent(&self) -> bool {
        // Failures of the upstream and of the audit log may pass, except these two.
        let is_final = matches!(
            self,
            Self::Upstream(upstream::UpstreamError::Deadline)
                | Self::Audit(audit::AuditError::Full { .. })
        );
        is_final || !matches!(self, Self::Upstream(_) | Self::Audit(_))
    }

    /// Returns true if the response tells the client not to repeat the request.
    fn tells_to_stop(&self) -> bool {
        self.retry_after().is_none() && self.is_permanent()
    }

    fn error_type(&self, protocol: LlmProtocol) -> &'static str {
        match (self.protocol_status(protocol), protocol) {
            (StatusCode::PAYMENT_REQUIRED, LlmProtocol::Messages) => "billing_error",
            (StatusCode::PAYMENT_REQUIRED, _) => "insufficient_quota",
            (StatusCode::TOO_MANY_REQUESTS, LlmProtocol::Responses) if self.tells_to_stop() => {
                "usage_limit_reached"
            }
            (StatusCode::TOO_MANY_REQUESTS, _) => "rate_limit_error",
            (StatusCode::UNAUTHORIZED, _) => "authentication_error",
            (StatusCode::FORBIDDEN, _) => "permission_error",
            (StatusCode::PAYLOAD_TOO_LARGE, LlmProtocol::Messages) => "request_too_large",
            (status, _) if status.is_client_error() => "invalid_request_error",
            (_, LlmProtocol::Messages) => "api_error",
            _ => "server_error",
        }
    }
}

/// Rounds up to whole seconds, because a client that retries too early is rejected again.
fn ceil_seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
}

/// The code of a call that an operator aborted.
pub const ABORTED_BY_OPERATOR: &str = "cut_by_operator";

/// The code of a call that the upstream rejected because of the gateway's credential.
pub const UPSTREAM_AUTH_CODE: &str = "upstream_auth";

/// The time after which a client checks whether a pause is over. Our choice: a person pauses a run and
/// resumes it.
const PAUSED_RETRY_AFTER: Duration = Duration::from_secs(10);

/// Returns the outcome that the records give for an upstream failure.
pub fn audit_outcome(error: &upstream::UpstreamError) -> CallOutcome {
    match error {
        upstream::UpstreamError::ConnectTimeout(_)
        | upstream::UpstreamError::FirstByteTimeout(_)
        | upstream::UpstreamError::IdleTimeout(_) => CallOutcome::UpstreamTimeout,
        upstream::UpstreamError::Deadline => CallOutcome::DeadlineExceeded,
        _ => CallOutcome::UpstreamFailed,
    }
}

fn budget_error_code(refusal: &budget::BudgetError) -> &'static str {
    match refusal {
        budget::BudgetError::Turns { .. } => "turn_budget_exhausted",
        budget::BudgetError::Tokens { .. } => "token_budget_exhausted",
        budget::BudgetError::Cost { .. } => "cost_budget_exhausted",
        budget::BudgetError::Deadline { .. } => "deadline_exceeded",
        budget::BudgetError::Concurrency { .. } => "too_many_concurrent_requests",
        budget::BudgetError::Reserved { .. } => "budget_reserved",
        budget::BudgetError::Rate { .. } => "rate_limited",
    }
}
