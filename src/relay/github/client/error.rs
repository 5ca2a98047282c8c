//! Why a call did not do what it was for, and whether it will later.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::response::Parts;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;

/// What came of a call that was not answered well. Nothing in it is a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GithubError {
    /// It may have been done, and it may not.
    #[error("GitHub did not answer: {0}")]
    Unanswered(String),
    #[error("GitHub wants fewer calls, and none for {} seconds: {message}", after.as_secs())]
    Limited { after: Duration, message: String },
    #[error("GitHub is unwell ({0})")]
    Unwell(StatusCode),
    #[error(
        "GitHub does not accept the token: {0}; give a valid one in `GITHUB_TOKEN`, or check `GITHUB_APP_ID` and `GITHUB_APP_KEY_FILE`"
    )]
    Unauthorized(String),
    #[error(
        "the token may not do this: {0}; it needs `contents: write` and `pull_requests: write` for this repository"
    )]
    Forbidden(String),
    #[error(
        "there is no such repository, or the token does not reach it; check the URL and what the token is for"
    )]
    NotFound,
    #[error("the repository has moved to {0}; give its new URL")]
    Moved(String),
    #[error("GitHub refuses this: {}", join_problems(message, reasons))]
    Invalid { message: String, reasons: Vec<ValidationProblem> },
    #[error("GitHub answers {status}: {message}")]
    Unexpected { status: StatusCode, message: String },
    #[error(
        "the API at `{api}` is not that of `{host}`, so no token of one is shown to the other; set `GITHUB_API_URL`"
    )]
    Foreign { api: String, host: String },
    #[error("the app's private key cannot be used: {0}")]
    Key(&'static str),
    #[error(
        "the text of {0} is full, and has no room to say that the work needs a review; make some"
    )]
    Full(String),
}

/// One thing that is wrong with a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ValidationProblem {
    pub field: String,
    pub code: String,
    pub message: String,
}

/// GitHub's body of every refusal.
#[derive(Default, Deserialize)]
#[serde(default)]
struct GithubErrorBody {
    message: String,
    errors: Vec<serde_json::Value>,
    url: String,
}

impl GithubError {
    /// Reads an answer that is not a success.
    pub(super) fn from_response(head: &Parts, body: &[u8]) -> Self {
        let refusal: GithubErrorBody = serde_json::from_slice(body).unwrap_or_default();
        let message = one_line(&refusal.message);
        if let Some(after) = rate_limit_wait(head, &message) {
            return Self::Limited { after, message };
        }
        match head.status {
            StatusCode::UNAUTHORIZED => Self::Unauthorized(message),
            StatusCode::FORBIDDEN => Self::Forbidden(message),
            StatusCode::NOT_FOUND | StatusCode::GONE => Self::NotFound,
            StatusCode::UNPROCESSABLE_ENTITY => {
                let reasons =
                    refusal.errors.into_iter().map(ValidationProblem::from_json).collect();
                Self::Invalid { message, reasons }
            }
            status if status.is_redirection() => {
                let location = header_text(&head.headers, "location").unwrap_or(&refusal.url);
                Self::Moved(one_line(location))
            }
            status if status.is_server_error() => Self::Unwell(status),
            status => Self::Unexpected { status, message },
        }
    }

    /// What a query was refused for, which is said with a status that says that all is well.
    pub(super) fn from_graphql(kind: &str, message: &str) -> Self {
        let message = one_line(message);
        match kind {
            "RATE_LIMITED" => Self::Limited { after: DEFAULT_RATE_LIMIT_WAIT, message },
            "FORBIDDEN" => Self::Forbidden(message),
            _ => Self::Invalid { message, reasons: vec![] },
        }
    }

    /// The stable code of what is wrong, for those who may not know more.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unanswered(_) => "forge_unreachable",
            Self::Limited { .. } => "forge_rate_limited",
            Self::Unauthorized(_) | Self::Key(_) => "forge_auth",
            Self::Forbidden(_) => "forge_forbidden",
            _ => "forge_failed",
        }
    }

    /// How long to wait before it is worth trying again; `None` where that would change nothing.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Unanswered(_) | Self::Unwell(_) => Some(Duration::ZERO),
            Self::Limited { after, .. } => Some(*after),
            // Git took the branch a moment ago, and the API does not know it yet.
            Self::Invalid { .. } if self.has_problem(|reason| reason.field == "head") => {
                Some(Duration::ZERO)
            }
            _ => None,
        }
    }

    /// Whether a request was refused for a reason.
    pub(in crate::relay::github) fn has_problem(
        &self,
        is_it: impl Fn(&ValidationProblem) -> bool,
    ) -> bool {
        matches!(self, Self::Invalid { reasons, .. } if reasons.iter().any(is_it))
    }
}

impl ValidationProblem {
    /// Most are objects; some parts of the API send a text.
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

/// When to come again, where the answer is that there were too many calls.
///
/// <https://docs.github.com/en/rest/using-the-rest-api/rate-limits-for-the-rest-api#exceeding-the-rate-limit>
fn rate_limit_wait(head: &Parts, message: &str) -> Option<Duration> {
    let is_candidate = matches!(head.status, StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS);
    if !is_candidate {
        return None;
    }
    let number = |name| header_text(&head.headers, name).and_then(|text| text.parse::<u64>().ok());
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

fn header_text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn join_problems(message: &str, reasons: &[ValidationProblem]) -> String {
    let reasons: Vec<_> = reasons.iter().map(ValidationProblem::to_string).collect();
    if reasons.is_empty() { message.to_owned() } else { reasons.join("; ") }
}

/// What stands in logs and rows is short, and one line.
pub(super) fn one_line(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE_CHARS).collect()
}

const MAX_MESSAGE_CHARS: usize = 300;
const MIN_RETRY_WAIT: Duration = Duration::from_secs(1);

/// What GitHub asks for where it does not say how long.
const DEFAULT_RATE_LIMIT_WAIT: Duration = Duration::from_mins(1);

/// Its limits are of an hour; what says more is not believed.
const MAX_RATE_LIMIT_WAIT: Duration = Duration::from_hours(24);
