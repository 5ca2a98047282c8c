//! What the runs have in common that share a sandbox, and the name that this gives to their workspace.

use super::workspace_store::{StoredBranchRef, WorkspaceOwner};
use crate::base::hex;

/// What runs have in common that share a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxKey {
    agent: String,
    branch: String,
    within: Option<SandboxKeyScope>,
    /// Whether a workspace that has the name of an earlier version may become this key's.
    inherits: bool,
    pub(super) kept: Vec<String>,
}

/// What a key of a service's run is good within: the same text elsewhere is another key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxKeyScope {
    pub grant: String,
    /// Who pays.
    pub account: String,
    /// Empty where there is none.
    pub repository: String,
    /// The field of the request that the text is of, such as `branch_key`.
    pub kind: &'static str,
}

impl SandboxKey {
    /// For the runs of an agent on a branch, or in another state that has a name.
    pub fn new(agent: &str, branch: &str) -> Self {
        let (agent, branch) = (agent.to_owned(), branch.to_owned());
        Self { agent, branch, within: None, inherits: false, kept: vec![] }
    }

    /// The work of two grants, for two accounts, on two repositories, or by two kinds of key is never in one place.
    #[must_use]
    pub fn scoped_to(self, scope: SandboxKeyScope) -> Self {
        Self { within: Some(scope), ..self }
    }

    /// Lets the key have the workspace that an earlier version kept under the same text, whatever account and kind of
    /// key that was for. The caller knows that it was for this account.
    #[must_use]
    pub fn with_inheritance(self) -> Self {
        Self { inherits: true, ..self }
    }

    /// Names in the workspace that stay there when the branch is checked out anew.
    #[must_use]
    pub fn preserving(self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { kept: names.into_iter().map(Into::into).collect(), ..self }
    }

    pub(super) fn name(&self) -> String {
        let Self { agent, branch, within, .. } = self;
        // A zero byte is in none of them, nor a line's end but in the last.
        name_digest(&match within {
            Some(SandboxKeyScope { grant, account, repository, kind }) => {
                format!("{agent}\0\0{grant}\n{account}\n{repository}\n{kind}\n{branch}")
            }
            None => format!("{agent}\0{branch}"),
        })
    }

    /// Returns the name that an earlier version gave to all keys with this text, where this key may inherit.
    pub(super) fn legacy_name(&self) -> Option<String> {
        let Self { agent, branch, within, inherits, .. } = self;
        let SandboxKeyScope { grant, repository, .. } = within.as_ref().filter(|_| *inherits)?;
        Some(name_digest(&format!("{agent}\0{grant}\n{repository}\n{branch}")))
    }

    pub(super) fn display_name(&self) -> String {
        format!("{} on {}", self.agent, self.branch)
    }

    pub(super) fn owner(&self, line: Option<StoredBranchRef>) -> WorkspaceOwner {
        let of =
            |part: fn(&SandboxKeyScope) -> &str| self.within.as_ref().map(part).map(str::to_owned);
        WorkspaceOwner {
            agent: self.agent.clone(),
            branch: self.branch.clone(),
            grant: of(|scope| &scope.grant),
            account: of(|scope| &scope.account),
            repository: of(|scope| &scope.repository),
            kind: of(|scope| scope.kind),
            line,
        }
    }
}

fn name_digest(name: &str) -> String {
    hex::sha256_hex(name.as_bytes())[..NAME_DIGITS].to_owned()
}

/// Of a key's name. 128 bits: no two of an installation's keys meet by accident.
pub(super) const NAME_DIGITS: usize = 32;
