//! The one ledger of a run: an atomic reservation before a call, one settlement after it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::rate::Rates;
use super::usage::{Amount, Tokens, Usage};

/// What a run may spend. `None` is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Calls that make a model generate.
    pub max_turns: Option<u64>,
    pub max_total_tokens: Option<Tokens>,
    pub max_input_tokens: Option<Tokens>,
    pub max_output_tokens: Option<Tokens>,
    /// Calls open at the same time.
    pub max_concurrent: Option<u32>,
    pub requests_per_minute: Option<u32>,
    pub tokens_per_minute: Option<u32>,
    /// Time from the start of the run to its end.
    #[serde(with = "humantime_serde")]
    pub deadline: Option<Duration>,
}

/// What one call asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// Whether the call makes a model generate.
    pub is_turn: bool,
    /// Estimated from the size of the request.
    pub input: Tokens,
    /// What the client allows the model to write; `None` where it set no limit.
    pub output: Option<Tokens>,
    /// How many answers the model writes; 0 is as good as 1.
    pub choices: u32,
}

/// Why a call may not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("turn budget exhausted: {spent} of {limit} turns are spent")]
    Turns { spent: u64, limit: u64 },
    #[error(
        "{kind} token budget exhausted: {spent} of {limit} tokens are spent and this call needs about {needed}"
    )]
    Tokens { kind: &'static str, spent: u64, limit: u64, needed: u64 },
    #[error("the run's deadline of {} has passed", humantime::format_duration(*limit))]
    Deadline { limit: Duration },
    #[error("{limit} calls are open at the same time, which is the limit")]
    Concurrency { limit: u32 },
    #[error("what is left of the {kind} budget is reserved by calls still open")]
    Reserved { kind: &'static str },
    #[error("the limit of {limit} {kind} per minute is reached")]
    Rate { kind: &'static str, limit: u32, retry_after: Duration },
}

/// What a run has spent, holds reserved and may still spend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    pub limits: Limits,
    pub spent: Amount,
    pub reserved: Amount,
    pub open_calls: u32,
    /// Turns that may still be reserved.
    pub turns_left: Option<u64>,
    pub input_tokens_left: Option<Tokens>,
    pub output_tokens_left: Option<Tokens>,
    pub total_tokens_left: Option<Tokens>,
    #[serde(with = "humantime_serde")]
    pub time_left: Option<Duration>,
}

/// A run's budget. All counters change under one lock, which is never held across an await.
#[derive(Debug)]
pub struct Ledger {
    limits: Limits,
    started: Instant,
    rates: Rates,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    spent: Amount,
    reserved: Amount,
    open_calls: u32,
}

/// What a call may spend. Dropped unsettled, it is charged in full.
#[derive(Debug)]
pub struct Reservation {
    ledger: Arc<Ledger>,
    granted: Amount,
    open: bool,
}

impl Ledger {
    /// `spent` is what earlier processes of the same run have spent already.
    pub fn new(limits: Limits, spent: Amount) -> Self {
        let rates = Rates::new(limits.requests_per_minute, limits.tokens_per_minute);
        let state = Mutex::new(State { spent, ..State::default() });
        Self { limits, started: Instant::now(), rates, state }
    }

    /// Reserves everything a call asks for, or nothing.
    ///
    /// # Errors
    /// The limit that stands in the way; what is spent for good comes before what only needs time.
    pub fn reserve(self: &Arc<Self>, ask: &Ask) -> Result<Reservation, Refusal> {
        self.check_deadline()?;
        let mut state = self.state();
        let granted = self.grant(&state, ask)?;
        if let Some(limit) = self.limits.max_concurrent.filter(|limit| state.open_calls >= *limit) {
            return Err(Refusal::Concurrency { limit });
        }
        self.rates.admit(granted.total())?;
        state.reserved = state.reserved + granted;
        state.open_calls += 1;
        drop(state);
        Ok(Reservation { ledger: Arc::clone(self), granted, open: true })
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// When the run must be over.
    pub fn deadline(&self) -> Option<Instant> {
        self.limits.deadline.map(|limit| self.started + limit)
    }

    pub fn spent(&self) -> Amount {
        self.state().spent
    }

    pub fn status(&self) -> Status {
        let (spent, reserved, open_calls) = {
            let state = self.state();
            (state.spent, state.reserved, state.open_calls)
        };
        let held = spent + reserved;
        let left =
            |limit: Option<Tokens>, held: Tokens| limit.map(|limit| limit.saturating_sub(held));
        Status {
            turns_left: self.limits.max_turns.map(|limit| limit.saturating_sub(held.turns)),
            input_tokens_left: left(self.limits.max_input_tokens, held.input),
            output_tokens_left: left(self.limits.max_output_tokens, held.output),
            total_tokens_left: left(self.limits.max_total_tokens, held.total()),
            time_left: self.deadline().map(|end| end.saturating_duration_since(Instant::now())),
            limits: self.limits.clone(),
            spent,
            reserved,
            open_calls,
        }
    }

    fn check_deadline(&self) -> Result<(), Refusal> {
        match self.limits.deadline {
            Some(limit) if self.started.elapsed() >= limit => Err(Refusal::Deadline { limit }),
            _ => Ok(()),
        }
    }

    /// What a call would be granted now, were no other call in its way.
    fn grant(&self, state: &State, ask: &Ask) -> Result<Amount, Refusal> {
        let Limits { max_turns, max_input_tokens, max_output_tokens, max_total_tokens, .. } =
            self.limits;
        let turns = u64::from(ask.is_turn);
        check_turns(max_turns, state, turns)?;
        let wanted_output = match (ask.is_turn, ask.output) {
            (true, None) => Tokens(DEFAULT_OUTPUT.0.saturating_mul(ask.choices.max(1).into())),
            (_, asked) => asked.unwrap_or_default(),
        };
        let least_output = Tokens(u64::from(ask.is_turn)).min(wanted_output);
        let free_input =
            free(max_input_tokens, "input", state.spent.input, state.reserved.input, ask.input)?;
        let free_output = free(
            max_output_tokens,
            "output",
            state.spent.output,
            state.reserved.output,
            least_output,
        )?;
        let free_total = free(
            max_total_tokens,
            "total",
            state.spent.total(),
            state.reserved.total(),
            ask.input + least_output,
        )?;
        let output = wanted_output.min(free_output).min(free_total.saturating_sub(ask.input));
        Ok(Amount { turns, input: ask.input.min(free_input), output })
    }

    fn close(&self, granted: Amount, charge: Amount) {
        let mut state = self.state();
        state.reserved = state.reserved.saturating_sub(granted);
        state.spent = state.spent + charge;
        state.open_calls = state.open_calls.saturating_sub(1);
        drop(state);
        self.rates.settle(granted.total(), charge.total());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    pub fn granted(&self) -> Amount {
        self.granted
    }

    /// Charges what was used, and gives back the rest.
    #[must_use = "the charge belongs into the audit"]
    pub fn settle(mut self, usage: &Usage) -> Amount {
        let charge = Amount { turns: self.granted.turns, input: usage.input, output: usage.output };
        self.open = false;
        self.ledger.close(self.granted, charge);
        charge
    }

    /// Gives everything back: it is proved that nothing was delivered upstream.
    pub fn release(mut self) {
        self.open = false;
        self.ledger.close(self.granted, Amount::default());
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.open {
            self.ledger.close(self.granted, self.granted);
        }
    }
}

fn check_turns(limit: Option<u64>, state: &State, turns: u64) -> Result<(), Refusal> {
    let Some(limit) = limit.filter(|_| turns > 0) else { return Ok(()) };
    // A turn held by an open call comes back only if that call is never delivered: not worth a wait.
    let held = state.spent.turns + state.reserved.turns;
    if held < limit { Ok(()) } else { Err(Refusal::Turns { spent: held, limit }) }
}

/// What is free of a limit, if at least `needed` is.
fn free(
    limit: Option<Tokens>,
    kind: &'static str,
    spent: Tokens,
    reserved: Tokens,
    needed: Tokens,
) -> Result<Tokens, Refusal> {
    let Some(limit) = limit else { return Ok(Tokens(u64::MAX)) };
    if spent + needed > limit {
        let (Tokens(spent), Tokens(limit), Tokens(needed)) = (spent, limit, needed);
        return Err(Refusal::Tokens { kind, spent, limit, needed });
    }
    if spent + reserved + needed > limit {
        return Err(Refusal::Reserved { kind });
    }
    Ok(limit.saturating_sub(spent + reserved))
}

/// Reserved for each answer whose client set no limit: the default of common clients, and what is
/// left where that is less.
const DEFAULT_OUTPUT: Tokens = Tokens(4096);
