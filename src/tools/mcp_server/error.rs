//! The errors of a server's client.

use super::request::McpSession;
use crate::base::hidden_characters::escape_hidden;
use crate::telemetry::audit::tool_records::ToolOutcome;
use crate::tools::program_error::ToolProgramError;

/// An error of a server. The text is for the operator.
#[derive(Debug, thiserror::Error)]
pub enum McpServerError {
    #[error("the server does not answer: {0}")]
    Unreachable(String),
    #[error("the server does not answer in time")]
    TimedOut,
    /// The reason is for the operator of `tools lock`: it may have text of the program.
    #[error("the server's program serves no more: {}", one_line(.0))]
    ProgramEnded(String),
    /// The program that knows the session has ended, and the request was not written to another one.
    #[error("the server's program ended before the request was sent")]
    NotSent,
    #[error("the server's credential cannot be read: {0}")]
    Credential(String),
    #[error("the server answers with the HTTP status {0}")]
    Status(u16),
    /// The server's text is cut, and shown to the operator of `tools lock`.
    #[error("the server refuses the request ({code}): {}", one_line(message))]
    Refused { code: i64, message: String },
    #[error("the server's answer is not valid: {0}")]
    Malformed(&'static str),
    #[error("the server's answer is larger than its limit")]
    TooLarge,
    #[error(
        "the server's definition of the tool `{tool}` is not the one in the lock file; read `cogni-gateway tools diff`, then run `cogni-gateway tools lock`"
    )]
    DefinitionChanged { tool: String },
    #[error("the server's answer contains the server's credential")]
    RepeatsCredential,
    #[error("the tool failed")]
    ToolFailed(String),
    #[error("the server asks for input, a model or a task, and gets none")]
    AsksForInput,
}

impl McpServerError {
    /// Creates the error of a refused request. The message is cut.
    pub(super) fn refused(code: i64, message: &str) -> Self {
        if ASKING_CODES.contains(&code) {
            return Self::AsksForInput;
        }
        let end = message.floor_char_boundary(MAX_ERROR_BYTES);
        Self::Refused { code, message: message[..end].to_owned() }
    }

    /// Returns the kind of failure, for the log.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "unreachable",
            Self::TimedOut => "timed_out",
            Self::ProgramEnded(_) | Self::NotSent => "program_ended",
            Self::Credential(_) => "credential_unreadable",
            Self::Status(_) => "status",
            Self::Refused { .. } => "refused",
            Self::Malformed(_) => "malformed",
            Self::TooLarge => "too_large",
            Self::DefinitionChanged { .. } => "definition_changed",
            Self::RepeatsCredential => "repeats_credential",
            Self::ToolFailed(_) => "tool_failed",
            Self::AsksForInput => "asks_for_input",
        }
    }

    /// Returns the error without the server's own text.
    pub(super) fn log_text(&self) -> String {
        match self {
            Self::Refused { code, .. } => format!("the server refuses the request ({code})"),
            Self::ProgramEnded(_) => "the server's program serves no more".to_owned(),
            other => other.to_string(),
        }
    }

    /// Returns true if the server could not be asked at all, in any era.
    pub(super) fn is_of_connection(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::TimedOut | Self::Credential(_) => true,
            Self::Status(status) => matches!(status, 401 | 403 | 429 | 500..),
            _ => false,
        }
    }

    /// Returns true if the server does not know the session any more, so that another one may be opened.
    pub(super) fn is_of_lost_session(&self, session: &McpSession) -> bool {
        match self {
            Self::Status(404) => session.id.is_some(),
            Self::ProgramEnded(_) => true,
            _ => false,
        }
    }

    /// Returns the error that the client of the call sees.
    pub(super) fn into_program_error(self, max_bytes: usize) -> ToolProgramError {
        match self {
            Self::TooLarge => ToolProgramError::too_large(max_bytes),
            Self::ToolFailed(text) => ToolProgramError::failed(text),
            Self::Refused { message, .. } => {
                ToolProgramError::failed(format!("the tool's server refuses: {message}"))
            }
            Self::DefinitionChanged { .. } => ToolProgramError {
                outcome: ToolOutcome::Failed,
                code: "tool_definition_changed",
                message: "the tool has changed since the operator approved it".to_owned(),
            },
            Self::AsksForInput => ToolProgramError {
                outcome: ToolOutcome::Failed,
                code: "tool_asks_for_input",
                message: "the tool asks for input, a model or a task, and gets none".to_owned(),
            },
            Self::Unreachable(_)
            | Self::TimedOut
            | Self::ProgramEnded(_)
            | Self::NotSent
            | Self::Credential(_)
            | Self::Status(_)
            | Self::Malformed(_)
            | Self::RepeatsCredential => {
                ToolProgramError::failed("the tool's server does not answer as it should")
            }
        }
    }
}

/// The codes of servers that need a capability of the client, or send the user to a page: `MissingRequiredClientCapability`
/// of MCP 2026-07-28, and `URLElicitationRequired` of 2025-11-25.
const ASKING_CODES: [i64; 2] = [-32021, -32042];

/// The longest error of a server that the client sees, in bytes.
const MAX_ERROR_BYTES: usize = 512;

/// Returns a text for a line of an error: no character of it hides, moves or ends another.
fn one_line(text: &str) -> String {
    escape_hidden(text).replace('\n', "\\n").replace('\t', "\\t")
}
