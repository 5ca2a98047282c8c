//! What the watchers of a run are told.

use std::sync::Arc;

use rusqlite::Row;
use rusqlite::types::Type;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One thing that happened in a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunEvent {
    /// Counts the run's events from 1, and from the next hundred thousand where another process has taken the run up.
    pub seq: u64,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    pub kind: RunEventKind,
    /// A JSON object.
    pub data: Arc<str>,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunEventKind {
    /// The sandbox is being made.
    RunStarted,
    /// The agent has said something, a part of its answer.
    TextDelta,
    /// The agent uses a tool of its own.
    ToolCall,
    ToolResult,
    /// A call of the LLM has been settled.
    UsageReport,
    /// The agent's whole answer.
    AssistantFinal,
    /// The run is not ok.
    Error,
    /// The agent has ended.
    Done,
    /// The run has ended, and its work is where it is.
    Final,
}

impl RunEvent {
    /// As it happens.
    pub(super) fn created_now(seq: u64, kind: RunEventKind, data: &Value) -> Self {
        Self { seq, at_ms: super::now_millis(), kind, data: data.to_string().into() }
    }
}

impl RunEventKind {
    /// As an SSE event's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RunStarted => "run_started",
            Self::TextDelta => "text_delta",
            Self::ToolCall => "tool_call",
            Self::ToolResult => "tool_result",
            Self::UsageReport => "usage_report",
            Self::AssistantFinal => "assistant_final",
            Self::Error => "error",
            Self::Done => "done",
            Self::Final => "final",
        }
    }

    /// Whether watchers can do without, where there is too much of it.
    pub(super) fn is_droppable(self) -> bool {
        matches!(self, Self::TextDelta | Self::ToolCall | Self::ToolResult | Self::UsageReport)
    }

    fn parse(text: &str) -> Option<Self> {
        ALL_KINDS.iter().copied().find(|kind| kind.as_str() == text)
    }
}

/// A row of `seq, at, kind, data`.
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
    RunEventKind::RunStarted,
    RunEventKind::TextDelta,
    RunEventKind::ToolCall,
    RunEventKind::ToolResult,
    RunEventKind::UsageReport,
    RunEventKind::AssistantFinal,
    RunEventKind::Error,
    RunEventKind::Done,
    RunEventKind::Final,
];
