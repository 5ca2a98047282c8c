//! The events that the watchers of a run receive.

use std::sync::Arc;

use rusqlite::Row;
use rusqlite::types::Type;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One event of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunEvent {
    /// The number of the event: from 1, or above the next multiple of a hundred thousand after another process has
    /// taken over the run.
    pub seq: u64,
    /// The time in milliseconds since 1970.
    pub at_ms: i64,
    pub kind: RunEventKind,
    /// The event's data as a JSON object.
    pub data: Arc<str>,
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunEventKind {
    /// The run waits for a place. The event is repeated when the position has halved.
    Queued,
    /// The service is creating the sandbox.
    RunStarted,
    /// The agent has written a part of its answer.
    TextDelta,
    /// The agent uses a tool of its own.
    ToolCall,
    ToolResult,
    /// A tool call waits for a person.
    ApprovalRequested,
    /// The question about a tool call is closed.
    ApprovalResolved,
    /// A denied call was proposed to a person, or a step of a standing approval was made.
    StandingApproval,
    /// A call of the LLM has been settled.
    UsageReport,
    /// The agent's whole answer.
    AssistantFinal,
    /// The run has failed.
    Error,
    /// The agent has ended.
    Done,
    /// The run has ended, and the delivery of its work goes no further for now.
    Final,
}

impl RunEvent {
    /// Creates an event with the current time.
    pub(super) fn created_now(seq: u64, kind: RunEventKind, data: &Value) -> Self {
        Self { seq, at_ms: super::now_millis(), kind, data: data.to_string().into() }
    }
}

impl RunEventKind {
    /// Returns the kind's name, which is also the SSE event's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::RunStarted => "run_started",
            Self::TextDelta => "text_delta",
            Self::ToolCall => "tool_call",
            Self::ToolResult => "tool_result",
            Self::ApprovalRequested => "approval_requested",
            Self::ApprovalResolved => "approval_resolved",
            Self::StandingApproval => "standing_approval",
            Self::UsageReport => "usage_report",
            Self::AssistantFinal => "assistant_final",
            Self::Error => "error",
            Self::Done => "done",
            Self::Final => "final",
        }
    }

    /// Returns true if the feed may drop events of this kind when the run has too many events.
    pub(super) fn is_droppable(self) -> bool {
        matches!(self, Self::TextDelta | Self::ToolCall | Self::ToolResult | Self::UsageReport)
    }

    fn parse(text: &str) -> Option<Self> {
        ALL_KINDS.iter().copied().find(|kind| kind.as_str() == text)
    }
}

/// Reads an event from a row of `seq, at, kind, data`.
pub(super) fn read_event(row: &Row<'_>) -> rusqlite::Result<RunEvent> {
    let kind: String = row.get(2)?;
    let odd =
        || rusqlite::Error::FromSqlConversionFailure(2, Type::Text, "no kind of event".into());
    Ok(RunEvent {
        seq: row.get::<_, i64>(0)?.cast_unsigned(),
        at_ms: row.get(1)?,
        kind: RunEventKind::parse(&kind).ok_or_else(odd)?,
        data: row.get::<_, String>(3)?.into(),
    })
}

const ALL_KINDS: &[RunEventKind] = &[
    RunEventKind::Queued,
    RunEventKind::RunStarted,
    RunEventKind::TextDelta,
    RunEventKind::ToolCall,
    RunEventKind::ToolResult,
    RunEventKind::ApprovalRequested,
    RunEventKind::ApprovalResolved,
    RunEventKind::StandingApproval,
    RunEventKind::UsageReport,
    RunEventKind::AssistantFinal,
    RunEventKind::Error,
    RunEventKind::Done,
    RunEventKind::Final,
];
