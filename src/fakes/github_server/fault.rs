//! Injected failures.

use http::StatusCode;

use super::reply::FakeResponse;
use super::route::GithubOperation;

/// A failure for the next requests of one operation.
#[derive(Clone, Debug)]
pub struct FaultRule {
    pub operation: GithubOperation,
    pub failure: InjectedFailure,
    /// The number of requests that fail.
    pub times: u32,
}

/// The way in which a request fails.
#[derive(Clone, Debug)]
pub enum InjectedFailure {
    /// The work is done; then the connection ends without an answer.
    LoseReply,
    /// No work is done, and the client receives this answer.
    Refuse(FakeResponse),
    /// The request waits at the gate before any work is done.
    HoldBefore,
    /// The work is done; then the answer waits at the gate.
    HoldAfter,
}

impl InjectedFailure {
    /// Returns GitHub's secondary rate limit: too many requests at once, with the time to wait in seconds.
    pub fn secondary_limit(retry_after: u64) -> Self {
        let text = "You have exceeded a secondary rate limit. Please wait a few minutes before you try again.";
        Self::Refuse(
            FakeResponse::error(StatusCode::FORBIDDEN, text)
                .with_header("retry-after", retry_after.to_string()),
        )
    }

    /// Returns GitHub's primary rate limit: no requests remain until a Unix time in seconds.
    pub fn primary_limit(reset: u64) -> Self {
        let text = "API rate limit exceeded for installation ID 1.";
        Self::Refuse(
            FakeResponse::error(StatusCode::FORBIDDEN, text)
                .with_header("x-ratelimit-remaining", "0".to_owned())
                .with_header("x-ratelimit-reset", reset.to_string()),
        )
    }

    /// Returns an error status of a failing API.
    pub fn error_status(status: StatusCode) -> Self {
        Self::Refuse(FakeResponse::error(status, status.canonical_reason().unwrap_or("Error")))
    }

    /// Returns the answer for an app without the permission for an operation.
    pub fn not_permitted() -> Self {
        Self::Refuse(FakeResponse::error(
            StatusCode::FORBIDDEN,
            "Resource not accessible by integration",
        ))
    }

    /// Returns an error of the GraphQL API, whose status is a success.
    pub fn graphql_error(kind: &str, message: &str) -> Self {
        Self::Refuse(FakeResponse::graphql_error(kind, message))
    }

    /// Returns the answer of an API that does not know a branch yet, although git has accepted the push.
    pub fn unknown_head() -> Self {
        Self::Refuse(FakeResponse::invalid("PullRequest", "head"))
    }
}
