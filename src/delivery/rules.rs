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
use crate::relay::judge::{Config, Invalid, Kind, Paths, Policy, Ruling, Scanner};

/// As they were when the run's work came out. They are read when they are needed: a row whose rules this version does not
/// know is one that cannot be judged, and no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rules {
    text: String,
}

/// An agent's own rules, as its file says them: the keys are those of `config/relay.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Own {
    pub policy: Stricter,
}

/// As much of a policy as an agent has of its own. What is not said here is as this host has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Stricter {
    pub review_files: Option<usize>,
    pub hold_files: Option<usize>,
    pub review_file_bytes: Option<u64>,
    pub hold_file_bytes: Option<u64>,
    pub submodule: Option<Ruling>,
    pub link_outside: Option<Ruling>,
    pub new_program: Option<Ruling>,
    pub strange_path: Option<Ruling>,
    pub lfs_pointer: Option<Ruling>,
    pub claims_provenance: Option<Ruling>,
    pub strange_date: Option<Ruling>,
    pub foreign_encoding: Option<Ruling>,
    pub work_elsewhere: Option<Ruling>,
    pub secret: Option<Ruling>,
    /// A list of its own: the first that matches a path counts beside the first of the host's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<Paths>,
    /// Beside the host's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<Kind>,
}

#[derive(Serialize)]
struct Written<'a> {
    policy: &'a Policy,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<&'a Own>,
}

impl Rules {
    /// This host's, and those of the agent, if it has some.
    pub fn new(host: &Policy, agent: Option<&Own>) -> Self {
        let written = toml::to_string(&Written { policy: host, agent });
        Self { text: written.expect("a policy is read from TOML, and can be written as such") }
    }

    /// What judges.
    ///
    /// # Errors
    /// Another version has written something that this one does not know, or the patterns of both are too large together.
    pub fn policy(&self) -> Result<Policy, Invalid> {
        let (host, own) = self.parts()?;
        let policy = own.unwrap_or_default().policy.over(&host);
        Scanner::new(&policy.secrets, &[])?;
        Ok(policy)
    }

    /// The same agent's, with another host's.
    ///
    /// # Errors
    /// As [`Rules::policy`].
    pub fn under(&self, host: &Policy) -> Result<Self, Invalid> {
        let (_, own) = self.parts()?;
        Ok(Self::new(host, own.as_ref()))
    }

    /// For statements and records: the SHA-256 of the text.
    pub fn digest(&self) -> String {
        hex::sha256(self.text.as_bytes())
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// What an earlier version did not know to say is as in `config/relay.toml`.
    fn parts(&self) -> Result<(Policy, Option<Own>), Invalid> {
        let mut said: Table = self.text.parse()?;
        let own = said.remove("agent").map(Value::try_into).transpose()?;
        Ok((Config::of(said)?.policy, own))
    }
}

impl Stricter {
    /// A host's rules, with these: of each, what is stricter.
    pub fn over(&self, host: &Policy) -> Policy {
        let Self { paths, secrets, .. } = self;
        let added = secrets.iter().filter(|kind| !host.secrets.contains(kind));
        Policy {
            review_files: least(self.review_files, host.review_files),
            hold_files: least(self.hold_files, host.hold_files),
            review_file_bytes: least(self.review_file_bytes, host.review_file_bytes),
            hold_file_bytes: least(self.hold_file_bytes, host.hold_file_bytes),
            submodule: strictest(self.submodule, host.submodule),
            link_outside: strictest(self.link_outside, host.link_outside),
            new_program: strictest(self.new_program, host.new_program),
            strange_path: strictest(self.strange_path, host.strange_path),
            lfs_pointer: strictest(self.lfs_pointer, host.lfs_pointer),
            claims_provenance: strictest(self.claims_provenance, host.claims_provenance),
            strange_date: strictest(self.strange_date, host.strange_date),
            foreign_encoding: strictest(self.foreign_encoding, host.foreign_encoding),
            work_elsewhere: strictest(self.work_elsewhere, host.work_elsewhere),
            secret: strictest(self.secret, host.secret),
            paths: host.paths.clone(),
            secrets: host.secrets.iter().chain(added).cloned().collect(),
            own_paths: paths.clone(),
        }
    }

    /// The key of a rule that is to push, which is looser than any host's, or no stricter.
    pub fn pushed(&self) -> Option<&'static str> {
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
        rulings.into_iter().find(|(_, ruling)| *ruling == Some(Ruling::Push)).map(|(key, _)| key)
    }

    /// The names of the rules that are said here.
    pub fn names(&self) -> Vec<String> {
        table(self).into_iter().map(|(name, _)| name).collect()
    }

    /// Those of them that are looser than the host's, and so change nothing.
    pub fn idle(&self, host: &Policy) -> Vec<String> {
        let holds = table(&self.over(host));
        let is_idle = |(name, said): &(String, Value)| !said.is_array() && holds[name] != *said;
        table(self).into_iter().filter(is_idle).map(|(name, _)| name).collect()
    }
}

fn table(policy: &impl Serialize) -> Table {
    Table::try_from(policy).expect("a policy is read from TOML, and can be written as such")
}

fn least<T: Ord + Copy>(own: Option<T>, host: T) -> T {
    own.map_or(host, |own| own.min(host))
}

fn strictest(own: Option<Ruling>, host: Ruling) -> Ruling {
    own.map_or(host, |own| own.max(host))
}
