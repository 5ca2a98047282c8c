//! How calls are refused, as the description tells it: what several calls have in common is said once, here.
//!
//! Nothing is ever made of these types; [`Error`](super::error::ApiError) is what answers.

#![expect(dead_code, reason = "the description shows what the answers are made of")]

use utoipa::IntoResponses;

use super::error::ErrorBody;

/// Whoever asks is not known, or may not.
#[derive(IntoResponses)]
pub(super) enum AuthErrorResponses {
    /// `unauthorized`, `grant_revoked`, `grant_expired`
    #[response(status = 401)]
    Unknown(ErrorBody),
    /// `forbidden`, without grants `forbidden_host` and `forbidden_origin`
    #[response(status = 403)]
    Forbidden(ErrorBody),
    /// `internal`: the log of the service has the reason
    #[response(status = 500)]
    Internal(ErrorBody),
    /// `too_many_connections`
    #[response(status = 503)]
    Crowded(ErrorBody),
}

/// What stands behind the path's `?` is not understood.
#[derive(IntoResponses)]
pub(super) enum QueryErrorResponses {
    /// `invalid_parameter`
    #[response(status = 400)]
    Parameter(ErrorBody),
}

/// There is nothing of this name that the caller can see.
#[derive(IntoResponses)]
pub(super) enum NotFoundResponses {
    /// `not_found`
    #[response(status = 404)]
    Missing(ErrorBody),
}

/// No run is begun.
#[derive(IntoResponses)]
pub(super) enum CreateRunErrorResponses {
    /// `invalid_json`, `invalid_parameter`
    #[response(status = 400)]
    Malformed(ErrorBody),
    /// `unauthorized`, `grant_revoked`, `grant_expired`
    #[response(status = 401)]
    Unknown(ErrorBody),
    /// `grant_budget_exhausted`: all of the grant's money is charged or reserved
    #[response(status = 402)]
    GrantBudget(ErrorBody),
    /// `forbidden`, `forbidden_agent`, `forbidden_account`, `forbidden_repo`, `sandbox_not_allowed`
    #[response(status = 403)]
    Forbidden(ErrorBody),
    /// `request_timeout`: of its body
    #[response(status = 408)]
    TooSlow(ErrorBody),
    /// `idempotency_conflict`; `workspaces_full`: too much of this grant's work is held, or was left
    #[response(status = 409)]
    Conflict(ErrorBody),
    /// `body_too_large`
    #[response(status = 413)]
    TooLarge(ErrorBody),
    /// `unsupported_media_type`
    #[response(status = 415)]
    MediaType(ErrorBody),
    /// `invalid_request`, `no_such_agent`
    #[response(status = 422)]
    Invalid(ErrorBody),
    /// `too_many_runs`, of a chat also `too_many_watchers`: of this grant
    #[response(status = 429)]
    GrantFull(ErrorBody),
    /// `internal`: the log of the service has the reason
    #[response(status = 500)]
    Internal(ErrorBody),
    /// `draining`, `overloaded`, `storage_full`, `too_many_connections`
    #[response(status = 503)]
    Busy(ErrorBody),
}
