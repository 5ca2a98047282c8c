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

/// Written when the work has left the sandbox and is on this machine's disk.
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

/// Written when the host has checked the work and decided on its delivery.
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
    /// `replayed` if the patches define the commits; otherwise `bundled` and the reason.
    pub mode: &'static str,
    /// The hash of the rules that the work was checked against.
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

/// Written when the branch contains the work.
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
    /// True if the branch contained the work already: an earlier attempt did not receive the response to its push.
    pub was_there: bool,
}

/// Written when the pull request exists with the intended text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PullRequestOpenedRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub relay: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub url: &'a str,
    pub is_new: bool,
}

/// Written when the work is not delivered and is kept instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WorkHeldRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub relay: &'a str,
    /// The code of the reason; never text of the agent.
    #[serde(serialize_with = "serialize_truncated")]
    pub code: &'a str,
}

/// Written when a delivery of the outbox continues without its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeliveryResumedRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub relay: &'a str,
    /// The step that the delivery had reached.
    pub step: &'static str,
}

/// Written when an operator has applied the work to a clone by hand.
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
