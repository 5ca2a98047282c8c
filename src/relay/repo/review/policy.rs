//! What is welcome, as data. `config/relay.toml` says it all, and is what holds where nobody says otherwise.

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

/// What becomes of which change.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ReviewPolicy {
    pub review_files: usize,
    pub hold_files: usize,
    pub review_file_bytes: u64,
    pub hold_file_bytes: u64,
    pub submodule: ReviewAction,
    pub link_outside: ReviewAction,
    pub new_program: ReviewAction,
    pub strange_path: ReviewAction,
    pub lfs_pointer: ReviewAction,
    pub claims_provenance: ReviewAction,
    pub strange_date: ReviewAction,
    pub foreign_encoding: ReviewAction,
    pub work_elsewhere: ReviewAction,
    pub secret: ReviewAction,
    pub paths: Vec<PathRule>,
    pub secrets: Vec<CredentialKind>,
    /// A second list, of whose work it is: the stricter of what the two say holds.
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

/// What one rule says; the strictest of all that are said holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReviewAction {
    Push,
    Review,
    Hold,
}

/// What is wrong with a file of settings.
#[derive(Debug, thiserror::Error)]
pub enum RelayConfigError {
    #[error("the relay's settings cannot be read")]
    Toml(#[from] toml::de::Error),
    #[error("a secret's pattern is no regular expression")]
    Pattern(#[from] regex::Error),
}

impl RelayConfig {
    /// Reads settings; what `text` does not say is as in `config/relay.toml`.
    pub fn parse(text: &str) -> Result<Self, RelayConfigError> {
        Self::from_table(text.parse()?)
    }

    /// The same, of what was read.
    pub fn from_table(said: toml::Table) -> Result<Self, RelayConfigError> {
        let mut whole: toml::Table = DEFAULT_CONFIG.parse()?;
        merge_tables(&mut whole, said);
        let config: Self = toml::Value::Table(whole).try_into()?;
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
    /// What the first rule for a path says, in each list.
    pub fn rules_for_path(&self, path: &[u8]) -> impl Iterator<Item = &PathRule> {
        let path = fold_case_and_invisible(path);
        let segments: Vec<_> = path.split('/').collect();
        let is_for =
            |rule: &&PathRule| rule.patterns.iter().any(|one| one.matches_segments(&segments));
        [&self.paths, &self.own_paths].map(|list| list.iter().find(is_for)).into_iter().flatten()
    }
}

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

const DEFAULT_CONFIG: &str = include_str!("../../../../config/relay.toml");
