//! The tools of the present configuration. A run keeps the configuration that it began with, but a person is asked about
//! a call, and an approved call begins, only while its tool is still configured as the run has it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::ApprovalConfig;
use crate::tools::job::ToolJob;

/// The tools that the present configuration grants, and the agents that list them.
#[derive(Debug, Default)]
pub struct PresentTools {
    pub tools: BTreeMap<String, PresentTool>,
    /// The tools of each agent, by the `agentId` of its runs.
    pub agents: BTreeMap<String, BTreeSet<String>>,
    /// The times and scopes of answers.
    pub approvals: ApprovalConfig,
}

/// A tool of the present configuration.
#[derive(Debug)]
pub struct PresentTool {
    /// The digest of the tool's definition.
    pub definition: String,
    /// The digest of the rules about the tool.
    pub rules: String,
    /// The program of a tool that is a file.
    pub job: Option<Arc<ToolJob>>,
}

impl PresentTools {
    /// Returns true if an agent may call a tool of this definition under these rules.
    pub fn has_tool(&self, (agent, tool): (&str, &str), (definition, rules): (&str, &str)) -> bool {
        let is_same =
            |present: &PresentTool| present.definition == definition && present.rules == rules;
        self.tools.get(tool).is_some_and(is_same)
            && self.agents.get(agent).is_some_and(|listed| listed.contains(tool))
    }

    /// Returns the program of a tool of this definition, if it is a file.
    pub fn find_program(&self, tool: &str, definition: &str) -> Option<&Arc<ToolJob>> {
        self.tools.get(tool).filter(|tool| tool.definition == definition)?.job.as_ref()
    }
}
