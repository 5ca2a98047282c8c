//! What the runs have in common that share a sandbox, and the name that this gives to their workspace.

use super::kept::{Line, Tenant};
use crate::base::hex;

/// What runs have in common that share a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    agent: String,
    branch: String,
    within: Option<Scope>,
    /// Whether a workspace that has the name of an earlier version may become this key's.
    inherits: bool,
    pub(super) kept: Vec<String>,
}

/// What a key of a service's run is good within: the same text elsewhere is another key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    pub grant: String,
    /// Who pays.
    pub account: String,
    /// Empty where there is none.
    pub repository: String,
    /// The field of the request that the text is of, such as `branch_key`.
    pub kind: &'static str,
}

impl Key {
    /// For the runs of an agent on a branch, or in another state that has a name.
    pub fn new(agent: &str, branch: &str) -> Self {
        let (agent, branch) = (agent.to_owned(), branch.to_owned());
        Self { agent, branch, within: None, inherits: false, kept: vec![] }
    }

    /// The work of two grants, for two accounts, on two repositories, or by two kinds of key is never in one place.
    #[must_use]
    pub fn within(self, scope: Scope) -> Self {
        Self { within: Some(scope), ..self }
    }

    /// Lets the key have the workspace that an earlier version kept under the same text, whatever account and kind of key
    /// that was for. The caller knows that it was for this account.
    #[must_use]
    pub fn inheriting(self) -> Self {
        Self { inherits: true, ..self }
    }

    /// Names in the workspace that stay there when the branch is checked out anew.
    #[must_use]
    pub fn keeping(self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { kept: names.into_iter().map(Into::into).collect(), ..self }
    }

    pub(super) fn name(&self) -> String {
        let Self { agent, branch, within, .. } = self;
        // A zero byte is in none of them, nor a line's end but in the last.
        digest(&match within {
            Some(Scope { grant, account, repository, kind }) => {
                format!("{agent}\0\0{grant}\n{account}\n{repository}\n{kind}\n{branch}")
            }
            None => format!("{agent}\0{branch}"),
        })
    }

    /// Returns the name that an earlier version gave to all keys with this text, where this key may inherit.
    pub(super) fn earlier_name(&self) -> Option<String> {
        let Self { agent, branch, within, inherits, .. } = self;
        let Scope { grant, repository, .. } = within.as_ref().filter(|_| *inherits)?;
        Some(digest(&format!("{agent}\0{grant}\n{repository}\n{branch}")))
    }

    pub(super) fn shown(&self) -> String {
        format!("{} on {}", self.agent, self.branch)
    }

    pub(super) fn tenant(&self, line: Option<Line>) -> Tenant {
        let of = |part: fn(&Scope) -> &str| self.within.as_ref().map(part).map(str::to_owned);
        Tenant {
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

fn digest(name: &str) -> String {
    hex::sha256(name.as_bytes())[..NAME_DIGITS].to_owned()
}

/// Of a key's name. 128 bits: no two of an installation's keys meet by accident.
pub(super) const NAME_DIGITS: usize = 32;
