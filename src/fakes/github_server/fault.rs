//! What goes wrong because it was asked for.

use http::StatusCode;

use super::reply::FakeResponse;
use super::route::GithubOperation;

/// Trouble for the next requests of one kind.
#[derive(Clone, Debug)]
pub struct FaultRule {
    pub operation: GithubOperation,
    pub trouble: InjectedFailure,
    /// How many requests meet it.
    pub times: u32,
}

/// How a request fails.
#[derive(Clone, Debug)]
pub enum InjectedFailure {
    /// The work is done; then the connection ends without an answer.
    LoseReply,
    /// Nothing is done, and this is the answer.
    Refuse(FakeResponse),
    /// The request waits at the gate before anything is done.
    HoldBefore,
    /// The work is done; then the answer waits at the gate.
    HoldAfter,
}

impl InjectedFailure {
    /// GitHub's secondary rate limit: too much at once, and when to come again.
    pub fn secondary_limit(retry_after: u64) -> Self {
        let text = "You have exceeded a secondary rate limit. Please wait a few minutes before you try again.";
        Self::Refuse(
            FakeResponse::error(StatusCode::FORBIDDEN, text)
                .with_header("retry-after", retry_after.to_string()),
        )
    }

    /// GitHub's primary rate limit: nothing is left until a second of the epoch.
    pub fn primary_limit(reset: u64) -> Self {
        let text = "API rate limit exceeded for installation ID 1.";
        Self::Refuse(
            FakeResponse::error(StatusCode::FORBIDDEN, text)
                .with_header("x-ratelimit-remaining", "0".to_owned())
                .with_header("x-ratelimit-reset", reset.to_string()),
        )
    }

    /// What an API that is ill answers.
    pub fn error_status(status: StatusCode) -> Self {
        Self::Refuse(FakeResponse::error(status, status.canonical_reason().unwrap_or("Error")))
    }

    /// What an app hears that may not do this.
    pub fn not_permitted() -> Self {
        Self::Refuse(FakeResponse::error(
            StatusCode::FORBIDDEN,
            "Resource not accessible by integration",
        ))
    }

    /// What the API that is not REST says, with a status that says that all is well.
    pub fn graphql_error(kind: &str, message: &str) -> Self {
        Self::Refuse(FakeResponse::graphql_error(kind, message))
    }

    /// What the API says while it does not yet know a branch that git has already taken.
    pub fn unknown_head() -> Self {
        Self::Refuse(FakeResponse::invalid("PullRequest", "head"))
    }
}
