//! The records of a question about a tool call or a budget: one when a person is asked, one when the question is closed,
//! and one when an answer raises the budget.
//!
//! **Invariant:** no field can hold the arguments of a call, except the argument fields that the operator has listed as
//! evidence. The digests are salted, like those of tool calls.
#![expect(clippy::ref_option_ref, reason = "serde hands a field to its function by reference")]

use std::collections::BTreeMap;

use serde::Serialize;

use super::records::{AuditRecord, serialize_truncated, serialize_truncated_option};
use crate::llm::budget::{BudgetAmount, SpendingLimit, SpendingLimits};

/// Written when a tool call begins to wait for a person.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ApprovalRequestedRecord<'a> {
    /// The id of the question.
    #[serde(serialize_with = "serialize_truncated")]
    pub approval: &'a str,
    /// The id of the call that waits.
    #[serde(serialize_with = "serialize_truncated")]
    pub call: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub tool: &'a str,
    /// The digest of everything that a person approves.
    #[serde(serialize_with = "serialize_truncated")]
    pub digest: &'a str,
    /// The rule that asks.
    #[serde(serialize_with = "serialize_truncated")]
    pub rule: &'a str,
    /// The salted digest of the arguments.
    #[serde(serialize_with = "serialize_truncated")]
    pub arguments: &'a str,
    pub argument_bytes: u64,
    /// The argument fields that the operator has listed, with their truncated values.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub evidence: &'a BTreeMap<String, String>,
    /// The time after which no person can approve the call and it cannot run.
    pub not_after: String,
}

/// Written when a call begins to wait for a larger budget. Further calls that the same limit refuses write no record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BudgetQuestionRecord<'a> {
    /// The id of the question.
    #[serde(serialize_with = "serialize_truncated")]
    pub approval: &'a str,
    /// The digest of everything that a person approves.
    #[serde(serialize_with = "serialize_truncated")]
    pub digest: &'a str,
    /// The reason of the question: `on_budget`.
    #[serde(serialize_with = "serialize_truncated")]
    pub rule: &'a str,
    /// The limit that is spent.
    pub limit: SpendingLimit,
    /// The limits in force.
    pub limits: &'a SpendingLimits,
    pub spent: BudgetAmount,
    /// The time after which no person can raise the limit.
    pub not_after: String,
}

/// Written before an answer raises limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BudgetRaisedRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub approval: &'a str,
    /// The grant that has answered.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub by: Option<&'a str>,
    /// The new values of the raised limits.
    pub raised: &'a SpendingLimits,
}

/// Written when a question is closed, whatever closed it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ApprovalResolvedRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub approval: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub digest: &'a str,
    /// `approved`, `denied`, `expired` or `withdrawn`.
    pub decision: &'static str,
    /// The grant that has answered; absent if no person has.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub by: Option<&'a str>,
    /// The time from the question to its answer.
    pub after_ms: u64,
}

impl AuditRecord for ApprovalRequestedRecord<'_> {
    const EVENT: &'static str = "approval.requested";
}

impl AuditRecord for BudgetQuestionRecord<'_> {
    const EVENT: &'static str = "approval.requested";
}

impl AuditRecord for BudgetRaisedRecord<'_> {
    const EVENT: &'static str = "budget.raised";
}

impl AuditRecord for ApprovalResolvedRecord<'_> {
    const EVENT: &'static str = "approval.resolved";
}
