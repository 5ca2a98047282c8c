//! The review policy as data. `config/relay.toml` has all defaults, which apply to every key that is not set.

use serde::{Deserialize, Serialize};

use super::normalize::fold_case_and_invisible;
use super::pattern::PathPattern;
use super::secret::CredentialKind;
use crate::relay::repo::artifact::RetentionLimits;
use crate::relay::repo::{FetchLimits, extract_commands, quarantine};

/// The relay's settings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RelayConfig {
    pub extract: extract_commands::ExtractLimits,
    pub quarantine: quarantine::QuarantineLimits,
    pub kept: RetentionLimits,
    #[serde(default)]
    pub fetch: FetchLimits,
    pub policy: ReviewPolicy,
}

/// The limits and the action of each rule.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ReviewPolicy {
    /// Work that changes more paths than this is pushed for review.
    pub review_files: usize,
    /// Work that changes more paths than this is held.
    pub hold_files: usize,
    /// Work with a larger file than this is pushed for review.
    pub review_file_bytes: u64,
    /// Work with a larger file than this is held.
    pub hold_file_bytes: u64,
    /// The action for a submodule, which is another repository.
    pub submodule: ReviewAction,
    /// The action for a symbolic link out of the repository.
    pub link_outside: ReviewAction,
    /// The action for a file that becomes executable.
    pub new_program: ReviewAction,
    /// The action for a path that is not UTF-8, or has invisible characters.
    pub strange_path: ReviewAction,
    /// The action for a pointer of Git LFS, whose large file is not in the repository.
    pub lfs_pointer: ReviewAction,
    /// The action for a commit that seems to be from the relay: it has a trailer that only the relay writes, or an author
    /// with the relay's name or address, or with control characters.
    pub claims_provenance: ReviewAction,
    /// The action for a commit with a date in the future or before 2000, or with an invalid time zone.
    pub strange_date: ReviewAction,
    /// The action for a commit whose author or message is not UTF-8.
    pub foreign_encoding: ReviewAction,
    /// The action for work whose checkout is at another commit than its branch: some of the work may not be delivered.
    pub work_elsewhere: ReviewAction,
    /// The action for a file or a commit with a credential.
    pub secret: ReviewAction,
    /// The rules about paths. The first rule that matches a path decides.
    pub paths: Vec<PathRule>,
    /// The kinds of credentials that the review looks for.
    pub secrets: Vec<CredentialKind>,
    /// The agent's own list of path rules. The stricter action of both lists counts.
    #[serde(skip)]
    pub own_paths: Vec<PathRule>,
}

/// A rule about paths.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PathRule {
    pub why: String,
    pub verdict: ReviewAction,
    #[serde(rename = "match")]
    pub patterns: Vec<PathPattern>,
}

/// The action of one rule. The strictest action of all rules that apply counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReviewAction {
    Push,
    Review,
    Hold,
}

/// An error of a settings file.
#[derive(Debug, thiserror::Error)]
pub enum RelayConfigError {
    #[error("cannot read the relay's settings")]
    Toml(#[from] toml::de::Error),
    #[error("a secret's pattern is no regular expression")]
    Pattern(#[from] regex::Error),
}

impl RelayConfig {
    /// Parses settings. Keys that `text` does not set are as in `config/relay.toml`.
    pub fn parse(text: &str) -> Result<Self, RelayConfigError> {
        Self::from_table(text.parse()?)
    }

    /// Builds settings from a parsed table. Keys that the table does not set are as in `config/relay.toml`.
    pub fn from_table(overrides: toml::Table) -> Result<Self, RelayConfigError> {
        let mut merged: toml::Table = DEFAULT_CONFIG.parse()?;
        // Tables are merged key by key. A list replaces the default list as a whole.
        merge_tables(&mut merged, overrides);
        let config: Self = toml::Value::Table(merged).try_into()?;
        // The patterns are compiled only to refuse a bad pattern now, and not at the first review.
        super::SecretScanner::new(&config.policy.secrets, &[])?;
        Ok(config)
    }
}

impl Default for RelayConfig {
    fn default() -> Self {
        Self::parse("").expect("the built-in settings are tested")
    }
}

impl ReviewPolicy {
    /// Returns the first rule that matches a path in each of the two lists.
    pub fn rules_for_path(&self, path: &[u8]) -> impl Iterator<Item = &PathRule> {
        // The path is folded once here, and not once for each pattern.
        let path = fold_case_and_invisible(path);
        let segments: Vec<_> = path.split('/').collect();
        let is_for = |rule: &&PathRule| {
            rule.patterns.iter().any(|pattern| pattern.matches_segments(&segments))
        };
        [&self.paths, &self.own_paths].map(|list| list.iter().find(is_for)).into_iter().flatten()
    }
}

/// Lays `over` on top of `under`, table by table.
fn merge_tables(under: &mut toml::Table, over: toml::Table) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(toml::Value::Table(under)), toml::Value::Table(over)) => {
                merge_tables(under, over);
            }
            (_, value) => drop(under.insert(key, value)),
        }
    }
}

/// The default settings.
const DEFAULT_CONFIG: &str = include_str!("../../../../config/relay.toml");
