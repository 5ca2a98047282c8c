//! The judgement about the rest of a request's body.

use std::sync::Arc;

use crate::llm::budget::BudgetLedger;
use crate::tools::connection_config::AGENT_PREFIX;
use crate::tools::taint::TaintPolicy;

/// The rules about what the run has seen, for the body of an admitted request: what has passed before is fixed, and what
/// comes later may have been read since.
#[derive(Clone)]
pub(super) struct BodyJudge {
    taint: Arc<TaintPolicy>,
    ledger: Arc<BudgetLedger>,
    /// The name of the connection in the rules.
    guarded: String,
}

impl BodyJudge {
    /// Returns the judge of the bodies that go to a connection; `None` if no rule guards it.
    pub(super) fn for_connection(
        (taint, ledger): (&Arc<TaintPolicy>, &Arc<BudgetLedger>),
        connection: &str,
    ) -> Option<Self> {
        let guarded = format!("{AGENT_PREFIX}{connection}");
        let (taint, ledger) = (Arc::clone(taint), Arc::clone(ledger));
        taint.is_guarded(&guarded).then_some(Self { taint, ledger, guarded })
    }

    /// Returns true if a request would be denied now. The ledger counts the body's own request.
    pub(super) fn denies_rest(&self) -> bool {
        self.taint.judge_call(&self.guarded, (&self.ledger, true)).is_some()
    }
}
