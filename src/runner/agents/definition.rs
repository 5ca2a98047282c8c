//! The definition of an agent: the types of an agent's file.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, de};

use super::policy_overlay::PolicyOverlay;
use crate::base::canonical;
use crate::gateway::config::GatewayConfig;
use crate::gateway::pipeline::policy::PolicyConfig;
use crate::gateway::run::AgentToolSettings;
use crate::llm::budget;
use crate::llm::request::{CapabilitySet, MODEL_NAME_RULE, ProviderCapability, is_model_name};
use crate::relay::delivery::rules::AgentReviewRules;
use crate::sandbox::spec::LimitOverrides;
use crate::sandbox::spec::RootSource;
use crate::tools::agent_modes::{AgentModes, ToolGroup};

/// The definition of one agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentDefinition {
    /// The agent's name. The agent's file has the same name, with `-` in place of `:`.
    pub name: String,
    /// The title for people; if absent, the name.
    pub title: Option<String>,
    pub description: String,
    /// The operator's own version, by which people compare runs.
    #[serde(deserialize_with = "deserialize_version")]
    pub version: String,
    /// The agent's name in the records of its calls; if absent, the name.
    pub graph_id: Option<String>,
    /// The name or ID of the agent's image, if the agent has an image. The start of a run pins the image by its ID.
    pub image: Option<String>,
    /// The directory of an unpacked root file system, in place of an image.
    pub rootfs: Option<PathBuf>,
    #[serde(default)]
    pub driver: DriverChoice,
    /// The program and its arguments, which are executed unchanged except for placeholders.
    pub argv: Vec<String>,
    /// The path of the project's own agent program in the sandbox; absent for every other agent.
    pub program: Option<PathBuf>,
    /// The preparation of the agent's workspace.
    #[serde(default)]
    pub setup: WorkspaceSetup,
    /// The format of the agent's standard error during its work.
    #[serde(default)]
    pub stream: AgentStreamFormat,
    #[serde(default)]
    pub mode: SandboxLifetime,
    /// The number of warm sandboxes that are kept ready for the agent.
    #[serde(default)]
    pub slots: u32,
    /// The actions that providers may do for the agent outside of the sandbox; if absent, the gateway's policy decides.
    pub capabilities: Option<CapabilitySet>,
    /// The tools that the agent may call, of those that its gateway grants in `[tools]`. An empty list allows none.
    #[serde(default)]
    pub tools: Vec<String>,
    /// What the agent may do with groups of tools, its workspace and its sandbox.
    #[serde(default)]
    pub modes: AgentModes,
    /// The environment variables of the agent, in addition to those of every sandbox.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub limits: LimitOverrides,
    #[serde(default)]
    pub models: ModelSelection,
    /// The upper bound of a run's budget, whatever the request asks for.
    #[serde(default)]
    pub budget: budget::BudgetLimits,
    /// The policy that is laid over the policy of the agent's gateway.
    #[serde(default)]
    pub policy: PolicyOverlay,
    /// The review rules of the agent's work, with the keys of `config/relay.toml`. The rules may be stricter than this
    /// host's rules, but never looser.
    pub relay: Option<AgentReviewRules>,
    /// The settings of an agent whose `setup` is `openclaw`.
    #[serde(default)]
    pub openclaw: OpenClawConfig,
    /// The files that are written into the agent's workspace, by their paths. An existing file is not replaced.
    #[serde(default)]
    pub files: BTreeMap<PathBuf, FileContent>,
}

/// The models that an agent may use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSelection {
    /// The models that the agent may use. If the list is empty, the gateway's policy decides.
    pub allow: Vec<String>,
    /// The model of a run that names no model.
    pub default: Option<String>,
}

/// The preparation of an agent's workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceSetup {
    /// The workspace gets the conversation in `.cogni/messages.json`.
    #[default]
    Messages,
    /// The workspace gets the files of `OpenClaw`: its settings, the last message, and the messages before it.
    #[serde(rename = "openclaw")]
    OpenClaw,
}

/// The format of an agent's standard error during its work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentStreamFormat {
    /// No format: standard error is not parsed.
    #[default]
    None,
    /// Lines of JSON, in the format of the project's own agent.
    Events,
}

/// The lifetime of an agent's sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxLifetime {
    /// The sandbox serves a single run.
    #[default]
    OneShot,
    /// The sandbox serves many runs, one after the other.
    LongRunning,
}

/// The driver that makes the sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverChoice {
    /// Docker Engine for a sandbox with an image, the embedded driver for every other sandbox.
    #[default]
    Auto,
    Docker,
    Embedded,
}

impl DriverChoice {
    /// Returns this choice, or `other` if this choice is `Auto`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        if self == Self::Auto { other } else { self }
    }
}

/// The settings of an agent that runs `OpenClaw`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OpenClawConfig {
    /// The agent within `OpenClaw` that answers.
    pub agent: String,
    /// The number of tokens that `OpenClaw` assumes a model can read.
    pub context_window: u64,
    /// The maximum number of tokens that `OpenClaw` lets a model write in one answer.
    pub max_tokens: u64,
    /// The allowed tools. `OpenClaw` takes an empty list for all tools, so the list must not be empty.
    pub allow: Vec<String>,
    /// The denied tools, in addition to those that cannot work in a sandbox.
    pub deny: Vec<String>,
}

/// The text of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FileContent {
    Inline(String),
    /// The text is in a file beside the agent's file, and is read together with the agent's file.
    External(ExternalFile),
}

/// A reference to a file beside the agent's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExternalFile {
    pub file: PathBuf,
}

/// The error of an agent whose list of models has no model in common with its gateway's list.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "none of the models that `{agent}` may use is let through by the gateway's `policy.body.models`; add one of them there"
)]
pub struct NoModelLeftError {
    agent: String,
}

impl AgentDefinition {
    /// Lays the agent's layer over the configuration of its gateway: its policy, its tools and its budget.
    ///
    /// # Errors
    /// Returns an error if no model is left.
    pub fn lay_over(&self, config: &mut GatewayConfig) -> Result<(), NoModelLeftError> {
        let metadata = &mut config.identity.metadata;
        metadata.entry("graph_id").or_insert_with(|| self.effective_graph_id().into());
        self.apply_to(&mut config.policy)?;
        let (id, tools) = (self.name.clone(), self.tools.clone());
        let modes = self.modes.to_table();
        config.tools.agent = Some(Box::new(AgentToolSettings { id, tools, modes }));
        config.budget = config.budget.capped_by(&self.budget);
        Ok(())
    }

    /// Lays the agent's policy, models and capabilities over the policy of its gateway.
    ///
    /// # Errors
    /// Returns an error if no model is left. An empty list would admit every model, so it cannot express "no model".
    pub fn apply_to(&self, base: &mut PolicyConfig) -> Result<(), NoModelLeftError> {
        self.policy.clone().apply_to(base);
        if let Some(capabilities) = &self.capabilities {
            base.body.capabilities.clone_from(capabilities);
        }
        base.body.capabilities.retain(|capability| self.mode_against(*capability).is_none());
        // Models are intersected: an agent's file cannot add a model.
        base.body.models = self.intersect_models(&base.body.models)?;
        Ok(())
    }

    /// Returns the group of tools whose mode takes a capability of the provider away.
    pub(super) fn mode_against(&self, capability: ProviderCapability) -> Option<ToolGroup> {
        let group = match capability {
            ProviderCapability::WebSearch
            | ProviderCapability::WebFetch
            | ProviderCapability::RemoteMcp
            | ProviderCapability::RemoteMedia
            // A tool of an unknown type may reach the web.
            | ProviderCapability::UnknownTools => ToolGroup::Web,
            ProviderCapability::CodeInterpreter
            | ProviderCapability::ComputerUse
            | ProviderCapability::Containers => ToolGroup::Commands,
            ProviderCapability::FileSearch | ProviderCapability::FileIds => ToolGroup::Files,
            ProviderCapability::ImageGeneration
            | ProviderCapability::StoredState
            | ProviderCapability::Background => return None,
        };
        self.modes.restricts(group).then_some(group)
    }

    /// Returns the models that both lists contain. An empty list admits every model.
    fn intersect_models(&self, base: &[String]) -> Result<Vec<String>, NoModelLeftError> {
        let own = &self.models.allow;
        if own.is_empty() {
            return Ok(base.to_vec());
        }
        let is_let_through = |model: &&String| base.is_empty() || base.contains(model);
        let models: Vec<_> = own.iter().filter(is_let_through).cloned().collect();
        if models.is_empty() {
            return Err(NoModelLeftError { agent: self.name.clone() });
        }
        Ok(models)
    }

    /// Returns the source of the sandbox's root file system.
    pub fn root_source(&self) -> RootSource {
        match (&self.image, &self.rootfs) {
            (Some(image), _) => RootSource::Image(image.clone()),
            (None, Some(path)) => RootSource::Directory(path.clone()),
            (None, None) => RootSource::Host,
        }
    }

    /// Returns the agent's name in the records of its calls.
    pub fn effective_graph_id(&self) -> &str {
        self.graph_id.as_deref().unwrap_or(&self.name)
    }

    /// Returns a digest of the whole definition, with the defaults and the texts of the files beside the agent's file.
    /// Two runs with the same digest had the same agent.
    pub fn digest(&self) -> String {
        canonical::digest("agent 1", self)
            .expect("an entry is read from TOML, so its paths are text")
    }

    /// Returns the model of a run that requests the model `requested`: the requested model, or else the default model.
    ///
    /// # Errors
    /// Returns an error if the name is invalid, or if the agent may not use the model.
    pub fn select_model(&self, requested: Option<String>) -> Result<Option<String>, String> {
        let Some(model) = requested.or_else(|| self.models.default.clone()) else {
            return Ok(None);
        };
        if !is_model_name(&model) {
            return Err(format!("`{}` must be {MODEL_NAME_RULE}", model.escape_debug()));
        }
        // An empty list leaves the decision to the gateway's policy, which checks every call.
        let allow = &self.models.allow;
        if allow.is_empty() || allow.contains(&model) {
            return Ok(Some(model));
        }
        Err(format!("`{}` may not use the model `{model}`; take {}", self.name, quote_names(allow)))
    }

    /// Returns the agent's own timeout for a run of `max_runtime`. The timeout is shorter, so that the agent can end by
    /// itself with an answer before the runner stops it.
    pub fn agent_timeout(max_runtime: Duration) -> Duration {
        // A short run keeps at least half of its time, and the result is never zero.
        let early = max_runtime.saturating_sub(SHUTDOWN_MARGIN).max(max_runtime / 2);
        early.max(Duration::from_secs(1))
    }
}

impl Default for OpenClawConfig {
    fn default() -> Self {
        Self {
            agent: "main".to_owned(),
            // The minimum of the models that OpenClaw is used with.
            context_window: 200_000,
            max_tokens: 8192,
            allow: OPENCLAW_TOOLS.map(str::to_owned).into(),
            deny: vec![],
        }
    }
}

impl FromStr for DriverChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "docker" => Ok(Self::Docker),
            "embedded" => Ok(Self::Embedded),
            _ => Err("give auto, docker or embedded"),
        }
    }
}

/// Returns the name of the file of an agent.
pub(super) fn definition_file_name(agent: &str) -> String {
    agent.replace(':', "-") + ".toml"
}

fn quote_names(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn deserialize_version<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum VersionValue {
        Number(u64),
        Text(String),
    }
    match VersionValue::deserialize(deserializer) {
        Ok(VersionValue::Number(number)) => Ok(number.to_string()),
        Ok(VersionValue::Text(text)) if !text.is_empty() => Ok(text),
        _ => Err(de::Error::custom("give a text or a whole number")),
    }
}

/// The tools of `OpenClaw` that work on files and run commands. `OpenClaw` has some fifty more tools, for personal
/// machines, and each version adds others.
const OPENCLAW_TOOLS: [&str; 7] = ["apply_patch", "edit", "exec", "ls", "process", "read", "write"];

/// The part of a run's time that the agent's own timeout excludes (our choice). The agent needs some time to write its
/// answer and end.
const SHUTDOWN_MARGIN: Duration = Duration::from_mins(1);
