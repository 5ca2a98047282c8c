//! Estimates the tokens that a model may have written while no text arrived.

use std::time::{Duration, Instant};

use crate::llm::budget::Tokens;

/// A timer for the periods in which the model could write and no text arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct SilenceTimer {
    /// The arrival of the latest text or, before the first text, the time at which the call was sent.
    since: Instant,
    /// The number of texts that have arrived.
    texts: u64,
    /// The total length of the pauses that have ended.
    pauses: Duration,
}

impl SilenceTimer {
    pub(super) fn start_at(since: Instant) -> Self {
        Self { since, texts: 0, pauses: Duration::ZERO }
    }

    /// Records that `texts` texts have arrived by `now`.
    pub(super) fn record_texts(&mut self, texts: u64, now: Instant) {
        if texts == self.texts {
            return;
        }
        let pause = now.saturating_duration_since(self.since);
        if pause >= MIN_SILENCE {
            self.pauses += pause;
        }
        (self.texts, self.since) = (texts, now);
    }

    /// Returns the tokens that the model may have written in silence until `now`, in all of its
    /// answers.
    pub(super) fn estimate_tokens(&self, now: Instant, choices: u32) -> Tokens {
        // The current pause counts in full, however short it is: the stream may have stopped in the
        // middle of it.
        let time = self.pauses + now.saturating_duration_since(self.since);
        let written = time.as_millis().saturating_mul(MAX_TOKENS_PER_SECOND).div_ceil(1000);
        let tokens = u64::try_from(written).unwrap_or(u64::MAX);
        Tokens(tokens.saturating_mul(u64::from(choices.max(1))))
    }
}

/// The shortest gap between two texts that counts as a pause. Our choice: a model that writes without a
/// pause has shorter gaps.
const MIN_SILENCE: Duration = Duration::from_secs(1);

/// The output rate of a fast model, in tokens per second. The frontier models of the large providers
/// write 50 to 150.
const MAX_TOKENS_PER_SECOND: u128 = 200;
