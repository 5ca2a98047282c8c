//! What a run's work is judged by: this host's rules, which its agent's own make stricter, and never looser.
//!
//! The two are written down with the work as one text, and whoever takes it up later judges by that, whatever this
//! host's files say by then. The text is TOML, in the words of `config/relay.toml`, with the agent's own below
//! `[agent.policy]`; its SHA-256 is in the statement.
//!
//! **Invariant:** what this host's rules say of a change, the stricter ones say, or more.

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::base::hex;
use crate::relay::repo::review::{
    CredentialKind, PathRule, RelayConfig, RelayConfigError, ReviewAction, ReviewPolicy,
    SecretScanner,
};

/// As they were when the run's work came out. They are read when they are needed: a row whose rules this version does not
/// know is one that cannot be judged, and no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReviewRules {
    text: String,
}

/// An agent's own rules, as its file says them: the keys are those of `config/relay.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AgentReviewRules {
    pub policy: PolicyTightening,
}

/// As much of a policy as an agent has of its own. What is not said here is as this host has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyTightening {
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
    /// A list of its own: the first that matches a path counts beside the first of the host's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathRule>,
    /// Beside the host's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<CredentialKind>,
}

#[derive(Serialize)]
struct StoredRules<'a> {
    policy: &'a ReviewPolicy,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<&'a AgentReviewRules>,
}

impl ReviewRules {
    /// This host's, and those of the agent, if it has some.
    pub fn new(host: &ReviewPolicy, agent: Option<&AgentReviewRules>) -> Self {
        let written = toml::to_string(&StoredRules { policy: host, agent });
        Self { text: written.expect("a policy is read from TOML, and can be written as such") }
    }

    /// What judges.
    ///
    /// # Errors
    /// Another version has written something that this one does not know, or the patterns of both are too large together.
    pub fn parse_policy(&self) -> Result<ReviewPolicy, RelayConfigError> {
        let (host, own) = self.parse_parts()?;
        let policy = own.unwrap_or_default().policy.tighten(&host);
        SecretScanner::new(&policy.secrets, &[])?;
        Ok(policy)
    }

    /// The same agent's, with another host's.
    ///
    /// # Errors
    /// As [`ReviewRules::parse_policy`].
    pub fn with_host_policy(&self, host: &ReviewPolicy) -> Result<Self, RelayConfigError> {
        let (_, own) = self.parse_parts()?;
        Ok(Self::new(host, own.as_ref()))
    }

    /// For statements and records: the SHA-256 of the text.
    pub fn digest(&self) -> String {
        hex::sha256_hex(self.text.as_bytes())
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// What an earlier version did not know to say is as in `config/relay.toml`.
    fn parse_parts(&self) -> Result<(ReviewPolicy, Option<AgentReviewRules>), RelayConfigError> {
        let mut said: Table = self.text.parse()?;
        let own = said.remove("agent").map(Value::try_into).transpose()?;
        Ok((RelayConfig::from_table(said)?.policy, own))
    }
}

impl PolicyTightening {
    /// A host's rules, with these: of each, what is stricter.
    pub fn tighten(&self, host: &ReviewPolicy) -> ReviewPolicy {
        let Self { paths, secrets, .. } = self;
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
            paths: host.paths.clone(),
            secrets: host.secrets.iter().chain(added).cloned().collect(),
            own_paths: paths.clone(),
        }
    }

    /// The key of a rule that is to push, which is looser than any host's, or no stricter.
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

    /// The names of the rules that are said here.
    pub fn rule_names(&self) -> Vec<String> {
        to_table(self).into_iter().map(|(name, _)| name).collect()
    }

    /// Those of them that are looser than the host's, and so change nothing.
    pub fn ineffective_rules(&self, host: &ReviewPolicy) -> Vec<String> {
        let holds = to_table(&self.tighten(host));
        let is_idle = |(name, said): &(String, Value)| !said.is_array() && holds[name] != *said;
        to_table(self).into_iter().filter(is_idle).map(|(name, _)| name).collect()
    }
}

fn to_table(policy: &impl Serialize) -> Table {
    Table::try_from(policy).expect("a policy is read from TOML, and can be written as such")
}

fn min_limit<T: Ord + Copy>(own: Option<T>, host: T) -> T {
    own.map_or(host, |own| own.min(host))
}

fn max_action(own: Option<ReviewAction>, host: ReviewAction) -> ReviewAction {
    own.map_or(host, |own| own.max(host))
}
