//! What a grant allows, as it is written down.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{GrantPattern, GrantScope};
use crate::llm::budget::{BudgetLimits, Nanodollars};

/// The scopes of a grant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GrantTerms {
    pub access: BTreeSet<GrantScope>,
    /// Agents that run in sandboxes may be asked for, which all of ours do.
    pub allow_sandbox: bool,
    /// Agents, by their names.
    pub agents: Vec<GrantPattern>,
    /// Who may be made to pay. The first pays where nobody is named.
    pub accounts: Vec<GrantPattern>,
    /// Repositories, by their URLs: `https://host/owner/*`.
    pub repositories: Vec<GrantPattern>,
    /// What one run may spend at most, whatever else is asked for.
    pub budget: BudgetLimits,
    /// Runs that have not ended.
    pub max_runs: Option<u32>,
    /// Money that all runs may cost together, for as long as the grant exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cost_usd_total: Option<Nanodollars>,
    /// Money that the runs of one day (UTC) may cost together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cost_usd_per_day: Option<Nanodollars>,
}

/// Terms that would allow nothing, or not what they seem to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantTermsError {
    #[error("the grant has no access; give some of read, runs, billing and admin")]
    Access,
    #[error("the grant may begin runs of no agent; name some, such as `sandbox:agent` or `*`")]
    Agents,
    #[error("the grant may begin runs that nobody pays for; name an account")]
    Accounts,
    #[error("the grant may begin runs, and all agents run in sandboxes; allow those, too")]
    Sandbox,
    #[error("the grant may have no run; give at least 1, or no limit")]
    MaxRuns,
    #[error("the grant may spend nothing; give a cap of more than $0, or none")]
    Cap,
    #[error(
        "a repository's pattern ends in `/*`, or in `:*` for any port: `https://github.com/acme*` would be `acme-evil`'s, too"
    )]
    Repositories,
    #[error("a grant's name has 1 to 128 characters, and none that cannot be seen")]
    Name,
}

impl GrantTerms {
    /// Whether a grant with these terms can be used at all.
    ///
    /// # Errors
    /// What is missing.
    pub fn validate(&self) -> Result<(), GrantTermsError> {
        if self.access.is_empty() {
            return Err(GrantTermsError::Access);
        }
        if self.max_runs == Some(0) {
            return Err(GrantTermsError::MaxRuns);
        }
        let caps = [self.max_cost_usd_total, self.max_cost_usd_per_day];
        if caps.contains(&Some(Nanodollars::ZERO)) {
            return Err(GrantTermsError::Cap);
        }
        if !self.repositories.iter().all(is_bounded) {
            return Err(GrantTermsError::Repositories);
        }
        if !self.access.contains(&GrantScope::Runs) {
            return Ok(());
        }
        match self {
            Self { allow_sandbox: false, .. } => Err(GrantTermsError::Sandbox),
            Self { agents, .. } if agents.is_empty() => Err(GrantTermsError::Agents),
            Self { accounts, .. } if accounts.is_empty() => Err(GrantTermsError::Accounts),
            _ => Ok(()),
        }
    }
}

/// Whether a pattern ends where a name does.
fn is_bounded(pattern: &GrantPattern) -> bool {
    let beginning = pattern.as_str().strip_suffix('*');
    beginning.is_none_or(|text| text.is_empty() || text.ends_with(['/', ':']))
}
