//! Review rules for a run's work: this host's rules, which the agent's own rules can make stricter, and never looser.
//!
//! Both are stored with the work as one text. A later attempt reviews by that text, even if this host's files have
//! changed. The text is TOML with the keys of `config/relay.toml`, and the agent's rules are below `[agent.policy]`.
//! The statement names the text's SHA-256.
//!
//! **Invariant:** the combined rules give each change at least the action that this host's rules give.

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::base::digest::sha256_hex;
use crate::relay::repo::review::{
    CredentialKind, PathRule, RelayConfig, RelayConfigError, ReviewAction, ReviewPolicy,
    SecretScanner,
};

/// The stored rules of a work, as they were when the work came out. The text is parsed only when it is needed. So a row
/// whose rules this version cannot parse cannot be reviewed, but everything else works.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReviewRules {
    text: String,
}

/// An agent's own rules, as in the agent's file, with the keys of `config/relay.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AgentReviewRules {
    pub policy: AgentReviewPolicy,
}

/// The part of a policy that an agent sets. This host's value applies to every absent key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AgentReviewPolicy {
    pub review_files: Option<usize>,
    pub hold_files: Option<usize>,
    pub review_file_bytes: Option<u64>,
    pub hold_file_bytes: Option<u64>,
    pub submodule: Option<ReviewAction>,
    pub link_outside: Option<ReviewAction>,
    pub new_program: Option<ReviewAction>,
    pub strange_path: Option<ReviewAction>,
    pub lfs_pointer: Option<ReviewAction>,
    pub claims_provenance: Option<ReviewAction>,
    pub strange_date: Option<ReviewAction>,
    pub foreign_encoding: Option<ReviewAction>,
    pub work_elsewhere: Option<ReviewAction>,
    pub secret: Option<ReviewAction>,
    /// The agent's own list of path rules. Its first match counts, beside the first match of the host's list.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathRule>,
    /// Kinds of credentials to scan for, in addition to the host's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<CredentialKind>,
}

/// The form of the stored text.
#[derive(Serialize)]
struct StoredRules<'a> {
    policy: &'a ReviewPolicy,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<&'a AgentReviewRules>,
}

impl ReviewRules {
    /// Combines this host's policy and the agent's rules, if there are any, into one text.
    pub fn new(host: &ReviewPolicy, agent: Option<&AgentReviewRules>) -> Self {
        let written = toml::to_string(&StoredRules { policy: host, agent });
        Self { text: written.expect("a policy is read from TOML, and can be written as such") }
    }

    /// Parses the text into the policy that reviews the work.
    ///
    /// # Errors
    /// Returns an error if another version wrote a key that this version does not know, or if the patterns of both
    /// lists together are too large.
    pub fn parse_policy(&self) -> Result<ReviewPolicy, RelayConfigError> {
        let (host, agent_rules) = self.parse_parts()?;
        let policy = agent_rules.unwrap_or_default().policy.tighten(&host);
        // The scanner is built only to find out whether all patterns together stay within the limit.
        SecretScanner::new(&policy.secrets, &[])?;
        Ok(policy)
    }

    /// Replaces the host's policy by `host`, and keeps the agent's rules.
    ///
    /// # Errors
    /// Returns the errors of [`ReviewRules::parse_policy`], except the one for large patterns.
    pub fn with_host_policy(&self, host: &ReviewPolicy) -> Result<Self, RelayConfigError> {
        let (_, agent_rules) = self.parse_parts()?;
        Ok(Self::new(host, agent_rules.as_ref()))
    }

    /// Returns the SHA-256 of the text in hex, for statements and audit records.
    pub fn digest(&self) -> String {
        sha256_hex(self.text.as_bytes())
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Parses the host's policy and the agent's rules. Keys that an earlier version did not have get their default
    /// value.
    fn parse_parts(&self) -> Result<(ReviewPolicy, Option<AgentReviewRules>), RelayConfigError> {
        let mut rules: Table = self.text.parse()?;
        // The key is removed before the rest is parsed, because the host's settings have no such key.
        let agent_rules = rules.remove("agent").map(Value::try_into).transpose()?;
        Ok((RelayConfig::from_table(rules)?.policy, agent_rules))
    }
}

impl AgentReviewPolicy {
    /// Combines a host's policy with these rules, and takes the stricter value of each key.
    pub fn tighten(&self, host: &ReviewPolicy) -> ReviewPolicy {
        let Self { paths, secrets, .. } = self;
        // A kind that both lists have counts once.
        let added = secrets.iter().filter(|kind| !host.secrets.contains(kind));
        ReviewPolicy {
            review_files: min_limit(self.review_files, host.review_files),
            hold_files: min_limit(self.hold_files, host.hold_files),
            review_file_bytes: min_limit(self.review_file_bytes, host.review_file_bytes),
            hold_file_bytes: min_limit(self.hold_file_bytes, host.hold_file_bytes),
            submodule: max_action(self.submodule, host.submodule),
            link_outside: max_action(self.link_outside, host.link_outside),
            new_program: max_action(self.new_program, host.new_program),
            strange_path: max_action(self.strange_path, host.strange_path),
            lfs_pointer: max_action(self.lfs_pointer, host.lfs_pointer),
            claims_provenance: max_action(self.claims_provenance, host.claims_provenance),
            strange_date: max_action(self.strange_date, host.strange_date),
            foreign_encoding: max_action(self.foreign_encoding, host.foreign_encoding),
            work_elsewhere: max_action(self.work_elsewhere, host.work_elsewhere),
            secret: max_action(self.secret, host.secret),
            // The host's list stays as it is. The agent's list is a second one, so that it cannot shadow a rule of the
            // host.
            paths: host.paths.clone(),
            secrets: host.secrets.iter().chain(added).cloned().collect(),
            own_paths: paths.clone(),
        }
    }

    /// Returns the first key whose action is `push`. No host has a looser action, so the agent's key has no effect.
    pub fn loosened_key(&self) -> Option<&'static str> {
        let rulings = [
            ("relay.policy.submodule", self.submodule),
            ("relay.policy.link_outside", self.link_outside),
            ("relay.policy.new_program", self.new_program),
            ("relay.policy.strange_path", self.strange_path),
            ("relay.policy.lfs_pointer", self.lfs_pointer),
            ("relay.policy.claims_provenance", self.claims_provenance),
            ("relay.policy.strange_date", self.strange_date),
            ("relay.policy.foreign_encoding", self.foreign_encoding),
            ("relay.policy.work_elsewhere", self.work_elsewhere),
            ("relay.policy.secret", self.secret),
        ];
        rulings
            .into_iter()
            .find(|(_, ruling)| *ruling == Some(ReviewAction::Push))
            .map(|(key, _)| key)
    }

    /// Returns the names of the keys that are set here.
    pub fn rule_names(&self) -> Vec<String> {
        to_table(self).into_iter().map(|(name, _)| name).collect()
    }

    /// Returns the names of the keys that have no effect, because the host's value is stricter.
    pub fn ineffective_rules(&self, host: &ReviewPolicy) -> Vec<String> {
        let holds = to_table(&self.tighten(host));
        // Lists are never without effect: their items are added to the host's.
        let is_idle = |(name, value): &(String, Value)| !value.is_array() && holds[name] != *value;
        to_table(self).into_iter().filter(is_idle).map(|(name, _)| name).collect()
    }
}

/// Converts a policy to a TOML table.
fn to_table(policy: &impl Serialize) -> Table {
    Table::try_from(policy).expect("a policy is read from TOML, and can be written as such")
}

/// Returns the smaller limit, which is the stricter one.
fn min_limit<T: Ord + Copy>(agent: Option<T>, host: T) -> T {
    agent.map_or(host, |agent| agent.min(host))
}

/// Returns the stricter action. Actions are ordered by strictness.
fn max_action(agent: Option<ReviewAction>, host: ReviewAction) -> ReviewAction {
    agent.map_or(host, |agent| agent.max(host))
}
