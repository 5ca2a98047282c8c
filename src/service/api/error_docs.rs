//! Descriptions of error answers for the `OpenAPI` document. Answers that several handlers share are described here
//! once.
//!
//! The service never creates values of these types; it answers with [`ApiError`](super::error::ApiError).

#![expect(dead_code, reason = "the description shows what the answers are made of")]

use utoipa::IntoResponses;

use super::error::ErrorBody;

/// The caller is unknown or is not allowed to do this.
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

/// The query of the request is not valid.
#[derive(IntoResponses)]
pub(super) enum QueryErrorResponses {
    /// `invalid_parameter`
    #[response(status = 400)]
    Parameter(ErrorBody),
}

/// The run, or the record of the run, does not exist or is not visible to the caller.
#[derive(IntoResponses)]
pub(super) enum NotFoundResponses {
    /// `not_found`
    #[response(status = 404)]
    Missing(ErrorBody),
}

/// The records of the run do not exist any more.
#[derive(IntoResponses)]
pub(super) enum RecordsRemovedResponses {
    /// `records_removed`: later runs of the grant have filled what its runs may keep
    #[response(status = 410)]
    Removed(ErrorBody),
}

/// The run was not started.
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
    /// `request_timeout`: the body did not arrive in time
    #[response(status = 408)]
    TooSlow(ErrorBody),
    /// `idempotency_conflict`; `workspaces_full`: too much work of this grant is held or not yet collected
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
    /// `queue_full`: the run would have to wait, and the queue has no room; for a chat also `too_many_watchers`
    #[response(status = 429)]
    QueueFull(ErrorBody),
    /// `internal`: the log of the service has the reason
    #[response(status = 500)]
    Internal(ErrorBody),
    /// `draining`, `storage_full`, `too_many_connections`
    #[response(status = 503)]
    Busy(ErrorBody),
}
