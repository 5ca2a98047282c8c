//! Who may ask for what: bearer tokens with scopes, of which only hashes are kept.
//!
//! A grant is for a program that asks on behalf of others, not for those others. It says which agents may be run, who
//! may be made to pay, which repositories may be worked on, and what one run may spend at most.
//!
//! **Invariant:** a token is random and is told once; what is stored cannot be turned into it.
//!
//! **Invariant:** what a grant does not name it does not allow: an empty list allows nothing.

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
    /// For people: who has it.
    pub name: String,
    pub terms: GrantTerms,
    pub created: SystemTime,
    /// From here on it is worth nothing.
    pub expires: Option<SystemTime>,
    pub revoked: Option<SystemTime>,
    /// To the minute, because it is not written down more often.
    pub used: Option<SystemTime>,
}

impl AccessGrant {
    /// # Errors
    /// It has been revoked, or its time is over.
    pub fn check_valid_at(&self, now: SystemTime) -> Result<(), AccessDeniedError> {
        if self.revoked.is_some() {
            return Err(AccessDeniedError::Revoked);
        }
        match self.expires {
            Some(end) if end <= now => Err(AccessDeniedError::Expired),
            _ => Ok(()),
        }
    }

    /// # Errors
    /// It does not come with this kind of access.
    pub fn check_scope(&self, access: GrantScope) -> Result<(), AccessDeniedError> {
        if self.terms.access.contains(&access) {
            Ok(())
        } else {
            Err(AccessDeniedError::Access(access))
        }
    }

    /// # Errors
    /// The agent is not among those it names.
    pub fn check_agent(&self, agent: &str) -> Result<(), AccessDeniedError> {
        let is_named = self.terms.agents.iter().any(|pattern| pattern.matches(agent));
        if is_named { Ok(()) } else { Err(AccessDeniedError::Agent(agent.to_owned())) }
    }

    /// # Errors
    /// It is for nothing that runs in a sandbox.
    pub fn check_sandbox(&self) -> Result<(), AccessDeniedError> {
        if self.terms.allow_sandbox { Ok(()) } else { Err(AccessDeniedError::Sandbox) }
    }

    /// Who pays: the account that is asked for, or the first that the grant names.
    ///
    /// # Errors
    /// The account is not among those it names, or none is asked for and the first is a pattern.
    pub fn resolve_account(&self, asked: Option<&str>) -> Result<String, AccessDeniedError> {
        let accounts = &self.terms.accounts;
        let Some(asked) = asked else {
            let first = accounts.first().and_then(GrantPattern::exact_text);
            return first.map(str::to_owned).ok_or(AccessDeniedError::NoAccount);
        };
        let is_named = accounts.iter().any(|pattern| pattern.matches(asked));
        if is_named {
            Ok(asked.to_owned())
        } else {
            Err(AccessDeniedError::Account(asked.to_owned()))
        }
    }

    /// Which addresses the repository's host may have, by the URL that the repository is cloned from, in its one spelling.
    ///
    /// # Errors
    /// The repository is not among those it names.
    pub fn check_repository(&self, url: &str) -> Result<HostReach, AccessDeniedError> {
        let bare = url.strip_suffix(".git").unwrap_or(url);
        let is_file = url.starts_with(FILE_SCHEME);
        let named = self.terms.repositories.iter().filter(|pattern| {
            // What is on this machine is named on purpose: a `*` alone is for forges.
            pattern.as_str().starts_with(FILE_SCHEME) == is_file
                && (pattern.matches(bare) || pattern.matches(url))
        });
        let reaches = named.map(|pattern| {
            if has_complete_host(pattern) { HostReach::Named } else { HostReach::Public }
        });
        let allowed = reaches.filter(|reach| is_file || reach.allows_host(url_host(url)));
        allowed.max().ok_or_else(|| AccessDeniedError::Repository(url.to_owned()))
    }

    /// Whether it may see and end what another grant has begun.
    pub fn is_admin(&self) -> bool {
        self.terms.access.contains(&GrantScope::Admin)
    }
}

/// Whether a pattern has a URL's host from its beginning to its end.
fn has_complete_host(pattern: &GrantPattern) -> bool {
    let Some(beginning) = pattern.as_str().strip_suffix('*') else { return true };
    let Some((_, rest)) = beginning.split_once("://") else { return false };
    let host = url_host(beginning);
    // A port may be open; an address in brackets ends with its bracket.
    !host.is_empty() && (rest.contains('/') || rest.ends_with(':')) && !host.starts_with('[')
}

/// The host of a URL, or of the beginning of one; with its bracket where that is not closed.
fn url_host(url: &str) -> &str {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let authority = rest.split('/').next().unwrap_or_default();
    match authority.strip_prefix('[').and_then(|inner| inner.split_once(']')) {
        Some((address, _)) => address,
        None if authority.starts_with('[') => authority,
        None => authority.split(':').next().unwrap_or_default(),
    }
}

const FILE_SCHEME: &str = "file://";
