//! Tools that are files: each call runs a program in a sandbox of its own, which has no network and no gateway.
//!
//! The arguments of a call are one JSON file in the sandbox. They are in no argument of the program and pass through no
//! shell.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::argument_schema::ArgumentSchema;
use super::config::ToolConfigError;
use super::definition::{TOOL_NAME_RULE, ToolDefinition, ToolProgramKind, is_tool_name};
use super::program::ToolProgramError;
use crate::base::digest::sha256_hex;
use crate::base::serde_words;
use crate::sandbox::spec::{LimitOverrides, MountAccess, SandboxLimits};

/// The file of one tool.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolFile {
    /// The tool's name. The file has the same name.
    name: String,
    description: String,
    /// The program and its arguments, executed without a shell. `${ARGUMENTS_FILE}` is the path of the call's arguments.
    argv: Vec<String>,
    /// The image of the sandbox; without it, the sandbox has this machine's programs.
    image: Option<String>,
    #[serde(default)]
    workspace: JobWorkspace,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    limits: LimitOverrides,
    #[serde(default)]
    parameters: ArgumentSchema,
}

/// The program of a tool that is a file.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolJob {
    pub argv: Vec<String>,
    pub image: Option<String>,
    pub workspace: JobWorkspace,
    pub env: BTreeMap<String, String>,
    pub limits: SandboxLimits,
}

/// The access of a tool to the workspace of its run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobWorkspace {
    /// An empty directory in memory.
    #[default]
    None,
    /// The run's workspace, which the tool cannot change.
    Ro,
    /// The run's workspace. Only a run that may write to its workspace has such tools.
    Rw,
}

/// One call of a tool that is a file.
#[derive(Clone, Debug)]
pub struct JobCall {
    /// The id of the call, which names its sandbox.
    pub id: String,
    pub job: Arc<ToolJob>,
    /// The arguments as the client wrote them, in JSON.
    pub arguments: String,
    pub timeout: Duration,
    /// Cancelled when the call must end.
    pub stop: CancellationToken,
}

/// The future of a call's result, as JSON.
pub type JobFuture = Pin<Box<dyn Future<Output = Result<String, ToolProgramError>> + Send>>;

/// Runs calls in sandboxes.
pub trait JobRunner: Send + Sync {
    /// Runs a call to its end, and removes its sandbox. The caller does not drop the future before that.
    fn run_job(&self, call: JobCall) -> JobFuture;

    /// Returns the run's access to its workspace; `None` if the run has no workspace on this machine.
    fn workspace_access(&self) -> Option<MountAccess>;
}

impl JobWorkspace {
    /// Returns true if a run with this access to its workspace may have the tool.
    pub fn is_possible_with(self, access: Option<MountAccess>) -> bool {
        match self {
            Self::None => true,
            Self::Ro => access.is_some(),
            Self::Rw => access == Some(MountAccess::ReadWrite),
        }
    }
}

/// Loads the tools of a directory, in the order of their file names.
///
/// # Errors
/// Returns an error that names the file, the key and the remedy.
pub fn load_tool_files(directory: &Path) -> Result<Vec<ToolDefinition>, ToolConfigError> {
    let shown = directory.display();
    let unreadable =
        |error| ToolConfigError::new("directory", format!("`{shown}` cannot be read: {error}"));
    let entries = fs::read_dir(directory).map_err(unreadable)?;
    let paths: Result<Vec<PathBuf>, _> =
        entries.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut paths = paths.map_err(unreadable)?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    paths.sort();
    let load = |path: &PathBuf| {
        let wrong = |problem: String| {
            ToolConfigError::new("directory", format!("`{}`: {problem}", path.display()))
        };
        let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let file: ToolFile = serde_words::from_toml(&text).map_err(wrong)?;
        let definition = file.into_definition(path).map_err(wrong)?;
        Ok(ToolDefinition { digest: sha256_hex(text.as_bytes()), ..definition })
    };
    paths.iter().map(load).collect()
}

impl ToolFile {
    fn into_definition(self, path: &Path) -> Result<ToolDefinition, String> {
        if !is_tool_name(&self.name) || self.name.starts_with(RESERVED_PREFIX) {
            return Err(format!(
                "`name`: a tool's name is {TOOL_NAME_RULE}, and does not begin with `{RESERVED_PREFIX}`"
            ));
        }
        if path.file_stem().is_none_or(|stem| stem != self.name.as_str()) {
            return Err(format!("`name`: the file of this tool is `{}.toml`", self.name));
        }
        if self.argv.first().is_none_or(|program| !program.starts_with('/')) {
            return Err("`argv`: begin with the absolute path of a program".to_owned());
        }
        if !self.argv.iter().any(|word| word.contains(ARGUMENTS_PLACEHOLDER))
            && !self.parameters.properties.is_empty()
        {
            return Err(format!(
                "`argv`: name {ARGUMENTS_PLACEHOLDER}, or the tool cannot read its arguments"
            ));
        }
        self.parameters.check_schema().map_err(|error| error.to_string())?;
        let limits = SandboxLimits {
            max_runtime: self.limits.max_runtime.unwrap_or(DEFAULT_TIMEOUT),
            max_output_bytes: self
                .limits
                .max_output
                .map_or(DEFAULT_OUTPUT_BYTES, |size| usize::try_from(size.0).unwrap_or(usize::MAX)),
            ..self.limits.resolve_limits()
        };
        if limits.max_output_bytes > MAX_OUTPUT_BYTES {
            return Err(format!("`limits.max_output`: give at most {MAX_OUTPUT_BYTES} bytes"));
        }
        let Self { name, description, argv, image, workspace, env, parameters, .. } = self;
        Ok(ToolDefinition {
            name: name.into(),
            digest: String::new(),
            description,
            parameters,
            timeout: limits.max_runtime,
            // The result has both streams, and JSON may write a byte with six.
            max_result_bytes: limits.max_output_bytes.saturating_mul(12) + 1024,
            program: ToolProgramKind::Job(Arc::new(ToolJob {
                argv,
                image,
                workspace,
                env,
                limits,
            })),
        })
    }
}

impl ToolJob {
    /// Returns the program and its arguments.
    pub fn resolved_argv(&self) -> Vec<String> {
        let resolve = |word: &String| word.replace(ARGUMENTS_PLACEHOLDER, ARGUMENTS_TARGET);
        self.argv.iter().map(resolve).collect()
    }
}

/// The path of a call's arguments in its sandbox.
pub const ARGUMENTS_TARGET: &str = "/arguments.json";

const ARGUMENTS_PLACEHOLDER: &str = "${ARGUMENTS_FILE}";

/// The beginning of the names of built-in tools.
const RESERVED_PREFIX: &str = "core__";

/// The longest time of a call, unless the file names another. Our choice.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// The stored bytes of each stream, unless the file names another number. Our choice.
const DEFAULT_OUTPUT_BYTES: usize = 64 << 10;

/// The most stored bytes of each stream: the result of a call must fit among the kept results.
const MAX_OUTPUT_BYTES: usize = 512 << 10;
