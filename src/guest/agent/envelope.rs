//! The one line on standard output: `{"payloads":[{"text":…}],"meta":{"durationMs":…,"agentMeta":…,"error":…}}`.
//!
//! `payloads` contains the model's last text, or is empty. `meta.error` is null or describes the failure. The token
//! counts in `agentMeta` are the provider's and are only informative: billing uses the gateway's records.

use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

/// The result of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputEnvelope {
    /// The text of the model's last answer.
    pub text: String,
    pub model: String,
    /// The number of answers that the model has given.
    pub rounds: u32,
    /// The reason why the model stopped, as the provider names it.
    pub finish: String,
    pub usage: ConversationUsage,
    pub error: Option<AgentFailure>,
}

/// Token counts, summed over all rounds of a conversation or for one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConversationUsage {
    pub input: u64,
    pub output: u64,
}

/// The reason why a conversation has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentFailure {
    pub kind: AgentFailureKind,
    pub message: String,
    /// The gateway's error code, if the gateway sent the error.
    pub code: Option<String>,
    /// The HTTP status, if the failure is an HTTP answer.
    pub status: Option<u16>,
}

/// The step at which a conversation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentFailureKind {
    /// The conversation's file is missing or cannot be read.
    NoConversation,
    /// The environment does not name a model, or names an address that a sandbox cannot reach.
    NoModel,
    /// The LLM's address does not answer.
    Unreachable,
    /// The gateway or the provider has refused the request.
    Refused,
    /// The answer broke off, or is not a valid answer.
    BrokenAnswer,
    /// The model's output limit cut a call for the tool.
    CutOff,
    TooManyRounds,
    Timeout,
}

impl OutputEnvelope {
    /// Adds the result of one round.
    pub fn add_round(&mut self, text: &str, finish: String, usage: ConversationUsage) {
        // Only the last text is printed; earlier texts went to standard error as events.
        text.clone_into(&mut self.text);
        self.finish = finish;
        self.rounds += 1;
        self.usage.input += usage.input;
        self.usage.output += usage.output;
    }

    /// Returns the line, including its line feed.
    pub fn to_line(&self, duration: Duration) -> String {
        let ConversationUsage { input, output } = self.usage;
        let payloads = if self.text.is_empty() { json!([]) } else { json!([{"text": self.text}]) };
        let envelope = json!({
            "payloads": payloads,
            "meta": {
                "durationMs": u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
                "agentMeta": {
                    "model": self.model,
                    "rounds": self.rounds,
                    "finish": self.finish,
                    "usage": {"input": input, "output": output, "total": input + output},
                },
                "error": self.error.as_ref().map(AgentFailure::to_json),
            },
        });
        format!("{envelope}\n")
    }
}

impl AgentFailure {
    pub fn new(kind: AgentFailureKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), code: None, status: None }
    }

    fn to_json(&self) -> Value {
        let mut error = json!({"kind": self.kind.to_string(), "message": self.message});
        if let Some(code) = &self.code {
            error["code"] = json!(code);
        }
        if let Some(status) = self.status {
            error["status"] = json!(status);
        }
        error
    }
}

impl fmt::Display for AgentFailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoConversation => "no_conversation",
            Self::NoModel => "no_model",
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
            Self::BrokenAnswer => "broken_answer",
            Self::CutOff => "cut_off",
            Self::TooManyRounds => "too_many_rounds",
            Self::Timeout => "timeout",
        })
    }
}
