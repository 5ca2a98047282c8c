//! Limits that an operator has changed, when the configuration is read again.

use super::Limits;
use super::ledger::lower;

impl Limits {
    /// The limits after `fresh` was read where `old` was read before: a limit that an operator has changed meanwhile stays
    /// as it is in force, and is lowered where the fresh one is another than before, and lower.
    #[must_use]
    pub fn laid_over(&self, old: &Self, fresh: &Self) -> Self {
        Self {
            max_turns: lay_over(self.max_turns, old.max_turns, fresh.max_turns),
            max_total_tokens: lay_over(
                self.max_total_tokens,
                old.max_total_tokens,
                fresh.max_total_tokens,
            ),
            max_input_tokens: lay_over(
                self.max_input_tokens,
                old.max_input_tokens,
                fresh.max_input_tokens,
            ),
            max_output_tokens: lay_over(
                self.max_output_tokens,
                old.max_output_tokens,
                fresh.max_output_tokens,
            ),
            max_cost_usd: lay_over(self.max_cost_usd, old.max_cost_usd, fresh.max_cost_usd),
            max_concurrent: lay_over(self.max_concurrent, old.max_concurrent, fresh.max_concurrent),
            requests_per_minute: lay_over(
                self.requests_per_minute,
                old.requests_per_minute,
                fresh.requests_per_minute,
            ),
            tokens_per_minute: lay_over(
                self.tokens_per_minute,
                old.tokens_per_minute,
                fresh.tokens_per_minute,
            ),
            free_calls_per_minute: lay_over(
                self.free_calls_per_minute,
                old.free_calls_per_minute,
                fresh.free_calls_per_minute,
            ),
            deadline: lay_over(self.deadline, old.deadline, fresh.deadline),
        }
    }
}

/// Lays a limit that was set over one that is read again; see [`Limits::laid_over`].
fn lay_over<T: Ord + Copy>(set: Option<T>, old: Option<T>, fresh: Option<T>) -> Option<T> {
    match (set == old, fresh == old) {
        (true, _) => fresh,
        (false, true) => set,
        (false, false) => lower(set, fresh),
    }
}
