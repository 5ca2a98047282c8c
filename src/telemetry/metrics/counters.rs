//! The counters of runs and models.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::metrics::count_as_f64;
use crate::llm::budget::TokenUsage;

/// A number that many threads change and a scrape reads. No other memory access is ordered by it.
#[derive(Debug, Default)]
pub(super) struct AtomicCounter(AtomicU64);

/// The numbers of tokens by kind, in the order of [`TOKEN_KINDS`].
#[derive(Debug, Default)]
pub(super) struct TokenCounters([AtomicCounter; TOKEN_KINDS.len()]);

impl AtomicCounter {
    pub(super) fn add_count(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(super) fn sub_count(&self, less: u64) {
        self.0.fetch_sub(less, Ordering::Relaxed);
    }

    /// Sets the number and returns the previous one.
    pub(super) fn replace_count(&self, new: u64) -> u64 {
        self.0.swap(new, Ordering::Relaxed)
    }

    pub(super) fn as_float(&self) -> f64 {
        count_as_f64(self.0.load(Ordering::Relaxed))
    }
}

impl TokenCounters {
    pub(super) fn add_usage(&self, usage: &TokenUsage) {
        let TokenUsage { input, output, cache_read, cache_write, reasoning, .. } = *usage;
        let tokens = [input, output, cache_read, cache_write, reasoning];
        // Most calls have no cache or reasoning tokens. An atomic addition of zero would still cost.
        for (count, tokens) in self.0.iter().zip(tokens).filter(|(_, tokens)| !tokens.is_zero()) {
            count.add_count(tokens.0);
        }
    }

    /// Returns the counts by kind.
    pub(super) fn counts_by_kind(&self) -> impl Iterator<Item = (&'static str, f64)> {
        TOKEN_KINDS.into_iter().zip(self.0.iter().map(AtomicCounter::as_float))
    }
}

/// The values of the label `kind`. The first two together are all tokens; the others are parts of them.
const TOKEN_KINDS: [&str; 5] = ["input", "output", "cache_read", "cache_write", "reasoning"];
