//! The one line on standard output: `{"payloads":[{"text":…}],"meta":{"durationMs":…,"agentMeta":…,"error":…}}`.
//!
//! `payloads` has the last thing that the model said, or nothing; `meta.error` is null, or says what went wrong. What
//! `agentMeta` counts is what the provider told, for people: what is paid for is in the gateway's records.

use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

/// What comes of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputEnvelope {
    /// The last thing that the model said.
    pub text: String,
    pub model: String,
    /// How often it was asked.
    pub rounds: u32,
    /// Why it stopped, in the provider's words.
    pub finish: String,
    pub usage: ConversationUsage,
    pub error: Option<AgentFailure>,
}

/// Tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConversationUsage {
    pub input: u64,
    pub output: u64,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentFailure {
    pub kind: AgentFailureKind,
    pub message: String,
    /// What the gateway calls it, where it is the gateway's.
    pub code: Option<String>,
    /// The HTTP status, where there is one.
    pub status: Option<u16>,
}

/// Where it went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentFailureKind {
    /// There is no conversation, or it cannot be read.
    NoConversation,
    /// The environment does not say which model, or where.
    NoModel,
    /// Nobody answers.
    Unreachable,
    /// The gateway, or the provider, has refused.
    Refused,
    /// The answer broke off.
    BrokenAnswer,
    /// The model was cut off in the middle of a call for the tool.
    CutOff,
    TooManyRounds,
    Timeout,
}

impl OutputEnvelope {
    /// Takes in what came of one round.
    pub fn add_round(&mut self, text: &str, finish: String, usage: ConversationUsage) {
        text.clone_into(&mut self.text);
        self.finish = finish;
        self.rounds += 1;
        self.usage.input += usage.input;
        self.usage.output += usage.output;
    }

    /// The line, with its end.
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
