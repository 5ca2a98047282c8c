//! The lock file: the definitions of the servers' tools, as the operator has read them.
//!
//! `cogni-gateway tools lock` writes the file, and `tools diff` compares it with the servers. A run is offered what the
//! file says, so a server cannot put a text before a model that the operator has not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display, Formatter};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, process};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::foreign_schema::argument_view;
use crate::base::canonical;
use crate::base::regular_file::read_regular_file;
use crate::tools::config::{McpServerConfig, ToolConfig, ToolConfigError};
use crate::tools::definition::{ToolDefinition, ToolProgramKind, is_tool_name};
use crate::tools::pinned_tool::PinnedTool;

/// The content of a lock file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolLockFile {
    version: u32,
    /// The definitions of each server's tools, by their names.
    servers: BTreeMap<String, BTreeMap<String, Value>>,
}

/// A difference between two lock files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolLockChange {
    kind: char,
    server: String,
    tool: String,
    /// The members of the definition that differ.
    members: Vec<String>,
}

impl ToolLockFile {
    pub fn new(servers: BTreeMap<String, BTreeMap<String, Value>>) -> Self {
        Self { version: VERSION, servers }
    }

    /// Reads a lock file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or has another form.
    pub fn read_file(path: &Path) -> io::Result<Self> {
        Self::parse_text(&read_regular_file(path, MAX_LOCK_FILE_BYTES)?)
    }

    fn parse_text(text: &str) -> io::Result<Self> {
        let file: Self = serde_json::from_str(text)?;
        if file.version == VERSION {
            Ok(file)
        } else {
            Err(io::Error::other(format!("version {} is not known", file.version)))
        }
    }

    /// Writes the file under another name first, so that a reader never finds half of it.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write_file(&self, path: &Path) -> io::Result<()> {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}", process::id()));
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        let mut file = fs::File::create(&name)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&name, path)
    }

    /// Returns the changes that lead from this file to another one.
    pub fn list_changes(&self, other: &Self) -> Vec<ToolLockChange> {
        let keys = |file: &Self| {
            let tools = file.servers.iter().flat_map(|(server, tools)| {
                tools.keys().map(|tool| (server.clone(), tool.clone())).collect::<Vec<_>>()
            });
            tools.collect::<BTreeSet<_>>()
        };
        let all = keys(self).into_iter().chain(keys(other)).collect::<BTreeSet<_>>();
        let changes = all.into_iter().filter_map(|(server, tool)| {
            let old = self.find_definition(&server, &tool);
            let new = other.find_definition(&server, &tool);
            let (kind, members) = match (old, new) {
                (None, _) => ('+', vec![]),
                (_, None) => ('-', vec![]),
                (Some(old), Some(new)) if definition_digest(old) == definition_digest(new) => {
                    return None;
                }
                (Some(old), Some(new)) => ('~', differing_members(old, new)),
            };
            Some(ToolLockChange { kind, server, tool, members })
        });
        changes.collect()
    }

    fn find_definition(&self, server: &str, tool: &str) -> Option<&Value> {
        self.servers.get(server)?.get(tool)
    }

    /// Returns the tools of a server that a configuration can grant.
    fn server_tools(&self, server: &str, config: &McpServerConfig) -> Vec<ToolDefinition> {
        let tools = self.servers.get(server).into_iter().flatten();
        tools
            .filter_map(|(tool, definition)| pinned_tool((server, config), tool, definition))
            .collect()
    }
}

/// Reads the text of a lock file.
///
/// # Errors
/// Returns an error that names the remedy.
pub fn read_lock_file(path: &Path) -> Result<String, ToolConfigError> {
    read_regular_file(path, MAX_LOCK_FILE_BYTES).map_err(|error| unreadable_error(path, &error))
}

/// Returns the tools of all servers of a configuration, as its lock file has them.
///
/// # Errors
/// Returns an error that names the key and the remedy.
pub fn locked_tools(
    config: &ToolConfig,
    texts: &BTreeMap<PathBuf, String>,
) -> Result<Vec<ToolDefinition>, ToolConfigError> {
    if config.mcp.is_empty() {
        return Ok(vec![]);
    }
    let path = config.lock.as_deref().ok_or_else(|| {
        ToolConfigError::new("lock", format!("name the file of the servers' tools, and {WRITE_IT}"))
    })?;
    let text = texts.get(path).map(String::as_str).unwrap_or_default();
    let file = ToolLockFile::parse_text(text).map_err(|error| unreadable_error(path, &error))?;
    let tools = config.mcp.iter().flat_map(|(server, config)| file.server_tools(server, config));
    Ok(tools.collect())
}

fn unreadable_error(path: &Path, error: &io::Error) -> ToolConfigError {
    let shown = path.display();
    ToolConfigError::new("lock", format!("`{shown}` cannot be read: {error}; {WRITE_IT}"))
}

/// The largest lock file, in bytes. Our choice: thousands of definitions.
const MAX_LOCK_FILE_BYTES: u64 = 16 << 20;

/// The remedy for a lock file that is missing or damaged.
const WRITE_IT: &str = "write it with `cogni-gateway tools lock --config FILE`";

/// Returns the digest of a definition, without the metadata that may differ at each request.
pub fn definition_digest(definition: &Value) -> String {
    let mut definition = definition.clone();
    if let Some(members) = definition.as_object_mut() {
        members.remove("_meta");
    }
    // A value of JSON can always be written as JSON.
    canonical::digest("tool definition 1", &definition).unwrap_or_default()
}

/// Returns the reason why a tool cannot be granted, if there is one.
pub fn unusable_reason(server: &str, tool: &str, definition: &Value) -> Option<&'static str> {
    if !is_tool_name(&full_name(server, tool)) {
        return Some("its name has other characters than small letters, digits, `_` and `-`");
    }
    if !definition["inputSchema"].is_object() {
        return Some("it has no schema of its arguments");
    }
    // Such a tool wants arguments in headers, too.
    let has_headers = definition["inputSchema"].to_string().contains("\"x-mcp-header\":");
    has_headers.then_some("it wants arguments in headers (`x-mcp-header`)")
}

fn pinned_tool(
    (server, config): (&str, &McpServerConfig),
    tool: &str,
    definition: &Value,
) -> Option<ToolDefinition> {
    if unusable_reason(server, tool, definition).is_some() {
        return None;
    }
    let digest = definition_digest(definition);
    let schema = &definition["inputSchema"];
    // A wrong table is refused when the server is opened.
    let job = config.sandbox_job().ok().flatten();
    let with_program =
        job.as_ref().and_then(|_| canonical::digest("server tool 1", &(&digest, config)).ok());
    Some(ToolDefinition {
        name: full_name(server, tool).into(),
        digest: with_program.unwrap_or_else(|| digest.clone()),
        description: definition["description"].as_str().unwrap_or_default().to_owned(),
        parameters: argument_view(schema),
        program: ToolProgramKind::Mcp(Arc::new(PinnedTool {
            server: server.to_owned(),
            name: tool.to_owned(),
            digest,
            input_schema: schema.clone(),
            job,
        })),
        timeout: config.timeout,
        max_result_bytes: config.max_result_bytes,
    })
}

fn full_name(server: &str, tool: &str) -> String {
    format!("{server}__{tool}")
}

fn differing_members(old: &Value, new: &Value) -> Vec<String> {
    let names = |value: &Value| -> BTreeSet<String> {
        value.as_object().into_iter().flat_map(|members| members.keys().cloned()).collect()
    };
    let all = names(old).into_iter().chain(names(new)).collect::<BTreeSet<_>>();
    all.into_iter().filter(|name| name != "_meta" && old.get(name) != new.get(name)).collect()
}

impl Display for ToolLockChange {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { kind, server, tool, members } = self;
        // A server chooses these texts, and a terminal must not obey them.
        write!(f, "{kind} {}__{}", server.escape_debug(), tool.escape_debug())?;
        if members.is_empty() {
            Ok(())
        } else {
            write!(f, ": {}", members.join(", ").escape_debug())
        }
    }
}

/// The version of the file's form.
const VERSION: u32 = 1;
