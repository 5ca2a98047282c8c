//! Receipts, and what they come to for a run.

use std::time::SystemTime;

use serde::Serialize;

use super::ChargeSource;
use super::call_usage::serialize_rfc3339;
use crate::llm::budget::{Nanodollars, Tokens};

/// That a call was charged. There is one for each call at most.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChargeReceipt {
    /// `run/attempt/call id`.
    pub source_reference: String,
    pub call_id: String,
    pub run: String,
    pub attempt: String,
    pub account: String,
    pub model: Option<String>,
    #[serde(rename = "amount_usd")]
    pub amount: Nanodollars,
    pub source: ChargeSource,
    /// The tokens that were charged for, as the source has them.
    pub input: Tokens,
    pub output: Tokens,
    /// When the call was over, by the source's clock.
    #[serde(serialize_with = "serialize_rfc3339")]
    pub ended: SystemTime,
    /// When the receipt was written here.
    #[serde(serialize_with = "serialize_rfc3339")]
    pub received: SystemTime,
}

/// What a run's calls come to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunBill {
    pub run: String,
    pub account: String,
    /// All calls that were admitted.
    pub calls: u64,
    /// Of those, the ones that used something and so must be charged.
    pub billable: u64,
    /// Billable calls whose tokens nobody reported.
    pub estimated: u64,
    pub receipts: u64,
    /// The sum of the receipts.
    #[serde(rename = "amount_usd")]
    pub amount: Nanodollars,
    /// Billable calls that have no receipt.
    pub missing: u64,
    /// Of those, the ones that should have one by now.
    pub overdue: u64,
    /// Receipts over nothing for calls that used tokens: whoever charges has no price for the model.
    pub unpriced: u64,
    /// Notices that contradict a receipt, or name another run.
    pub conflicting: u64,
    pub state: BillState,
    pub flags: Vec<BillFlag>,
}

/// How far a run's bill has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BillState {
    /// Every billable call has its receipt.
    Complete,
    /// Some have none yet.
    Pending,
    /// Some have none, and should.
    Overdue,
}

/// What somebody has to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BillFlag {
    /// A call has no receipt, and should.
    Unreceipted,
    /// A call used tokens and cost nothing.
    Unpriced,
    /// Two accounts of one call differ.
    Conflicting,
}

impl BillState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Pending => "pending",
            Self::Overdue => "overdue",
        }
    }
}

impl BillFlag {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unreceipted => "unreceipted",
            Self::Unpriced => "unpriced",
            Self::Conflicting => "conflicting",
        }
    }
}
