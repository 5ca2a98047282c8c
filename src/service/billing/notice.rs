//! A report of what a call has cost.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::CallUsage;
use crate::llm::budget::{Nanodollars, Tokens};

/// A report of one call's price, by the call's id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChargeNotice {
    pub call_id: String,
    pub source: ChargeSource,
    /// The run, as the gateway sent it to LiteLLM in the call's metadata.
    pub run: Option<String>,
    /// The deployment whose billing store the notice is for, from the call's metadata. A gateway without a billing
    /// store sends none.
    pub deployment: Option<String>,
    pub account: Option<String>,
    pub model: Option<String>,
    /// True if a later notice may name the cost: LiteLLM gave up on this attempt and may have retried, or LiteLLM has
    /// no price for the call.
    pub is_provisional: bool,
    pub amount: Nanodollars,
    pub input: Tokens,
    pub output: Tokens,
    pub started: SystemTime,
    pub ended: SystemTime,
}

/// The source of a charge: `litellm_callback` (LiteLLM reported the call when it had ended), `litellm_spend_logs` (the service
/// read LiteLLM's spend logs) or `price_table` (the gateway's own price table, without a LiteLLM).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChargeSource {
    /// LiteLLM's callback, right after the call.
    LitellmCallback,
    /// LiteLLM's spend logs, on our request.
    LitellmSpendLogs,
    /// Our own price table, if there is no LiteLLM in between.
    PriceTable,
}

impl ChargeNotice {
    /// Returns true if the notice can be the receipt of a call. LiteLLM reports a failed attempt with an amount of 0,
    /// and a call without a known price with no amount. If such a call used tokens, its cost is still unknown.
    pub fn is_charge_for(&self, fact: &CallUsage) -> bool {
        !(self.names_no_charge() && fact.is_billable())
    }

    /// Returns true if the notice does not name the call's cost.
    pub fn names_no_charge(&self) -> bool {
        self.is_provisional && self.amount.is_zero()
    }

    /// Returns true if the notice names any tokens.
    pub fn has_tokens(&self) -> bool {
        !(self.input.is_zero() && self.output.is_zero())
    }

    /// Returns the sort key of a call's notices: a final notice outranks a provisional one, then the larger amount
    /// outranks the smaller.
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

/// The largest accepted price of one call: a million dollars. Our choice: a larger amount is a mistake, and sums stay
/// far from an overflow.
pub const MAX_AMOUNT: Nanodollars = Nanodollars(1_000_000_000_000_000);
