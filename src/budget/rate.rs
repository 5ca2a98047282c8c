//! Requests and tokens per minute.

use std::num::NonZeroU32;
use std::time::Duration;

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};

use super::ledger::Refusal;
use super::usage::Tokens;

/// The two rate limits of a run. The caller keeps them under a lock.
#[derive(Debug)]
pub(super) struct Rates {
    requests: Option<Rate>,
    tokens: Option<Rate>,
    /// Tokens that calls used beyond their estimated input; the next calls pay them off.
    debt: u64,
}

#[derive(Debug)]
struct Rate {
    limit: NonZeroU32,
    limiter: DefaultDirectRateLimiter,
}

impl Rates {
    pub(super) fn new(requests: Option<u32>, tokens: Option<u32>) -> Self {
        Self { requests: Rate::new(requests), tokens: Rate::new(tokens), debt: 0 }
    }

    /// A limit that stays the same keeps its place in the minute.
    pub(super) fn change(&mut self, requests: Option<u32>, tokens: Option<u32>) {
        for (rate, limit) in [(&mut self.requests, requests), (&mut self.tokens, tokens)] {
            if rate.as_ref().map(|rate| rate.limit.get()) != limit {
                *rate = Rate::new(limit);
            }
        }
    }

    /// Takes one request and its input out of the minute, or says how long to wait.
    ///
    /// What is taken cannot be put back, so the request comes first: a client that hammers at one
    /// limit must not use up a minute of tokens with calls that are never made. For the same reason
    /// the output is not taken before it is known; it becomes a debt when the call is settled.
    pub(super) fn admit(&mut self, input: Tokens) -> Result<(), Refusal> {
        self.requests.as_ref().map_or(Ok(()), |rate| rate.take("requests", 1))?;
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
