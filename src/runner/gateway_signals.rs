//! The reports of a run's gateway to its runner: signals while it serves, and the summary of its calls.

use tokio_util::sync::CancellationToken;

use crate::llm::budget::BudgetAmount;

/// The signals that a gateway sends while it serves a run.
#[derive(Clone, Debug, Default)]
pub(super) struct GatewaySignals {
    /// Cancelled when the gateway accepts connections.
    pub(super) ready: CancellationToken,
    /// Cancelled when the budget is spent, so that the gateway admits no further call of the run.
    pub(super) exhausted: CancellationToken,
    /// Cancelled when the gateway has stopped serving.
    pub(super) gone: CancellationToken,
}

/// The counts and costs of the run's calls.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CallSummary {
    pub(super) spent: BudgetAmount,
    pub(super) admitted: u64,
    pub(super) refused: u64,
    /// The number of admitted calls that did not reach the upstream.
    pub(super) unreached: u64,
    /// True if the last call was refused because it needed more than what was left of the budget.
    pub(super) is_denied: bool,
}
