//! The grants of clients: bearer tokens with scopes, of which the service stores only hashes.
//!
//! A grant is for a client program that acts for its own users, not for those users. The grant names the agents that
//! the client may run, the accounts that may pay, the repositories for work, and the limits of one run.
//!
//! **Invariant:** a token is random and is shown once; the stored hash cannot be turned into the token.
//!
//! **Invariant:** a grant allows only what the grant names: an empty list allows nothing. Only for answers about the runs
//! of other grants, an empty list of agents or accounts stands for all of them.

mod error;
mod pattern;
mod scope;
mod store;
mod terms;
mod token;

use std::time::SystemTime;

use crate::base::host_reach::HostReach;

pub use error::AccessDeniedError;
pub use pattern::GrantPattern;
pub use scope::GrantScope;
pub use store::{GRANT_SCHEMA, GrantStore, GrantStoreError};
pub use terms::{GrantTerms, GrantTermsError};

/// One grant, without its token.
#[derive(Clone, Debug, PartialEq)]
pub struct AccessGrant {
    pub id: String,
    /// The name of the grant's holder, for people.
    pub name: String,
    pub terms: GrantTerms,
    pub created: SystemTime,
    /// The time from which the grant is not valid.
    pub expires: Option<SystemTime>,
    pub revoked: Option<SystemTime>,
    /// The last use, to the minute, because a use is recorded once a minute at most.
    pub used: Option<SystemTime>,
}

impl AccessGrant {
    /// Checks that the grant is valid at a time.
    ///
    /// # Errors
    /// Returns an error if the grant is revoked or expired.
    pub fn check_valid_at(&self, now: SystemTime) -> Result<(), AccessDeniedError> {
        if self.revoked.is_some() {
            return Err(AccessDeniedError::Revoked);
        }
        match self.expires {
            Some(end) if end <= now => Err(AccessDeniedError::Expired),
            _ => Ok(()),
        }
    }

    /// Checks that the grant has a scope.
    ///
    /// # Errors
    /// Returns an error if the grant does not have the scope.
    pub fn check_scope(&self, access: GrantScope) -> Result<(), AccessDeniedError> {
        if self.terms.access.contains(&access) {
            Ok(())
        } else {
            Err(AccessDeniedError::MissingScope(access))
        }
    }

    /// Checks that the grant allows an agent.
    ///
    /// # Errors
    /// Returns an error if the grant does not name the agent.
    pub fn check_agent(&self, agent: &str) -> Result<(), AccessDeniedError> {
        let is_named = self.terms.agents.iter().any(|pattern| pattern.matches(agent));
        if is_named { Ok(()) } else { Err(AccessDeniedError::AgentNotAllowed(agent.to_owned())) }
    }

    /// Returns the agents whose runs the grant answers for. An empty list stands for all agents.
    pub fn approver_agents(&self) -> &[GrantPattern] {
        limiting_patterns(&self.terms.agents)
    }

    /// Returns the accounts whose runs the grant answers for. An empty list stands for all accounts.
    pub fn approver_accounts(&self) -> &[GrantPattern] {
        limiting_patterns(&self.terms.accounts)
    }

    /// Checks that the grant answers for the runs of an agent and an account.
    ///
    /// # Errors
    /// Returns an error if the grant names other agents or other accounts only.
    pub fn check_approver(&self, agent: &str, account: &str) -> Result<(), AccessDeniedError> {
        self.check_approver_of(agent)?;
        if covers_name(self.approver_accounts(), account) {
            Ok(())
        } else {
            Err(AccessDeniedError::ForeignAccount(account.to_owned()))
        }
    }

    /// Checks that the grant answers for some runs of an agent.
    ///
    /// # Errors
    /// Returns an error if the grant names other agents only.
    pub fn check_approver_of(&self, agent: &str) -> Result<(), AccessDeniedError> {
        if covers_name(self.approver_agents(), agent) {
            Ok(())
        } else {
            Err(AccessDeniedError::AgentNotAllowed(agent.to_owned()))
        }
    }

    /// Checks that the grant may set the policy of an agent, which is about the runs of all accounts.
    ///
    /// # Errors
    /// Returns an error if the grant can start runs, or does not answer for all runs of the agent.
    pub fn check_policy_change(&self, agent: &str) -> Result<(), AccessDeniedError> {
        if self.check_scope(GrantScope::Runs).is_ok() {
            return Err(AccessDeniedError::StartsRuns);
        }
        self.check_approver_of(agent)?;
        if self.approver_accounts().is_empty() {
            Ok(())
        } else {
            Err(AccessDeniedError::NamesAccounts)
        }
    }

    /// Checks that the grant allows agents in sandboxes.
    ///
    /// # Errors
    /// Returns an error if the grant does not allow sandboxes.
    pub fn check_sandbox(&self) -> Result<(), AccessDeniedError> {
        if self.terms.allow_sandbox { Ok(()) } else { Err(AccessDeniedError::SandboxNotAllowed) }
    }

    /// Returns the account that pays: the requested account, or else the first account of the grant.
    ///
    /// # Errors
    /// Returns an error if the grant does not name the account, or if none is requested and the grant's first account
    /// is a pattern.
    pub fn resolve_account(&self, asked: Option<&str>) -> Result<String, AccessDeniedError> {
        let accounts = &self.terms.accounts;
        // Only an exact name can be the default: a pattern names no account to charge.
        let Some(asked) = asked else {
            let first = accounts.first().and_then(GrantPattern::exact_text);
            return first.map(str::to_owned).ok_or(AccessDeniedError::NoAccount);
        };
        let is_named = accounts.iter().any(|pattern| pattern.matches(asked));
        if is_named {
            Ok(asked.to_owned())
        } else {
            Err(AccessDeniedError::AccountNotAllowed(asked.to_owned()))
        }
    }

    /// Checks that the grant allows a repository, and returns the addresses that the repository's host may have. `url`
    /// is the URL for cloning, in its canonical spelling.
    ///
    /// # Errors
    /// Returns an error if the grant does not name the repository.
    pub fn check_repository(&self, url: &str) -> Result<HostReach, AccessDeniedError> {
        // A pattern may name the repository with or without the `.git` of its URL.
        let bare = url.strip_suffix(".git").unwrap_or(url);
        let is_file = url.starts_with(FILE_SCHEME);
        let named = self.terms.repositories.iter().filter(|pattern| {
            // A repository on this machine needs a pattern of its own: a `*` alone means repositories on forges.
            pattern.as_str().starts_with(FILE_SCHEME) == is_file
                && (pattern.matches(bare) || pattern.matches(url))
        });
        // Only a pattern with a complete host shows that the operator means this very host, which may then have a
        // private address. A wildcard host reaches public addresses only.
        let reaches = named.map(|pattern| {
            if has_complete_host(pattern) { HostReach::Named } else { HostReach::Public }
        });
        let allowed = reaches.filter(|reach| is_file || reach.allows_host(url_host(url)));
        // The widest of the matching patterns counts.
        allowed.max().ok_or_else(|| AccessDeniedError::RepositoryNotAllowed(url.to_owned()))
    }

    /// Returns true if the grant may see and cancel the runs of other grants.
    pub fn is_admin(&self) -> bool {
        self.terms.access.contains(&GrantScope::Admin)
    }
}

/// Returns the patterns that leave some name out; none if one of them matches every name.
fn limiting_patterns(patterns: &[GrantPattern]) -> &[GrantPattern] {
    if patterns.iter().any(|pattern| pattern.as_str() == "*") { &[] } else { patterns }
}

/// Returns true if a name fits one of the patterns, or there is none.
fn covers_name(patterns: &[GrantPattern], name: &str) -> bool {
    patterns.is_empty() || patterns.iter().any(|pattern| pattern.matches(name))
}

/// Returns true if a pattern names a URL's host completely.
fn has_complete_host(pattern: &GrantPattern) -> bool {
    let Some(beginning) = pattern.as_str().strip_suffix('*') else { return true };
    let Some((_, rest)) = beginning.split_once("://") else { return false };
    let host = url_host(beginning);
    // The text before the `*` names the whole host only if the host's end is visible: by a slash, or by the colon
    // before the port. The host of an unclosed bracket is incomplete.
    !host.is_empty() && (rest.contains('/') || rest.ends_with(':')) && !host.starts_with('[')
}

/// Returns the host of a URL or of a URL's beginning. The host of an unclosed bracket keeps its bracket.
fn url_host(url: &str) -> &str {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let authority = rest.split('/').next().unwrap_or_default();
    match authority.strip_prefix('[').and_then(|inner| inner.split_once(']')) {
        // An IPv6 address contains colons, so only the closing bracket ends it.
        Some((address, _)) => address,
        None if authority.starts_with('[') => authority,
        None => authority.split(':').next().unwrap_or_default(),
    }
}

/// The beginning of the URLs of repositories on this machine.
const FILE_SCHEME: &str = "file://";
