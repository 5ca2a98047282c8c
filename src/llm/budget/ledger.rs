//! The only ledger of a run: an atomic reservation before a call, one settlement after it.

mod account_rate;
mod connections;
mod state;
mod tool_calls;
mod top_up;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::budget_error::BudgetError;
use super::cost::Nanodollars;
use super::limits::BudgetLimits;
use super::price::ModelPrice;
use super::rate::{RecentUsage, RunRateLimits};
use super::usage::{BudgetAmount, TokenUsage, Tokens};
use state::LedgerState;

pub use connections::{
    ByteDirection, ConnectionBudgetError, ConnectionLimits, ConnectionReservation,
    ConnectionReserveRequest, ConnectionSpending,
};
pub use state::MAX_CALL_TOKENS;
pub use tool_calls::{
    ToolBudgetError, ToolBudgetLimits, ToolReservation, ToolReserveRequest, ToolSpending,
};
pub use top_up::{BudgetAnswer, BudgetAsker};

/// The kind of a call, by the budgets that the call uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallKind {
    /// The model generates: the call uses a turn, tokens and money.
    Turn,
    /// The model only reads: the call uses tokens and money, but no turn.
    Tokens,
    /// The provider charges nothing: only the rate of such calls is limited.
    Free,
}

/// The resources that one call requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReserveRequest {
    /// True if the call makes a model generate.
    pub is_turn: bool,
    /// The input, estimated from the size of the request.
    pub input: Tokens,
    /// The most that the input can be. A value below `input` means that `input` is exact.
    pub input_bound: Tokens,
    /// The maximum output that the client allows. `None` if the client set no limit.
    pub output: Option<Tokens>,
    /// The output that the provider may bill beside the answers, whatever their limit is.
    pub unlimited_output: Tokens,
    /// The number of answers that the model writes; 0 means the same as 1.
    pub choices: u32,
    /// The price of the model's tokens. `None` if the price is unknown or the call is not to be charged.
    pub price: Option<Arc<ModelPrice>>,
}

/// The amounts that a run has spent, has reserved and may still spend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BudgetStatus {
    pub limits: BudgetLimits,
    pub spent: BudgetAmount,
    pub reserved: BudgetAmount,
    pub open_calls: u32,
    /// The number of turns that can still be reserved.
    pub turns_left: Option<u64>,
    pub input_tokens_left: Option<Tokens>,
    pub output_tokens_left: Option<Tokens>,
    pub total_tokens_left: Option<Tokens>,
    pub cost_left_usd: Option<Nanodollars>,
    #[serde(with = "humantime_serde")]
    pub time_left: Option<Duration>,
}

/// The amounts that a run may still spend. `None` means no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetRemainder {
    /// The number of turns that can still be reserved.
    pub turns: Option<u64>,
    pub input_tokens: Option<Tokens>,
    pub output_tokens: Option<Tokens>,
    pub total_tokens: Option<Tokens>,
    pub cost_usd: Option<Nanodollars>,
    pub time: Option<Duration>,
}

/// The budget of a run. Limits and counters change under one lock, which is never held across an await.
#[derive(Debug)]
pub struct BudgetLedger {
    started: Instant,
    exhausted: CancellationToken,
    /// Notified when a call is closed.
    closed: Notify,
    state: Mutex<LedgerState>,
}

/// The usage by earlier processes of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PriorUsage {
    pub spent: BudgetAmount,
    /// The time since the run began.
    pub age: Duration,
    /// The usage that the rates of the run still count.
    pub recent: RecentUsage,
}

/// A permit for one open call, taken before the call's body is read. Dropping the permit releases it.
#[derive(Debug)]
pub struct OpenCallPermit {
    /// `None` after the permit has moved into a reservation.
    ledger: Option<Arc<BudgetLedger>>,
    kind: CallKind,
}

/// A reservation of budget for one call. A reservation that is dropped unsettled is charged in full.
#[derive(Debug)]
pub struct BudgetReservation {
    ledger: Arc<BudgetLedger>,
    kind: CallKind,
    started: Instant,
    granted: BudgetAmount,
    /// The estimate of the input, which is at most the granted input.
    input_estimate: Tokens,
    output_limit: Option<Tokens>,
    deadline: Option<Instant>,
    price: Option<Arc<ModelPrice>>,
    open: bool,
}

impl BudgetLedger {
    pub fn new(limits: BudgetLimits, past: PriorUsage) -> Self {
        let PriorUsage { spent, age, recent } = past;
        let now = Instant::now();
        let mut rates = RunRateLimits::new(&limits, now);
        rates.take_recent(recent, now);
        let reserved = BudgetAmount::default();
        let state = LedgerState {
            limits,
            rates,
            spent,
            reserved,
            open_calls: 0,
            is_denied: false,
            defers_refusals: false,
            tools: BTreeMap::new(),
            connections: BTreeMap::new(),
        };
        Self {
            started: now.checked_sub(age).unwrap_or(now),
            exhausted: CancellationToken::new(),
            closed: Notify::new(),
            state: Mutex::new(state),
        }
    }

    /// Admits a call whose body is not yet read. Checks the limits that are spent permanently, the deadline, the
    /// rates of calls and the number of open calls, and takes a permit for an open call.
    ///
    /// `must_pay` states that every model has a price, so that no call is possible when all money is spent.
    ///
    /// # Errors
    /// Returns the limit that prevents the call, as [`OpenCallPermit::reserve_budget`] does.
    pub fn enter_call(
        self: &Arc<Self>,
        kind: CallKind,
        must_pay: bool,
    ) -> Result<OpenCallPermit, BudgetError> {
        let mut state = self.lock_state();
        // Without the body the model's price is unknown, but any price is too much when all money is spent.
        if must_pay && kind != CallKind::Free && !state.defers_refusals {
            self.check_money_left(&mut state)?;
        }
        self.enter_call_needing(state, kind, &kind.minimal_request())
    }

    /// Admits a call as [`enter_call`](Self::enter_call) does, but for a call that needs at least `least`.
    fn enter_call_needing(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, LedgerState>,
        kind: CallKind,
        least: &ReserveRequest,
    ) -> Result<OpenCallPermit, BudgetError> {
        if let Err(refusal) = self.try_enter_call(&mut state, kind, least) {
            self.record_denial(&mut state, &refusal, least.price.clone());
            return Err(refusal);
        }
        drop(state);
        Ok(OpenCallPermit { ledger: Some(Arc::clone(self)), kind })
    }

    fn try_enter_call(
        &self,
        state: &mut LedgerState,
        kind: CallKind,
        least: &ReserveRequest,
    ) -> Result<(), BudgetError> {
        // The order decides which error the client receives: spent limits come before limits that time lifts. The rate
        // comes last, because its check also takes from the bucket.
        self.check_deadline(&state.limits)?;
        // A person may raise a spent limit, so the amounts are checked by the reservation, when the whole call is known.
        if !state.defers_refusals {
            state.grant_request(least)?;
        }
        if let Some(limit) = state.limits.max_concurrent.filter(|limit| state.open_calls >= *limit)
        {
            return Err(BudgetError::Concurrency { limit });
        }
        state.rates.take_request(kind == CallKind::Free, Instant::now())?;
        state.open_calls += 1;
        Ok(())
    }

    /// Reserves everything that a call requests, or nothing. The function combines [`enter_call`](Self::enter_call)
    /// and [`OpenCallPermit::reserve_budget`].
    ///
    /// # Errors
    /// Returns the limit that prevents the call. Permanent limits take precedence over temporary ones.
    pub fn reserve_call(
        self: &Arc<Self>,
        ask: &ReserveRequest,
    ) -> Result<BudgetReservation, BudgetError> {
        let kind = match ask {
            ReserveRequest { is_turn: true, .. } => CallKind::Turn,
            ReserveRequest { input: Tokens::ZERO, .. } => CallKind::Free,
            _ => CallKind::Tokens,
        };
        self.enter_call_needing(self.lock_state(), kind, ask)?.reserve_budget(ask)
    }

    /// Records a refusal. If no other call is possible either, marks the run's budget as exhausted.
    fn record_denial(
        &self,
        state: &mut LedgerState,
        refusal: &BudgetError,
        price: Option<Arc<ModelPrice>>,
    ) {
        if !state.defers_refusals {
            self.count_denial(state, refusal, price);
        }
    }

    fn count_denial(
        &self,
        state: &mut LedgerState,
        refusal: &BudgetError,
        price: Option<Arc<ModelPrice>>,
    ) {
        state.is_denied = refusal.is_permanent();
        if state.is_denied && state.is_exhausted_for(price) {
            self.exhausted.cancel();
        }
    }

    /// Returns an error if all of a money limit is spent.
    fn check_money_left(&self, state: &mut LedgerState) -> Result<(), BudgetError> {
        let spent = state.spent.cost;
        match state.limits.max_cost_usd.filter(|limit| spent >= *limit) {
            Some(limit) => {
                state.is_denied = true;
                self.exhausted.cancel();
                Err(BudgetError::Cost { spent, limit, needed: Nanodollars::default() })
            }
            None => Ok(()),
        }
    }

    /// Returns true if money is limited, so that the price of a model must be known.
    pub fn counts_cost(&self) -> bool {
        self.lock_state().limits.max_cost_usd.is_some()
    }

    /// Changes the limits. Spent amounts stay spent, and open calls keep their reservations.
    pub fn set_limits(&self, limits: BudgetLimits) {
        // A limit may now be below what is spent. No call is cut for that: the next request is refused.
        let mut state = self.lock_state();
        state.rates.set_limits(&limits, Instant::now());
        state.limits = limits;
    }

    /// Returns the time at which the run must end. Returns `None` for a deadline beyond the range of the clock.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline_under(&self.lock_state().limits)
    }

    fn deadline_under(&self, limits: &BudgetLimits) -> Option<Instant> {
        self.started.checked_add(limits.deadline?)
    }

    /// Returns a token that is cancelled when a call is refused and no other call is possible either. A call that is
    /// merely too large for the rest does not cancel it. Nor does taking the last turn, because the run may still
    /// need its answer.
    pub fn exhausted_token(&self) -> &CancellationToken {
        &self.exhausted
    }

    /// Waits until a call is settled or released. Each notification wakes one waiter; several calls may have closed
    /// by then.
    pub async fn wait_for_close(&self) {
        self.closed.notified().await;
    }

    /// Returns true if the most recent request was refused because its budget is spent permanently.
    pub fn was_last_call_denied(&self) -> bool {
        self.lock_state().is_denied
    }

    pub fn spent_amount(&self) -> BudgetAmount {
        self.lock_state().spent
    }

    pub fn budget_status(&self) -> BudgetStatus {
        let state = self.lock_state();
        let left = self.remainder_beside(&state, state.spent + state.reserved);
        BudgetStatus {
            limits: state.limits.clone(),
            spent: state.spent,
            reserved: state.reserved,
            open_calls: state.open_calls,
            turns_left: left.turns,
            input_tokens_left: left.input_tokens,
            output_tokens_left: left.output_tokens,
            total_tokens_left: left.total_tokens,
            cost_left_usd: left.cost_usd,
            time_left: left.time,
        }
    }

    /// Returns the remainder as if an open call had not reserved `own`.
    pub fn remainder_excluding(&self, own: BudgetAmount) -> BudgetRemainder {
        let state = self.lock_state();
        self.remainder_beside(&state, (state.spent + state.reserved).saturating_sub(own))
    }

    fn remainder_beside(&self, state: &LedgerState, held: BudgetAmount) -> BudgetRemainder {
        let limits = &state.limits;
        let left =
            |limit: Option<Tokens>, held: Tokens| limit.map(|limit| limit.saturating_sub(held));
        let end = self.deadline_under(limits);
        BudgetRemainder {
            turns: limits.max_turns.map(|limit| limit.saturating_sub(held.turns)),
            input_tokens: left(limits.max_input_tokens, held.input),
            output_tokens: left(limits.max_output_tokens, held.output),
            total_tokens: left(limits.max_total_tokens, held.total_tokens()),
            cost_usd: limits.max_cost_usd.map(|limit| limit.saturating_sub(held.cost)),
            time: end.map(|end| end.saturating_duration_since(Instant::now())),
        }
    }

    fn check_deadline(&self, limits: &BudgetLimits) -> Result<(), BudgetError> {
        match limits.deadline {
            Some(limit) if self.started.elapsed() >= limit => Err(BudgetError::Deadline { limit }),
            _ => Ok(()),
        }
    }

    /// Ends an open call with its charge. Every call ends here, and once.
    fn close_reservation(
        &self,
        reservation: &BudgetReservation,
        charge: BudgetAmount,
        now: Instant,
    ) {
        let BudgetReservation { kind, started, granted, .. } = *reservation;
        let estimate = reservation.rated_estimate();
        let mut state = self.lock_state();
        // The reservation is replaced by the charge under one lock, so no other call sees both or neither.
        state.reserved = state.reserved.saturating_sub(granted);
        state.spent = state.spent + charge;
        let age = now.saturating_duration_since(started);
        // The minute has had the estimate since the start of the call. It takes what the call used beyond the estimate,
        // or gets back what the call did not use, less what time has refilled since.
        state.rates.release_excess(granted.total_tokens().saturating_sub(estimate));
        state.rates.settle_tokens(estimate, charge.total_tokens(), age, now);
        // Only the settlement shows that a call was free of charge, for example because the upstream refused it.
        if kind != CallKind::Free && state.is_charge_free(charge) {
            state.rates.settle_uncharged(now);
        }
        self.leave_call(state);
    }

    /// Releases a permit for an open call.
    fn leave_call(&self, mut state: MutexGuard<'_, LedgerState>) {
        state.open_calls = state.open_calls.saturating_sub(1);
        // The lock is released first, so that the woken task does not wait for it.
        drop(state);
        self.closed.notify_one();
    }

    fn lock_state(&self) -> MutexGuard<'_, LedgerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CallKind {
    /// Returns the smallest request of this kind, for a check of the remaining budget before the body is read.
    fn minimal_request(self) -> ReserveRequest {
        let input = if self == Self::Free { Tokens::ZERO } else { Tokens(1) };
        let output = (self == Self::Turn).then_some(Tokens(1));
        let is_turn = self == Self::Turn;
        ReserveRequest { is_turn, input, output, choices: 1, ..ReserveRequest::default() }
    }
}

impl OpenCallPermit {
    /// Reserves everything that the call requests, or nothing.
    ///
    /// # Errors
    /// Returns the limit that prevents the call. Permanent limits take precedence over temporary ones.
    pub fn reserve_budget(
        mut self,
        ask: &ReserveRequest,
    ) -> Result<BudgetReservation, BudgetError> {
        let started = Instant::now();
        let reserved = self.try_reserve(ask, started);
        // On an error the permit stays in `self` and is released when `self` is dropped.
        let (granted, output_limit, deadline) = reserved?;
        let ledger = self.ledger.take().expect("a place is there until it is used");
        let (kind, price) = (self.kind, ask.price.clone());
        let (input_estimate, open) = (ask.input, true);
        let reservation = BudgetReservation {
            ledger,
            kind,
            started,
            granted,
            input_estimate,
            output_limit,
            deadline,
            price,
            open,
        };
        Ok(reservation)
    }

    fn try_reserve(
        &self,
        ask: &ReserveRequest,
        now: Instant,
    ) -> Result<(BudgetAmount, Option<Tokens>, Option<Instant>), BudgetError> {
        let ledger = self.ledger.as_ref().expect("a place is there until it is used");
        // One lock holds from the first check to the reservation. So two calls cannot both take the last tokens.
        let mut state = ledger.lock_state();
        let reserved = ledger.check_deadline(&state.limits).and_then(|()| {
            let (granted, output_limit) = state.grant_request(ask)?;
            // The rate comes after the amounts, because it takes from the minute and an amount that is refused must not.
            let estimate = ask.input + granted.output;
            let excess = granted.total_tokens().saturating_sub(estimate);
            let is_alone = state.is_input_free();
            state.rates.take_tokens(estimate, excess, is_alone, now)?;
            state.reserved = state.reserved + granted;
            Ok((granted, output_limit, ledger.deadline_under(&state.limits)))
        });
        match &reserved {
            Ok(_) => state.is_denied = false,
            Err(refusal) => ledger.record_denial(&mut state, refusal, ask.price.clone()),
        }
        reserved
    }
}

impl Drop for OpenCallPermit {
    fn drop(&mut self) {
        if let Some(ledger) = self.ledger.take() {
            ledger.leave_call(ledger.lock_state());
        }
    }
}

impl BudgetReservation {
    pub fn granted_amount(&self) -> BudgetAmount {
        self.granted
    }

    /// Returns the estimate of the call's input. The granted input is the most that the input can be, or all that was
    /// left.
    pub fn input_estimate(&self) -> Tokens {
        self.input_estimate
    }

    /// Returns the tokens that were taken from the minute at the start of the call.
    fn rated_estimate(&self) -> Tokens {
        self.input_estimate + self.granted.output
    }

    /// Returns the maximum output of all answers of the call together, if a budget limits it. Output that no limit of an
    /// answer bounds is not included.
    pub fn output_limit(&self) -> Option<Tokens> {
        self.output_limit
    }

    /// Returns the time at which the run must end. Returns `None` for a deadline beyond the range of the clock.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Charges the usage and gives back the rest of the reservation.
    #[must_use = "the charge belongs into the audit"]
    pub fn settle_usage(self, usage: &TokenUsage) -> BudgetAmount {
        self.settle_usage_at(usage, Instant::now())
    }

    /// Charges the usage like [`settle_usage`](Self::settle_usage). The call ended at `now`.
    #[must_use = "the charge belongs into the audit"]
    pub fn settle_usage_at(mut self, usage: &TokenUsage, now: Instant) -> BudgetAmount {
        let cost = self.price.as_ref().map(|price| price.call_cost(usage)).unwrap_or_default();
        let charge = BudgetAmount {
            turns: self.granted.turns,
            input: usage.input,
            output: usage.output,
            cost,
        };
        // The flag is cleared first: `self` is dropped at the end of this function and must not be charged again.
        self.open = false;
        self.ledger.close_reservation(&self, charge, now);
        charge
    }

    /// Gives the whole reservation back. The caller has proof that no byte of the call was delivered upstream.
    pub fn release_unspent(mut self) {
        self.open = false;
        self.ledger.close_reservation(&self, BudgetAmount::default(), Instant::now());
    }
}

impl Drop for BudgetReservation {
    fn drop(&mut self) {
        // The call was neither settled nor released, because its task was dropped or has panicked. The upstream may have
        // done all of its work, so the whole reservation is charged.
        if self.open {
            self.ledger.close_reservation(self, self.granted, Instant::now());
        }
    }
}
