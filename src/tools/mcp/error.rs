//! The errors of the protocol, with their codes and their HTTP statuses.

use http::StatusCode;
use serde_json::{Value, json};

use super::version::{McpEra, SERVED_VERSIONS};
use crate::tools::refusal::ToolRefusal;

/// An error in response to a message.
#[derive(Debug, thiserror::Error)]
pub(super) enum McpError {
    #[error("the request comes from a page of another origin")]
    ForeignOrigin,
    /// The message could have been a call, so its refusal is recorded like the refusal of a call.
    #[error("{}", refusal_message(.0))]
    Refused(#[from] ToolRefusal),
    #[error("the parameters are not valid: {0}")]
    InvalidParams(String),
    #[error("this version of the protocol is not served")]
    UnsupportedVersion { requested: String },
    #[error("this method is not served")]
    UnknownMethod(McpEra),
}

impl McpError {
    /// Returns the code of JSON-RPC.
    pub(super) fn rpc_code(&self) -> i32 {
        match self {
            Self::Refused(ToolRefusal::Json(_)) => PARSE_ERROR,
            Self::Refused(ToolRefusal::HeaderMismatch(_)) => HEADER_MISMATCH,
            Self::Refused(
                ToolRefusal::NotGranted(_)
                | ToolRefusal::InvalidToolName
                | ToolRefusal::Arguments(_),
            )
            | Self::InvalidParams(_) => INVALID_PARAMS,
            Self::ForeignOrigin | Self::Refused(_) => INVALID_REQUEST,
            Self::UnsupportedVersion { .. } => UNSUPPORTED_VERSION,
            Self::UnknownMethod(_) => METHOD_NOT_FOUND,
        }
    }

    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::ForeignOrigin => StatusCode::FORBIDDEN,
            // The method was served, and its answer is an error.
            Self::Refused(ToolRefusal::NotGranted(_) | ToolRefusal::InvalidToolName)
            | Self::UnknownMethod(McpEra::Legacy) => StatusCode::OK,
            Self::Refused(refusal) => refusal.status(),
            Self::InvalidParams(_) | Self::UnsupportedVersion { .. } => StatusCode::BAD_REQUEST,
            Self::UnknownMethod(McpEra::Modern) => StatusCode::NOT_FOUND,
        }
    }

    /// Returns the code in the access log.
    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::ForeignOrigin => "foreign_origin",
            Self::Refused(refusal) => refusal.code(),
            Self::InvalidParams(_) => "invalid_params",
            Self::UnsupportedVersion { .. } => "unsupported_version",
            Self::UnknownMethod(_) => "unknown_method",
        }
    }

    /// Returns the error object of the response.
    pub(super) fn to_object(&self) -> Value {
        let mut error = json!({"code": self.rpc_code(), "message": self.to_string()});
        if let Self::UnsupportedVersion { requested } = self {
            error["data"] = json!({"supported": SERVED_VERSIONS, "requested": requested});
        }
        error
    }
}

/// Returns the message about a refusal. A tool that is not granted and one that does not exist have the same message.
fn refusal_message(refusal: &ToolRefusal) -> String {
    match refusal {
        ToolRefusal::NotGranted(_) | ToolRefusal::InvalidToolName => {
            "unknown tool; `tools/list` names the tools that this run may call".to_owned()
        }
        refusal => refusal.to_string(),
    }
}

const PARSE_ERROR: i32 = -32_700;
const INVALID_REQUEST: i32 = -32_600;
const METHOD_NOT_FOUND: i32 = -32_601;
const INVALID_PARAMS: i32 = -32_602;
const HEADER_MISMATCH: i32 = -32_020;
const UNSUPPORTED_VERSION: i32 = -32_022;
