//! The reasons why a request on a shared listener belongs to no run.

/// A reason why a request belongs to no run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    #[error("the request has no run token; send the run token as the API key")]
    Missing,
    #[error("the run token is not valid")]
    Invalid,
    #[error("the run token has expired")]
    Expired,
    #[error("the run of this token is not served here, or is no longer served")]
    UnknownRun,
    #[error("the run is ending")]
    RunClosing,
    #[error("the run has too many open connections: its limit is reached")]
    TooManyConnections,
}

impl AuthError {
    pub fn code(self) -> &'static str {
        match self {
            Self::Missing => "run_token_missing",
            Self::Invalid => "run_token_invalid",
            Self::Expired => "run_token_expired",
            Self::UnknownRun => "unknown_run",
            Self::RunClosing => "run_closing",
            Self::TooManyConnections => "too_many_connections",
        }
    }
}
