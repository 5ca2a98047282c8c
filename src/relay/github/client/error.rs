//! The errors of calls to GitHub, and whether a later attempt may succeed.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::response::Parts;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;

use crate::base::hidden_characters::escape_hidden;

/// An error of a call to GitHub. No variant contains a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GithubError {
    /// The call has no answer. GitHub may have carried it out, or not.
    #[error("GitHub did not answer: {0}")]
    NoResponse(String),
    #[error("GitHub limits the rate of calls, and accepts none for {} seconds: {message}", after.as_secs())]
    RateLimited { after: Duration, message: String },
    #[error("GitHub has a temporary failure ({0})")]
    ServerError(StatusCode),
    #[error(
        "GitHub does not accept the token: {0}; give a valid one in `GITHUB_TOKEN`, or check `GITHUB_APP_ID` and `GITHUB_APP_KEY_FILE`"
    )]
    Unauthorized(String),
    #[error(
        "the token may not do this: {0}; it needs `contents: write` and `pull_requests: write` for this repository"
    )]
    Forbidden(String),
    #[error(
        "GitHub has no such repository, or the token has no access to it; check the URL and the token's repositories"
    )]
    NotFound,
    #[error("the repository has moved to {0}; give its new URL")]
    RepositoryMoved(String),
    #[error("GitHub refuses this: {}", join_problems(message, reasons))]
    Invalid { message: String, reasons: Vec<ValidationProblem> },
    #[error("GitHub answers {status}: {message}")]
    Unexpected { status: StatusCode, message: String },
    #[error(
        "the API at `{api}` is not that of `{host}`, so no token of one is shown to the other; set `GITHUB_API_URL`"
    )]
    OtherHost { api: String, host: String },
    #[error("the app's private key cannot be used: {0}")]
    InvalidAppKey(&'static str),
    #[error(
        "GitHub lists {0} open pull requests from the branch, or more; close the ones that are not needed, or choose another branch key"
    )]
    TooManyPullRequests(usize),
    #[error(
        "the text of {0} is full and has no room for the notice that the work needs a review; shorten that text"
    )]
    DescriptionFull(String),
}

/// One problem of a request that GitHub has refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ValidationProblem {
    pub field: String,
    pub code: String,
    pub message: String,
}

/// The body of GitHub's error answers.
#[derive(Default, Deserialize)]
#[serde(default)]
struct GithubErrorBody {
    message: String,
    errors: Vec<serde_json::Value>,
    url: String,
}

impl GithubError {
    /// Maps an answer that is not a success to an error.
    pub(super) fn from_response(head: &Parts, body: &[u8]) -> Self {
        let refusal: GithubErrorBody = serde_json::from_slice(body).unwrap_or_default();
        let message = one_line(&refusal.message);
        // Rate limits come first: GitHub reports them as 403 or 429, which would otherwise look like a missing
        // permission.
        if let Some(after) = rate_limit_wait(head, &message) {
            return Self::RateLimited { after, message };
        }
        match head.status {
            StatusCode::UNAUTHORIZED => Self::Unauthorized(message),
            StatusCode::FORBIDDEN => Self::Forbidden(message),
            // GitHub also answers 404 for a repository that the token must not know about.
            StatusCode::NOT_FOUND | StatusCode::GONE => Self::NotFound,
            StatusCode::UNPROCESSABLE_ENTITY => {
                let reasons =
                    refusal.errors.into_iter().map(ValidationProblem::from_json).collect();
                Self::Invalid { message, reasons }
            }
            status if status.is_redirection() => {
                // REST answers name the new address in a header or in the body.
                let location = header_text(&head.headers, "location").unwrap_or(&refusal.url);
                Self::RepositoryMoved(one_line(location))
            }
            status if status.is_server_error() => Self::ServerError(status),
            status => Self::Unexpected { status, message },
        }
    }

    /// Maps an error of a GraphQL answer, whose HTTP status is a success.
    pub(super) fn from_graphql(kind: &str, message: &str) -> Self {
        let message = one_line(message);
        match kind {
            "RATE_LIMITED" => Self::RateLimited { after: DEFAULT_RATE_LIMIT_WAIT, message },
            "FORBIDDEN" => Self::Forbidden(message),
            _ => Self::Invalid { message, reasons: vec![] },
        }
    }

    /// Returns the stable error code, for clients that must not see the details.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoResponse(_) => "forge_unreachable",
            Self::RateLimited { .. } => "forge_rate_limited",
            Self::Unauthorized(_) | Self::InvalidAppKey(_) => "forge_auth",
            Self::Forbidden(_) => "forge_forbidden",
            _ => "forge_failed",
        }
    }

    /// Returns the wait before another attempt, or `None` if another attempt would have the same result.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::NoResponse(_) | Self::ServerError(_) => Some(Duration::ZERO),
            Self::RateLimited { after, .. } => Some(*after),
            // Git has pushed the branch a moment ago, and the API does not know it yet.
            Self::Invalid { .. } if self.has_problem(|reason| reason.field == "head") => {
                Some(Duration::ZERO)
            }
            _ => None,
        }
    }

    /// Returns true if GitHub has refused the request because of a problem that `is_it` accepts.
    pub(in crate::relay::github) fn has_problem(
        &self,
        is_it: impl Fn(&ValidationProblem) -> bool,
    ) -> bool {
        matches!(self, Self::Invalid { reasons, .. } if reasons.iter().any(is_it))
    }
}

impl ValidationProblem {
    /// Reads one problem of an answer. Most problems are objects; some parts of the API send a text.
    fn from_json(value: serde_json::Value) -> Self {
        let mut reason = match value {
            serde_json::Value::String(message) => Self { message, ..Self::default() },
            value => serde_json::from_value(value).unwrap_or_default(),
        };
        for text in [&mut reason.field, &mut reason.code, &mut reason.message] {
            *text = one_line(text);
        }
        reason
    }
}

impl fmt::Display for ValidationProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.message.is_empty() {
            return write!(f, "`{}` is {}", self.field, self.code);
        }
        f.write_str(&self.message)
    }
}

/// Returns the wait that a rate limit demands, or `None` if the answer is not about a rate limit.
///
/// <https://docs.github.com/en/rest/using-the-rest-api/rate-limits-for-the-rest-api#exceeding-the-rate-limit>
fn rate_limit_wait(head: &Parts, message: &str) -> Option<Duration> {
    // Other statuses never mean a rate limit, whatever their headers state.
    let is_candidate = matches!(head.status, StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS);
    if !is_candidate {
        return None;
    }
    let number = |name| header_text(&head.headers, name).and_then(|text| text.parse::<u64>().ok());
    // In the order of GitHub's documentation: the stated wait, then the time of the reset, then a minute.
    let after = if let Some(seconds) = number("retry-after") {
        Duration::from_secs(seconds)
    } else if number("x-ratelimit-remaining") == Some(0) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let reset = Duration::from_secs(number("x-ratelimit-reset").unwrap_or(0));
        reset.saturating_sub(now).max(MIN_RETRY_WAIT)
    } else {
        let says_so = message.to_ascii_lowercase().contains("rate limit");
        (says_so || head.status == StatusCode::TOO_MANY_REQUESTS)
            .then_some(DEFAULT_RATE_LIMIT_WAIT)?
    };
    Some(after.min(MAX_RATE_LIMIT_WAIT))
}

/// Returns the text of a header, if it is text.
fn header_text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Joins the problems of a refusal, or returns the message if there are none.
fn join_problems(message: &str, reasons: &[ValidationProblem]) -> String {
    let reasons: Vec<_> = reasons.iter().map(ValidationProblem::to_string).collect();
    if reasons.is_empty() { message.to_owned() } else { reasons.join("; ") }
}

/// Removes control characters and cuts a text, because logs and rows have one short line. Other hidden characters become
/// visible.
pub(super) fn one_line(text: &str) -> String {
    let line: String = text.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE_CHARS).collect();
    escape_hidden(&line).chars().take(MAX_MESSAGE_CHARS).collect()
}

/// The longest text of a message in characters. Our choice.
const MAX_MESSAGE_CHARS: usize = 300;
/// The shortest wait if GitHub's stated time of the reset has passed already. Our choice.
const MIN_RETRY_WAIT: Duration = Duration::from_secs(1);

/// The wait if GitHub states none, as its documentation asks for.
const DEFAULT_RATE_LIMIT_WAIT: Duration = Duration::from_mins(1);

/// The longest wait. GitHub's limits are counted per hour; a longer stated wait is not believed. Our choice.
const MAX_RATE_LIMIT_WAIT: Duration = Duration::from_hours(24);
