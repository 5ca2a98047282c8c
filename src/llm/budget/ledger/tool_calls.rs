//! The tool calls of a run in its ledger: each call reserves money, a place among the tool's calls and a place in the
//! tool's minute, all under the lock that LLM calls reserve under.
//!
//! **Invariant:** the money that tool calls and LLM calls have spent and reserved is one sum, so no order of calls spends
//! more than the run's limit.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::BudgetLedger;
use super::account_rate::AccountRate;
use crate::llm::budget::budget_error::BudgetError;
use crate::llm::budget::cost::Nanodollars;
use crate::llm::budget::usage::BudgetAmount;

/// The limits of one tool within a run. `None` means no limit beside the run's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ToolBudgetLimits {
    /// The maximum number of calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<u64>,
    /// The maximum number of calls per minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_minute: Option<u32>,
    /// The maximum cost of all calls, in dollars.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<Nanodollars>,
}

/// The number of calls of a tool, and their cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ToolSpending {
    pub calls: u64,
    pub cost: Nanodollars,
}

impl ToolSpending {
    /// Adds one call and its cost.
    pub fn add_call(&mut self, cost: Nanodollars) {
        self.calls += 1;
        self.cost = self.cost + cost;
    }
}

/// The amount that one tool call reserves.
#[derive(Clone, Copy, Debug)]
pub struct ToolReserveRequest<'a> {
    pub tool: &'a Arc<str>,
    pub price: Nanodollars,
    pub limits: ToolBudgetLimits,
}

/// The limit that prevents a tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToolBudgetError {
    #[error(transparent)]
    Run(#[from] BudgetError),
    #[error("the tool's call budget is exhausted: {spent} of {limit} calls are spent")]
    Calls { spent: u64, limit: u64 },
    #[error(
        "the tool's cost budget is exhausted: ${spent} of ${limit} are spent and this call needs ${needed}"
    )]
    Cost { spent: Nanodollars, limit: Nanodollars, needed: Nanodollars },
    #[error("open calls hold the rest of the tool's budget; retry when a call has ended")]
    Reserved,
}

/// A reservation for one tool call. A reservation that is dropped unsettled is charged in full.
pub struct ToolReservation {
    ledger: Arc<BudgetLedger>,
    tool: Arc<str>,
    price: Nanodollars,
    is_open: bool,
}

/// The account of one tool.
#[derive(Debug)]
pub(super) struct ToolAccount {
    spent: ToolSpending,
    reserved: ToolSpending,
    rate: AccountRate,
}

impl ToolAccount {
    pub(super) fn new(spent: ToolSpending, now: Instant) -> Self {
        let (reserved, rate) = (ToolSpending::default(), AccountRate::new(now));
        Self { spent, reserved, rate }
    }

    /// Checks the limits that calls use up.
    pub(super) fn check_limits(
        &self,
        request: &ToolReserveRequest<'_>,
    ) -> Result<(), ToolBudgetError> {
        let Self { spent, reserved, .. } = self;
        let ToolBudgetLimits { calls, cost_usd, .. } = request.limits;
        // Each limit is compared twice. What is spent never comes back, so that refusal is final. What open calls hold may
        // come back, so that refusal asks the client to try again.
        if let Some(limit) = calls {
            if spent.calls >= limit {
                return Err(ToolBudgetError::Calls { spent: spent.calls, limit });
            }
            if spent.calls + reserved.calls >= limit {
                return Err(ToolBudgetError::Reserved);
            }
        }
        if let Some(limit) = cost_usd {
            let needed = request.price;
            if spent.cost + needed > limit {
                return Err(ToolBudgetError::Cost { spent: spent.cost, limit, needed });
            }
            if spent.cost + reserved.cost + needed > limit {
                return Err(ToolBudgetError::Reserved);
            }
        }
        Ok(())
    }
}

impl BudgetLedger {
    /// Checks the permanent limits of a tool call, and takes nothing.
    ///
    /// # Errors
    /// Returns the limit that prevents the call for good.
    pub fn check_tool_call(&self, request: &ToolReserveRequest<'_>) -> Result<(), ToolBudgetError> {
        let mut state = self.lock_state();
        self.check_deadline(&state.limits)?;
        state.check_tool_limits(request, Instant::now())
    }

    /// Reserves everything that a tool call needs, or nothing.
    ///
    /// # Errors
    /// Returns the limit that prevents the call. Permanent limits take precedence over temporary ones.
    pub fn reserve_tool_call(
        self: &Arc<Self>,
        request: &ToolReserveRequest<'_>,
    ) -> Result<ToolReservation, ToolBudgetError> {
        let (mut guard, now) = (self.lock_state(), Instant::now());
        let state = &mut *guard;
        self.check_deadline(&state.limits)?;
        state.check_tool_limits(request, now)?;
        let account = state.tools.get_mut(request.tool).expect("the check opens the account");
        // Rates, which take from their buckets, so every other check comes before them.
        let limit = request.limits.per_minute.and_then(NonZeroU32::new);
        account.rate.check_available("calls of this tool", limit, now)?;
        state.rates.take_free(now)?;
        account.rate.take_request(now);
        // Reserve. Nothing can fail from here on.
        account.reserved.calls += 1;
        account.reserved.cost = account.reserved.cost + request.price;
        state.reserved.cost = state.reserved.cost + request.price;
        drop(guard);
        Ok(ToolReservation {
            ledger: Arc::clone(self),
            tool: Arc::clone(request.tool),
            price: request.price,
            is_open: true,
        })
    }

    /// Sets the calls and costs of each tool that earlier processes of the run have spent. The costs are part of
    /// [`PriorUsage::spent`](super::PriorUsage::spent) already.
    pub fn restore_tool_spending(&self, spent: impl IntoIterator<Item = (String, ToolSpending)>) {
        let (mut state, now) = (self.lock_state(), Instant::now());
        for (tool, spent) in spent {
            state.tools.insert(tool.into(), ToolAccount::new(spent, now));
        }
    }

    /// Sets the number of calls of each tool that earlier processes of the run admitted in the last minute.
    pub fn restore_tool_rates(&self, recent: impl IntoIterator<Item = (String, u64)>) {
        let (mut state, now) = (self.lock_state(), Instant::now());
        for (tool, calls) in recent {
            let account = state.tools.entry(tool.into());
            let account = account.or_insert_with(|| ToolAccount::new(ToolSpending::default(), now));
            account.rate.set_recent(calls, now);
            state.rates.take_recent_free(calls, now);
        }
    }

    /// Returns the calls and costs of each tool that was called. Amounts that open calls hold reserved count as spent.
    pub fn tool_spending(&self) -> BTreeMap<Arc<str>, ToolSpending> {
        let state = self.lock_state();
        let accounts = state.tools.iter();
        let total = |account: &ToolAccount| ToolSpending {
            calls: account.spent.calls + account.reserved.calls,
            cost: account.spent.cost + account.reserved.cost,
        };
        accounts.map(|(tool, account)| (Arc::clone(tool), total(account))).collect()
    }

    /// Replaces a reservation by a charge, under one lock. `calls` is 0 if the call did not take place.
    fn close_tool_call(&self, reservation: &ToolReservation, charge: ToolSpending) {
        let mut state = self.lock_state();
        // The run's money and the tool's own account hold the same price; both give it back.
        let price = reservation.price;
        state.reserved.cost = state.reserved.cost.saturating_sub(price);
        state.spent.cost = state.spent.cost + charge.cost;
        if let Some(account) = state.tools.get_mut(&reservation.tool) {
            account.reserved.calls = account.reserved.calls.saturating_sub(1);
            account.reserved.cost = account.reserved.cost.saturating_sub(price);
            account.spent.calls += charge.calls;
            account.spent.cost = account.spent.cost + charge.cost;
        }
        drop(state);
        // An LLM call may wait for the money that this call has held.
        self.closed.notify_one();
    }
}

impl ToolReservation {
    /// Returns the amount that the call may spend.
    pub fn granted_amount(&self) -> BudgetAmount {
        BudgetAmount { cost: self.price, ..BudgetAmount::default() }
    }

    /// Charges the call's price, and counts the call.
    #[must_use = "the charge belongs into the audit"]
    pub fn settle_call(mut self) -> BudgetAmount {
        self.is_open = false;
        self.ledger.close_tool_call(&self, ToolSpending { calls: 1, cost: self.price });
        self.granted_amount()
    }

    /// Gives the whole reservation back. The caller has proof that the tool did not run.
    pub fn release_unspent(mut self) {
        self.is_open = false;
        self.ledger.close_tool_call(&self, ToolSpending::default());
    }
}

impl Drop for ToolReservation {
    fn drop(&mut self) {
        // The call's task was dropped or has panicked. The tool may have run, so the call is charged.
        if self.is_open {
            self.ledger.close_tool_call(self, ToolSpending { calls: 1, cost: self.price });
        }
    }
}

impl fmt::Debug for ToolReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolReservation").field("tool", &self.tool).finish_non_exhaustive()
    }
}

impl ToolBudgetError {
    /// Returns the stable code that clients, metrics and the audit log receive.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Run(BudgetError::Deadline { .. }) => "deadline_exceeded",
            Self::Run(BudgetError::Rate { .. }) => "rate_limited",
            Self::Run(BudgetError::Reserved { .. }) | Self::Reserved => "budget_reserved",
            Self::Run(_) => "cost_budget_exhausted",
            Self::Calls { .. } => "tool_call_budget_exhausted",
            Self::Cost { .. } => "tool_cost_budget_exhausted",
        }
    }

    /// Returns true if the same call cannot be admitted later either.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Calls { .. } | Self::Cost { .. } => true,
            Self::Run(error) => {
                error.is_permanent() || matches!(error, BudgetError::Deadline { .. })
            }
            Self::Reserved => false,
        }
    }
}
