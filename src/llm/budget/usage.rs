//! Tokens, and the source of their count.

use std::iter::Sum;
use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

use super::cost::Nanodollars;

/// A number of tokens. Sums saturate, so that a hostile count cannot wrap a budget around to zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tokens(pub u64);

/// The usage of one call, in one form for the three protocols.
///
/// `input` is all text that the model read, including cached parts. OpenAI counts this way;
/// Anthropic's `input_tokens` excludes the cache, so the cache is added. `output` includes
/// reasoning.
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
    /// The part of `cache_write` with a lifetime of one hour. The rest has a lifetime of five
    /// minutes.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub cache_write_1h: Tokens,
    /// The part of `output` that was reasoning.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub reasoning: Tokens,
    /// The part of `input` that was audio.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub audio_input: Tokens,
    /// The part of `output` that was audio.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub audio_output: Tokens,
    /// The part of `input` that was pictures.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub image_input: Tokens,
    /// The part of `input` that was video.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub video_input: Tokens,
    /// The part of `output` that was pictures.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub image_output: Tokens,
    /// The part of `output` that was video.
    #[serde(default, skip_serializing_if = "Tokens::is_zero")]
    pub video_output: Tokens,
    pub source: UsageSource,
}

/// The source of a token count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UsageSource {
    /// The provider reported the count in the delivered response.
    Provider,
    /// The provider reported the count in the rest of a stream, which the gateway read after the
    /// client had disconnected.
    Drained,
    /// The gateway estimated the count from bytes, because the provider reported none.
    #[default]
    Estimated,
}

/// An amount of the limited resources: spent, reserved or remaining.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetAmount {
    pub turns: u64,
    pub input: Tokens,
    pub output: Tokens,
    /// The cost by the gateway's own price table. Zero if the table does not contain the model.
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

    /// Returns true if no part of the amount exceeds the same part of the other.
    pub fn is_within(&self, other: &Self) -> bool {
        self.turns <= other.turns
            && self.input <= other.input
            && self.output <= other.output
            && self.cost <= other.cost
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
