//! What somebody says that a call has cost.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::CallUsage;
use crate::llm::budget::{Nanodollars, Tokens};

/// One call by its id, and the price that somebody has put to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChargeNotice {
    pub call_id: String,
    pub source: ChargeSource,
    /// The run, as the gateway told LiteLLM in the call's metadata.
    pub run: Option<String>,
    /// Whose books it is for, told in the same way; a gateway without books tells none.
    pub deployment: Option<String>,
    pub account: Option<String>,
    pub model: Option<String>,
    /// Another notice may say what the call cost: LiteLLM gave up on this attempt, and may have tried again; or it put no
    /// price to the call.
    pub is_provisional: bool,
    pub amount: Nanodollars,
    pub input: Tokens,
    pub output: Tokens,
    pub started: SystemTime,
    pub ended: SystemTime,
}

/// Who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChargeSource {
    /// LiteLLM, as soon as the call was over.
    LitellmCallback,
    /// LiteLLM, when we asked.
    LitellmSpendLogs,
    /// We ourselves, where there is no LiteLLM in between.
    PriceTable,
}

impl ChargeNotice {
    /// Tells whether the notice can be the receipt of a call. LiteLLM reports a failed attempt with an amount of 0, and a
    /// call that it cannot price with none; where the call used tokens all the same, what it cost is still to be said.
    pub fn is_charge_for(&self, fact: &CallUsage) -> bool {
        !(self.names_no_charge() && fact.is_billable())
    }

    /// Tells whether the notice leaves open what the call cost.
    pub fn names_no_charge(&self) -> bool {
        self.is_provisional && self.amount.is_zero()
    }

    /// Tells whether the notice names any tokens.
    pub fn has_tokens(&self) -> bool {
        !(self.input.is_zero() && self.output.is_zero())
    }

    /// Sorts what is said of one call by how much it counts: what is final before what is not, then the larger amount.
    pub(super) fn precedence(&self) -> (bool, Nanodollars) {
        (!self.is_provisional, self.amount)
    }
}

impl ChargeSource {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::LitellmCallback => "litellm_callback",
            Self::LitellmSpendLogs => "litellm_spend_logs",
            Self::PriceTable => "price_table",
        }
    }
}

/// The most that one call can be said to have cost: a million dollars. Whoever says more is mistaken, and sums stay far
/// from where they would wrap.
pub const MAX_AMOUNT: Nanodollars = Nanodollars(1_000_000_000_000_000);

/// The most tokens that one call can be said to have had, for the same reason.
pub const MAX_TOKENS: Tokens = Tokens(1_000_000_000);
