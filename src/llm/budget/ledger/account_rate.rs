//! The rate of one tool or one connection.

use std::num::NonZeroU32;
use std::time::Instant;

use crate::llm::budget::BudgetError;
use crate::llm::budget::rate::RateLimiter;

/// A rate whose limit is known only when a request arrives.
#[derive(Debug)]
pub(super) struct AccountRate {
    limiter: RateLimiter,
    /// The requests that earlier processes admitted in the last minute, and the time when this was known. The rate takes
    /// them with the first request, which knows the limit.
    recent: Option<(u64, Instant)>,
}

impl AccountRate {
    pub(super) fn new(now: Instant) -> Self {
        Self { limiter: RateLimiter::unlimited(now), recent: None }
    }

    /// Sets the requests that earlier processes admitted in the last minute.
    pub(super) fn set_recent(&mut self, requests: u64, now: Instant) {
        self.recent = Some((requests, now));
    }

    /// Checks that the rate allows a request now under a limit, and takes nothing.
    ///
    /// # Errors
    /// Returns an error that names the requests and the time until the next one.
    pub(super) fn check_available(
        &mut self,
        name: &'static str,
        limit: Option<NonZeroU32>,
        now: Instant,
    ) -> Result<(), BudgetError> {
        if let Some((requests, known)) = self.recent.take() {
            self.limiter.set_limit(limit, known);
            self.limiter.take_recent(requests, known);
        }
        self.limiter.set_limit(limit, now);
        self.limiter.check_available(name, 1, now)
    }

    pub(super) fn take_request(&mut self, now: Instant) {
        self.limiter.take_count(1, now);
    }
}
