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
    /// `unauthorized`: the request has no token, or an unknown one. `grant_revoked`, `grant_expired`: get another grant.
    #[response(status = 401)]
    Unknown(ErrorBody),
    /// `forbidden`: the grant lacks the access that this operation needs. `forbidden_host`, `forbidden_origin`: in a
    /// service without grants, the request names another host than `localhost`, or comes from a page of another origin.
    #[response(status = 403)]
    Forbidden(ErrorBody),
    /// `internal`: the service has failed. Its log has the reason under the `x-request-id` of the answer.
    #[response(status = 500)]
    Internal(ErrorBody),
    /// `too_many_connections`, `overloaded`: the service is busy. `storage_full`: its disk is full. Repeat the request
    /// after the seconds of `Retry-After`.
    #[response(status = 503)]
    Crowded(ErrorBody),
}

/// The query of the request is not valid.
#[derive(IntoResponses)]
pub(super) enum QueryErrorResponses {
    /// `invalid_parameter`: a parameter has an invalid value or is unknown. The message names it.
    #[response(status = 400)]
    Parameter(ErrorBody),
}

/// The run, or the record of the run, does not exist or is not visible to the caller.
#[derive(IntoResponses)]
pub(super) enum NotFoundResponses {
    /// `not_found`: there is no such run or record, or the grant cannot see it.
    #[response(status = 404)]
    Missing(ErrorBody),
}

/// The records of the run do not exist any more.
#[derive(IntoResponses)]
pub(super) enum RecordsRemovedResponses {
    /// `records_removed`: the service has removed the records of the run, because later runs of the grant have filled the
    /// space of the grant.
    #[response(status = 410)]
    Removed(ErrorBody),
}

/// The run was not started.
#[derive(IntoResponses)]
pub(super) enum CreateRunErrorResponses {
    /// `invalid_json`: the body is not JSON. `invalid_parameter`: a header or parameter is invalid.
    #[response(status = 400)]
    Malformed(ErrorBody),
    /// `unauthorized`: the request has no token, or an unknown one. `grant_revoked`, `grant_expired`: get another grant.
    #[response(status = 401)]
    Unknown(ErrorBody),
    /// `grant_budget_exhausted`: the money of the grant is charged or reserved. Wait for a run of the grant to end, or for
    /// the seconds of `Retry-After`.
    #[response(status = 402)]
    GrantBudget(ErrorBody),
    /// `forbidden`, `sandbox_not_allowed`: the grant may not start runs. `forbidden_agent`, `forbidden_account`,
    /// `forbidden_repo`: the grant does not allow this agent, account or repository.
    #[response(status = 403)]
    Forbidden(ErrorBody),
    /// `request_timeout`: the body did not arrive in time.
    #[response(status = 408)]
    TooSlow(ErrorBody),
    /// `idempotency_conflict`: an earlier request with another body has used this `Idempotency-Key`. `workspaces_full`: too
    /// much work of this grant is on hold or not yet collected.
    #[response(status = 409)]
    Conflict(ErrorBody),
    /// `body_too_large`: the body is larger than 1 MiB.
    #[response(status = 413)]
    TooLarge(ErrorBody),
    /// `unsupported_media_type`: send the body as `application/json`.
    #[response(status = 415)]
    MediaType(ErrorBody),
    /// `invalid_request`: a field of the body is invalid; the message names it. `no_such_agent`: the grant allows no agent
    /// of this name.
    #[response(status = 422)]
    Invalid(ErrorBody),
    /// `queue_full`: the run would have to wait, and the queue has no room. `too_many_watchers`: the grant already watches
    /// as many runs at the same time as it may (only for a chat).
    #[response(status = 429)]
    QueueFull(ErrorBody),
    /// `internal`: the service has failed. Its log has the reason under the `x-request-id` of the answer.
    #[response(status = 500)]
    Internal(ErrorBody),
    /// `draining`: the service is shutting down. `storage_full`: its disk is full. `too_many_connections`, `overloaded`:
    /// the service is busy. Repeat the request after the seconds of `Retry-After`.
    #[response(status = 503)]
    Busy(ErrorBody),
}
