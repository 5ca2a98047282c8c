//! Why a call did not do what it was for, and whether it will later.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::response::Parts;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;

/// What came of a call that was not answered well. Nothing in it is a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
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
    #[error("GitHub refuses this: {}", list(message, reasons))]
    Invalid { message: String, reasons: Vec<Reason> },
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
pub struct Reason {
    pub field: String,
    pub code: String,
    pub message: String,
}

/// GitHub's body of every refusal.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Refusal {
    message: String,
    errors: Vec<serde_json::Value>,
    url: String,
}

impl Error {
    /// Reads an answer that is not a success.
    pub(super) fn refused(head: &Parts, body: &[u8]) -> Self {
        let refusal: Refusal = serde_json::from_slice(body).unwrap_or_default();
        let message = short(&refusal.message);
        if let Some(after) = limited(head, &message) {
            return Self::Limited { after, message };
        }
        match head.status {
            StatusCode::UNAUTHORIZED => Self::Unauthorized(message),
            StatusCode::FORBIDDEN => Self::Forbidden(message),
            StatusCode::NOT_FOUND | StatusCode::GONE => Self::NotFound,
            StatusCode::UNPROCESSABLE_ENTITY => {
                let reasons = refusal.errors.into_iter().map(Reason::read).collect();
                Self::Invalid { message, reasons }
            }
            status if status.is_redirection() => {
                let location = text(&head.headers, "location").unwrap_or(&refusal.url);
                Self::Moved(short(location))
            }
            status if status.is_server_error() => Self::Unwell(status),
            status => Self::Unexpected { status, message },
        }
    }

    /// What a query was refused for, which is said with a status that says that all is well.
    pub(super) fn of_query(kind: &str, message: &str) -> Self {
        let message = short(message);
        match kind {
            "RATE_LIMITED" => Self::Limited { after: A_MINUTE, message },
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
    pub fn later(&self) -> Option<Duration> {
        match self {
            Self::Unanswered(_) | Self::Unwell(_) => Some(Duration::ZERO),
            Self::Limited { after, .. } => Some(*after),
            // Git took the branch a moment ago, and the API does not know it yet.
            Self::Invalid { .. } if self.has(|reason| reason.field == "head") => {
                Some(Duration::ZERO)
            }
            _ => None,
        }
    }

    /// Whether a request was refused for a reason.
    pub(in crate::forge) fn has(&self, is_it: impl Fn(&Reason) -> bool) -> bool {
        matches!(self, Self::Invalid { reasons, .. } if reasons.iter().any(is_it))
    }
}

impl Reason {
    /// Most are objects; some parts of the API send a text.
    fn read(value: serde_json::Value) -> Self {
        let mut reason = match value {
            serde_json::Value::String(message) => Self { message, ..Self::default() },
            value => serde_json::from_value(value).unwrap_or_default(),
        };
        for text in [&mut reason.field, &mut reason.code, &mut reason.message] {
            *text = short(text);
        }
        reason
    }
}

impl fmt::Display for Reason {
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
fn limited(head: &Parts, message: &str) -> Option<Duration> {
    let is_candidate = matches!(head.status, StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS);
    if !is_candidate {
        return None;
    }
    let number = |name| text(&head.headers, name).and_then(|text| text.parse::<u64>().ok());
    let after = if let Some(seconds) = number("retry-after") {
        Duration::from_secs(seconds)
    } else if number("x-ratelimit-remaining") == Some(0) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let reset = Duration::from_secs(number("x-ratelimit-reset").unwrap_or(0));
        reset.saturating_sub(now).max(SOON)
    } else {
        let says_so = message.to_ascii_lowercase().contains("rate limit");
        (says_so || head.status == StatusCode::TOO_MANY_REQUESTS).then_some(A_MINUTE)?
    };
    Some(after.min(A_DAY))
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn list(message: &str, reasons: &[Reason]) -> String {
    let reasons: Vec<_> = reasons.iter().map(Reason::to_string).collect();
    if reasons.is_empty() { message.to_owned() } else { reasons.join("; ") }
}

/// What stands in logs and rows is short, and one line.
pub(super) fn short(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_CHARACTERS).collect()
}

const MAX_CHARACTERS: usize = 300;
const SOON: Duration = Duration::from_secs(1);

/// What GitHub asks for where it does not say how long.
const A_MINUTE: Duration = Duration::from_mins(1);

/// Its limits are of an hour; what says more is not believed.
const A_DAY: Duration = Duration::from_hours(24);
