//! The summary of an agent for clients.

use serde::Serialize;
use utoipa::ToSchema;

use super::AgentDefinition;
use super::availability::AgentUnavailableError;
use crate::tools::agent_modes::AgentModes;

/// An agent in a list of agents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentSummary {
    /// The agent's name in requests: `agent` of a run, `graphName` of a chat.
    pub agent_id: String,
    /// The agent's name in the records of its calls.
    pub graph_id: String,
    /// The agent's title, for people.
    pub name: String,
    /// The agent's description, for people.
    pub description: String,
    /// The version of the agent's definition, as its author has written it.
    pub version: String,
    /// The SHA-256 digest of the agent's whole definition, in hexadecimal digits.
    pub digest: String,
    /// The models that the agent may use. An empty list means that the agent may use every model.
    pub models: Vec<String>,
    /// The agent's own review rules, in addition to this host's rules: their names in `[policy]` of relay.toml.
    pub relay_rules: Vec<String>,
    /// The agent's modes: what it may do with groups of tools, its workspace and its sandbox.
    pub modes: AgentModes,
    /// True if the agent can run on this host.
    pub available: bool,
    /// The reason why the agent cannot run on this host. Absent if the agent can run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl AgentSummary {
    /// Returns the summary of an agent with its availability on this host.
    pub fn new(entry: &AgentDefinition, available: &Result<(), AgentUnavailableError>) -> Self {
        Self {
            agent_id: entry.name.clone(),
            graph_id: entry.effective_graph_id().to_owned(),
            name: entry.title.clone().unwrap_or_else(|| entry.name.clone()),
            description: entry.description.clone(),
            version: entry.version.clone(),
            digest: entry.digest(),
            models: entry.models.allow.clone(),
            relay_rules: entry
                .relay
                .as_ref()
                .map(|own| own.policy.rule_names())
                .unwrap_or_default(),
            modes: entry.modes,
            available: available.is_ok(),
            reason: available.as_ref().err().map(ToString::to_string),
        }
    }
}
