//! Requests and tokens per minute.

use std::num::NonZeroU32;
use std::time::Duration;

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};

use super::ledger::{FREE_CALLS_PER_MINUTE, Limits, Refusal};
use super::usage::Tokens;

/// The rate limits of a run. The caller keeps them under a lock.
#[derive(Debug)]
pub(super) struct Rates {
    requests: Option<Rate>,
    tokens: Option<Rate>,
    /// Calls that cost no tokens.
    free: Option<Rate>,
    /// Tokens that calls used beyond their estimated input; the next calls pay them off.
    debt: u64,
}

#[derive(Debug)]
struct Rate {
    limit: NonZeroU32,
    limiter: DefaultDirectRateLimiter,
}

impl Rates {
    pub(super) fn new(limits: &Limits) -> Self {
        let [requests, tokens, free] = per_minute(limits).map(Rate::new);
        Self { requests, tokens, free, debt: 0 }
    }

    /// A limit that stays the same keeps its place in the minute.
    pub(super) fn change(&mut self, limits: &Limits) {
        let rates = [&mut self.requests, &mut self.tokens, &mut self.free];
        for (rate, limit) in rates.into_iter().zip(per_minute(limits)) {
            if rate.as_ref().map(|rate| rate.limit.get()) != limit {
                *rate = Rate::new(limit);
            }
        }
    }

    /// Takes one request out of the minute, or says how long to wait.
    ///
    /// What is taken cannot be put back. Therefore the requests come before the tokens: a client that
    /// hammers at one limit must not use up a minute of tokens with calls that are never made.
    pub(super) fn enter(&mut self, is_free: bool) -> Result<(), Refusal> {
        if let Some(rate) = self.free.as_ref().filter(|_| is_free) {
            rate.take("calls without a charge", 1)?;
        }
        self.requests.as_ref().map_or(Ok(()), |rate| rate.take("requests", 1))
    }

    /// Takes the input of a call out of the minute, or says how long to wait. The output becomes a debt when
    /// the call is settled, because it is not known before.
    pub(super) fn admit(&mut self, input: Tokens) -> Result<(), Refusal> {
        let Some(rate) = &self.tokens else { return Ok(()) };
        let owed = input.0.saturating_add(self.debt);
        rate.take("tokens", owed)?;
        self.debt = owed.saturating_sub(rate.limit.get().into());
        Ok(())
    }

    pub(super) fn settle(&mut self, taken: Tokens, used: Tokens) {
        if self.tokens.is_some() {
            self.debt = self.debt.saturating_add(used.saturating_sub(taken).0);
        }
    }
}

impl Rate {
    fn new(limit: Option<u32>) -> Option<Self> {
        let limit = NonZeroU32::new(limit?)?;
        Some(Self { limit, limiter: RateLimiter::direct(Quota::per_minute(limit)) })
    }

    fn take(&self, kind: &'static str, wanted: u64) -> Result<(), Refusal> {
        // More than a whole minute's worth can never be had at once; it takes the whole minute.
        let capped = u32::try_from(wanted).unwrap_or(u32::MAX).clamp(1, self.limit.get());
        let wanted = NonZeroU32::new(capped).unwrap_or(NonZeroU32::MIN);
        let retry_after = match self.limiter.check_n(wanted) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(not_until)) => not_until.wait_time_from(DefaultClock::default().now()),
            Err(_beyond_capacity) => Duration::from_mins(1),
        };
        Err(Refusal::Rate { kind, limit: self.limit.get(), retry_after })
    }
}

/// The limits of requests, of tokens and of calls that cost no tokens.
fn per_minute(limits: &Limits) -> [Option<u32>; 3] {
    let free = limits.free_calls_per_minute.or(Some(FREE_CALLS_PER_MINUTE));
    [limits.requests_per_minute, limits.tokens_per_minute, free]
}
