//! What a file says about one agent.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, de};

use super::policy_overlay::PolicyOverlay;
use crate::base::canonical;
use crate::llm::budget;
use crate::llm::request::{CapabilitySet, MODEL_NAME_RULE, is_model_name};
use crate::relay::delivery::rules::AgentReviewRules;
use crate::sandbox::spec::LimitOverrides;
use crate::sandbox::spec::RootSource;

/// One agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentDefinition {
    /// Its file is named after it, with `-` for `:`.
    pub name: String,
    /// For people; the name where nothing is said.
    pub title: Option<String>,
    pub description: String,
    /// The operator's own, for whoever compares what ran.
    #[serde(deserialize_with = "deserialize_version")]
    pub version: String,
    /// What it is called in the records of its calls; the name where nothing is said.
    pub graph_id: Option<String>,
    /// The image it needs, if it needs one, by name or id. It is pinned by its id when a run starts.
    pub image: Option<String>,
    /// An unpacked root in place of an image.
    pub rootfs: Option<PathBuf>,
    #[serde(default)]
    pub driver: DriverChoice,
    /// Executed as it stands, but for its placeholders.
    pub argv: Vec<String>,
    /// Where our own agent's program is shown in the sandbox; none where the agent is of another make.
    pub program: Option<PathBuf>,
    /// How its workspace is made ready.
    #[serde(default)]
    pub setup: WorkspaceSetup,
    /// What it writes on standard error while it works.
    #[serde(default)]
    pub stream: AgentStreamFormat,
    #[serde(default)]
    pub mode: SandboxLifetime,
    /// Sandboxes that are kept ready for it.
    #[serde(default)]
    pub slots: u32,
    /// What providers may do for it, outside of the sandbox; where nothing is said, what its gateway's policy says.
    pub capabilities: Option<CapabilitySet>,
    /// The tools of this machine that it may use. None are there yet, so the list is empty.
    #[serde(default)]
    pub tools: Vec<String>,
    /// Beside what every sandbox has.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub limits: LimitOverrides,
    #[serde(default)]
    pub models: ModelSelection,
    /// The most that a run of it may spend, whatever is asked for.
    #[serde(default)]
    pub budget: budget::BudgetLimits,
    /// Laid over its gateway's.
    #[serde(default)]
    pub policy: PolicyOverlay,
    /// What becomes of its work, in the words of `config/relay.toml`: stricter than this host's rules, and never
    /// looser.
    pub relay: Option<AgentReviewRules>,
    /// Of an agent whose `setup` is `openclaw`.
    #[serde(default)]
    pub openclaw: OpenClawConfig,
    /// Files that it finds in its workspace where there are none of that name, by their paths in it.
    #[serde(default)]
    pub files: BTreeMap<PathBuf, FileContent>,
}

/// The models that an agent may use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSelection {
    /// None but these; where there is none, those that its gateway's policy lets through.
    pub allow: Vec<String>,
    /// Taken where a run names none.
    pub default: Option<String>,
}

/// How an agent's workspace is made ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceSetup {
    /// The conversation is in `.cogni/messages.json`.
    #[default]
    Messages,
    /// What `OpenClaw` reads: its settings, the last message, and what was said before it.
    #[serde(rename = "openclaw")]
    OpenClaw,
}

/// What an agent writes on standard error while it works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentStreamFormat {
    /// Nothing that is meant for others.
    #[default]
    None,
    /// Lines of JSON, as our own agent's.
    Events,
}

/// How long an agent's sandbox lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxLifetime {
    /// For one run.
    #[default]
    OneShot,
    /// For many runs, one after another.
    LongRunning,
}

/// Who makes the sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverChoice {
    /// Docker Engine where there is an image, else we ourselves.
    #[default]
    Auto,
    Docker,
    Embedded,
}

impl DriverChoice {
    /// This one; where it is for nobody to say, the other.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        if self == Self::Auto { other } else { self }
    }
}

/// What an `OpenClaw` is told beside what all are told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OpenClawConfig {
    /// Which of its agents answers.
    pub agent: String,
    /// The most that it takes a model to read.
    pub context_window: u64,
    /// The most that it lets a model write at once.
    pub max_tokens: u64,
    /// Its tools. It takes an empty list for all that it has, so there is none.
    pub allow: Vec<String>,
    /// Tools that it goes without, beside those that cannot work in a sandbox.
    pub deny: Vec<String>,
}

/// A file's text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FileContent {
    Here(String),
    /// In a file beside the entry's, which is read with it.
    Beside(ExternalFile),
}

/// Where a text is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExternalFile {
    pub file: PathBuf,
}

impl AgentDefinition {
    /// Where its sandboxes have their programs from.
    pub fn root_source(&self) -> RootSource {
        match (&self.image, &self.rootfs) {
            (Some(image), _) => RootSource::Image(image.clone()),
            (None, Some(path)) => RootSource::Directory(path.clone()),
            (None, None) => RootSource::Host,
        }
    }

    /// What it is called in the records of its calls.
    pub fn effective_graph_id(&self) -> &str {
        self.graph_id.as_deref().unwrap_or(&self.name)
    }

    /// Returns a digest of all that the entry says, defaults and the files beside it included: two runs with the same
    /// digest had the same agent.
    pub fn digest(&self) -> String {
        canonical::digest("agent 1", self)
            .expect("an entry is read from TOML, so its paths are text")
    }

    /// The model of a run that has `asked` for one, or for none.
    ///
    /// # Errors
    /// The agent may not use that one.
    pub fn select_model(&self, asked: Option<String>) -> Result<Option<String>, String> {
        let Some(model) = asked.or_else(|| self.models.default.clone()) else { return Ok(None) };
        if !is_model_name(&model) {
            return Err(format!("`{}` must be {MODEL_NAME_RULE}", model.escape_debug()));
        }
        let allow = &self.models.allow;
        if allow.is_empty() || allow.contains(&model) {
            return Ok(Some(model));
        }
        Err(format!("`{}` may not use the model `{model}`; take {}", self.name, quote_names(allow)))
    }

    /// How long the agent may take, of what its run may: it is to end by itself, with an answer, and not by our doing.
    pub fn agent_timeout(max_runtime: Duration) -> Duration {
        let early = max_runtime.saturating_sub(SHUTDOWN_MARGIN).max(max_runtime / 2);
        early.max(Duration::from_secs(1))
    }
}

impl Default for OpenClawConfig {
    fn default() -> Self {
        Self {
            agent: "main".to_owned(),
            // What the models that it is used with have at least, and take at once.
            context_window: 200_000,
            max_tokens: 8192,
            allow: OPENCLAW_TOOLS.map(str::to_owned).into(),
            deny: vec![],
        }
    }
}

impl FromStr for DriverChoice {
    type Err = &'static str;

    fn from_str(given: &str) -> Result<Self, Self::Err> {
        match given {
            "auto" => Ok(Self::Auto),
            "docker" => Ok(Self::Docker),
            "embedded" => Ok(Self::Embedded),
            _ => Err("give auto, docker or embedded"),
        }
    }
}

/// The file of an agent of this name.
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

/// What works on files and runs commands. It has some fifty more, for machines that are somebody's, and each version
/// brings others.
const OPENCLAW_TOOLS: [&str; 7] = ["apply_patch", "edit", "exec", "ls", "process", "read", "write"];

/// Of what a run may take, what is not the agent's: it needs some time to write its answer and end.
const SHUTDOWN_MARGIN: Duration = Duration::from_mins(1);
