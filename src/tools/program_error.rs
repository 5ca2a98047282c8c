//! The error of a tool that ran.

use std::time::Duration;

use crate::telemetry::audit::tool_records::ToolOutcome;

/// An error of a tool that ran.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ToolProgramError {
    pub outcome: ToolOutcome,
    /// The stable code that the client, the metrics and the audit log receive.
    pub code: &'static str,
    pub message: String,
}

impl ToolProgramError {
    /// Creates the error of a tool that reports a failure.
    pub fn failed(message: impl Into<String>) -> Self {
        Self { outcome: ToolOutcome::Failed, code: "tool_failed", message: message.into() }
    }

    /// Creates the error of a tool whose time is up.
    pub fn timed_out(timeout: Duration) -> Self {
        let timeout = humantime::format_duration(timeout);
        let message = format!("the tool did not end within {timeout}");
        Self { outcome: ToolOutcome::TimedOut, code: "tool_timeout", message }
    }

    /// Creates the error of a call that a shutdown or an operator has ended.
    pub fn stopped() -> Self {
        let message =
            "the call was stopped: the run ends, or an operator has aborted it".to_owned();
        Self { outcome: ToolOutcome::ShutDown, code: "tool_stopped", message }
    }

    /// Creates the error of a tool whose result is larger than its limit.
    pub fn too_large(limit: usize) -> Self {
        let message = format!("the tool's result is larger than its limit of {limit} bytes");
        Self { outcome: ToolOutcome::OutputTooLarge, code: "tool_output_too_large", message }
    }
}
