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
use super::mcp_server::lock_file::{locked_tools, read_lock_file};
use crate::base::digest::sha256_hex;
use crate::base::regular_file::read_regular_file;
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

/// The texts of the files that a configuration names, by their paths.
pub type ToolFileTexts = BTreeMap<PathBuf, String>;

/// Reads the files that a configuration names: each tool that is a file, and the lock file.
///
/// # Errors
/// Returns an error that names the file and the key.
pub fn read_tool_files(config: &ToolConfig) -> Result<ToolFileTexts, ToolConfigError> {
    let mut texts = ToolFileTexts::new();
    if let Some(directory) = &config.directory {
        for path in list_tool_files(directory)? {
            let text = read_regular_file(&path, MAX_FILE_BYTES).map_err(|error| {
                let problem = format!("`{}` cannot be read: {error}", path.display());
                ToolConfigError::new("directory", problem)
            })?;
            texts.insert(path, text);
        }
    }
    if let Some(path) = config.lock.as_ref().filter(|_| !config.mcp.is_empty()) {
        texts.insert(path.clone(), read_lock_file(path)?);
    }
    Ok(texts)
}

/// Returns the definitions of all tools of a configuration: the built-in ones, those that are files, and those of
/// servers.
///
/// # Errors
/// Returns an error that names the file, the key and the remedy. The error shows no value of the file.
pub fn known_tools(
    config: &ToolConfig,
    texts: &ToolFileTexts,
) -> Result<Vec<ToolDefinition>, ToolConfigError> {
    let mut tools = built_in_tools(config);
    let is_tool = |path: &Path| path.parent() == config.directory.as_deref();
    for (path, text) in texts.iter().filter(|(path, _)| is_tool(path)) {
        tools.push(parse_tool_file(path, text).map_err(|problem| {
            ToolConfigError::new("directory", format!("`{}`: {problem}", path.display()))
        })?);
    }
    for tool in locked_tools(config, texts)? {
        if tools.iter().any(|other| other.name == tool.name) {
            let problem = format!("has the tool `{}`, which is a file, too; rename one", tool.name);
            return Err(ToolConfigError::new("lock", problem));
        }
        tools.push(tool);
    }
    Ok(tools)
}

/// Returns the paths of the tools in a directory.
fn list_tool_files(directory: &Path) -> Result<Vec<PathBuf>, ToolConfigError> {
    let shown = directory.display();
    let unreadable =
        |error| ToolConfigError::new("directory", format!("`{shown}` cannot be read: {error}"));
    let entries = fs::read_dir(directory).map_err(unreadable)?;
    let paths: Result<Vec<PathBuf>, _> =
        entries.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut paths = paths.map_err(unreadable)?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    Ok(paths)
}

fn parse_tool_file(path: &Path, text: &str) -> Result<ToolDefinition, String> {
    // The excerpt of a TOML error may show a secret of `env`.
    let file: ToolFile = toml::from_str(text).map_err(|error| {
        let line = serde_words::toml_line(text, &error);
        format!("line {line}: {}", serde_words::in_words("", error.message()))
    })?;
    let definition = file.into_definition(path)?;
    Ok(ToolDefinition { digest: sha256_hex(text.as_bytes()), ..definition })
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

/// The largest file of a tool, in bytes. Our choice.
const MAX_FILE_BYTES: u64 = 256 << 10;
