//! The limits of a run: the values that an operator or a grant sets, and the combination of two
//! sets.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::cost::Nanodollars;
use super::usage::Tokens;

/// The limits on a run's spending. `None` means no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BudgetLimits {
    /// The maximum number of calls that make a model generate.
    pub max_turns: Option<u64>,
    pub max_total_tokens: Option<Tokens>,
    pub max_input_tokens: Option<Tokens>,
    pub max_output_tokens: Option<Tokens>,
    /// The maximum cost in dollars, by the gateway's own price table.
    pub max_cost_usd: Option<Nanodollars>,
    /// The maximum number of calls open at the same time.
    pub max_concurrent: Option<u32>,
    pub requests_per_minute: Option<u32>,
    pub tokens_per_minute: Option<u32>,
    /// The maximum number of calls per minute that cost no tokens and no limited turn, such as
    /// `count_tokens` and calls that the upstream refuses. The default is
    /// [`FREE_CALLS_PER_MINUTE`](super::FREE_CALLS_PER_MINUTE).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_calls_per_minute: Option<u32>,
    /// The maximum time from the start of the run to its end.
    #[serde(with = "humantime_serde")]
    pub deadline: Option<Duration>,
}

impl BudgetLimits {
    /// Returns these limits, with the limits of `base` in place of missing ones.
    #[must_use]
    pub fn or_defaults(self, base: &Self) -> Self {
        Self {
            max_turns: self.max_turns.or(base.max_turns),
            max_total_tokens: self.max_total_tokens.or(base.max_total_tokens),
            max_input_tokens: self.max_input_tokens.or(base.max_input_tokens),
            max_output_tokens: self.max_output_tokens.or(base.max_output_tokens),
            max_cost_usd: self.max_cost_usd.or(base.max_cost_usd),
            max_concurrent: self.max_concurrent.or(base.max_concurrent),
            requests_per_minute: self.requests_per_minute.or(base.requests_per_minute),
            tokens_per_minute: self.tokens_per_minute.or(base.tokens_per_minute),
            free_calls_per_minute: self.free_calls_per_minute.or(base.free_calls_per_minute),
            deadline: self.deadline.or(base.deadline),
        }
    }

    /// Returns true if any limit applies to the whole run, rather than to a minute or to open
    /// calls.
    pub fn counts_spending(&self) -> bool {
        let Self { max_turns, max_cost_usd, deadline, .. } = self;
        let tokens = [self.max_total_tokens, self.max_input_tokens, self.max_output_tokens];
        let is_set = [max_turns.is_some(), max_cost_usd.is_some(), deadline.is_some()];
        is_set.contains(&true) || tokens.iter().any(Option::is_some)
    }

    /// Returns the lower of each pair of limits.
    #[must_use]
    pub fn capped_by(&self, ceiling: &Self) -> Self {
        Self {
            max_turns: min_limit(self.max_turns, ceiling.max_turns),
            max_total_tokens: min_limit(self.max_total_tokens, ceiling.max_total_tokens),
            max_input_tokens: min_limit(self.max_input_tokens, ceiling.max_input_tokens),
            max_output_tokens: min_limit(self.max_output_tokens, ceiling.max_output_tokens),
            max_cost_usd: min_limit(self.max_cost_usd, ceiling.max_cost_usd),
            max_concurrent: min_limit(self.max_concurrent, ceiling.max_concurrent),
            requests_per_minute: min_limit(self.requests_per_minute, ceiling.requests_per_minute),
            tokens_per_minute: min_limit(self.tokens_per_minute, ceiling.tokens_per_minute),
            free_calls_per_minute: min_limit(
                self.free_calls_per_minute,
                ceiling.free_calls_per_minute,
            ),
            deadline: min_limit(self.deadline, ceiling.deadline),
        }
    }
}

/// Returns the lower of two limits. `None` means no limit.
pub(super) fn min_limit<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
