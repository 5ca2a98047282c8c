//! The limits on everything that a run spends. A person may raise these limits while the run goes on.
//!
//! **Invariant:** a raise only adds: no limit falls, and a run without a limit gets none.

use serde::{Deserialize, Serialize};

use super::budget_error::BudgetError;
use super::cost::Nanodollars;
use super::limits::BudgetLimits;
use super::usage::Tokens;

/// A limit on everything that a run spends. Its text is its key in `[budget]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpendingLimit {
    MaxTurns,
    MaxTotalTokens,
    MaxInputTokens,
    MaxOutputTokens,
    MaxCostUsd,
}

/// The limits on everything that a run spends. `None` is no limit; in a raise it is no change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpendingLimits {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_turns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_total_tokens: Option<Tokens>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_input_tokens: Option<Tokens>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_output_tokens: Option<Tokens>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cost_usd: Option<Nanodollars>,
}

/// The reason why a raise is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RaiseError {
    #[error("the question is about `{}`; raise it, too", .0.as_str())]
    Missing(SpendingLimit),
    #[error("the run has no limit `{}`; leave it out", .0.as_str())]
    NotLimited(SpendingLimit),
    #[error("`{}` is not above the limit in force; a limit can only be raised", .0.as_str())]
    NotHigher(SpendingLimit),
    #[error("`{}` is above the limit of the grant that has started the run", .0.as_str())]
    AboveGrant(SpendingLimit),
}

impl SpendingLimit {
    const ALL: [Self; 5] = [
        Self::MaxTurns,
        Self::MaxTotalTokens,
        Self::MaxInputTokens,
        Self::MaxOutputTokens,
        Self::MaxCostUsd,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::MaxTurns => "max_turns",
            Self::MaxTotalTokens => "max_total_tokens",
            Self::MaxInputTokens => "max_input_tokens",
            Self::MaxOutputTokens => "max_output_tokens",
            Self::MaxCostUsd => "max_cost_usd",
        }
    }
}

impl SpendingLimits {
    /// Returns a limit in its smallest unit: turns, tokens or billionths of a dollar.
    pub fn value(&self, limit: SpendingLimit) -> Option<u64> {
        match limit {
            SpendingLimit::MaxTurns => self.max_turns,
            SpendingLimit::MaxTotalTokens => self.max_total_tokens.map(|tokens| tokens.0),
            SpendingLimit::MaxInputTokens => self.max_input_tokens.map(|tokens| tokens.0),
            SpendingLimit::MaxOutputTokens => self.max_output_tokens.map(|tokens| tokens.0),
            SpendingLimit::MaxCostUsd => self.max_cost_usd.map(|money| money.0),
        }
    }

    /// Returns true if a limit is above a value, or there is no limit.
    pub fn is_above(&self, limit: SpendingLimit, value: u64) -> bool {
        self.value(limit).is_none_or(|now| now > value)
    }

    /// Checks a raise of these limits, which are in force. It must raise the limit `spent`.
    ///
    /// # Errors
    /// Returns the first limit that the raise must not have, or lacks.
    pub fn check_raise(&self, raise: &Self, spent: SpendingLimit) -> Result<(), RaiseError> {
        if raise.value(spent).is_none() {
            return Err(RaiseError::Missing(spent));
        }
        for limit in SpendingLimit::ALL {
            match (self.value(limit), raise.value(limit)) {
                (_, None) => {}
                (None, Some(_)) => return Err(RaiseError::NotLimited(limit)),
                (Some(now), Some(then)) if then > now => {}
                _ => return Err(RaiseError::NotHigher(limit)),
            }
        }
        Ok(())
    }

    /// Checks that a raise stays within the limits of a grant.
    ///
    /// # Errors
    /// Returns the first limit that is above the grant's.
    pub fn check_within(&self, grant: &Self) -> Result<(), RaiseError> {
        let is_above = |limit: &SpendingLimit| {
            let (raised, allowed) = (self.value(*limit), grant.value(*limit));
            raised.zip(allowed).is_some_and(|(raised, allowed)| raised > allowed)
        };
        match SpendingLimit::ALL.into_iter().find(is_above) {
            Some(limit) => Err(RaiseError::AboveGrant(limit)),
            None => Ok(()),
        }
    }
}

impl BudgetLimits {
    /// Returns the limits that a person may raise.
    pub fn spending_limits(&self) -> SpendingLimits {
        let &Self {
            max_turns,
            max_total_tokens,
            max_input_tokens,
            max_output_tokens,
            max_cost_usd,
            ..
        } = self;
        SpendingLimits {
            max_turns,
            max_total_tokens,
            max_input_tokens,
            max_output_tokens,
            max_cost_usd,
        }
    }

    /// Raises limits. A limit never falls, and no limit is added.
    pub(super) fn raise_spending(&mut self, raise: &SpendingLimits) {
        fn raise_limit<T: Ord + Copy>(limit: &mut Option<T>, to: Option<T>) {
            if let (Some(limit), Some(to)) = (limit, to) {
                *limit = to.max(*limit);
            }
        }
        raise_limit(&mut self.max_turns, raise.max_turns);
        raise_limit(&mut self.max_total_tokens, raise.max_total_tokens);
        raise_limit(&mut self.max_input_tokens, raise.max_input_tokens);
        raise_limit(&mut self.max_output_tokens, raise.max_output_tokens);
        raise_limit(&mut self.max_cost_usd, raise.max_cost_usd);
    }
}

impl BudgetError {
    /// Returns the limit that is spent for good, and its value; `None` if no raise of a limit helps.
    pub fn spent_limit(&self) -> Option<(SpendingLimit, u64)> {
        match *self {
            Self::Turns { limit, .. } => Some((SpendingLimit::MaxTurns, limit)),
            Self::Cost { limit, .. } => Some((SpendingLimit::MaxCostUsd, limit.0)),
            Self::Tokens { kind, limit, .. } => {
                let name = match kind {
                    "input" => SpendingLimit::MaxInputTokens,
                    "output" => SpendingLimit::MaxOutputTokens,
                    _ => SpendingLimit::MaxTotalTokens,
                };
                Some((name, limit))
            }
            Self::Deadline { .. }
            | Self::Concurrency { .. }
            | Self::Reserved { .. }
            | Self::Rate { .. } => None,
        }
    }
}
