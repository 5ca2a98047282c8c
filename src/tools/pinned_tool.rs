//! A tool of an MCP server, as the operator has pinned it.

use serde_json::Value;

/// A tool of a server, as the lock file pins it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedTool {
    pub server: String,
    /// The tool's name on the server.
    pub name: String,
    pub digest: String,
    /// The schema of the arguments, as the server wrote it.
    pub input_schema: Value,
}
