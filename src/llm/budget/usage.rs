//! Tokens, and who counted them.

use std::iter::Sum;
use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

use super::cost::Nanodollars;

/// A number of tokens. Sums saturate: a hostile count cannot wrap a budget round to zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tokens(pub u64);

/// What one call used, normalised over the three protocols.
///
/// `input` is everything the model read, cached parts included (OpenAI counts so; Anthropic's
/// `input_tokens` excludes the cache and is added up). `output` includes reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenUsage {
    pub input: Tokens,
    pub output: Tokens,
    /// The part of `input` that was read from a cache.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub cache_read: Tokens,
    /// The part of `input` that was written to a cache.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub cache_write: Tokens,
    /// The part of `cache_write` that is kept for an hour; the rest is kept for five minutes.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub cache_write_1h: Tokens,
    /// The part of `output` that was reasoning.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub reasoning: Tokens,
    /// The part of `input` that was sound.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub audio_input: Tokens,
    /// The part of `output` that was sound.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub audio_output: Tokens,
    pub source: UsageSource,
}

/// Who counted the tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UsageSource {
    /// The provider, in the response that was delivered.
    Provider,
    /// The provider, in the rest of a stream that was read after the client had left.
    Drained,
    /// We did, from bytes, because nobody reported.
    #[default]
    Estimated,
}

/// An amount of what is limited: spent, reserved or left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetAmount {
    pub turns: u64,
    pub input: Tokens,
    pub output: Tokens,
    /// By our own price table; zero where the model stands in none.
    #[serde(default, rename = "cost_usd", skip_serializing_if = "Nanodollars::is_zero")]
    pub cost: Nanodollars,
}

impl Tokens {
    pub const ZERO: Self = Self(0);

    pub fn is_zero(&self) -> bool {
        self.0 == 0
    }

    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl TokenUsage {
    pub fn total_tokens(&self) -> Tokens {
        self.input + self.output
    }
}

impl BudgetAmount {
    pub fn total_tokens(&self) -> Tokens {
        self.input + self.output
    }

    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self {
            turns: self.turns.saturating_sub(other.turns),
            input: self.input.saturating_sub(other.input),
            output: self.output.saturating_sub(other.output),
            cost: self.cost.saturating_sub(other.cost),
        }
    }
}

impl Add for BudgetAmount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            turns: self.turns.saturating_add(other.turns),
            input: self.input + other.input,
            output: self.output + other.output,
            cost: self.cost + other.cost,
        }
    }
}

impl UsageSource {
    pub const ALL: [Self; 3] = [Self::Provider, Self::Drained, Self::Estimated];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Provider => "provider",
            Self::Drained => "drained",
            Self::Estimated => "estimated",
        }
    }
}

impl Add for Tokens {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Tokens {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Tokens {
    fn sum<I: Iterator<Item = Self>>(tokens: I) -> Self {
        tokens.fold(Self::ZERO, Add::add)
    }
}
