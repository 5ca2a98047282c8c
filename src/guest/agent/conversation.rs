//! The conversation: first the messages of a file, then the model's answers and the tool's results.
//!
//! The file is `{"messages": [{"role": …, "content": …}, …]}` or only the array, in the format of chat completions.
//! Beside `messages` the file may contain `system`, a message that comes before all other messages, and `tools`:
//! `false` gives the model no tools.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::envelope::{AgentFailure, AgentFailureKind};
use super::exec;

/// A call that the model makes to a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelToolCall {
    pub id: String,
    pub name: String,
    /// The arguments as the model wrote them. They are JSON only if the model made no mistake.
    pub arguments: String,
}

/// The messages so far, in the format of chat completions.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentConversation {
    messages: Vec<Value>,
    has_tools: bool,
}

impl AgentConversation {
    /// Reads a conversation from a file.
    ///
    /// # Errors
    /// Returns `NoConversation` if the file cannot be read, is too long, or is not a conversation.
    pub fn read(path: &Path) -> Result<Self, AgentFailure> {
        let wrong = |why: String| {
            AgentFailure::new(
                AgentFailureKind::NoConversation,
                format!("`{}`: {why}", path.display()),
            )
        };
        let mut text = String::new();
        let file = File::open(path).map_err(|error| wrong(error.to_string()))?;
        // One byte more than the limit, so that a file of exactly the limit is still accepted.
        file.take(MAX_FILE_BYTES + 1)
            .read_to_string(&mut text)
            .map_err(|error| wrong(error.to_string()))?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(wrong(format!("it is longer than {} MiB", MAX_FILE_BYTES >> 20)));
        }
        Self::parse(&text).map_err(wrong)
    }

    /// Reads a conversation from JSON.
    ///
    /// # Errors
    /// Returns a message that names the invalid part.
    pub fn parse(text: &str) -> Result<Self, String> {
        let value =
            serde_json::from_str(text).map_err(|error| format!("not valid JSON: {error}"))?;
        let (mut rest, messages) = match value {
            Value::Object(mut object) => {
                let messages = object.remove("messages");
                (object, messages)
            }
            array => (Map::new(), Some(array)),
        };
        let Some(Value::Array(mut messages)) = messages else {
            return Err("there is no array of messages".to_owned());
        };
        match rest.remove("system") {
            None | Some(Value::Null) => {}
            Some(Value::String(system)) => {
                messages.insert(0, json!({"role": "system", "content": system}));
            }
            Some(_) => return Err("`system` is not a string".to_owned()),
        }
        let has_tools = match rest.remove("tools") {
            None | Some(Value::Null) => true,
            Some(Value::Bool(tools)) => tools,
            Some(_) => return Err("`tools` is neither true nor false".to_owned()),
        };
        if messages.is_empty() {
            return Err("there is no message".to_owned());
        }
        Ok(Self { messages, has_tools })
    }

    /// Returns the body of a request that asks `model` to continue.
    pub fn to_request_body(&self, model: &str) -> String {
        let mut body = json!({
            "model": model,
            "messages": self.messages,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if self.has_tools {
            body["tools"] = json!([exec::tool_description()]);
        }
        body.to_string()
    }

    /// Appends the model's text and its calls.
    pub fn push_assistant(&mut self, text: &str, calls: &[ModelToolCall]) {
        let calls: Vec<_> = calls
            .iter()
            .map(|call| {
                let function = json!({"name": call.name, "arguments": call.arguments});
                json!({"id": call.id, "type": "function", "function": function})
            })
            .collect();
        // In this format an answer that has only calls has `null` as its text.
        let content = if text.is_empty() { Value::Null } else { text.into() };
        self.messages.push(json!({"role": "assistant", "content": content, "tool_calls": calls}));
    }

    /// Appends the result of a call.
    pub fn push_tool_result(&mut self, id: &str, result: &str) {
        self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": result}));
    }
}

/// The maximum size of the file: the gateway's default limit for a request's body.
const MAX_FILE_BYTES: u64 = 32 << 20;
