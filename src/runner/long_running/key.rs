//! The key of a long-running sandbox, and the name of the key's workspace.

use super::workspace_store::{StoredBranchRef, WorkspaceOwner};
use crate::base::digest::sha256_hex;

/// The properties that the runs of one long-running sandbox have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxKey {
    agent: String,
    branch: String,
    scope: Option<SandboxKeyScope>,
    /// True if the key may take over a workspace under the name that an earlier version of this program gave it.
    inherits: bool,
    pub(super) kept: Vec<String>,
}

/// The scope of a key of the service. The same text in another scope is another key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxKeyScope {
    pub grant: String,
    /// The billing account.
    pub account: String,
    /// The repository; empty if the run has no repository.
    pub repository: String,
    /// The field of the request that contains the text, such as `branch_key`.
    pub kind: &'static str,
}

impl SandboxKey {
    /// Makes the key of an agent's runs on a branch, or in another named state.
    pub fn new(agent: &str, branch: &str) -> Self {
        let (agent, branch) = (agent.to_owned(), branch.to_owned());
        Self { agent, branch, scope: None, inherits: false, kept: vec![] }
    }

    /// Restricts the key to a scope. So two grants, accounts, repositories or kinds of key never share a workspace.
    #[must_use]
    pub fn scoped_to(self, scope: SandboxKeyScope) -> Self {
        Self { scope: Some(scope), ..self }
    }

    /// Lets the key take over the workspace that an earlier version of this program kept under the same text. That
    /// workspace's name contained no account and no kind of key. The caller knows that the workspace belongs to this
    /// account.
    #[must_use]
    pub fn with_inheritance(self) -> Self {
        Self { inherits: true, ..self }
    }

    /// Sets the names in the workspace that are kept when the branch is checked out again.
    #[must_use]
    pub fn preserving(self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { kept: names.into_iter().map(Into::into).collect(), ..self }
    }

    pub(super) fn name(&self) -> String {
        let Self { agent, branch, scope, .. } = self;
        // The separators make the digest's input unambiguous: no part contains a zero byte, and only the last part may
        // contain a line end.
        name_digest(&match scope {
            Some(SandboxKeyScope { grant, account, repository, kind }) => {
                format!("{agent}\0\0{grant}\n{account}\n{repository}\n{kind}\n{branch}")
            }
            None => format!("{agent}\0{branch}"),
        })
    }

    /// Returns the name that an earlier version of this program gave to all keys with this text, if the key may take
    /// over that workspace.
    pub(super) fn legacy_name(&self) -> Option<String> {
        let Self { agent, branch, scope, inherits, .. } = self;
        let SandboxKeyScope { grant, repository, .. } = scope.as_ref().filter(|_| *inherits)?;
        Some(name_digest(&format!("{agent}\0{grant}\n{repository}\n{branch}")))
    }

    pub(super) fn display_name(&self) -> String {
        match (self.agent.as_str(), self.branch.as_str()) {
            ("", _) => "the agents that share a workspace".to_owned(),
            (agent, "") => agent.to_owned(),
            (agent, branch) => format!("{agent} on {branch}"),
        }
    }

    pub(super) fn owner(&self, line: Option<StoredBranchRef>) -> WorkspaceOwner {
        let of =
            |part: fn(&SandboxKeyScope) -> &str| self.scope.as_ref().map(part).map(str::to_owned);
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
    sha256_hex(name.as_bytes())[..NAME_DIGITS].to_owned()
}

/// The number of hexadecimal digits of a key's name. With 128 bits, two keys of an installation do not collide by
/// accident.
pub(super) const NAME_DIGITS: usize = 32;
