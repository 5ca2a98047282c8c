//! The terms of a grant, as they are stored.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{GrantPattern, GrantScope};
use crate::llm::budget::{BudgetLimits, Nanodollars};

/// The terms of a grant: its scopes, names and limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GrantTerms {
    pub access: BTreeSet<GrantScope>,
    /// True if the client may run agents in sandboxes, which all of our agents use.
    pub allow_sandbox: bool,
    /// The names of the agents that the client may run, and whose runs it answers for. With none, it answers for all.
    pub agents: Vec<GrantPattern>,
    /// The accounts that may pay, and whose runs the client answers for. The first pays if the request names none. With
    /// none, the client answers for all.
    pub accounts: Vec<GrantPattern>,
    /// The URLs of the repositories for work: `https://host/owner/*`.
    pub repositories: Vec<GrantPattern>,
    /// The limits of one run, whatever the request says.
    pub budget: BudgetLimits,
    /// The maximum number of concurrent runs. Further runs wait in the service's queue.
    pub max_runs: Option<u32>,
    /// The maximum number of runs in the queue, if it is below the service's own maximum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_queued_runs: Option<u32>,
    /// The money that all runs of the grant may cost together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cost_usd_total: Option<Nanodollars>,
    /// The money that the runs of one day (UTC) may cost together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cost_usd_per_day: Option<Nanodollars>,
}

/// An error for terms that would allow nothing, or more than the operator intends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantTermsError {
    #[error("the grant has no access; give some of read, runs, billing, admin and approve")]
    NoAccess,
    #[error("the grant may begin runs of no agent; name some, such as `sandbox:agent` or `*`")]
    NoAgents,
    #[error("the grant may begin runs, and has no account that pays; name an account")]
    NoAccounts,
    #[error("the grant may begin runs, and all agents run in sandboxes; allow sandboxes, too")]
    SandboxRequired,
    #[error("the grant's maximum number of runs is 0; give at least 1, or no limit")]
    ZeroRuns,
    #[error("the grant may spend nothing; give a cap of more than $0, or none")]
    ZeroCap,
    #[error(
        "the deadline of a run is 0s, so every call would fail; give a longer time, or no limit"
    )]
    ZeroDeadline,
    #[error(
        "a repository's pattern ends in `/*`, or in `:*` for any port: `https://github.com/acme*` would be `acme-evil`'s, too"
    )]
    AmbiguousRepositoryPattern,
    #[error("the grant's name is invalid; give 1 to 128 visible characters")]
    InvalidName,
}

impl GrantTerms {
    /// Checks that a grant with these terms can be used.
    ///
    /// # Errors
    /// Returns the first term that is missing or contradictory.
    pub fn validate(&self) -> Result<(), GrantTermsError> {
        if self.access.is_empty() {
            return Err(GrantTermsError::NoAccess);
        }
        if self.max_runs == Some(0) {
            return Err(GrantTermsError::ZeroRuns);
        }
        let caps = [self.max_cost_usd_total, self.max_cost_usd_per_day];
        if caps.contains(&Some(Nanodollars::ZERO)) {
            return Err(GrantTermsError::ZeroCap);
        }
        if self.budget.deadline == Some(Duration::ZERO) {
            return Err(GrantTermsError::ZeroDeadline);
        }
        if !self.repositories.iter().all(is_bounded) {
            return Err(GrantTermsError::AmbiguousRepositoryPattern);
        }
        // Agents, accounts and sandboxes matter only for a grant that may begin runs.
        if !self.access.contains(&GrantScope::Runs) {
            return Ok(());
        }
        match self {
            Self { allow_sandbox: false, .. } => Err(GrantTermsError::SandboxRequired),
            Self { agents, .. } if agents.is_empty() => Err(GrantTermsError::NoAgents),
            Self { accounts, .. } if accounts.is_empty() => Err(GrantTermsError::NoAccounts),
            _ => Ok(()),
        }
    }
}

/// Returns true if a pattern ends at the end of a name, so that `acme*` cannot match `acme-evil`.
fn is_bounded(pattern: &GrantPattern) -> bool {
    // A pattern without `*` is exact, and a lone `*` means every repository on purpose.
    let beginning = pattern.as_str().strip_suffix('*');
    beginning.is_none_or(|text| text.is_empty() || text.ends_with(['/', ':']))
}
