//! The error of a call that the budget does not allow.

use std::time::Duration;

use super::cost::Nanodollars;

/// The limit that prevents a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BudgetError {
    #[error("turn budget exhausted: {spent} of {limit} turns are spent")]
    Turns { spent: u64, limit: u64 },
    #[error(
        "{kind} token budget exhausted: {spent} of {limit} tokens are spent and this call needs about {needed}"
    )]
    Tokens { kind: &'static str, spent: u64, limit: u64, needed: u64 },
    #[error(
        "cost budget exhausted: ${spent} of ${limit} are spent and this call needs about ${needed}"
    )]
    Cost { spent: Nanodollars, limit: Nanodollars, needed: Nanodollars },
    #[error("the run's deadline of {} has passed", humantime::format_duration(*limit))]
    Deadline { limit: Duration },
    #[error("the limit of {limit} open calls is reached; retry when a call has ended")]
    Concurrency { limit: u32 },
    #[error("open calls hold the rest of the {kind} budget; retry when a call has ended")]
    Reserved { kind: &'static str },
    #[error("the limit of {limit} {kind} per minute is reached")]
    Rate { kind: &'static str, limit: u32, retry_after: Duration },
}

impl BudgetError {
    /// Returns true if the same call cannot be admitted later either. The deadline is reported by
    /// [`BudgetLedger::deadline`](super::BudgetLedger::deadline).
    pub(super) fn is_permanent(&self) -> bool {
        match self {
            Self::Turns { .. } | Self::Tokens { .. } | Self::Cost { .. } => true,
            Self::Deadline { .. }
            | Self::Concurrency { .. }
            | Self::Reserved { .. }
            | Self::Rate { .. } => false,
        }
    }

    /// Returns the name of the limit.
    pub fn limit_kind(&self) -> &'static str {
        match self {
            Self::Turns { .. } => "turn",
            Self::Cost { .. } => "cost",
            Self::Deadline { .. } => "time",
            Self::Concurrency { .. } => "open call",
            Self::Tokens { kind, .. } | Self::Reserved { kind } | Self::Rate { kind, .. } => kind,
        }
    }
}
