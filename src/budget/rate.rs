//! Requests and tokens per minute.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use governor::clock::{Clock, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};

use super::ledger::Refusal;
use super::usage::Tokens;

/// The two rate limits of a run.
#[derive(Debug)]
pub(super) struct Rates {
    requests: Option<Rate>,
    tokens: Option<Rate>,
    /// Tokens that calls used beyond what they had reserved; the next calls pay them off.
    debt: AtomicU64,
}

#[derive(Debug)]
struct Rate {
    limit: NonZeroU32,
    limiter: DefaultDirectRateLimiter,
}

impl Rates {
    pub(super) fn new(requests: Option<u32>, tokens: Option<u32>) -> Self {
        Self { requests: Rate::new(requests), tokens: Rate::new(tokens), debt: AtomicU64::new(0) }
    }

    /// Takes one request and its tokens out of the minute, or says how long to wait.
    ///
    /// What is taken cannot be put back, so the request comes first: a client that hammers at one limit
    /// must not use up a minute of tokens with calls that are never made.
    pub(super) fn admit(&self, tokens: Tokens) -> Result<(), Refusal> {
        self.requests.as_ref().map_or(Ok(()), |rate| rate.take("requests", 1))?;
        let Some(rate) = &self.tokens else { return Ok(()) };
        let debt = self.debt.swap(0, Ordering::Relaxed);
        rate.take("tokens", tokens.0.saturating_add(debt)).inspect_err(|_| {
            self.debt.fetch_add(debt, Ordering::Relaxed);
        })
    }

    pub(super) fn settle(&self, reserved: Tokens, used: Tokens) {
        if self.tokens.is_some() {
            self.debt.fetch_add(used.saturating_sub(reserved).0, Ordering::Relaxed);
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
