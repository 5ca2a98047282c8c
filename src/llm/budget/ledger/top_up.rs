//! Budgets that ask: a person may raise a spent limit while the run goes on.
//!
//! A call that a spent limit refuses asks a [`BudgetAsker`], waits, and reserves again. Until the asker's answer, no
//! refusal ends the run.

use std::pin::Pin;
use std::sync::Arc;

use super::BudgetLedger;
use crate::llm::budget::budget_error::BudgetError;
use crate::llm::budget::price::ModelPrice;
use crate::llm::budget::spending_limits::SpendingLimits;

/// Asks a person for a larger budget.
pub trait BudgetAsker: Send + Sync {
    /// Waits until a person has raised the limit that has refused a call. Dropping the future leaves the question open.
    ///
    /// # Errors
    /// Returns the refusal that the call ends with, if no person has raised the limit.
    fn ask_for_budget(&self, refusal: BudgetError) -> BudgetAnswer<'_>;
}

/// A wait for more budget.
pub type BudgetAnswer<'a> = Pin<Box<dyn Future<Output = Result<(), BudgetError>> + Send + 'a>>;

impl BudgetLedger {
    /// Lets refused calls ask a person before their refusal counts. A call is then judged when its body is known, and a
    /// spent limit ends the run only by [`refuse_finally`](Self::refuse_finally).
    pub fn defer_refusals(&self) {
        self.lock_state().defers_refusals = true;
    }

    /// Counts the refusal of a call that no person has funded. If no other call is possible either, marks the run's
    /// budget as exhausted.
    pub fn refuse_finally(&self, refusal: &BudgetError, price: Option<Arc<ModelPrice>>) {
        self.count_denial(&mut self.lock_state(), refusal, price);
    }

    /// Raises limits. No limit falls, and no limit is added. Returns the limits in force.
    pub fn raise_limits(&self, raise: &SpendingLimits) -> SpendingLimits {
        let mut state = self.lock_state();
        state.limits.raise_spending(raise);
        let limits = state.limits.spending_limits();
        drop(state);
        // A call that waits for money that open calls hold may fit now.
        self.closed.notify_one();
        limits
    }

    /// Returns the limits that a person may raise.
    pub fn spending_limits(&self) -> SpendingLimits {
        self.lock_state().limits.spending_limits()
    }
}
