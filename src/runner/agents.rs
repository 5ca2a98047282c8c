//! The catalog of agents that a request can name. Each agent has a file, in which the operator defines the agent's
//! program, models, permissions and budget.
//!
//! [`definition`] has the types of a file. [`parse`] parses a file and locates its errors. [`placeholders`] inserts
//! values that are known only when a run begins. [`policy_overlay`] lays an agent's own policy over its gateway's
//! policy. [`availability`] checks that an agent can run on this host. [`AgentSummary`] is the description for clients.
//!
//! **Invariant:** a catalog contains every file of its directory, or does not exist. A process that reloads the catalog
//! keeps the old catalog until the new catalog is valid.

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

/// The agents by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentCatalog {
    entries: BTreeMap<String, Arc<AgentDefinition>>,
}

/// The error of a name that no agent has.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no agent `{name}`{}", quote_names(known))]
pub struct UnknownAgentError {
    name: String,
    known: Vec<String>,
}

impl UnknownAgentError {
    /// Removes the names that the error's reader may not know from the list of known agents.
    #[must_use]
    pub fn redact_names(mut self, may_know: impl Fn(&str) -> bool) -> Self {
        self.known.retain(|name| may_know(name));
        self
    }
}

impl AgentCatalog {
    /// Returns the catalog of the agents that are built into this program.
    pub fn builtin() -> Self {
        let entries = BUILTIN_FILES.iter().map(|(name, text)| {
            let entry =
                parse::parse_definition(Path::new(name), text).expect("a test reads each of them");
            (entry.name.clone(), Arc::new(entry))
        });
        Self { entries: entries.collect() }
    }

    /// Loads the agents of a directory, without the built-in agents. Each file whose name ends in `.toml` is one agent.
    ///
    /// # Errors
    /// Returns an error for the first invalid file, with the line and the correction. Returns an error if the directory
    /// cannot be read or has no agent.
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
            // Each file has to be named after its agent, so no two files define the same agent.
            entries.insert(entry.name.clone(), Arc::new(entry));
        }
        if entries.is_empty() {
            return Err(CatalogError::Empty(directory.to_owned()));
        }
        Ok(Self { entries })
    }

    /// Returns the agent of a name.
    ///
    /// # Errors
    /// Returns an error if no agent has the name.
    pub fn find_agent(&self, name: &str) -> Result<&Arc<AgentDefinition>, UnknownAgentError> {
        self.entries.get(name).ok_or_else(|| {
            let known = self.entries.keys().cloned().collect();
            UnknownAgentError { name: name.to_owned(), known }
        })
    }

    /// Returns the agents in the order of their names.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = &Arc<AgentDefinition>> {
        self.entries.values()
    }
}

fn quote_names(known: &[String]) -> String {
    let known: Vec<_> = known.iter().map(|name| format!("`{name}`")).collect();
    if known.is_empty() { String::new() } else { format!("; there is {}", known.join(", ")) }
}

/// Returns the file of a built-in agent, as an example of an agent's file.
pub fn builtin_file(name: &str) -> Option<&'static str> {
    let file = definition::definition_file_name(name);
    BUILTIN_FILES.iter().find(|(known, _)| *known == file).map(|(_, text)| *text)
}

/// The built-in files, which are those of `config/agents`. Each file is named after its agent.
const BUILTIN_FILES: &[(&str, &str)] = &[
    ("sandbox-agent.toml", include_str!("../../config/agents/sandbox-agent.toml")),
    ("sandbox-openclaw.toml", include_str!("../../config/agents/sandbox-openclaw.toml")),
];
