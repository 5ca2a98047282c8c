//! One run of an agent of the catalog: its conversation, its models, and the files that the runner writes for it.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::runner::agents::AgentDefinition;

/// An agent of the catalog, with the messages, models and time of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentInvocation {
    pub entry: Arc<AgentDefinition>,
    /// The messages of the conversation. The list is empty if the workspace already holds the conversation.
    pub messages: Vec<ChatMessage>,
    /// The model that the agent begins with.
    pub model: String,
    /// The models that the agent may choose from, as far as its settings list them.
    pub models: Vec<String>,
    /// The time within which the agent has to answer.
    pub timeout: Duration,
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatMessage {
    pub role: ChatRole,
    pub content: String,
}

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChatRole {
    System,
    User,
    Assistant,
}

/// The files in an agent's workspace that are no part of its work.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AgentFiles {
    /// The files that the runner writes for each run, as path and text.
    pub(super) own: Vec<(&'static str, String)>,
    /// The files and directories that the agent's program makes for itself.
    pub(super) made: &'static [&'static str],
}

impl ChatMessage {
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: ChatRole::User, content: content.into() }
    }
}

/// The environment variable that tells the program its model's name.
pub const MODEL_VARIABLE: &str = "COGNI_MODEL";
