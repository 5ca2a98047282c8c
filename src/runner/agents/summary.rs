//! An agent, as others are told of it.

use serde::Serialize;
use utoipa::ToSchema;

use super::AgentDefinition;
use super::availability::AgentUnavailableError;

/// One agent of a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentSummary {
    /// The name that it is asked for by.
    pub agent_id: String,
    /// What it is called in the records of its calls.
    pub graph_id: String,
    /// For people.
    pub name: String,
    pub description: String,
    pub version: String,
    /// Of all that its entry says.
    pub digest: String,
    /// Those it may use; an empty list is no limit.
    pub models: Vec<String>,
    /// The rules of its own that its work is judged by, beside this host's: their names in `[policy]` of relay.toml.
    pub relay_rules: Vec<String>,
    /// Whether it can run here.
    pub available: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl AgentSummary {
    /// An agent, and whether it can run here.
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
            available: available.is_ok(),
            reason: available.as_ref().err().map(ToString::to_string),
        }
    }
}
