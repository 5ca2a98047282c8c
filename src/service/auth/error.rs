//! Why somebody may not do what they ask for.

use super::GrantScope;

/// The reason, as its code and as a sentence. What the token was, nobody is told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessDeniedError {
    #[error("a grant is needed; send `Authorization: Bearer` and its token")]
    Missing,
    #[error("there is no grant with this token")]
    Unknown,
    #[error("this grant has been revoked")]
    Revoked,
    #[error("this grant has expired")]
    Expired,
    #[error("this grant does not come with `{0}` access")]
    Access(GrantScope),
    #[error("this grant does not allow agents in sandboxes")]
    Sandbox,
    #[error("this grant does not allow the agent `{0}`")]
    Agent(String),
    #[error("this grant does not allow the account `{0}` to pay")]
    Account(String),
    #[error("this grant names no account that pays where none is asked for; name one")]
    NoAccount,
    #[error("this grant does not allow the repository `{0}`")]
    Repository(String),
    #[error("this grant may have {0} runs at the same time, and has; wait for one to end")]
    Runs(u32),
}

impl AccessDeniedError {
    /// Stable, and documented in the manual.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Missing | Self::Unknown => "unauthorized",
            Self::Revoked => "grant_revoked",
            Self::Expired => "grant_expired",
            Self::Access(_) => "forbidden",
            Self::Sandbox => "sandbox_not_allowed",
            Self::Agent(_) => "forbidden_agent",
            Self::Account(_) | Self::NoAccount => "forbidden_account",
            Self::Repository(_) => "forbidden_repo",
            Self::Runs(_) => "too_many_runs",
        }
    }
}
