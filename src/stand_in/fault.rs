//! What goes wrong because it was asked for.

use http::StatusCode;

use super::reply::Reply;
use super::route::Operation;

/// Trouble for the next requests of one kind.
#[derive(Clone, Debug)]
pub struct Fault {
    pub operation: Operation,
    pub trouble: Trouble,
    /// How many requests meet it.
    pub times: u32,
}

/// How a request fails.
#[derive(Clone, Debug)]
pub enum Trouble {
    /// The work is done; then the connection ends without an answer.
    LoseReply,
    /// Nothing is done, and this is the answer.
    Refuse(Reply),
    /// The request waits at the gate before anything is done.
    HoldBefore,
    /// The work is done; then the answer waits at the gate.
    HoldAfter,
}

impl Trouble {
    /// GitHub's secondary rate limit: too much at once, and when to come again.
    pub fn secondary_limit(retry_after: u64) -> Self {
        let text = "You have exceeded a secondary rate limit. Please wait a few minutes before you try again.";
        Self::Refuse(
            Reply::error(StatusCode::FORBIDDEN, text).with("retry-after", retry_after.to_string()),
        )
    }

    /// GitHub's primary rate limit: nothing is left until a second of the epoch.
    pub fn primary_limit(reset: u64) -> Self {
        let text = "API rate limit exceeded for installation ID 1.";
        Self::Refuse(
            Reply::error(StatusCode::FORBIDDEN, text)
                .with("x-ratelimit-remaining", "0".to_owned())
                .with("x-ratelimit-reset", reset.to_string()),
        )
    }

    /// What an API that is ill answers.
    pub fn status(status: StatusCode) -> Self {
        Self::Refuse(Reply::error(status, status.canonical_reason().unwrap_or("Error")))
    }

    /// What an app hears that may not do this.
    pub fn not_permitted() -> Self {
        Self::Refuse(Reply::error(StatusCode::FORBIDDEN, "Resource not accessible by integration"))
    }

    /// What the API that is not REST says, with a status that says that all is well.
    pub fn of_query(kind: &str, message: &str) -> Self {
        Self::Refuse(Reply::graph_error(kind, message))
    }

    /// What the API says while it does not yet know a branch that git has already taken.
    pub fn head_unknown() -> Self {
        Self::Refuse(Reply::invalid("PullRequest", "head"))
    }
}
