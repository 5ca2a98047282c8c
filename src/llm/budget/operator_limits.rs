//! Combines limits that an operator changed in a running process with limits that are read again
//! from the configuration.

use super::BudgetLimits;
use super::limits::min_limit;

impl BudgetLimits {
    /// Returns the limits to use after `fresh` was read in place of `old`. A limit that an operator
    /// changed at run time stays in force. If the fresh value differs from the old one, the lower
    /// of the operator's and the fresh value applies.
    #[must_use]
    pub fn merge_operator_limits(&self, old: &Self, fresh: &Self) -> Self {
        Self {
            max_turns: merge_operator_limit(self.max_turns, old.max_turns, fresh.max_turns),
            max_total_tokens: merge_operator_limit(
                self.max_total_tokens,
                old.max_total_tokens,
                fresh.max_total_tokens,
            ),
            max_input_tokens: merge_operator_limit(
                self.max_input_tokens,
                old.max_input_tokens,
                fresh.max_input_tokens,
            ),
            max_output_tokens: merge_operator_limit(
                self.max_output_tokens,
                old.max_output_tokens,
                fresh.max_output_tokens,
            ),
            max_cost_usd: merge_operator_limit(
                self.max_cost_usd,
                old.max_cost_usd,
                fresh.max_cost_usd,
            ),
            max_concurrent: merge_operator_limit(
                self.max_concurrent,
                old.max_concurrent,
                fresh.max_concurrent,
            ),
            requests_per_minute: merge_operator_limit(
                self.requests_per_minute,
                old.requests_per_minute,
                fresh.requests_per_minute,
            ),
            tokens_per_minute: merge_operator_limit(
                self.tokens_per_minute,
                old.tokens_per_minute,
                fresh.tokens_per_minute,
            ),
            free_calls_per_minute: merge_operator_limit(
                self.free_calls_per_minute,
                old.free_calls_per_minute,
                fresh.free_calls_per_minute,
            ),
            deadline: merge_operator_limit(self.deadline, old.deadline, fresh.deadline),
        }
    }
}

/// Merges one limit; see [`BudgetLimits::merge_operator_limits`].
fn merge_operator_limit<T: Ord + Copy>(
    set: Option<T>,
    old: Option<T>,
    fresh: Option<T>,
) -> Option<T> {
    // First entry: the limit in force is still the one of the old configuration, so the operator
    // did not change it. Second entry: the configuration did not change.
    match (set == old, fresh == old) {
        (true, _) => fresh,
        (false, true) => set,
        (false, false) => min_limit(set, fresh),
    }
}
