//! Refusals: the reasons why a tool call did not begin, with the status and the text that the client reads.

use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};

use super::argument_schema::ArgumentError;
use super::config::LIST_RULE;
use super::policy::{PolicyLayer, ToolDenial};
use crate::base::db::DatabaseError;
use crate::base::json::JsonError;
use crate::base::local_endpoint::{LocalReply, RetryAdvice};
use crate::llm::budget::{BudgetError, ToolBudgetError};
use crate::telemetry::audit::AuditError;

/// A reason why a tool call did not begin.
#[derive(Debug, thiserror::Error)]
pub enum ToolRefusal {
    #[error(
        "the path is not served; there are `GET /tool/list`, `POST /tool/exec`, `GET /tool/exec/ID` and `POST /mcp`"
    )]
    NotServed,
    #[error("the request comes from a page of another origin")]
    ForeignOrigin,
    #[error("the request body is larger than the limit of {limit} bytes")]
    TooLarge { limit: usize },
    #[error("the request body is not acceptable JSON: {0}")]
    Json(JsonError),
    #[error("the request is not valid: {0}")]
    InvalidRequest(String),
    #[error("the request is not valid: `tool` is not the name of a tool")]
    InvalidToolName,
    /// A header of MCP and the body contradict each other, so two readers would read two requests.
    #[error("the headers do not fit the body: {0}")]
    HeaderMismatch(String),
    #[error("the request names another run; leave `run_id` out, the socket decides")]
    OtherRun,
    /// A list does not name the tool. The message is the same for a tool that does not exist.
    #[error("this run may not call this tool; `GET /tool/list` names the tools that it may call")]
    NotGranted(ToolDenial),
    #[error("the rule `{}` does not allow this call", .0.rule)]
    Denied(ToolDenial),
    /// A rule denies the call, and a person may allow the same call for later.
    #[error(
        "the rule `{}` does not allow this call; a person may allow it by the proposal {proposal}, call again when one has", .denial.rule
    )]
    Proposed { denial: ToolDenial, proposal: String },
    #[error("the arguments do not fit the tool: {0}")]
    Arguments(#[from] ArgumentError),
    #[error(transparent)]
    Budget(#[from] ToolBudgetError),
    /// The run's money is spent, and the question to raise it has no answer yet.
    #[error(
        "waiting for approval: the run's budget is spent, and a person is asked to raise it; call again to wait on"
    )]
    BudgetAsked,
    #[error("the run has {limit} tool calls open, which is the limit; retry when one has ended")]
    Busy { limit: usize },
    #[error(
        "too many questions to people: 8 calls of the run wait, it has asked 256 times, or 128 questions of its grant are open; wait for the answers"
    )]
    TooManyQuestions,
    /// An approved call cannot begin: the question has expired, the run has ended, or the call is not the approved one.
    #[error("the approval does not count for this call: {0}; call again to ask again")]
    ApprovalLost(&'static str),
    #[error("the question to a person cannot be written or read")]
    ApprovalStore(#[from] DatabaseError),
    #[error(
        "the idempotency key belongs to a call with another tool or other arguments; use a new key"
    )]
    KeyConflict,
    #[error("there is no such call; the results of earlier calls are kept for a while only")]
    UnknownCall,
    #[error("an operator has paused this run; try again later")]
    Paused,
    #[error("an operator has ended this run")]
    Ended,
    #[error("the audit log cannot be written")]
    Audit(#[from] AuditError),
}

impl ToolRefusal {
    /// Returns the stable code that clients, metrics and the audit log receive.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotServed => "not_found",
            Self::ForeignOrigin => "foreign_origin",
            Self::TooLarge { .. } => "request_too_large",
            Self::Json(error) => error.code(),
            Self::InvalidRequest(_) | Self::InvalidToolName => "invalid_request",
            Self::HeaderMismatch(_) => "header_mismatch",
            Self::OtherRun => "run_mismatch",
            Self::NotGranted(_) | Self::Denied(_) | Self::Proposed { .. } => "policy_denied",
            Self::Arguments(_) => "invalid_arguments",
            Self::Budget(error) => error.code(),
            Self::BudgetAsked => "budget_pending",
            Self::Busy { .. } => "too_many_tool_calls",
            Self::TooManyQuestions => "too_many_approvals",
            Self::ApprovalLost(_) => "approval_lost",
            Self::ApprovalStore(_) => "approval_unavailable",
            Self::KeyConflict => "idempotency_conflict",
            Self::UnknownCall => "unknown_call",
            Self::Paused => "run_paused",
            Self::Ended => "run_ended",
            Self::Audit(_) => "audit_unavailable",
        }
    }

    pub fn status(&self) -> StatusCode {
        match self {
            Self::NotServed | Self::UnknownCall => StatusCode::NOT_FOUND,
            Self::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Json(_)
            | Self::InvalidRequest(_)
            | Self::InvalidToolName
            | Self::HeaderMismatch(_)
            | Self::Arguments(_) => StatusCode::BAD_REQUEST,
            Self::ForeignOrigin
            | Self::OtherRun
            | Self::NotGranted(_)
            | Self::Denied(_)
            | Self::Proposed { .. }
            | Self::ApprovalLost(_)
            | Self::Ended => StatusCode::FORBIDDEN,
            Self::Budget(error) if error.is_permanent() => StatusCode::PAYMENT_REQUIRED,
            Self::Budget(_)
            | Self::BudgetAsked
            | Self::Busy { .. }
            | Self::TooManyQuestions
            | Self::Paused => StatusCode::TOO_MANY_REQUESTS,
            Self::KeyConflict => StatusCode::CONFLICT,
            Self::Audit(_) | Self::ApprovalStore(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Returns true if the same call may begin a moment later.
    pub(super) fn is_temporary(&self) -> bool {
        self.status() == StatusCode::TOO_MANY_REQUESTS
    }

    /// Returns the denial of the policy, if the policy decided.
    pub fn denial(&self) -> Option<&ToolDenial> {
        match self {
            Self::NotGranted(denial) | Self::Denied(denial) | Self::Proposed { denial, .. } => {
                Some(denial)
            }
            _ => None,
        }
    }

    /// Returns the proposal by which a person may allow the call.
    pub(super) fn proposal(&self) -> Option<&str> {
        match self {
            Self::Proposed { proposal, .. } => Some(proposal),
            _ => None,
        }
    }

    /// Returns the layer and the rule that the client may know. For a tool that a list does not name or a mode
    /// takes away, the client does not learn more: the answer would tell which tools exist.
    pub(super) fn public_decision(&self) -> Option<(&'static str, &str)> {
        match self {
            Self::NotGranted(_) => Some((PolicyLayer::Run.as_str(), LIST_RULE)),
            Self::Denied(denial) | Self::Proposed { denial, .. } => {
                Some((denial.layer.as_str(), &denial.rule))
            }
            _ => None,
        }
    }

    fn retry_advice(&self) -> RetryAdvice {
        match self {
            Self::Budget(ToolBudgetError::Run(BudgetError::Rate { retry_after, .. })) => {
                RetryAdvice::After(*retry_after)
            }
            Self::Budget(error) if error.is_permanent() => RetryAdvice::Never,
            Self::Budget(_)
            | Self::BudgetAsked
            | Self::Busy { .. }
            | Self::TooManyQuestions
            | Self::Paused
            | Self::Audit(_)
            | Self::ApprovalStore(_) => RetryAdvice::After(RETRY_DELAY),
            _ => RetryAdvice::Never,
        }
    }

    /// Returns the response to the client.
    pub fn to_reply(&self) -> LocalReply {
        let mut error = json!({
            "type": "tool_error",
            "code": self.code(),
            "message": self.to_string(),
        });
        if let Some((layer, rule)) = self.public_decision() {
            error["layer"] = Value::from(layer);
            error["rule"] = Value::from(rule);
        }
        if let Some(proposal) = self.proposal() {
            error["proposal"] = Value::from(proposal);
        }
        LocalReply {
            status: self.status(),
            body: json!({ "error": error }).to_string(),
            allow: None,
            code: Some(self.code()),
            retry: self.retry_advice(),
        }
    }
}

/// The delay after which a client may retry a refusal that passes by itself.
const RETRY_DELAY: Duration = Duration::from_secs(1);
