//! The limits and the amounts of a ledger, and the decision what a call is granted.
//!
//! The tokens of an input are known only from the provider's report. Before the call there are two numbers: an
//! estimate, and the most that the input can be. A call beside others must fit with the most. A call that is alone must
//! fit with the estimate, and then holds the most, or all that is left.
//!
//! **Invariant:** at any time at most one open call can use more than it holds, so no number of calls exceeds a limit by
//! more than one of them does alone.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use super::connections::ConnectionAccount;
use super::tool_calls::{ToolAccount, ToolBudgetError, ToolReserveRequest, ToolSpending};
use super::{CallKind, ReserveRequest};
use crate::llm::budget::budget_error::BudgetError;
use crate::llm::budget::cost::Nanodollars;
use crate::llm::budget::limits::BudgetLimits;
use crate::llm::budget::price::ModelPrice;
use crate::llm::budget::rate::RunRateLimits;
use crate::llm::budget::usage::{BudgetAmount, Tokens};

/// The part of a ledger that changes, under the ledger's lock.
#[derive(Debug)]
pub(super) struct LedgerState {
    pub(super) limits: BudgetLimits,
    pub(super) rates: RunRateLimits,
    pub(super) spent: BudgetAmount,
    pub(super) reserved: BudgetAmount,
    pub(super) open_calls: u32,
    pub(super) is_denied: bool,
    /// True if a refusal by a spent limit asks a person first, and does not count yet.
    pub(super) defers_refusals: bool,
    /// The accounts of the tools that were called. Only tool calls read them.
    pub(super) tools: BTreeMap<Arc<str>, ToolAccount>,
    /// The accounts of the connections that were used. Only requests over connections read them.
    pub(super) connections: BTreeMap<Arc<str>, ConnectionAccount>,
}

impl LedgerState {
    /// Returns the amount that a call is granted now, and the maximum output if a limit bounds the output. The rates
    /// and the number of open calls are not considered.
    pub(super) fn grant_request(
        &self,
        ask: &ReserveRequest,
    ) -> Result<(BudgetAmount, Option<Tokens>), BudgetError> {
        let bound = ask.input_bound.max(ask.input);
        if self.is_input_free() {
            let (granted, output_limit) = self.grant_with_input(ask, ask.input)?;
            return Ok((self.raise_to_bound(granted, bound, ask.price.as_deref()), output_limit));
        }
        self.grant_with_input(ask, bound).or_else(|refusal| {
            // A call that is too large only by what its input could be can be admitted when it is alone.
            self.grant_with_input(ask, ask.input)?;
            Err(BudgetError::Reserved { kind: refusal.limit_kind() })
        })
    }

    /// Returns true if no open call holds input.
    pub(super) fn is_input_free(&self) -> bool {
        self.reserved.input.is_zero()
    }

    /// Raises the amount for the estimate of an input to the amount for the input's bound, as far as the budget allows.
    fn raise_to_bound(
        &self,
        granted: BudgetAmount,
        bound: Tokens,
        price: Option<&ModelPrice>,
    ) -> BudgetAmount {
        let BudgetLimits { max_input_tokens, max_total_tokens, max_cost_usd, .. } = self.limits;
        let held = self.spent + self.reserved;
        let input = max_input_tokens.map(|limit| limit.saturating_sub(held.input));
        let total = max_total_tokens
            .map(|limit| limit.saturating_sub(held.total_tokens() + granted.output));
        let money = max_cost_usd.map(|limit| limit.saturating_sub(held.cost));
        let cost = price.map(|price| price.max_cost(bound, granted.output)).unwrap_or_default();
        BudgetAmount {
            input: [input, total].into_iter().flatten().fold(bound, Ord::min).max(granted.input),
            cost: money.map_or(cost, |money| money.min(cost)).max(granted.cost),
            ..granted
        }
    }

    /// Returns the amount that a call with this input is granted, and the maximum output if a limit bounds the output.
    fn grant_with_input(
        &self,
        ask: &ReserveRequest,
        input: Tokens,
    ) -> Result<(BudgetAmount, Option<Tokens>), BudgetError> {
        // 1. Check the turns. 2. Determine the wanted and the minimal output. 3. Collect the bounds of tokens and
        //    money. 4. Grant the wanted output or the lowest bound.
        let turns = u64::from(ask.is_turn);
        self.check_turns(turns)?;
        let choices = u64::from(ask.choices.max(1));
        let answers = match (ask.is_turn, ask.output) {
            (true, None) => {
                let answers = Tokens(DEFAULT_OUTPUT_TOKENS.0.saturating_mul(choices));
                answers.min(MAX_CALL_TOKENS).max(Tokens(choices))
            }
            // Some upstreams take an output limit of 0 for no limit, so at least one token per answer counts.
            (true, Some(asked)) => asked.max(Tokens(choices)),
            (false, asked) => asked.unwrap_or_default(),
        };
        let wanted = answers + ask.unlimited_output;
        // A turn is worth starting only if each answer can have at least one token.
        let least = if ask.is_turn { Tokens(choices) } else { Tokens::ZERO } + ask.unlimited_output;
        self.remaining_tokens(TokenLimitKind::Input, input)?;
        let bounds = [
            self.remaining_tokens(TokenLimitKind::Output, least)?,
            self.remaining_tokens(TokenLimitKind::Total, input + least)?
                .map(|free| free.saturating_sub(input)),
            self.affordable_output(ask.price.as_deref(), input, least)?,
        ];
        let bound = bounds.into_iter().flatten().min().map(|free| free.min(wanted));
        let output = bound.unwrap_or(wanted);
        let cost =
            ask.price.as_ref().map(|price| price.max_cost(input, output)).unwrap_or_default();
        let limit =
            bound.filter(|_| ask.is_turn).map(|bound| bound.saturating_sub(ask.unlimited_output));
        Ok((BudgetAmount { turns, input, output, cost }, limit))
    }

    /// Returns true if not even the smallest answer at this price would be admitted, with all reservations given
    /// back.
    pub(super) fn is_exhausted_for(&mut self, price: Option<Arc<ModelPrice>>) -> bool {
        // The reservations are set to zero for the check and restored afterwards; the caller holds the lock.
        let least = ReserveRequest { price, ..CallKind::Turn.minimal_request() };
        let reserved = mem::take(&mut self.reserved);
        let granted = self.grant_request(&least);
        self.reserved = reserved;
        granted.is_err()
    }

    /// Checks the limits that are spent for good: the tool's calls and money, the run's money. Afterwards the tool has an
    /// account.
    pub(super) fn check_tool_limits(
        &mut self,
        request: &ToolReserveRequest<'_>,
        now: Instant,
    ) -> Result<(), ToolBudgetError> {
        let account = self.tools.entry(Arc::clone(request.tool));
        let account = account.or_insert_with(|| ToolAccount::new(ToolSpending::default(), now));
        account.check_limits(request)?;
        Ok(self.check_price(request.price)?)
    }

    /// Checks that the run's money pays for a price.
    pub(super) fn check_price(&self, needed: Nanodollars) -> Result<(), BudgetError> {
        let limit = self.limits.max_cost_usd.filter(|_| !needed.is_zero());
        let Some(limit) = limit else { return Ok(()) };
        let (spent, reserved) = (self.spent.cost, self.reserved.cost);
        if spent + needed > limit {
            return Err(BudgetError::Cost { spent, limit, needed });
        }
        if spent + reserved + needed > limit {
            return Err(BudgetError::Reserved { kind: "cost" });
        }
        Ok(())
    }

    /// Returns true if a charge changes no limited amount. A turn counts only if turns are limited.
    pub(super) fn is_charge_free(&self, charge: BudgetAmount) -> bool {
        let counts_turn = charge.turns > 0 && self.limits.max_turns.is_some();
        charge.total_tokens().is_zero() && charge.cost.is_zero() && !counts_turn
    }

    fn check_turns(&self, turns: u64) -> Result<(), BudgetError> {
        let Some(limit) = self.limits.max_turns.filter(|_| turns > 0) else { return Ok(()) };
        // An open call gives its turn back only if it is never delivered, so a wait would rarely help. The turn
        // counts as spent.
        let spent = self.spent.turns + self.reserved.turns;
        if spent < limit { Ok(()) } else { Err(BudgetError::Turns { spent, limit }) }
    }

    /// Returns the free tokens of a kind if that kind is limited. Returns an error if fewer than `needed` are free.
    fn remaining_tokens(
        &self,
        kind: TokenLimitKind,
        needed: Tokens,
    ) -> Result<Option<Tokens>, BudgetError> {
        let BudgetLimits { max_input_tokens, max_output_tokens, max_total_tokens, .. } =
            self.limits;
        let (name, limit, of): (_, _, fn(&BudgetAmount) -> Tokens) = match kind {
            TokenLimitKind::Input => ("input", max_input_tokens, |amount| amount.input),
            TokenLimitKind::Output => ("output", max_output_tokens, |amount| amount.output),
            TokenLimitKind::Total => ("total", max_total_tokens, BudgetAmount::total_tokens),
        };
        let Some(limit) = limit else { return Ok(None) };
        let (spent, reserved) = (of(&self.spent), of(&self.reserved));
        // Spent tokens never come back, so this refusal is permanent. The next one only needs open calls to close.
        if spent + needed > limit {
            let (Tokens(spent), Tokens(limit), Tokens(needed)) = (spent, limit, needed);
            return Err(BudgetError::Tokens { kind: name, spent, limit, needed });
        }
        if spent + reserved + needed > limit {
            return Err(BudgetError::Reserved { kind: name });
        }
        Ok(Some(limit.saturating_sub(spent + reserved)))
    }

    /// Returns the output that the remaining money pays for, if money is limited. Returns an error if it does not pay
    /// for `least`.
    fn affordable_output(
        &self,
        price: Option<&ModelPrice>,
        input: Tokens,
        least: Tokens,
    ) -> Result<Option<Tokens>, BudgetError> {
        let (Some(limit), Some(price)) = (self.limits.max_cost_usd, price) else {
            return Ok(None);
        };
        let needed = price.max_cost(input, least);
        let (spent, reserved) = (self.spent.cost, self.reserved.cost);
        // If the whole limit is spent, a call without cost is refused too: an operator who sets a budget of $0 wants
        // no calls.
        if spent >= limit || spent + needed > limit {
            return Err(BudgetError::Cost { spent, limit, needed });
        }
        if spent + reserved + needed > limit {
            return Err(BudgetError::Reserved { kind: "cost" });
        }
        Ok(Some(price.affordable_output(limit.saturating_sub(spent + reserved), input)))
    }
}

/// The limited kinds of tokens.
#[derive(Clone, Copy)]
enum TokenLimitKind {
    Input,
    Output,
    Total,
}

/// The most output tokens that one call may ask for, all its answers together. Our choice: 16 answers of the longest
/// output that one answer may ask for.
pub const MAX_CALL_TOKENS: Tokens = Tokens(16_000_000);

/// The output reserved for each answer without a client limit, or the remaining budget if that is less. With a
/// budget, the reserved output becomes the answer's limit. Our choice: Codex sets no limit, and its longest turns,
/// including reasoning, stay below this value.
const DEFAULT_OUTPUT_TOKENS: Tokens = Tokens(16 * 1024);
