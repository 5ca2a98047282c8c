//! The policy about a run's tool calls: every layer must allow a call.
//!
//! The layers are asked in this order: the agent's list and modes, the run's list (`[tools] granted`), the run's sandbox, and
//! the rules about the tool. A list that does not name a tool denies it, so an empty list denies every tool. The first layer that denies a
//! call decides. A rule may also say that a person is asked; the person is asked last, and may only deny.
//!
//! **Invariant:** a rule that cannot be evaluated denies the call.

mod compile;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::agent_modes::AgentToolLayer;
use super::config::{LIST_RULE, ToolConfig, ToolConfigError};
use super::definition::ToolDefinition;
use super::rule_facts::{ToolCallFacts, ToolFact};
use super::taint::TaintPolicy;
use crate::base::condition::{RuleEvalError, RuleExpr};
use crate::llm::budget::{Nanodollars, ToolBudgetLimits};
use crate::sandbox::spec::MountAccess;

/// The compiled policy of a run.
#[derive(Debug)]
pub struct ToolPolicy {
    /// The tools that the run's configuration grants.
    granted: BTreeMap<Arc<str>, GrantedTool>,
    /// The layer of the run's agent; `None` for a run without an agent of the catalog.
    agent: Option<AgentToolLayer>,
    /// The run's access to its workspace; `None` if the run has no workspace on this machine.
    workspace: Option<MountAccess>,
    /// The rules about what the run has seen.
    taint: Arc<TaintPolicy>,
    /// The digest of the configuration that the policy was compiled from.
    digest: String,
}

/// A tool that the run's configuration grants, with the rules about it.
#[derive(Debug)]
pub struct GrantedTool {
    pub definition: ToolDefinition,
    pub price: Nanodollars,
    pub limits: ToolBudgetLimits,
    /// The arguments that the audit log may hold.
    pub evidence: BTreeSet<String>,
    /// The rule that asks a person about each call; `None` if no person is asked.
    pub asking_rule: Option<Arc<str>>,
    /// The digest of the rules about the tool and about what a run has seen.
    pub rules_digest: String,
    rules: Vec<CompiledToolRule>,
}

#[derive(Debug)]
struct CompiledToolRule {
    name: Arc<str>,
    /// True if no person may allow what the rule denies.
    is_final: bool,
    when: Option<RuleExpr<ToolFact>>,
}

/// A layer of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyLayer {
    /// The list of tools and the modes in the agent's file.
    Agent,
    /// The list of tools in the configuration of the run.
    Run,
    /// The run's sandbox: a tool gets no more of the workspace than the run has.
    Sandbox,
    /// The rules about the tool.
    Tool,
    /// A person who is asked about the call.
    Approval,
}

/// A denial by the policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolDenial {
    pub layer: PolicyLayer,
    /// The name of the rule, or [`LIST_RULE`] for a list that does not name the tool.
    pub rule: Arc<str>,
    /// The reason why the rule could not be evaluated, if that is why the call is denied.
    pub fault: Option<RuleEvalError>,
}

impl ToolPolicy {
    /// Compiles the policy of a run. `agent` is the layer of the run's agent, if the run has one.
    ///
    /// # Errors
    /// Returns the first mistake: an unknown tool, a contradiction between layers, or a rule that fails its own examples.
    pub fn compile_policy(
        config: &ToolConfig,
        tools: Vec<ToolDefinition>,
        agent: Option<AgentToolLayer>,
    ) -> Result<Self, ToolConfigError> {
        compile::compile_policy(config, tools, agent)
    }

    /// Returns the tool of a name, if the lists of all layers name it.
    ///
    /// # Errors
    /// Returns the first layer whose list does not name the tool. A tool that does not exist is on no list.
    pub fn find_tool(&self, name: &str) -> Result<&GrantedTool, ToolDenial> {
        let denial = |layer, rule| ToolDenial { layer, rule: Arc::from(rule), fault: None };
        if let Some(rule) = self.agent.as_ref().and_then(|agent| agent.denying_rule(name)) {
            return Err(denial(PolicyLayer::Agent, rule));
        }
        let tool = self.granted.get(name).ok_or_else(|| denial(PolicyLayer::Run, LIST_RULE))?;
        if self.fits_sandbox(tool) {
            Ok(tool)
        } else {
            Err(denial(PolicyLayer::Sandbox, LIST_RULE))
        }
    }

    /// Returns the tools that the lists of all layers name, in the order of their names.
    pub fn listed_tools(&self) -> impl Iterator<Item = &GrantedTool> {
        self.named_tools().filter(|tool| self.fits_sandbox(tool))
    }

    fn named_tools(&self) -> impl Iterator<Item = &GrantedTool> {
        let is_named =
            |name: &str| self.agent.as_ref().is_none_or(|own| own.denying_rule(name).is_none());
        self.granted.values().filter(move |tool| is_named(&tool.definition.name))
    }

    /// Sets the run's access to its workspace.
    #[must_use]
    pub fn with_workspace(self, workspace: Option<MountAccess>) -> Self {
        Self { workspace, ..self }
    }

    /// Returns the first tool that the lists of all layers name and that needs a sandbox.
    pub fn first_job(&self) -> Option<&str> {
        let is_job = |tool: &&GrantedTool| tool.definition.program.sandbox_job().is_some();
        self.named_tools().find(is_job).map(|tool| &*tool.definition.name)
    }

    /// Returns the first rule that asks a person.
    pub fn first_asking_rule(&self) -> Option<&str> {
        let asking = self.granted.values().find_map(|tool| tool.asking_rule.as_deref());
        asking.or_else(|| self.taint.first_asking_rule())
    }

    /// Returns the rules about what the run has seen.
    pub fn taint(&self) -> &Arc<TaintPolicy> {
        &self.taint
    }

    /// Returns the layer of the run's agent; `None` for a run without an agent of the catalog.
    pub fn agent(&self) -> Option<&AgentToolLayer> {
        self.agent.as_ref()
    }

    /// Returns the digest of the configuration that the policy was compiled from.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    fn fits_sandbox(&self, tool: &GrantedTool) -> bool {
        let job = tool.definition.program.sandbox_job();
        job.is_none_or(|job| job.workspace.is_possible_with(self.workspace))
    }
}

impl GrantedTool {
    /// Asks the rules about a call whose arguments fit the tool's schema.
    ///
    /// # Errors
    /// Returns the first rule whose condition does not hold or cannot be evaluated.
    pub fn check_rules(&self, facts: &ToolCallFacts<'_>) -> Result<(), ToolDenial> {
        for CompiledToolRule { name, when, .. } in &self.rules {
            let denial =
                |fault| ToolDenial { layer: PolicyLayer::Tool, rule: Arc::clone(name), fault };
            match when.as_ref().map(|when| when.eval_bool(facts)) {
                None | Some(Ok(true)) => {}
                Some(Ok(false)) => return Err(denial(None)),
                Some(Err(fault)) => return Err(denial(Some(fault))),
            }
        }
        Ok(())
    }

    /// Returns the names of the rules that deny a call whose arguments fit the tool's schema; `None` if no person may allow
    /// the call in spite of them: one of them is final, or cannot be evaluated.
    pub fn overridable_rules(&self, facts: &ToolCallFacts<'_>) -> Option<Vec<String>> {
        let mut denying = vec![];
        for CompiledToolRule { name, is_final, when } in &self.rules {
            match when.as_ref().map(|when| when.eval_bool(facts)) {
                None | Some(Ok(true)) => {}
                Some(Ok(false)) if !is_final => denying.push(name.to_string()),
                Some(_) => return None,
            }
        }
        Some(denying)
    }

    /// Returns the names of the rules about the tool.
    pub fn rule_names(&self) -> Vec<Arc<str>> {
        self.rules.iter().map(|rule| Arc::clone(&rule.name)).collect()
    }

    /// Returns the arguments that the audit log may hold, as texts.
    pub fn collect_evidence(&self, mut arguments: Map<String, Value>) -> BTreeMap<String, String> {
        let listed = self.evidence.iter().filter_map(|name| {
            let text = match arguments.remove(name)? {
                Value::String(text) => text,
                other => other.to_string(),
            };
            let end = text.floor_char_boundary(MAX_EVIDENCE_BYTES);
            Some((name.clone(), text[..end].to_owned()))
        });
        listed.collect()
    }
}

impl PolicyLayer {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Run => "run",
            Self::Sandbox => "sandbox",
            Self::Tool => "tool",
            Self::Approval => "approval",
        }
    }
}

/// The longest text of one evidence field, in bytes: the longest text in an audit record.
const MAX_EVIDENCE_BYTES: usize = 256;
