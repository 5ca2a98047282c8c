//! The agents that can be asked for by name: each is a file, read as it was when this program was built.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use crate::sandbox::spec::Wanted;

/// One agent.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    pub name: String,
    pub description: String,
    /// Executed as it stands.
    pub argv: Vec<String>,
    /// Where our own agent's program is shown in the sandbox; none where the agent is of another make.
    pub program: Option<PathBuf>,
    /// Where in the workspace the agent finds what it is to answer.
    pub conversation: PathBuf,
    /// The image it needs, if it needs one.
    pub image: Option<String>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub limits: Wanted,
}

/// There is no such agent.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no agent `{asked}`; there is {known}")]
pub struct Unknown {
    asked: String,
    known: String,
}

/// All agents.
pub fn entries() -> impl Iterator<Item = Entry> {
    FILES.iter().map(|text| toml::from_str(text).expect("a test reads each of them"))
}

/// The agent of a name.
///
/// # Errors
/// There is none.
pub fn find(name: &str) -> Result<Entry, Unknown> {
    entries().find(|entry| entry.name == name).ok_or_else(|| {
        let known: Vec<_> = entries().map(|entry| format!("`{}`", entry.name)).collect();
        Unknown { asked: name.to_owned(), known: known.join(", ") }
    })
}

/// `config/agents`, each file named after its agent.
const FILES: &[&str] = &[include_str!("../config/agents/sandbox-agent.toml")];
