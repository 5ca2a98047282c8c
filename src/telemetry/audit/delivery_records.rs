//! The records of a delivery, one type for each event.
//!
//! A step is written to the outbox before it is recorded here. A process that continues after a crash repeats the
//! interrupted step and its record; for a branch or a pull request that already has the work, the record says so. An
//! end that was written in a process's last moment is in the outbox only, which is the authority.
#![expect(clippy::ref_option_ref, reason = "serde hands a field to its function by reference")]

use serde::Serialize;

use super::records::{
    AuditRecord, serialize_truncated, serialize_truncated_list, serialize_truncated_option,
};

/// Written when the work is out of the sandbox, on this machine's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WorkExtractedRecord<'a> {
    /// The outbox's id of the work.
    #[serde(serialize_with = "serialize_truncated")]
    pub relay: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub repository: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub branch: &'a str,
    /// The commit that the work is based on.
    #[serde(serialize_with = "serialize_truncated")]
    pub start: &'a str,
    /// The head as the sandbox reports it, until the next record.
    #[serde(serialize_with = "serialize_truncated")]
    pub tree: &'a str,
    pub commits: u32,
}

/// Written when the host has looked at it, and decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WorkReviewedRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub relay: &'a str,
    /// `push`, `review` or `hold`.
    pub verdict: &'static str,
    /// The commit that would be pushed.
    #[serde(serialize_with = "serialize_truncated")]
    pub head: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub tree: &'a str,
    /// `replayed`, where the patches tell what the commits are; else `bundled`, and why.
    pub mode: &'static str,
    /// The hash of the rules that it was judged by.
    #[serde(serialize_with = "serialize_truncated")]
    pub rules: &'a str,
    pub files: u64,
    /// The number of rules with a finding.
    pub reasons: u64,
    /// The first finding.
    #[serde(
        serialize_with = "serialize_truncated_list",
        skip_serializing_if = "<[String]>::is_empty"
    )]
    pub said: &'a [String],
}

/// Written when the branch has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BranchPushedRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub relay: &'a str,
    /// The commit of the branch before the push; absent for a new branch.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub from: Option<&'a str>,
    #[serde(serialize_with = "serialize_truncated")]
    pub to: &'a str,
    /// It was there already: an earlier attempt had not heard the answer.
    pub was_there: bool,
}

/// Written when a pull request says what it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PullRequestOpenedRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub relay: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub url: &'a str,
    pub is_new: bool,
}

/// Written when it is not delivered, and kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WorkHeldRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub relay: &'a str,
    /// The kind of the reason: never the agent's text.
    #[serde(serialize_with = "serialize_truncated")]
    pub code: &'a str,
}

/// Written when a row is taken up without its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeliveryResumedRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub relay: &'a str,
    /// The step that the delivery had reached.
    pub step: &'static str,
}

/// The record of an operator who has applied the work to a clone by hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WorkAppliedRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub relay: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub head: &'a str,
}

impl AuditRecord for DeliveryResumedRecord<'_> {
    const EVENT: &'static str = "relay.resumed";
}

impl AuditRecord for WorkAppliedRecord<'_> {
    const EVENT: &'static str = "relay.applied";
}

impl AuditRecord for WorkExtractedRecord<'_> {
    const EVENT: &'static str = "relay.extracted";
}

impl AuditRecord for WorkReviewedRecord<'_> {
    const EVENT: &'static str = "relay.judged";
}

impl AuditRecord for BranchPushedRecord<'_> {
    const EVENT: &'static str = "relay.pushed";
}

impl AuditRecord for PullRequestOpenedRecord<'_> {
    const EVENT: &'static str = "relay.pull_requested";
}

impl AuditRecord for WorkHeldRecord<'_> {
    const EVENT: &'static str = "relay.held";
}
