//! Limits per minute on requests, on tokens and on calls without a charge: token buckets with a
//! capacity of one minute.
//!
//! A bucket stores the amount that was taken and that time has not yet refilled. The limit may
//! change meanwhile, and a debt remains until time has paid it off.
//!
//! **Invariant:** the calls of any minute use at most twice the limit. Two exceptions exist: a
//! single call that needs more than a minute's capacity, and the usage of one call beyond its estimate.

use std::num::NonZeroU32;
use std::ops::Add;
use std::time::{Duration, Instant};

use super::budget_error::BudgetError;
use super::limits::BudgetLimits;
use super::usage::Tokens;

/// The usage of the last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecentUsage {
    /// The number of admitted calls.
    pub requests: u64,
    /// The tokens of the calls that have ended.
    pub tokens: Tokens,
}

impl Add for RecentUsage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            tokens: self.tokens + other.tokens,
        }
    }
}

/// The default maximum of calls per minute that cost nothing. Our choice: ten calls a second exceed an agent's token
/// counting, and write less than 10 KB a second to the audit log.
pub const FREE_CALLS_PER_MINUTE: u32 = 600;

/// The rate limits of a run. The caller keeps them under a lock.
#[derive(Debug)]
pub(super) struct RunRateLimits {
    requests: RateLimiter,
    tokens: RateLimiter,
    /// The tokens that open calls may use beyond those that they took from the minute. Time does not refill them.
    excess: Tokens,
    /// The bucket for calls that are free by their route.
    free: RateLimiter,
    /// The bucket for calls of other routes whose settlement charged nothing that is limited. It is
    /// separate from `free`, so that a client that counts tokens too often can still call its
    /// model.
    uncharged: RateLimiter,
}

/// A bucket with the capacity of one minute.
#[derive(Debug)]
pub(super) struct RateLimiter {
    /// The limit per minute. `None` means no limit; then the bucket counts nothing.
    limit: Option<NonZeroU32>,
    /// The parts that were taken and not yet refilled. One unit has [`PARTS_PER_UNIT`] parts.
    used: u128,
    /// The time up to which `used` includes the refill.
    updated: Instant,
}

impl RunRateLimits {
    pub(super) fn new(limits: &BudgetLimits, now: Instant) -> Self {
        let [requests, tokens, free, uncharged] =
            limits_per_minute(limits).map(|limit| RateLimiter { limit, used: 0, updated: now });
        Self { requests, tokens, excess: Tokens::ZERO, free, uncharged }
    }

    /// Changes the limits. Amounts that were taken stay taken.
    pub(super) fn set_limits(&mut self, limits: &BudgetLimits, now: Instant) {
        let Self { requests, tokens, free, uncharged, .. } = self;
        let rates = [requests, tokens, free, uncharged];
        for (rate, limit) in rates.into_iter().zip(limits_per_minute(limits)) {
            rate.set_limit(limit, now);
        }
    }

    /// Takes one request from the minute, or returns the time to wait. A call that is free by its
    /// route also takes a place in the free bucket. Any other call may turn out to be uncharged, so
    /// the function only checks that the uncharged bucket has a place.
    ///
    /// Requests are checked before tokens. Otherwise a client that repeats calls at one limit would
    /// use up a minute of tokens with calls that are never made.
    pub(super) fn take_request(&mut self, is_free: bool, now: Instant) -> Result<(), BudgetError> {
        let unpaid = if is_free { &mut self.free } else { &mut self.uncharged };
        // Both checks come before both takes: a refused call must not consume anything.
        unpaid.check_available("calls without a charge", 1, now)?;
        self.requests.check_available("requests", 1, now)?;
        self.requests.take_count(1, now);
        if is_free {
            self.free.take_count(1, now);
        }
        Ok(())
    }

    /// Takes one place among the calls that are free by their route, or returns the time to wait.
    pub(super) fn take_free(&mut self, now: Instant) -> Result<(), BudgetError> {
        self.free.check_available("calls without a charge", 1, now)?;
        self.free.take_count(1, now);
        Ok(())
    }

    /// Takes what an earlier process of the run has used in the last minute, at most a minute's worth. Time has refilled
    /// a part of it already, so this errs towards the limit.
    pub(super) fn take_recent(&mut self, recent: RecentUsage, now: Instant) {
        self.requests.take_recent(recent.requests, now);
        self.tokens.take_recent(recent.tokens.0, now);
    }

    /// Takes free calls of an earlier process like [`take_recent`](Self::take_recent).
    pub(super) fn take_recent_free(&mut self, calls: u64, now: Instant) {
        self.free.take_recent(calls, now);
    }

    /// Takes the tokens that a call is estimated to use from the minute, or returns the time to wait. The call may use
    /// `excess` tokens more than its estimate. If other calls are open, the minute must have room for these tokens,
    /// too, so that all calls of a minute together exceed their estimates by no more than the excess of one call.
    pub(super) fn take_tokens(
        &mut self,
        estimate: Tokens,
        excess: Tokens,
        is_alone: bool,
        now: Instant,
    ) -> Result<(), BudgetError> {
        if estimate.is_zero() {
            return Ok(());
        }
        self.tokens.check_available("tokens", estimate.0, now)?;
        if !is_alone {
            let most = estimate + excess + self.excess;
            // A full bucket is enough for one call of any size, but not for several open calls: time refills the bucket
            // while they are open, and their excess is taken only when they end.
            let is_above_capacity =
                self.tokens.limit.is_some_and(|limit| most.0 > limit.get().into());
            if is_above_capacity || self.tokens.check_available("tokens", most.0, now).is_err() {
                return Err(BudgetError::Reserved { kind: "tokens per minute" });
            }
        }
        self.tokens.take_count(estimate.0, now);
        self.excess += excess;
        Ok(())
    }

    /// Forgets the tokens that a call could have used beyond its estimate; the call has ended.
    pub(super) fn release_excess(&mut self, excess: Tokens) {
        self.excess = self.excess.saturating_sub(excess);
    }

    /// Charges the tokens that a call used. `reserved` tokens were taken `age` ago.
    pub(super) fn settle_tokens(
        &mut self,
        reserved: Tokens,
        used: Tokens,
        age: Duration,
        now: Instant,
    ) {
        // At most one of the two differences is above zero.
        self.tokens.take_count(used.saturating_sub(reserved).0, now);
        self.tokens.return_count(reserved.saturating_sub(used).0, age, now);
    }

    /// Counts a call that could have had a charge and had none.
    pub(super) fn settle_uncharged(&mut self, now: Instant) {
        self.uncharged.take_count(1, now);
    }
}

impl RateLimiter {
    /// Creates a bucket without a limit.
    pub(super) fn unlimited(now: Instant) -> Self {
        Self { limit: None, used: 0, updated: now }
    }

    /// Changes the limit. The amount that was taken stays taken.
    pub(super) fn set_limit(&mut self, limit: Option<NonZeroU32>, now: Instant) {
        self.refill_to(now);
        self.limit = limit;
    }

    /// Returns an error with the time to wait if `count` cannot be taken now. A count above the
    /// capacity of a minute waits for a full bucket, and the minutes that follow pay off the debt.
    pub(super) fn check_available(
        &mut self,
        kind: &'static str,
        count: u64,
        now: Instant,
    ) -> Result<(), BudgetError> {
        self.refill_to(now);
        // One nanosecond refills `limit` parts, so the missing parts divided by the limit are the
        // nanoseconds to wait, rounded up.
        let Some(limit) = self.limit else { return Ok(()) };
        let (limit, capacity) = (limit.get(), to_parts(limit.get().into()));
        // `min(capacity)`: a call larger than the bucket needs only a full bucket.
        let missing = (self.used + to_parts(count).min(capacity)).saturating_sub(capacity);
        if missing == 0 {
            return Ok(());
        }
        let wait = missing.div_ceil(limit.into());
        let retry_after = Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX));
        Err(BudgetError::Rate { kind, limit, retry_after })
    }

    pub(super) fn take_count(&mut self, count: u64, now: Instant) {
        self.refill_to(now);
        if self.limit.is_some() {
            self.used = self.used.saturating_add(to_parts(count)).min(to_parts(u64::MAX));
        }
    }

    /// Takes what an earlier process has used, at most a minute's worth.
    pub(super) fn take_recent(&mut self, count: u64, now: Instant) {
        let capacity = self.limit.map_or(0, NonZeroU32::get);
        self.take_count(count.min(capacity.into()), now);
    }

    /// Gives back an amount that was taken `age` ago, less the part that time has refilled since
    /// then.
    fn return_count(&mut self, count: u64, age: Duration, now: Instant) {
        self.refill_to(now);
        let unused = to_parts(count).saturating_sub(self.parts_refilled(age));
        self.used = self.used.saturating_sub(unused);
    }

    fn refill_to(&mut self, now: Instant) {
        if self.limit.is_none() {
            // Without a limit nothing is owed, so a limit that is set later starts with a full
            // bucket.
            (self.used, self.updated) = (0, self.updated.max(now));
            return;
        }
        let refilled = self.parts_refilled(now.saturating_duration_since(self.updated));
        self.used = self.used.saturating_sub(refilled);
        // Threads read the clock before they take the lock, so `now` can lie in the past. The time
        // must not move back, or an interval would refill twice.
        self.updated = self.updated.max(now);
    }

    /// Returns the parts that time refills.
    fn parts_refilled(&self, time: Duration) -> u128 {
        self.limit.map_or(u128::MAX, |limit| time.as_nanos().saturating_mul(limit.get().into()))
    }
}

/// Returns the limits of requests, of tokens, and of the two kinds of calls without a charge.
fn limits_per_minute(limits: &BudgetLimits) -> [Option<NonZeroU32>; 4] {
    let free = limits.free_calls_per_minute.or(Some(FREE_CALLS_PER_MINUTE));
    [limits.requests_per_minute, limits.tokens_per_minute, free, free]
        .map(|limit| NonZeroU32::new(limit?))
}

fn to_parts(count: u64) -> u128 {
    u128::from(count) * PARTS_PER_UNIT
}

/// The number of parts in one unit: the nanoseconds in a minute. So each nanosecond refills as many
/// parts as the limit per minute.
const PARTS_PER_UNIT: u128 = 60_000_000_000;

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// A call in a generated history. `used` is the final usage, or the reservation while the call is open.
    struct Call {
        begun: Instant,
        reserved: u64,
        used: u64,
        is_open: bool,
    }

    fn rates(limit: u32, now: Instant) -> RunRateLimits {
        RunRateLimits::new(
            &BudgetLimits { tokens_per_minute: Some(limit), ..BudgetLimits::default() },
            now,
        )
    }

    /// G9: slow calls that overlap do not each use the minute that time has refilled.
    #[test]
    fn open_calls_together_can_use_at_most_a_minutes_worth() {
        let start = Instant::now();
        let mut rates = rates(6000, start);
        let (estimate, excess) = (Tokens(1870), Tokens(3740));
        rates.take_tokens(estimate, excess, true, start).unwrap();
        let later = start + Duration::from_secs(150);
        let refused = rates.take_tokens(estimate, excess, false, later);
        assert!(matches!(refused, Err(BudgetError::Reserved { .. })), "{refused:?}");
        rates.take_tokens(Tokens(100), Tokens(200), false, later).unwrap();
        rates.release_excess(excess);
        rates.take_tokens(estimate, excess, false, later).unwrap();
    }

    /// G9: only time pays off a debt, and the debt lasts for the full time.
    #[test]
    fn a_call_beyond_a_minutes_worth_is_paid_off_by_time() {
        let begun = Instant::now();
        let mut rates = rates(1000, begun);
        rates.take_tokens(Tokens(8000), Tokens::ZERO, true, begun).unwrap();
        let later = |seconds| begun + Duration::from_secs(seconds);
        for seconds in [1, 61, 122, 419] {
            rates.take_tokens(Tokens(1), Tokens::ZERO, true, later(seconds)).unwrap_err();
        }
        rates.settle_tokens(Tokens(8000), Tokens(5000), Duration::from_secs(1), later(420));
        rates.take_tokens(Tokens(1000), Tokens::ZERO, true, later(480)).unwrap();
        let refusal = rates.take_tokens(Tokens(1), Tokens::ZERO, true, later(480)).unwrap_err();
        let retry_after = Duration::from_millis(60);
        assert_eq!(refusal, BudgetError::Rate { kind: "tokens", limit: 1000, retry_after });
    }

    /// G9: a thread that read the clock first may take the lock second, without refilling an interval twice.
    #[test]
    fn a_clock_that_was_read_early_brings_nothing_back() {
        let begun = Instant::now();
        let mut rates = rates(1000, begun);
        rates.take_tokens(Tokens(1000), Tokens::ZERO, true, begun).unwrap();
        let minute = begun + Duration::from_mins(1);
        rates.take_tokens(Tokens(1000), Tokens::ZERO, true, minute).unwrap();
        rates.take_tokens(Tokens(1), Tokens::ZERO, true, begun).unwrap_err();
        rates.take_tokens(Tokens(1), Tokens::ZERO, true, minute).unwrap_err();
    }

    #[test]
    fn what_is_taken_stays_taken_when_the_limit_changes() {
        let now = Instant::now();
        let mut rates = rates(1000, now);
        rates.take_tokens(Tokens(1000), Tokens::ZERO, true, now).unwrap();
        rates.set_limits(
            &BudgetLimits { tokens_per_minute: Some(1500), ..BudgetLimits::default() },
            now,
        );
        rates.take_tokens(Tokens(501), Tokens::ZERO, true, now).unwrap_err();
        rates.take_tokens(Tokens(500), Tokens::ZERO, true, now).unwrap();
    }

    proptest! {
        /// G9: for every history of calls, the calls that begin within a minute use at most the minute's limit and
        /// one burst of the same size.
        #[test]
        fn a_minute_has_no_more_than_its_limit_and_one_burst(
            steps in vec((0_u64..30_000, 1_u64..=1000, 0_u64..=100, any::<prop::sample::Index>()), 1..120),
        ) {
            let start = Instant::now();
            let (mut now, mut rates) = (start, rates(1000, start));
            let mut calls: Vec<Call> = vec![];
            for (pause, tokens, percent, which) in steps {
                now += Duration::from_millis(pause * u64::from(percent % 3 == 0));
                if percent % 2 == 0 || calls.is_empty() {
                    if rates.take_tokens(Tokens(tokens), Tokens::ZERO, true, now).is_ok() {
                        calls.push(Call { begun: now, reserved: tokens, used: tokens, is_open: true });
                    }
                    continue;
                }
                let call = which.get(&calls);
                if call.is_open {
                    let used = call.reserved * percent / 100;
                    rates.settle_tokens(Tokens(call.reserved), Tokens(used), now - call.begun, now);
                    let at = which.index(calls.len());
                    calls[at] = Call { used, is_open: false, ..calls[at] };
                }
            }
            for first in &calls {
                let minute = first.begun..=first.begun + Duration::from_mins(1);
                let used: u64 =
                    calls.iter().filter(|call| minute.contains(&call.begun)).map(|call| call.used).sum();
                prop_assert!(used <= 2000, "{used}");
            }
        }
    }
}
