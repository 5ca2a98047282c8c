//! The reasons for which a grant does not allow a request.

use super::GrantScope;

/// The reason of a refusal, with its code and a sentence. The sentence never contains the token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessDeniedError {
    #[error("a grant is needed; send `Authorization: Bearer` and its token")]
    NoToken,
    #[error("there is no grant with this token")]
    UnknownToken,
    #[error("this grant has been revoked")]
    Revoked,
    #[error("this grant has expired")]
    Expired,
    #[error("this grant does not have `{0}` access")]
    MissingScope(GrantScope),
    #[error("this grant does not allow agents in sandboxes")]
    SandboxNotAllowed,
    #[error("this grant does not allow the agent `{0}`")]
    AgentNotAllowed(String),
    #[error("this grant does not allow the account `{0}` to pay")]
    AccountNotAllowed(String),
    #[error("this grant does not answer for the account `{0}`")]
    ForeignAccount(String),
    #[error(
        "this grant names accounts, and the policy of an agent is about the runs of all accounts; use a grant with `approve` access that names none"
    )]
    NamesAccounts,
    #[error("this grant has no default account; name an account")]
    NoAccount,
    #[error("this grant does not allow the repository `{0}`")]
    RepositoryNotAllowed(String),
    #[error("this grant has started the run; another grant with `approve` access has to answer")]
    OwnRun,
    #[error(
        "this grant can start runs, and who starts runs may not set what their tools may do; use a grant with `approve` and without `runs` access"
    )]
    StartsRuns,
    #[error("no grant is named for this user; name one in `tools.approvals.webhook.approvers`")]
    UnknownApprover,
}

impl AccessDeniedError {
    /// Returns the stable code, which the manual documents.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoToken | Self::UnknownToken => "unauthorized",
            Self::Revoked => "grant_revoked",
            Self::Expired => "grant_expired",
            Self::MissingScope(_) => "forbidden",
            Self::SandboxNotAllowed => "sandbox_not_allowed",
            Self::AgentNotAllowed(_) => "forbidden_agent",
            Self::AccountNotAllowed(_)
            | Self::ForeignAccount(_)
            | Self::NamesAccounts
            | Self::NoAccount => "forbidden_account",
            Self::RepositoryNotAllowed(_) => "forbidden_repo",
            Self::OwnRun => "forbidden_own_run",
            Self::StartsRuns => "forbidden_with_runs",
            Self::UnknownApprover => "unknown_approver",
        }
    }
}
