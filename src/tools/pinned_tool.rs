//! A tool of an MCP server, as the operator has pinned it.

use std::sync::Arc;

use serde_json::Value;

use super::job::ToolJob;

/// A tool of a server, as the lock file pins it.
#[derive(Clone, Debug, PartialEq)]
pub struct PinnedTool {
    pub server: String,
    /// The tool's name on the server.
    pub name: String,
    pub digest: String,
    /// The schema of the arguments, as the server wrote it.
    pub input_schema: Value,
    /// The program of the server, if the server is one.
    pub job: Option<Arc<ToolJob>>,
}
