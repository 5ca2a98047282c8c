//! The counters that runs and models are made of.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::metrics::float;
use crate::budget::Usage;

/// A number that many threads change and a scrape reads. Nothing is ordered by it.
#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

/// Tokens by kind, as [`TOKEN_KINDS`] orders them.
#[derive(Debug, Default)]
pub(super) struct TokenCounts([Count; TOKEN_KINDS.len()]);

impl Count {
    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    pub(super) fn sub(&self, less: u64) {
        self.0.fetch_sub(less, Ordering::Relaxed);
    }

    /// Sets the number and tells what it was.
    pub(super) fn swap(&self, new: u64) -> u64 {
        self.0.swap(new, Ordering::Relaxed)
    }

    pub(super) fn float(&self) -> f64 {
        float(self.0.load(Ordering::Relaxed))
    }
}

impl TokenCounts {
    pub(super) fn add(&self, usage: &Usage) {
        let Usage { input, output, cache_read, cache_write, reasoning, .. } = *usage;
        let tokens = [input, output, cache_read, cache_write, reasoning];
        for (count, tokens) in self.0.iter().zip(tokens).filter(|(_, tokens)| !tokens.is_zero()) {
            count.add(tokens.0);
        }
    }

    /// The counts by kind.
    pub(super) fn floats(&self) -> impl Iterator<Item = (&'static str, f64)> {
        TOKEN_KINDS.into_iter().zip(self.0.iter().map(Count::float))
    }
}

/// Values of the label `kind`. The first two are all tokens; the others are parts of them.
const TOKEN_KINDS: [&str; 5] = ["input", "output", "cache_read", "cache_write", "reasoning"];
