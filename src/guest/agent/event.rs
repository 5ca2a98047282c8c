//! Progress events for a program that displays them: lines of JSON on standard error.
//!
//! ```text
//! {"type":"text_delta","text":"Hel"}
//! {"type":"tool_call","id":"call_1","argv":["ls","-l"]}
//! {"type":"tool_result","id":"call_1","exit_code":0}
//! ```

use std::io::{self, Write};

use serde::Serialize;

/// An event: one line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ProgressEvent<'a> {
    /// A piece of the model's text, as it arrived.
    TextDelta { text: &'a str },
    /// The tool is started.
    ToolCall { id: &'a str, argv: &'a [String] },
    /// The tool has ended. The exit code is `None` if the program was not started or was killed.
    ToolResult { id: &'a str, exit_code: Option<i32> },
}

/// Writes an event with one call, so that no other output is mixed into its line. A failed write is ignored: the agent
/// works without a reader.
pub fn emit_event(event: &ProgressEvent<'_>) {
    let mut line = serde_json::to_string(event).expect("texts and numbers are JSON");
    line.push('\n');
    let _ = io::stderr().write_all(line.as_bytes());
}
