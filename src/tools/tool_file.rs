//! The files that define tools. Each file is one tool.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;

use super::argument_schema::ArgumentSchema;
use super::config::{ToolConfig, ToolConfigError};
use super::definition::{
    TOOL_NAME_RULE, ToolDefinition, ToolProgramKind, built_in_tools, is_tool_name,
};
use super::job::{ARGUMENTS_PLACEHOLDER, JobWorkspace, ToolJob};
use super::mcp_server::lock_file::locked_tools;
use crate::base::digest::sha256_hex;
use crate::base::serde_words;
use crate::sandbox::spec::{LimitOverrides, SandboxLimits};

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

/// Returns the definitions of all tools of a configuration: the built-in ones, those that are files, and those of
/// servers.
///
/// # Errors
/// Returns an error that names the file, the key and the remedy.
pub fn known_tools(config: &ToolConfig) -> Result<Vec<ToolDefinition>, ToolConfigError> {
    let mut tools = built_in_tools(config);
    if let Some(directory) = &config.directory {
        tools.extend(load_tool_files(directory)?);
    }
    for tool in locked_tools(config)? {
        if tools.iter().any(|other| other.name == tool.name) {
            let problem = format!("has the tool `{}`, which is a file, too; rename one", tool.name);
            return Err(ToolConfigError::new("lock", problem));
        }
        tools.push(tool);
    }
    Ok(tools)
}

/// Loads the tools of a directory, in the order of their file names.
///
/// # Errors
/// Returns an error that names the file, the key and the remedy.
fn load_tool_files(directory: &Path) -> Result<Vec<ToolDefinition>, ToolConfigError> {
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

/// The beginning of the names of built-in tools.
const RESERVED_PREFIX: &str = "core__";

/// The longest time of a call, unless the file names another. Our choice.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// The stored bytes of each stream, unless the file names another number. Our choice.
const DEFAULT_OUTPUT_BYTES: usize = 64 << 10;

/// The most stored bytes of each stream: the result of a call must fit among the kept results.
const MAX_OUTPUT_BYTES: usize = 512 << 10;
