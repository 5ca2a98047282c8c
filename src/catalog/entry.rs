//! What a file says about one agent.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, de};

use super::policy::Policy;
use crate::base::canonical;
use crate::body::{Grants, MODEL_NAME_RULE, is_model_name};
use crate::budget;
use crate::delivery::rules::Own;
use crate::sandbox::spec::Root;
use crate::sandbox::spec::Wanted;

/// One agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its file is named after it, with `-` for `:`.
    pub name: String,
    /// For people; the name where nothing is said.
    pub title: Option<String>,
    pub description: String,
    /// The operator's own, for whoever compares what ran.
    #[serde(deserialize_with = "version")]
    pub version: String,
    /// What it is called in the records of its calls; the name where nothing is said.
    pub graph_id: Option<String>,
    /// The image it needs, if it needs one, by name or id. It is pinned by its id when a run starts.
    pub image: Option<String>,
    /// An unpacked root in place of an image.
    pub rootfs: Option<PathBuf>,
    #[serde(default)]
    pub driver: Maker,
    /// Executed as it stands, but for its placeholders.
    pub argv: Vec<String>,
    /// Where our own agent's program is shown in the sandbox; none where the agent is of another make.
    pub program: Option<PathBuf>,
    /// How its workspace is made ready.
    #[serde(default)]
    pub setup: Setup,
    /// What it writes on standard error while it works.
    #[serde(default)]
    pub stream: Stream,
    #[serde(default)]
    pub mode: Mode,
    /// Sandboxes that are kept ready for it.
    #[serde(default)]
    pub slots: u32,
    /// What providers may do for it, outside of the sandbox; where nothing is said, what its gateway's policy says.
    pub capabilities: Option<Grants>,
    /// The tools of this machine that it may use. None are there yet, so the list is empty.
    #[serde(default)]
    pub tools: Vec<String>,
    /// Beside what every sandbox has.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub limits: Wanted,
    #[serde(default)]
    pub models: Models,
    /// The most that a run of it may spend, whatever is asked for.
    #[serde(default)]
    pub budget: budget::Limits,
    /// Laid over its gateway's.
    #[serde(default)]
    pub policy: Policy,
    /// What becomes of its work, in the words of `config/relay.toml`: stricter than this host's rules, and never looser.
    pub relay: Option<Own>,
    /// Of an agent whose `setup` is `openclaw`.
    #[serde(default)]
    pub openclaw: OpenClaw,
    /// Files that it finds in its workspace where there are none of that name, by their paths in it.
    #[serde(default)]
    pub files: BTreeMap<PathBuf, Text>,
}

/// The models that an agent may use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Models {
    /// None but these; where there is none, those that its gateway's policy lets through.
    pub allow: Vec<String>,
    /// Taken where a run names none.
    pub default: Option<String>,
}

/// How an agent's workspace is made ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Setup {
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
pub enum Stream {
    /// Nothing that is meant for others.
    #[default]
    None,
    /// Lines of JSON, as our own agent's.
    Events,
}

/// How long an agent's sandbox lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// For one run.
    #[default]
    OneShot,
    /// For many runs, one after another.
    LongRunning,
}

/// Who makes the sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Maker {
    /// Docker Engine where there is an image, else we ourselves.
    #[default]
    Auto,
    Docker,
    Embedded,
}

impl Maker {
    /// This one; where it is for nobody to say, the other.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        if self == Self::Auto { other } else { self }
    }
}

/// What an `OpenClaw` is told beside what all are told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OpenClaw {
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
pub enum Text {
    Here(String),
    /// In a file beside the entry's, which is read with it.
    Beside(Beside),
}

/// Where a text is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Beside {
    pub file: PathBuf,
}

impl Entry {
    /// Where its sandboxes have their programs from.
    pub fn root(&self) -> Root {
        match (&self.image, &self.rootfs) {
            (Some(image), _) => Root::Image(image.clone()),
            (None, Some(path)) => Root::Directory(path.clone()),
            (None, None) => Root::Host,
        }
    }

    /// What it is called in the records of its calls.
    pub fn graph(&self) -> &str {
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
    pub fn model(&self, asked: Option<String>) -> Result<Option<String>, String> {
        let Some(model) = asked.or_else(|| self.models.default.clone()) else { return Ok(None) };
        if !is_model_name(&model) {
            return Err(format!("`{}` must be {MODEL_NAME_RULE}", model.escape_debug()));
        }
        let allow = &self.models.allow;
        if allow.is_empty() || allow.contains(&model) {
            return Ok(Some(model));
        }
        Err(format!("`{}` may not use the model `{model}`; take {}", self.name, quoted(allow)))
    }

    /// How long the agent may take, of what its run may: it is to end by itself, with an answer, and not by our doing.
    pub fn own_time(max_runtime: Duration) -> Duration {
        let early = max_runtime.saturating_sub(REST).max(max_runtime / 2);
        early.max(Duration::from_secs(1))
    }
}

impl Default for OpenClaw {
    fn default() -> Self {
        Self {
            agent: "main".to_owned(),
            // What the models that it is used with have at least, and take at once.
            context_window: 200_000,
            max_tokens: 8192,
            allow: TOOLS.map(str::to_owned).into(),
            deny: vec![],
        }
    }
}

impl FromStr for Maker {
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
pub(super) fn file_name(agent: &str) -> String {
    agent.replace(':', "-") + ".toml"
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn version<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Version {
        Number(u64),
        Text(String),
    }
    match Version::deserialize(deserializer) {
        Ok(Version::Number(number)) => Ok(number.to_string()),
        Ok(Version::Text(text)) if !text.is_empty() => Ok(text),
        _ => Err(de::Error::custom("give a text or a whole number")),
    }
}

/// What works on files and runs commands. It has some fifty more, for machines that are somebody's, and each version
/// brings others.
const TOOLS: [&str; 7] = ["apply_patch", "edit", "exec", "ls", "process", "read", "write"];

/// Of what a run may take, what is not the agent's: it needs some time to write its answer and end.
const REST: Duration = Duration::from_mins(1);
