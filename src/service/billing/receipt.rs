//! Receipts of single calls, and the bill of a run.

use std::time::SystemTime;

use serde::Serialize;

use super::ChargeSource;
use super::call_usage::serialize_rfc3339;
use crate::llm::budget::{Nanodollars, Tokens};

/// The proof that a call was charged. A call has at most one receipt.
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
    /// The end of the call, by the source's clock.
    #[serde(serialize_with = "serialize_rfc3339")]
    pub ended: SystemTime,
    /// The time at which the receipt was written here.
    #[serde(serialize_with = "serialize_rfc3339")]
    pub received: SystemTime,
}

/// The bill of a run: counts and sums over its calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunBill {
    pub run: String,
    pub account: String,
    /// The number of admitted calls.
    pub calls: u64,
    /// The number of calls that used tokens and must be charged.
    pub billable: u64,
    /// Billable calls whose tokens are an estimate, because the upstream reported none.
    pub estimated: u64,
    pub receipts: u64,
    /// The sum of the receipts.
    #[serde(rename = "amount_usd")]
    pub amount: Nanodollars,
    /// Billable calls that have no receipt.
    pub missing: u64,
    /// Billable calls without a receipt whose time for a receipt is over.
    pub overdue: u64,
    /// Receipts of $0 for calls that used tokens: the charging side has no price for the model.
    pub unpriced: u64,
    /// Notices that contradict a receipt, or name another run.
    pub conflicting: u64,
    pub state: BillState,
    pub flags: Vec<BillFlag>,
}

/// The state of a run's bill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BillState {
    /// Every billable call has its receipt.
    Complete,
    /// Billable calls without a receipt exist, and their time for a receipt goes on.
    Pending,
    /// Billable calls without a receipt exist, and their time for a receipt is over.
    Overdue,
}

/// A problem of a bill that the operator must check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BillFlag {
    /// A call has no receipt, and its time for a receipt is over.
    Unreceipted,
    /// A call used tokens and cost nothing.
    Unpriced,
    /// Two notices of one call contradict each other.
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
