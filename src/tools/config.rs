//! The `[tools]` table of a configuration.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::approval::{ApprovalConfig, ApprovalMode};
use super::connection_config::ConnectionConfig;
use super::credential_source::CredentialSource;
use super::job::{JobWorkspace, ToolJob};
use crate::base::serde_words;
use crate::llm::budget::{Nanodollars, ToolBudgetLimits};
use crate::sandbox::spec::{LimitOverrides, SandboxLimits};

/// The tools that the runs of a configuration may call. Without the table, a run has no tools.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ToolConfig {
    /// The names of the tools that runs may call. An empty list grants nothing.
    pub granted: Vec<String>,
    /// The directory of tools that are files, each with the name of its tool and `.toml`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<PathBuf>,
    /// The Prometheus server that `core__metrics_query` reads.
    pub metrics: Option<PrometheusConfig>,
    /// The servers of MCP whose tools runs may call. The name of a server begins the names of its tools, before `__`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub mcp: BTreeMap<String, McpServerConfig>,
    /// The servers that runs may reach over their socket, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub connections: BTreeMap<String, ConnectionConfig>,
    /// The file of the definitions of these servers' tools, which `cogni-gateway tools lock` writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lock: Option<PathBuf>,
    /// The groups of tools and connections that the modes of agents switch.
    #[serde(skip_serializing_if = "is_default")]
    pub groups: ToolGroupConfig,
    /// The conditions, prices and budgets of granted tools.
    pub rules: Vec<ToolRuleConfig>,
    /// The times of the questions that rules ask.
    pub approvals: ApprovalConfig,
    /// The rules about what a run has seen.
    #[serde(skip_serializing_if = "TaintConfig::is_empty")]
    pub taint: TaintConfig,
}

/// The groups of tools and connections. A `*` in a name stands for any text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ToolGroupConfig {
    /// The granted tools that run commands.
    pub commands: Vec<String>,
    /// The granted tools and the connections (`connect__NAME`) that reach the web.
    pub web: Vec<String>,
    /// The granted tools and the connections that read or write files.
    pub files: Vec<String>,
}

/// The marks of tools and connections, and the rules about runs that have seen them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TaintConfig {
    /// The marks of granted tools and of connections (`connect__NAME`), such as `untrusted`. A run that uses a marked one
    /// has seen the mark.
    pub marks: BTreeMap<String, String>,
    /// The rules that test the marks.
    pub rules: Vec<TaintRuleConfig>,
}

/// One rule about the marks that a run has seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaintRuleConfig {
    /// The name that refusals and records show.
    pub name: String,
    /// The condition, in CEL, on `run.saw.MARK`.
    pub when: String,
    /// The granted tools and the connections (`connect__NAME`) that the rule guards; a `*` stands for any text.
    pub tools: Vec<String>,
    /// The effect on their calls and requests while the condition holds.
    #[serde(rename = "then")]
    pub effect: TaintEffect,
    /// Sets of marks for which the condition must hold.
    #[serde(default, rename = "match")]
    pub matching: Vec<Vec<String>>,
    /// Sets of marks for which the condition must not hold.
    #[serde(default)]
    pub not_match: Vec<Vec<String>>,
}

/// The effect of a rule about what a run has seen. The later one is the stricter one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaintEffect {
    /// A person is asked about each call. No person is asked about a connection.
    Ask,
    /// Each call is denied.
    Deny,
}

/// The Prometheus server of the tool `core__metrics_query`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrometheusConfig {
    /// The server's address, such as `http://prometheus:9090`.
    pub url: String,
    /// The longest time of a query.
    #[serde(default = "default_query_timeout", with = "humantime_serde")]
    pub timeout: Duration,
    /// The largest result, in bytes.
    #[serde(default = "default_query_bytes")]
    pub max_result_bytes: usize,
}

/// A server of MCP: an address, or a program in a sandbox of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct McpServerConfig {
    /// The server's address, such as `https://api.example.com/mcp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The program and its arguments, executed without a shell. Its messages are lines on its standard input and output.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// The image of the program's sandbox; without it, the sandbox has this machine's programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The program's access to the workspace of its run.
    #[serde(default, skip_serializing_if = "is_default")]
    pub workspace: JobWorkspace,
    /// The program's variables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, ProgramVariable>,
    /// The limits of the program's sandbox.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: LimitOverrides,
    /// The headers that authorize the host, by their names.
    #[serde(default)]
    pub headers: BTreeMap<String, CredentialSource>,
    /// The longest time of a call.
    #[serde(default = "default_server_timeout", with = "humantime_serde")]
    pub timeout: Duration,
    /// The largest result, in bytes.
    #[serde(default = "default_query_bytes")]
    pub max_result_bytes: usize,
}

/// One rule about a granted tool, as the operator configured it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolRuleConfig {
    /// The name that refusals and records show.
    pub name: String,
    /// The tool that the rule is about.
    pub tool: String,
    /// The condition, in CEL, that a call must fulfil. Without a condition, the rule allows every call.
    pub when: Option<String>,
    /// The price of a call, in dollars. If several rules have a price, the highest applies.
    pub price_usd: Option<Nanodollars>,
    /// The limits of the tool within a run. If several rules have limits, the lowest applies.
    #[serde(default)]
    pub budget: ToolBudgetLimits,
    /// The mode in which the tool runs. If several rules have a mode, the strictest applies.
    #[serde(default)]
    pub approve: ApprovalMode,
    /// True if no person may allow a call that the condition does not.
    #[serde(default, rename = "final", skip_serializing_if = "std::ops::Not::not")]
    pub is_final: bool,
    /// The arguments that the audit log may hold. No other argument stands in it.
    #[serde(default)]
    pub evidence: Vec<String>,
    /// Example calls that the condition must allow.
    #[serde(default, rename = "match")]
    pub matching: Vec<ToolRuleExample>,
    /// Example calls that the condition must not allow.
    #[serde(default)]
    pub not_match: Vec<ToolRuleExample>,
}

/// An example call of a rule. An example sets only the facts that matter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ToolRuleExample {
    pub args: Map<String, Value>,
    pub run: ExampleRun,
    pub agent: ExampleAgent,
}

/// The run of an example call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExampleRun {
    pub id: String,
    pub attempt: String,
    pub account: String,
    pub metadata: Map<String, Value>,
}

/// The agent of an example call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExampleAgent {
    pub name: String,
}

/// A table of tools that cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`tools{}{key}`: {problem}", if key.is_empty() { "" } else { "." })]
pub struct ToolConfigError {
    /// The key below `tools`, such as `rules[0].when`.
    pub key: String,
    /// The mistake, and its remedy.
    pub problem: String,
}

impl ToolConfig {
    /// Parses the table. An unknown key is an error.
    ///
    /// # Errors
    /// Returns an error that names the key.
    pub fn from_table(table: &toml::Table) -> Result<Self, ToolConfigError> {
        let table = toml::Value::Table(table.clone());
        serde_path_to_error::deserialize(table).map_err(|error| {
            let key = error.path().to_string();
            let key = if key == "." { String::new() } else { key };
            let message = error.into_inner().message().to_owned();
            ToolConfigError { key, problem: serde_words::in_words("", &message) }
        })
    }
}

/// A variable of a server's program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "needs a text, or a table with one of `env` and `file`")]
pub enum ProgramVariable {
    Text(String),
    /// A credential of the host, read when the program starts.
    Secret(CredentialSource),
}

impl McpServerConfig {
    /// Returns the sources of the program's credentials, with the names of their variables.
    pub fn secret_env(&self) -> impl Iterator<Item = (&String, &CredentialSource)> {
        self.env.iter().filter_map(|(name, value)| match value {
            ProgramVariable::Text(_) => None,
            ProgramVariable::Secret(source) => Some((name, source)),
        })
    }

    /// Returns the sources of all credentials that the server gets.
    pub fn credentials(&self) -> impl Iterator<Item = &CredentialSource> {
        self.headers.values().chain(self.secret_env().map(|(_, source)| source))
    }

    /// Returns the program of a server that is one, as it runs in its sandbox.
    ///
    /// # Errors
    /// Returns the key that is wrong, and the mistake.
    pub fn sandbox_job(&self) -> Result<Option<Arc<ToolJob>>, (String, String)> {
        let wrong = |key: &str, problem: &str| Err((key.to_owned(), problem.to_owned()));
        let Some(program) = self.command.first() else {
            let is_set = [
                ("image", self.image.is_some()),
                ("workspace", self.workspace != JobWorkspace::None),
                ("env", !self.env.is_empty()),
                ("limits", self.limits != LimitOverrides::default()),
            ];
            return match is_set.iter().find(|(_, is_set)| *is_set) {
                Some((key, _)) => wrong(key, "belongs to a `command`, which is missing; remove it"),
                None => Ok(None),
            };
        };
        if !program.starts_with('/') {
            return wrong("command", "must begin with the absolute path of a program");
        }
        if !self.headers.is_empty() {
            return wrong(
                "headers",
                "belong to a `url`, and the server is a `command`; remove them",
            );
        }
        if self.limits.max_output.is_some() {
            return wrong("limits.max_output", "is for other tools; set `max_result_bytes`");
        }
        let mut env = BTreeMap::new();
        for (name, value) in &self.env {
            let key = format!("env.{}", name.escape_debug());
            if name.is_empty() || name.contains(['=', '\0']) {
                return wrong(&key, "is not the name of a variable");
            }
            match value {
                ProgramVariable::Text(text) => drop(env.insert(name.clone(), text.clone())),
                ProgramVariable::Secret(source) if source.has_one_place() => {}
                ProgramVariable::Secret(_) => return wrong(&key, "needs one of `env` and `file`"),
            }
        }
        if self.command.iter().chain(env.values()).any(|text| text.contains('\0')) {
            return wrong("command", "and `env` must not have a zero byte");
        }
        let limits = SandboxLimits {
            max_runtime: self.limits.max_runtime.unwrap_or(MAX_SERVER_RUNTIME),
            ..self.limits.resolve_limits()
        };
        limits.check().map_err(|error| ("limits".to_owned(), error.to_string()))?;
        let (argv, image) = (self.command.clone(), self.image.clone());
        Ok(Some(Arc::new(ToolJob { argv, image, workspace: self.workspace, env, limits })))
    }
}

impl TaintConfig {
    pub fn is_empty(&self) -> bool {
        self.marks.is_empty() && self.rules.is_empty()
    }
}

impl ToolConfigError {
    /// Creates an error for a key below `tools`.
    pub fn new(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { key: key.into(), problem: problem.into() }
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The rule of a list that grants or denies a tool or a connection.
pub const LIST_RULE: &str = "granted";

/// The longest time that the program of a server runs, unless the configuration names another. Our choice: longer than a
/// run. A program whose time is over starts anew with the next call.
const MAX_SERVER_RUNTIME: Duration = Duration::from_hours(24);

fn default_server_timeout() -> Duration {
    Duration::from_mins(1)
}

fn default_query_timeout() -> Duration {
    Duration::from_secs(10)
}

fn default_query_bytes() -> usize {
    256 * 1024
}
