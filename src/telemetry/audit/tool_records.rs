//! The records of a tool call, one type for each event.
//!
//! **Invariant:** no field can hold the arguments or the result of a call, except the argument fields that the operator
//! has listed as evidence. Digests are salted, so that a reader cannot guess a short argument from its digest.
#![expect(clippy::ref_option_ref, reason = "serde hands a field to its function by reference")]

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::records::{
    AuditRecord, RefusalsRepeatedRecord, serialize_truncated, serialize_truncated_option,
};
use crate::llm::budget::BudgetAmount;

/// Written, durably, before a tool runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolAdmittedRecord<'a> {
    /// The id of the call, which is unique within the run.
    #[serde(serialize_with = "serialize_truncated")]
    pub call: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub tool: &'a str,
    /// The digest of the tool's definition.
    #[serde(serialize_with = "serialize_truncated")]
    pub definition: &'a str,
    /// The operator's rules that applied to the call.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub rules: &'a [Arc<str>],
    /// The salted digest of the arguments.
    #[serde(serialize_with = "serialize_truncated")]
    pub arguments: &'a str,
    pub argument_bytes: u64,
    /// The argument fields that the operator has listed, with their truncated values.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub evidence: &'a BTreeMap<String, String>,
    /// The question that a person has answered with yes, or the standing approval. This call has used the answer up, or
    /// counts as a use.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub approval: Option<&'a str>,
    /// The process that made the call, if the kernel reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The largest amount that the call may spend. It is charged in full if a crash loses the settlement.
    pub reserved: BudgetAmount,
}

/// Written exactly once for each admitted tool call, whatever its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolSettledRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub call: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub tool: &'a str,
    pub outcome: ToolOutcome,
    /// The code of the error, if there was one.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub code: Option<&'a str>,
    /// The salted digest of the result; absent if there is no result.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub result: Option<&'a str>,
    pub result_bytes: u64,
    /// The amount that the ledger charged.
    pub charged: BudgetAmount,
    pub duration_ms: u64,
}

/// Written for a tool call that was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ToolRefusedRecord<'a> {
    pub code: &'static str,
    pub status: u16,
    /// The tool's name, if the request named one in the form of a tool's name.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub tool: Option<&'a str>,
    /// The layer of the policy that decided: `agent`, `run`, `sandbox` or `tool`; absent if no policy decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<&'static str>,
    /// The rule that decided.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub rule: Option<&'a str>,
    /// The proposal by which a person may allow the same call.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub proposal: Option<&'a str>,
    /// The salted digest of the arguments.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub arguments: Option<&'a str>,
    pub argument_bytes: u64,
    /// The process that made the call, if the kernel reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// Written in place of many [`ToolRefusedRecord`] with the same code.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub(super) struct ToolRefusalsRepeatedRecord(pub(super) RefusalsRepeatedRecord);

/// The end of an admitted tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolOutcome {
    /// The tool ran and returned a result.
    Completed,
    /// The tool ran and reported an error.
    Failed,
    /// The tool's time or the run's time ended the call.
    TimedOut,
    /// The result was larger than its limit.
    OutputTooLarge,
    /// A shutdown or an operator ended the call.
    ShutDown,
    /// A crash lost the settlement; the reserved amount is charged.
    Crashed,
    /// The admission was written but the tool did not run. Nothing is charged.
    NotSent,
}

impl ToolOutcome {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::OutputTooLarge => "output_too_large",
            Self::ShutDown => "shut_down",
            Self::Crashed => "crashed",
            Self::NotSent => "not_sent",
        }
    }
}

impl<'a> ToolSettledRecord<'a> {
    /// Creates a settlement by the log itself, for a call without further information.
    pub(super) fn for_lost_call(
        (call, tool): (&'a str, &'a str),
        outcome: ToolOutcome,
        charged: BudgetAmount,
    ) -> Self {
        Self {
            call,
            tool,
            outcome,
            code: None,
            result: None,
            result_bytes: 0,
            charged,
            duration_ms: 0,
        }
    }
}

impl AuditRecord for ToolAdmittedRecord<'_> {
    const EVENT: &'static str = "tool.admitted";
}

impl AuditRecord for ToolSettledRecord<'_> {
    const EVENT: &'static str = "tool.settled";
}

impl AuditRecord for ToolRefusedRecord<'_> {
    const EVENT: &'static str = "tool.refused";
}

impl AuditRecord for ToolRefusalsRepeatedRecord {
    const EVENT: &'static str = "tool.refused";
}
