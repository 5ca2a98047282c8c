//! The definition of a tool: its name, the schema of its arguments, and the program that runs it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::argument_schema::{ArgumentSchema, ArgumentType};
use super::config::ToolConfig;
use super::job::ToolJob;
use super::pinned_tool::PinnedTool;
use crate::base::digest::sha256_hex;

/// A tool that a configuration can grant.
#[derive(Clone, Debug)]
pub struct ToolDefinition {
    pub name: Arc<str>,
    /// The digest of the definition: of the tool's file, or of a built-in tool's name and version.
    pub digest: String,
    pub description: String,
    pub parameters: ArgumentSchema,
    pub program: ToolProgramKind,
    /// The longest time of a call.
    pub timeout: Duration,
    /// The largest result, in bytes.
    pub max_result_bytes: usize,
}

/// The program that runs a tool.
#[derive(Clone, Debug, PartialEq)]
pub enum ToolProgramKind {
    CurrentTime,
    MetricsQuery,
    /// A program in a sandbox of its own.
    Job(Arc<ToolJob>),
    /// A tool of a server.
    Mcp(Arc<PinnedTool>),
}

impl ToolProgramKind {
    /// Returns the program that runs in a sandbox: that of the tool, or that of its server.
    pub fn sandbox_job(&self) -> Option<&Arc<ToolJob>> {
        match self {
            Self::Job(job) => Some(job),
            Self::Mcp(tool) => tool.job.as_ref(),
            Self::CurrentTime | Self::MetricsQuery => None,
        }
    }
}

impl ToolDefinition {
    /// Returns the schema of the arguments, as clients see it.
    pub fn parameters_json(&self) -> Value {
        match &self.program {
            ToolProgramKind::Mcp(tool) => tool.input_schema.clone(),
            _ => json!(self.parameters),
        }
    }
}

/// Returns the definitions of the built-in tools that a configuration has the means for.
pub(super) fn built_in_tools(config: &ToolConfig) -> Vec<ToolDefinition> {
    let mut tools = vec![ToolDefinition {
        name: CURRENT_TIME_TOOL.into(),
        digest: built_in_digest(CURRENT_TIME_TOOL),
        description: "Returns the current time in UTC.".to_owned(),
        parameters: ArgumentSchema::default(),
        program: ToolProgramKind::CurrentTime,
        timeout: Duration::from_secs(1),
        max_result_bytes: 1024,
    }];
    if let Some(metrics) = &config.metrics {
        tools.push(ToolDefinition {
            name: METRICS_QUERY_TOOL.into(),
            digest: built_in_digest(METRICS_QUERY_TOOL),
            description: "Evaluates a PromQL expression at one time, or with `start`, `end` and `step` over a range."
                .to_owned(),
            parameters: metrics_query_parameters(),
            program: ToolProgramKind::MetricsQuery,
            timeout: metrics.timeout,
            max_result_bytes: metrics.max_result_bytes,
        });
    }
    tools
}

fn built_in_digest(name: &str) -> String {
    sha256_hex(format!("built-in tool {name} {}", env!("CARGO_PKG_VERSION")).as_bytes())
}

fn metrics_query_parameters() -> ArgumentSchema {
    let text = |description: &str, limit| ArgumentSchema {
        kind: ArgumentType::String,
        description: description.to_owned(),
        max_length: Some(limit),
        ..ArgumentSchema::default()
    };
    let moment = "A time in RFC 3339 or in Unix seconds";
    ArgumentSchema {
        properties: BTreeMap::from([
            ("query".to_owned(), text("The expression in PromQL", 4096)),
            ("time".to_owned(), text(moment, 40)),
            ("start".to_owned(), text(moment, 40)),
            ("end".to_owned(), text(moment, 40)),
            ("step".to_owned(), text("The distance of a range's points, such as `30s`", 20)),
        ]),
        required: vec!["query".to_owned()],
        ..ArgumentSchema::default()
    }
}

/// Returns true if a text has the form of a tool's name.
pub fn is_tool_name(name: &str) -> bool {
    let is_plain = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-')
    };
    (1..=64).contains(&name.len()) && name.bytes().all(is_plain)
}

/// The form of a tool's name, for error messages.
pub const TOOL_NAME_RULE: &str = "1 to 64 small letters, digits, `_` and `-`";

pub const CURRENT_TIME_TOOL: &str = "core__get_current_time";
pub const METRICS_QUERY_TOOL: &str = "core__metrics_query";
