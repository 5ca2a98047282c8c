//! What is welcome, as data. `config/relay.toml` says it all, and is what holds where nobody says otherwise.

use serde::{Deserialize, Serialize};

use super::pattern::Pattern;
use super::secret::Kind;
use super::seen::folded;
use crate::relay::artifact::KeptLimits;
use crate::relay::{FetchLimits, extract, quarantine};

/// The relay's settings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub extract: extract::Limits,
    pub quarantine: quarantine::Limits,
    pub kept: KeptLimits,
    #[serde(default)]
    pub fetch: FetchLimits,
    pub policy: Policy,
}

/// What becomes of which change.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    pub review_files: usize,
    pub hold_files: usize,
    pub review_file_bytes: u64,
    pub hold_file_bytes: u64,
    pub submodule: Ruling,
    pub link_outside: Ruling,
    pub new_program: Ruling,
    pub strange_path: Ruling,
    pub lfs_pointer: Ruling,
    pub claims_provenance: Ruling,
    pub strange_date: Ruling,
    pub foreign_encoding: Ruling,
    pub work_elsewhere: Ruling,
    pub secret: Ruling,
    pub paths: Vec<Paths>,
    pub secrets: Vec<Kind>,
    /// A second list, of whose work it is: the stricter of what the two say holds.
    #[serde(skip)]
    pub own_paths: Vec<Paths>,
}

/// A rule about paths.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Paths {
    pub why: String,
    pub verdict: Ruling,
    #[serde(rename = "match")]
    pub patterns: Vec<Pattern>,
}

/// What one rule says; the strictest of all that are said holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ruling {
    Push,
    Review,
    Hold,
}

/// What is wrong with a file of settings.
#[derive(Debug, thiserror::Error)]
pub enum Invalid {
    #[error("the relay's settings cannot be read")]
    Toml(#[from] toml::de::Error),
    #[error("a secret's pattern is no regular expression")]
    Pattern(#[from] regex::Error),
}

impl Config {
    /// Reads settings; what `text` does not say is as in `config/relay.toml`.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        Self::of(text.parse()?)
    }

    /// The same, of what was read.
    pub fn of(said: toml::Table) -> Result<Self, Invalid> {
        let mut whole: toml::Table = DEFAULTS.parse()?;
        overlay(&mut whole, said);
        let config: Self = toml::Value::Table(whole).try_into()?;
        super::Scanner::new(&config.policy.secrets, &[])?;
        Ok(config)
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::parse("").expect("the built-in settings are tested")
    }
}

impl Policy {
    /// What the first rule for a path says, in each list.
    pub fn on_path(&self, path: &[u8]) -> impl Iterator<Item = &Paths> {
        let path = folded(path);
        let segments: Vec<_> = path.split('/').collect();
        let is_for =
            |rule: &&Paths| rule.patterns.iter().any(|one| one.matches_segments(&segments));
        [&self.paths, &self.own_paths].map(|list| list.iter().find(is_for)).into_iter().flatten()
    }
}

fn overlay(under: &mut toml::Table, over: toml::Table) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(toml::Value::Table(under)), toml::Value::Table(over)) => overlay(under, over),
            (_, value) => drop(under.insert(key, value)),
        }
    }
}

const DEFAULTS: &str = include_str!("../../../config/relay.toml");
