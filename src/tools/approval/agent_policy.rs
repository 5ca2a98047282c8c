//! The policy of an agent: what people say about its tools while the service runs, beside the configuration.
//!
//! The policy is the layer `approval`. Every other layer must allow a call, too, so a policy can only deny calls, or let
//! a person be asked about them. Each call is judged by the policy of that moment, when it is made and again when it
//! begins.
//!
//! **Invariant:** a policy is replaced only by a person who names the digest of the policy that is replaced. Of two
//! people who change it at the same time, the second one reads it again.

use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};
use serde::{Deserialize, Serialize};

use super::standing_rows::is_revoked;
use super::store::ApprovalStore;
use crate::base::canonical;
use crate::base::db::DatabaseError;
use crate::base::star_pattern::matches_star_pattern;

/// What people say about the tools of an agent. The default says nothing: every call is left to the other layers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentToolPolicy {
    pub security: PolicySecurity,
    pub ask: PolicyAsk,
    /// The tools that [`PolicySecurity::Allowlist`] allows; a `*` stands for any text.
    pub allowlist: Vec<String>,
}

/// The tools of an agent that a policy allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicySecurity {
    /// No tool.
    Deny,
    /// The tools on the list.
    Allowlist,
    /// All tools.
    #[default]
    Full,
}

/// The calls that a policy lets a person be asked about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyAsk {
    /// None.
    #[default]
    Off,
    /// The calls of tools that are not on the list.
    OnMiss,
    /// Every call that the policy does not deny.
    Always,
}

/// The answer of a policy about a tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyVerdict {
    Allow,
    /// A person is asked, unless a standing approval allows the call.
    AskOnMiss,
    /// A person is asked about each call. No standing approval counts.
    AskAlways,
    Deny,
}

/// A policy that contradicts itself, or that is too large.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` is invalid: {problem}")]
pub struct AgentPolicyError {
    pub field: &'static str,
    pub problem: String,
}

/// The policy of an agent as the store keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentPolicyRow {
    pub policy: AgentToolPolicy,
    /// The time of the last change, in milliseconds since 1970; `None` for a policy that no person has set.
    pub changed_ms: Option<i64>,
    /// The grant that has set the policy.
    pub by: Option<String>,
}

/// The result of replacing a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyChange {
    Replaced(AgentPolicyRow),
    /// Another policy than the named one is in force.
    OtherBase,
    /// The grant that sets the policy was revoked.
    GrantRevoked,
}

impl AgentToolPolicy {
    /// Checks that the parts of the policy fit each other.
    ///
    /// # Errors
    /// Returns the first part that has no effect or is too large.
    pub fn check_parts(&self) -> Result<(), AgentPolicyError> {
        let wrong =
            |field, problem: &str| Err(AgentPolicyError { field, problem: problem.to_owned() });
        let is_list = self.security == PolicySecurity::Allowlist;
        if !is_list && !self.allowlist.is_empty() {
            return wrong("allowlist", "it has no effect without `security` `allowlist`");
        }
        if !is_list && self.ask == PolicyAsk::OnMiss {
            return wrong("ask", "`on_miss` has no effect without `security` `allowlist`");
        }
        if self.security == PolicySecurity::Deny && self.ask != PolicyAsk::Off {
            return wrong("ask", "with `security` `deny` no call can be asked about; give `off`");
        }
        if self.allowlist.len() > MAX_ALLOWLIST_NAMES {
            let problem = format!("it has more than {MAX_ALLOWLIST_NAMES} names; use `*`");
            return Err(AgentPolicyError { field: "allowlist", problem });
        }
        if let Some(name) = self.allowlist.iter().find(|name| !is_tool_pattern(name)) {
            let name = name.escape_debug();
            let problem = format!(
                "`{name}` is not the name of a tool: give 1 to {MAX_PATTERN_BYTES} small letters, digits, `_` and `-`, and `*` for any text"
            );
            return Err(AgentPolicyError { field: "allowlist", problem });
        }
        Ok(())
    }

    pub fn judge_tool(&self, tool: &str) -> PolicyVerdict {
        let is_listed = || self.allowlist.iter().any(|name| matches_star_pattern(name, tool));
        match (self.security, self.ask) {
            (PolicySecurity::Deny, _) => PolicyVerdict::Deny,
            (PolicySecurity::Allowlist, ask) if !is_listed() => match ask {
                PolicyAsk::OnMiss => PolicyVerdict::AskOnMiss,
                PolicyAsk::Off | PolicyAsk::Always => PolicyVerdict::Deny,
            },
            (_, PolicyAsk::Always) => PolicyVerdict::AskAlways,
            (_, PolicyAsk::Off | PolicyAsk::OnMiss) => PolicyVerdict::Allow,
        }
    }

    /// Returns the digest that a person names who replaces the policy.
    pub fn digest(&self) -> String {
        canonical::digest("agent tool policy 1", self).expect("a policy has string keys")
    }
}

impl ApprovalStore {
    /// Returns the policy of an agent, by its name in the catalog.
    ///
    /// # Errors
    /// Returns an error if the database cannot be read.
    pub async fn find_agent_policy(&self, agent: &str) -> Result<AgentPolicyRow, DatabaseError> {
        let agent = agent.to_owned();
        self.database.read_committed(move |view| find_row(view, &agent)).await
    }

    /// Replaces the policy of an agent, if `base` is the digest of the policy in force. The caller has checked the parts of
    /// the new one.
    ///
    /// # Errors
    /// Returns an error if the database cannot be written; then the policy stays as it was.
    pub async fn replace_agent_policy(
        &self,
        (agent, base): (&str, &str),
        policy: AgentToolPolicy,
        by: &str,
    ) -> Result<PolicyChange, DatabaseError> {
        let (agent, base, now) = (agent.to_owned(), base.to_owned(), self.now_ms());
        let by = by.to_owned();
        let replace = move |change: &Transaction<'_>| {
            if is_revoked(change, &by)? {
                return Ok(PolicyChange::GrantRevoked);
            }
            if find_row(change, &agent)?.policy.digest() != base {
                return Ok(PolicyChange::OtherBase);
            }
            let row = AgentPolicyRow { policy, changed_ms: Some(now), by: Some(by) };
            let text = serde_json::to_string(&row.policy)
                .map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
            change.execute(
                "INSERT OR REPLACE INTO agent_policy (agent, policy, changed, changed_by) VALUES (?1, ?2, ?3, ?4)",
                params![agent, text, now, row.by],
            )?;
            Ok(PolicyChange::Replaced(row))
        };
        self.database.write_in_transaction(replace).await
    }
}

fn find_row(view: &Connection, agent: &str) -> rusqlite::Result<AgentPolicyRow> {
    let query = "SELECT policy, changed, changed_by FROM agent_policy WHERE agent = ?1";
    let found = view.prepare_cached(query)?.query_row([agent], read_row).optional()?;
    Ok(found.unwrap_or_default())
}

fn read_row(row: &Row<'_>) -> rusqlite::Result<AgentPolicyRow> {
    let policy = serde_json::from_str(row.get_ref("policy")?.as_str()?)
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(0, Type::Text, error.into()))?;
    Ok(AgentPolicyRow { policy, changed_ms: row.get("changed")?, by: row.get("changed_by")? })
}

/// Returns true if a text can match the name of a tool.
fn is_tool_pattern(text: &str) -> bool {
    let is_plain = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-' | b'*')
    };
    (1..=MAX_PATTERN_BYTES).contains(&text.len()) && text.bytes().all(is_plain)
}

/// The rule in the refusals and questions of a policy. An operator's rule cannot have the name: it has a `_`.
pub const AGENT_POLICY_RULE: &str = "agent_policy";

/// The most names in an allowlist. Our choice: each call of a tool reads them.
const MAX_ALLOWLIST_NAMES: usize = 256;

/// The longest name in an allowlist, in bytes: that of a tool.
const MAX_PATTERN_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(security: PolicySecurity, ask: PolicyAsk, allowlist: &[&str]) -> AgentToolPolicy {
        let allowlist = allowlist.iter().map(|name| (*name).to_owned()).collect();
        AgentToolPolicy { security, ask, allowlist }
    }

    /// T4: what each policy says about a tool on the list and one that is not.
    #[test]
    fn each_policy_judges_listed_and_other_tools() {
        use PolicyAsk::{Always, Off, OnMiss};
        use PolicySecurity::{Allowlist, Deny, Full};
        use PolicyVerdict as Verdict;
        for (security, ask, listed, other) in [
            (Deny, Off, Verdict::Deny, Verdict::Deny),
            (Allowlist, Off, Verdict::Allow, Verdict::Deny),
            (Allowlist, OnMiss, Verdict::Allow, Verdict::AskOnMiss),
            (Allowlist, Always, Verdict::AskAlways, Verdict::Deny),
            (Full, Off, Verdict::Allow, Verdict::Allow),
            (Full, Always, Verdict::AskAlways, Verdict::AskAlways),
        ] {
            let listing = if security == Allowlist { &["text__*"][..] } else { &[] };
            let policy = policy(security, ask, listing);
            assert_eq!(policy.check_parts(), Ok(()), "{policy:?}");
            assert_eq!(policy.judge_tool("text__count"), listed, "{policy:?}");
            assert_eq!(policy.judge_tool("mail__send"), other, "{policy:?}");
        }
        // An empty list allows nothing.
        let empty = policy(Allowlist, Off, &[]);
        assert_eq!((empty.check_parts(), empty.judge_tool("a__b")), (Ok(()), PolicyVerdict::Deny));
    }

    /// T4: a part without an effect, a name that no tool has and a list that is too long are refused.
    #[test]
    fn a_contradictory_policy_is_refused() {
        use PolicyAsk::{Always, Off, OnMiss};
        use PolicySecurity::{Allowlist, Deny, Full};
        let long = "a".repeat(MAX_PATTERN_BYTES + 1);
        let many = vec!["a__b"; MAX_ALLOWLIST_NAMES + 1];
        for (policy, field) in [
            (policy(Full, Off, &["a__b"]), "allowlist"),
            (policy(Deny, Off, &["a__b"]), "allowlist"),
            (policy(Full, OnMiss, &[]), "ask"),
            (policy(Deny, OnMiss, &[]), "ask"),
            (policy(Deny, Always, &[]), "ask"),
            (policy(Allowlist, Off, &[""]), "allowlist"),
            (policy(Allowlist, Off, &["a b"]), "allowlist"),
            (policy(Allowlist, Off, &["A__b"]), "allowlist"),
            (policy(Allowlist, Off, &[&long]), "allowlist"),
            (policy(Allowlist, Off, &many), "allowlist"),
        ] {
            assert_eq!(policy.check_parts().map_err(|error| error.field), Err(field), "{policy:?}");
        }
    }
}
