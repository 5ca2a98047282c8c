//! The validation of a definition whose keys were parsed: the values have to fit together and be safe.

use std::collections::BTreeSet;
use std::path::{Component, PathBuf};
use std::time::Duration;

use super::definition::{
    AgentDefinition, DriverChoice, OpenClawConfig, SandboxLifetime, WorkspaceSetup,
};
use super::placeholders;
use crate::gateway::pipeline::rule::RuleSet;
use crate::llm::request::{MODEL_NAME_RULE, ProviderCapability, is_model_name};
use crate::relay::delivery::rules::AgentReviewRules;
use crate::relay::repo::review::SecretScanner;
use crate::tools::agent_modes::{SandboxScope, WorkspaceMode};
use crate::tools::definition::{TOOL_NAME_RULE, is_tool_name};

/// An error in a parsed definition, with the key that it is about.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DefinitionKeyError {
    pub(super) key: &'static str,
    pub(super) what: String,
}

impl AgentDefinition {
    /// Checks that the values of the definition are valid and fit together.
    pub(super) fn check(&self) -> Result<(), DefinitionKeyError> {
        let wrong = |key, reason: String| Err(DefinitionKeyError { key, what: reason });
        if !is_agent_name(&self.name) {
            return wrong("name", format!("`{}` is no name; {NAME_RULE}", self.name));
        }
        if self.graph_id.as_ref().is_some_and(|graph| !is_agent_name(graph)) {
            return wrong(
                "graph_id",
                format!("`{}` is no name; {NAME_RULE}", self.effective_graph_id()),
            );
        }
        if self.argv.is_empty() {
            return wrong("argv", "there is no program; give it, and its arguments".to_owned());
        }
        if let Some(unknown) =
            self.argv.iter().find_map(|word| placeholders::unknown_placeholder(word))
        {
            return wrong("argv", unknown);
        }
        match (&self.image, &self.rootfs, self.driver) {
            (Some(_), Some(_), _) => {
                return wrong("rootfs", "there is an image, too; give one of them".to_owned());
            }
            (Some(_), _, DriverChoice::Embedded) => {
                let why = "`embedded` knows no images; say `docker`, or give `rootfs`";
                return wrong("driver", why.to_owned());
            }
            (None, _, DriverChoice::Docker) => {
                return wrong("driver", "`docker` needs an image; give `image`".to_owned());
            }
            _ => (),
        }
        let mut names = self.models.allow.iter().chain(&self.models.default);
        if let Some(name) = names.find(|name| !is_model_name(name)) {
            return wrong("models", format!("`{}` must be {MODEL_NAME_RULE}", name.escape_debug()));
        }
        if let Some(model) = &self.models.default
            && !self.models.allow.is_empty()
            && !self.models.allow.contains(model)
        {
            let why = format!("`{model}` is not among those that `allow` has");
            return wrong("models.default", why);
        }
        if self.budget.deadline == Some(Duration::ZERO) {
            let why = "every call would fail; give a longer time, or leave it out to set none";
            return wrong("budget.deadline", format!("the time is `0s`, so {why}"));
        }
        self.check_tools()?;
        self.check_modes()?;
        self.check_setup()?;
        self.relay.as_ref().map_or(Ok(()), check_review_rules)?;
        let rules = RuleSet::compile_rules(&self.policy.rules);
        rules
            .map(drop)
            .map_err(|error| DefinitionKeyError { key: "policy.rules", what: error.to_string() })
    }

    /// Checks the form of the list only: the gateway that grants the tools may be another one at each run.
    fn check_tools(&self) -> Result<(), DefinitionKeyError> {
        let wrong = |reason| Err(DefinitionKeyError { key: "tools", what: reason });
        if let Some(name) = self.tools.iter().find(|name| !is_tool_name(name)) {
            return wrong(format!("`{}` must be {TOOL_NAME_RULE}", name.escape_debug()));
        }
        let unique: BTreeSet<_> = self.tools.iter().collect();
        if unique.len() < self.tools.len() {
            return wrong("a tool is listed twice; list it once".to_owned());
        }
        Ok(())
    }

    /// Refuses modes that contradict other keys of the file.
    fn check_modes(&self) -> Result<(), DefinitionKeyError> {
        let wrong = |key, reason: String| Err(DefinitionKeyError { key, what: reason });
        let against = |capability: &ProviderCapability| {
            Some((capability.name(), self.mode_against(*capability)?.name()))
        };
        if let Some((capability, mode)) = self.capabilities.iter().flatten().find_map(against) {
            return wrong(
                "capabilities",
                format!("`{capability}` is what `modes.{mode}` takes away; remove one of the two"),
            );
        }
        let is_kept = self.mode == SandboxLifetime::LongRunning;
        if self.modes.scope != SandboxScope::Session && !is_kept {
            return wrong("modes.scope", "it is for `mode = \"long_running\"`; say so".to_owned());
        }
        if self.modes.workspace == WorkspaceMode::Rw {
            return Ok(());
        }
        if is_kept || self.slots > 0 {
            let why = "a sandbox that is kept or made ahead writes to its workspace; \
                       remove `mode` and `slots`, or give `rw`";
            return wrong("modes.workspace", why.to_owned());
        }
        if self.setup == WorkspaceSetup::OpenClaw {
            let why = "OpenClaw keeps its state in the workspace; give `rw`";
            return wrong("modes.workspace", why.to_owned());
        }
        let has_message = self.argv.iter().any(|word| word.contains("${MESSAGE}"));
        if self.modes.workspace == WorkspaceMode::None && (!has_message || !self.files.is_empty()) {
            let why = "without a workspace there are no `files`, and the message reaches the agent \
                       in `argv` only; remove `files` and give `${MESSAGE}`, or give `ro`";
            return wrong("modes.workspace", why.to_owned());
        }
        Ok(())
    }

    fn check_setup(&self) -> Result<(), DefinitionKeyError> {
        let wrong = |key, reason: String| Err(DefinitionKeyError { key, what: reason });
        // Settings that no program would read are most likely a mistake of the operator.
        if self.setup != WorkspaceSetup::OpenClaw && self.openclaw != OpenClawConfig::default() {
            return wrong("openclaw", "it is for `setup = \"openclaw\"`; say so".to_owned());
        }
        if !is_agent_id(&self.openclaw.agent) {
            let why = format!("`{}` is none of its agents' ids", self.openclaw.agent);
            return wrong("openclaw.agent", format!("{why}; give letters, digits, `-` and `_`"));
        }
        if self.openclaw.allow.is_empty() {
            let why = "OpenClaw takes an empty list for all of its tools; name those it may use";
            return wrong("openclaw.allow", why.to_owned());
        }
        // `..` and a leading `/` are refused, so that every file is written below the workspace.
        let is_plain = |path: &PathBuf| {
            let mut parts = path.components();
            parts.all(|part| matches!(part, Component::Normal(_)))
        };
        if let Some(path) = self.files.keys().find(|path| !is_plain(path)) {
            let why = format!("`{}` leads out of the workspace", path.display());
            return wrong("files", format!("{why}; give a path below it"));
        }
        Ok(())
    }
}

fn check_review_rules(
    AgentReviewRules { policy }: &AgentReviewRules,
) -> Result<(), DefinitionKeyError> {
    if let Some(key) = policy.loosened_key() {
        return Err(DefinitionKeyError { key, what: RULES_ONLY_STRICTER.to_owned() });
    }
    let wrong = |error: regex::Error| DefinitionKeyError {
        key: "relay.policy.secrets",
        what: last_line(&error),
    };
    SecretScanner::new(&policy.secrets, &[]).map(drop).map_err(wrong)
}

/// Returns a message with the last line of a regular expression's error. The lines before it mark the position in the
/// pattern, which needs several lines.
fn last_line(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default();
    format!("a pattern is no regular expression: {}", last.trim_start_matches("error: "))
}

fn is_agent_name(name: &str) -> bool {
    let is_first = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_next = |byte: u8| is_first(byte) || b":._-".contains(&byte);
    name.len() <= MAX_NAME_BYTES
        && name.bytes().next().is_some_and(is_first)
        && name.bytes().all(is_next)
}

/// Returns true if `id` is a valid ID of an agent in `OpenClaw`, which also names a directory after the ID.
fn is_agent_id(id: &str) -> bool {
    let is_next = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    id.len() <= MAX_NAME_BYTES
        && id.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric())
        && id.bytes().all(is_next)
}

/// The message for an agent's review rule that is looser than this host's rules.
const RULES_ONLY_STRICTER: &str = "an agent's rules are stricter than this host's, and never looser; leave it out, or give `review` or `hold`. \
     What is looser is said in this host's own file, for all agents (`--relay-config`)";

/// The maximum length of an agent's name or ID in bytes.
const MAX_NAME_BYTES: usize = 64;

/// The rule of `is_agent_name`, for error messages.
const NAME_RULE: &str =
    "give up to 64 small letters, digits, `:`, `.`, `_` and `-`, a letter or digit first";
