//! The reasons for which a grant does not allow a request.

use super::GrantScope;

/// The reason of a refusal, with its code and a sentence. The sentence never contains the token.
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
    #[error("this grant does not have `{0}` access")]
    Access(GrantScope),
    #[error("this grant does not allow agents in sandboxes")]
    Sandbox,
    #[error("this grant does not allow the agent `{0}`")]
    Agent(String),
    #[error("this grant does not allow the account `{0}` to pay")]
    Account(String),
    #[error("this grant has no default account; name an account")]
    NoAccount,
    #[error("this grant does not allow the repository `{0}`")]
    Repository(String),
    #[error("this grant already has {0} concurrent runs, its maximum; retry when a run has ended")]
    Runs(u32),
}

impl AccessDeniedError {
    /// Returns the stable code, which the manual documents.
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
