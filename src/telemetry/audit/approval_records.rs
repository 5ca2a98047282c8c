//! The records of a question about a tool call or a budget: one when a person is asked, one when the question is closed,
//! and one when an answer raises the budget; and those of standing approvals: one when a denied call is proposed, and one for
//! each use.
//!
//! **Invariant:** no field can hold the arguments of a call, except the argument fields that the operator has listed as
//! evidence. The digests are salted, like those of tool calls.
#![expect(clippy::ref_option_ref, reason = "serde hands a field to its function by reference")]

use std::collections::BTreeMap;

use serde::Serialize;

use super::records::{
    AuditRecord, serialize_truncated, serialize_truncated_list, serialize_truncated_option,
};
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

/// Written when a rule denies a call and a person may allow the same call for later. The same denied call writes no further
/// record while its proposal is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ApprovalProposedRecord<'a> {
    /// The id of the proposal.
    #[serde(serialize_with = "serialize_truncated")]
    pub approval: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub tool: &'a str,
    /// The digest that a grant must name.
    #[serde(serialize_with = "serialize_truncated")]
    pub digest: &'a str,
    /// The rules that deny the call.
    #[serde(serialize_with = "serialize_truncated_list")]
    pub rules: &'a [String],
    /// The salted digest of the arguments.
    #[serde(serialize_with = "serialize_truncated")]
    pub arguments: &'a str,
    pub argument_bytes: u64,
    /// The argument fields that the operator has listed, with their truncated values.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub evidence: &'a BTreeMap<String, String>,
    /// The time after which no person can grant the proposal.
    pub not_after: String,
}

/// Written before the admission of a call that a standing approval allows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ApprovalUsedRecord<'a> {
    /// The id of the standing approval.
    #[serde(serialize_with = "serialize_truncated")]
    pub approval: &'a str,
    /// The id of the call.
    #[serde(serialize_with = "serialize_truncated")]
    pub call: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub tool: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub digest: &'a str,
    /// The rules in spite of which the call begins, or the rule that has asked.
    #[serde(serialize_with = "serialize_truncated_list")]
    pub rules: &'a [String],
    /// `run` or `always`.
    pub scope: &'static str,
    /// The grant of the person who has allowed the call.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub by: Option<&'a str>,
    /// The time at which the person has allowed the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub granted_at: Option<String>,
    /// The time after which no call can begin by the approval.
    pub not_after: String,
    /// The number of calls that have begun by the approval, with this one.
    pub used: u32,
    pub max_uses: u32,
}

impl AuditRecord for ApprovalProposedRecord<'_> {
    const EVENT: &'static str = "approval.proposed";
}

impl AuditRecord for ApprovalUsedRecord<'_> {
    const EVENT: &'static str = "approval.used";
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
