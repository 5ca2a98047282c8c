//! Receipts of single calls, and the bill of a run.

use std::time::SystemTime;

use serde::Serialize;
use utoipa::ToSchema;

use super::ChargeSource;
use super::call_usage::serialize_rfc3339;
use crate::llm::budget::{Nanodollars, Tokens};

/// The proof that a call was charged. A call has at most one receipt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ChargeReceipt {
    /// The key of the charge: `RUN/ATTEMPT/CALL_ID`. No two receipts have the same key.
    pub source_reference: String,
    /// The gateway's id of the call.
    pub call_id: String,
    /// The id of the run.
    pub run: String,
    /// The attempt of the run.
    pub attempt: String,
    /// The account that pays.
    pub account: String,
    /// The model that the source names. Null if the source names none.
    pub model: Option<String>,
    /// The charge in US dollars, as a decimal text.
    #[serde(rename = "amount_usd")]
    #[schema(value_type = String, example = "0.0096")]
    pub amount: Nanodollars,
    /// The source of the charge.
    pub source: ChargeSource,
    /// The input that was charged, in tokens, as the source has it.
    #[schema(value_type = u64)]
    pub input: Tokens,
    /// The output that was charged, in tokens, as the source has it.
    #[schema(value_type = u64)]
    pub output: Tokens,
    /// The end of the call, by the source's clock, in RFC 3339.
    #[schema(value_type = String, format = DateTime)]
    #[serde(serialize_with = "serialize_rfc3339")]
    pub ended: SystemTime,
    /// The time at which the service wrote the receipt, in RFC 3339.
    #[schema(value_type = String, format = DateTime)]
    #[serde(serialize_with = "serialize_rfc3339")]
    pub received: SystemTime,
}

/// The bill of a run: counts and sums over its calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct RunBill {
    /// The id of the run.
    pub run: String,
    /// The account that pays.
    pub account: String,
    /// The number of admitted calls.
    pub calls: u64,
    /// The number of calls that used tokens and must be charged.
    pub billable: u64,
    /// The number of billable calls whose tokens are an estimate, because the upstream reported none.
    pub estimated: u64,
    /// The number of receipts.
    pub receipts: u64,
    /// The sum of the receipts in US dollars, as a decimal text.
    #[serde(rename = "amount_usd")]
    #[schema(value_type = String, example = "0.0096")]
    pub amount: Nanodollars,
    /// The number of billable calls that have no receipt.
    pub missing: u64,
    /// The number of billable calls without a receipt whose time for a receipt is over.
    pub overdue: u64,
    /// The number of receipts of $0 for calls that used tokens: the charging side has no price for the model.
    pub unpriced: u64,
    /// The number of notices that contradict a receipt, or name another run.
    pub conflicting: u64,
    /// The state of the bill.
    pub state: BillState,
    /// The problems that the operator has to check.
    pub flags: Vec<BillFlag>,
}

/// The state of a run's bill: `complete` (every billable call has its receipt), `pending` (calls without a receipt
/// exist, and may still get one in time) or `overdue` (that time is over).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BillState {
    /// Every billable call has its receipt.
    Complete,
    /// Billable calls without a receipt exist, and may still get one in time.
    Pending,
    /// Billable calls without a receipt exist, and their time for a receipt is over.
    Overdue,
}

/// A problem of a bill that the operator must check: `unreceipted` (a call has no receipt in time), `unpriced` (a call used
/// tokens and cost nothing) or `conflicting` (two notices of one call contradict each other).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
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
