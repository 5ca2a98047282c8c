//! What happens on the way, for whoever shows it: lines of JSON on standard error.
//!
//! ```text
//! {"type":"text_delta","text":"Hel"}
//! {"type":"tool_call","id":"call_1","argv":["ls","-l"]}
//! {"type":"tool_result","id":"call_1","exit_code":0}
//! ```

use std::io::{self, Write};

use serde::Serialize;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ProgressEvent<'a> {
    /// A piece of what the model says, as it came.
    TextDelta { text: &'a str },
    /// The tool is used.
    ToolCall { id: &'a str, argv: &'a [String] },
    /// It is done; without an exit code it was not started, or was killed.
    ToolResult { id: &'a str, exit_code: Option<i32> },
}

/// Writes an event in one call, so that nothing comes between. That nobody reads it changes nothing.
pub fn emit_event(event: &ProgressEvent<'_>) {
    let mut line = serde_json::to_string(event).expect("texts and numbers are JSON");
    line.push('\n');
    let _ = io::stderr().write_all(line.as_bytes());
}
