//! The agents that can be asked for by name: each is a file, and each file is what an operator says about one agent:
//! its program, what it may use, which models, and what it may spend.
//!
//! [`definition`] is what a file can say; [`parse`] parses it, and says where it is wrong; [`placeholders`] fills in
//! what is known only when a run begins; [`policy_overlay`] lays an agent's own policy over its gateway's;
//! [`availability`] says whether an agent can run here; [`AgentSummary`] is an agent as others are told of it.
//!
//! **Invariant:** a catalog is whole or is not there. Whoever reads one anew keeps the old one until the new one is
//! good.

pub mod availability;
pub mod definition;
mod parse;
pub mod placeholders;
pub mod policy_overlay;
pub mod summary;
mod validate;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

pub use definition::{
    AgentDefinition, AgentStreamFormat, DriverChoice, SandboxLifetime, WorkspaceSetup,
};
pub use parse::CatalogError;
pub use summary::AgentSummary;

/// All agents, by their names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentCatalog {
    entries: BTreeMap<String, Arc<AgentDefinition>>,
}

/// There is no such agent.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no agent `{asked}`{}", quote_names(known))]
pub struct UnknownAgentError {
    asked: String,
    known: Vec<String>,
}

impl UnknownAgentError {
    /// As those are told who may know some of the others only.
    #[must_use]
    pub fn redact_names(mut self, may_know: impl Fn(&str) -> bool) -> Self {
        self.known.retain(|name| may_know(name));
        self
    }
}

impl AgentCatalog {
    /// The agents that this program brings along.
    pub fn builtin() -> Self {
        let entries = BUILTIN_FILES.iter().map(|(name, text)| {
            let entry =
                parse::parse_definition(Path::new(name), text).expect("a test reads each of them");
            (entry.name.clone(), Arc::new(entry))
        });
        Self { entries: entries.collect() }
    }

    /// The agents of a directory, and no others: what this program brings along is not in it. Each file whose name ends
    /// in `.toml` is one agent.
    ///
    /// # Errors
    /// The first file that is no agent: where, and what would be right. An agent that two files have.
    pub fn load_directory(directory: &Path) -> Result<Self, CatalogError> {
        let unreadable = |source| CatalogError::Unreadable { path: directory.to_owned(), source };
        let listed = fs::read_dir(directory).map_err(unreadable)?;
        let mut paths = listed
            .map(|file| file.map(|file| file.path()))
            .collect::<Result<Vec<_>, _>>()
            .map_err(unreadable)?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
        paths.sort();
        let mut entries = BTreeMap::new();
        for path in paths {
            let entry = parse::load_file(&path)?;
            // A name belongs to one file, but where a file system knows no cases.
            entries.insert(entry.name.clone(), Arc::new(entry));
        }
        if entries.is_empty() {
            return Err(CatalogError::Empty(directory.to_owned()));
        }
        Ok(Self { entries })
    }

    /// The agent of a name.
    ///
    /// # Errors
    /// There is none.
    pub fn find_agent(&self, name: &str) -> Result<&Arc<AgentDefinition>, UnknownAgentError> {
        self.entries.get(name).ok_or_else(|| {
            let known = self.entries.keys().cloned().collect();
            UnknownAgentError { asked: name.to_owned(), known }
        })
    }

    /// All agents, in the order of their names.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = &Arc<AgentDefinition>> {
        self.entries.values()
    }
}

fn quote_names(known: &[String]) -> String {
    let known: Vec<_> = known.iter().map(|name| format!("`{name}`")).collect();
    if known.is_empty() { String::new() } else { format!("; there is {}", known.join(", ")) }
}

/// The file of an agent that this program brings along, as an example of one.
pub fn builtin_file(name: &str) -> Option<&'static str> {
    let file = definition::definition_file_name(name);
    BUILTIN_FILES.iter().find(|(known, _)| *known == file).map(|(_, text)| *text)
}

/// `config/agents`, each file named after its agent.
const BUILTIN_FILES: &[(&str, &str)] = &[
    ("sandbox-agent.toml", include_str!("../../config/agents/sandbox-agent.toml")),
    ("sandbox-openclaw.toml", include_str!("../../config/agents/sandbox-openclaw.toml")),
];
