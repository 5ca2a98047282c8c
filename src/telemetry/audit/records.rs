//! The records of a run, one type for each event.
//!
//! **Invariant:** no field can hold a prompt, a completion or a secret. Fields hold only ids, counts, codes, names,
//! sizes and times. Text that a client or an upstream chose is truncated to [`MAX_TEXT_BYTES`] bytes, so that a record
//! stays far below [`MAX_LINE_BYTES`](super::read::MAX_LINE_BYTES) for every input.
#![expect(clippy::ref_option_ref, reason = "serde hands a field to its function by reference")]

use std::ops::Not;
use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer};

use crate::llm::budget::{BudgetAmount, Nanodollars, TokenUsage};

/// An event that the log can hold.
pub trait AuditRecord: Serialize {
    /// The value of the field `event` of the line.
    const EVENT: &'static str;

    /// Appends the record as a JSON object, in the bytes that serde writes.
    fn append_json(&self, line: &mut Vec<u8>) {
        serde_json::to_writer(line, self).expect("a record has string keys, a Vec room");
    }
}

/// Written when a process starts serving a run, and again when a restart resumes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunStartedRecord {
    /// The run's id. Every line contains it, so this record does not repeat it.
    #[serde(skip)]
    pub run: String,
    pub attempt: String,
    /// The billing account that the run's calls are charged to.
    pub account: String,
    /// The gateway's version.
    pub version: String,
    /// The hash of the effective configuration without secrets, for a comparison of two runs.
    pub policy: String,
    /// The hash of the price table.
    pub prices: String,
    /// The W3C id of the trace that the run is part of; a call's span in it is the end of its request's id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
    /// The kind of upstream: `litellm`, `openai` or `anthropic`. It decides which source states the cost of a call.
    pub upstream: &'static str,
}

/// Written when an operator has changed the policy or the prices of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PolicyChangedRecord<'a> {
    /// The number of changes since the process started.
    pub version: u64,
    pub policy: &'a str,
    pub prices: &'a str,
    /// The source of the change: `signal` or `admin`.
    pub by: &'static str,
}

/// A [`RunStartedRecord`] with the fields that only the log knows.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SessionStartedRecord<'a> {
    #[serde(flatten)]
    pub(super) started: &'a RunStartedRecord,
    /// The public key of this process's checkpoints, in hexadecimal.
    pub(super) public_key: &'a str,
    /// True if the file already held records.
    pub(super) resumed: bool,
}

/// Written when a process connects to the run's socket for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PeerConnectedRecord<'a> {
    /// The process id as the kernel reports it; absent for a process in a namespace that this process cannot see.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    pub uid: u32,
    pub gid: u32,
    /// The control group, read from `/proc`; absent if the process had ended before.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub cgroup: Option<&'a str>,
}

/// Written in place of many [`PeerConnectedRecord`]: connections by processes beyond those recorded one by one.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct ManyPeersRecord {
    pub(super) repeats: u64,
}

/// Written, durably, before the first byte of a call goes upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CallAdmittedRecord<'a> {
    /// The gateway's request id, which is unique within the run. LiteLLM uses it as its `litellm_call_id`.
    #[serde(serialize_with = "serialize_truncated")]
    pub request: &'a str,
    pub route: &'static str,
    #[serde(serialize_with = "serialize_truncated_option")]
    pub model: Option<&'a str>,
    /// The operator's rules that matched.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub rules: &'a [Arc<str>],
    pub stream: bool,
    pub request_bytes: u64,
    /// The process that made the call, if the kernel reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The largest amount that the call may spend. It is charged in full if a crash loses the settlement.
    pub reserved: BudgetAmount,
}

/// Written exactly once for each admitted call, whatever its outcome.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallSettledRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub request: &'a str,
    pub outcome: CallOutcome,
    /// The status that was sent to the client; 0 if the client left before a status was sent.
    pub status: u16,
    /// The code of the error, if there was one.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub code: Option<&'a str>,
    pub usage: TokenUsage,
    /// The amount that the ledger charged.
    pub charged: BudgetAmount,
    pub response_bytes: u64,
    /// The number of body frames that were sent to the client.
    pub frames: u64,
    /// The call id in LiteLLM's response. It should be equal to `request`; another id is worth an alarm.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub litellm_call_id: Option<&'a str>,
    /// The cost that LiteLLM's header states, in dollars, as it was sent.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub litellm_response_cost: Option<&'a str>,
    /// The cost that the response body states. LiteLLM's streams state the cost there, because their head is sent too
    /// early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reported_cost_usd: Option<Nanodollars>,
    #[serde(
        serialize_with = "serialize_rounded_milliseconds_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub first_byte_ms: Option<f64>,
    #[serde(serialize_with = "serialize_rounded_milliseconds")]
    pub duration_ms: f64,
}

/// Written for a request that never reached the upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CallRefusedRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub request: &'a str,
    pub code: &'static str,
    pub status: u16,
    #[serde(serialize_with = "serialize_method")]
    pub method: &'a str,
    /// The route's name, or `-` if the path is not served; never the client's own text.
    pub route: &'static str,
    #[serde(serialize_with = "serialize_truncated_option")]
    pub model: Option<&'a str>,
    /// The operator's rule that refused the request, if a rule did.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub rules: &'a [Arc<str>],
    pub request_bytes: u64,
    /// True if no further call of the run will be admitted, so the run is at its end.
    #[serde(skip_serializing_if = "Not::not")]
    pub exhausted: bool,
    /// The process id, like [`CallAdmittedRecord::pid`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// Written in place of many [`CallRefusedRecord`] with the same code.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct RefusalsRepeatedRecord {
    pub(super) code: &'static str,
    /// The status of the last refusal.
    pub(super) status: u16,
    /// The number of refusals that this record stands for.
    pub(super) repeats: u64,
}

/// Written at the orderly end of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFinishedRecord {
    pub spent: BudgetAmount,
    pub admitted: u64,
    pub refused: u64,
}

/// Written when a crash of an earlier process had cut the last line short.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct LogRepairedRecord<'a> {
    pub(super) torn_bytes: u64,
    /// The name of the file beside the log that now holds those bytes.
    pub(super) kept_in: &'a str,
}

/// A checkpoint: the signature of its own `prev`, which covers every record before it.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct CheckpointRecord<'a> {
    pub(super) signature: &'a str,
    pub(super) public_key: &'a str,
}

/// The end of an admitted call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallOutcome {
    /// The response was delivered to its end.
    Completed,
    /// The client left before the end of the response.
    ClientGone,
    /// The upstream could not be reached, closed the connection early, or sent data that is not HTTP.
    UpstreamFailed,
    /// The upstream was silent for longer than a timeout allows.
    UpstreamTimeout,
    /// The run's deadline ended the call.
    DeadlineExceeded,
    /// The gateway ended the stream, because it continued after the output tokens of its grant.
    CutOff,
    /// A shutdown or an operator ended the call.
    ShutDown,
    /// A crash lost the settlement; the reserved amount is charged.
    Crashed,
    /// The admission was written but never became durable, or its client left before it did. The call was not sent
    /// upstream, and nothing is charged. The log itself writes this outcome.
    NotSent,
}

impl CallOutcome {
    pub const ALL: [Self; 9] = [
        Self::Completed,
        Self::ClientGone,
        Self::UpstreamFailed,
        Self::UpstreamTimeout,
        Self::DeadlineExceeded,
        Self::CutOff,
        Self::ShutDown,
        Self::Crashed,
        Self::NotSent,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::ClientGone => "client_gone",
            Self::UpstreamFailed => "upstream_failed",
            Self::UpstreamTimeout => "upstream_timeout",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::CutOff => "cut_off",
            Self::ShutDown => "shut_down",
            Self::Crashed => "crashed",
            Self::NotSent => "not_sent",
        }
    }
}

impl<'a> CallSettledRecord<'a> {
    /// Creates a settlement by the log itself, for a call without further information.
    pub(super) fn for_lost_call(
        request: &'a str,
        outcome: CallOutcome,
        charged: BudgetAmount,
    ) -> Self {
        Self {
            request,
            outcome,
            status: 0,
            code: None,
            usage: TokenUsage {
                input: charged.input,
                output: charged.output,
                ..TokenUsage::default()
            },
            charged,
            response_bytes: 0,
            frames: 0,
            litellm_call_id: None,
            litellm_response_cost: None,
            reported_cost_usd: None,
            first_byte_ms: None,
            duration_ms: 0.0,
        }
    }
}

impl AuditRecord for SessionStartedRecord<'_> {
    const EVENT: &'static str = "run.started";
}

impl AuditRecord for PeerConnectedRecord<'_> {
    const EVENT: &'static str = "connection.opened";
}

impl AuditRecord for ManyPeersRecord {
    const EVENT: &'static str = "connection.opened";
}

impl AuditRecord for CallRefusedRecord<'_> {
    const EVENT: &'static str = "request.refused";
}

impl AuditRecord for RefusalsRepeatedRecord {
    const EVENT: &'static str = "request.refused";
}

/// Written when an operator has acted on a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OperatorActedRecord {
    pub action: &'static str,
    /// The user id of the process that requested the action; `None` if the kernel did not report it.
    pub uid: Option<u32>,
}

impl AuditRecord for OperatorActedRecord {
    const EVENT: &'static str = "run.operated";
}

impl AuditRecord for PolicyChangedRecord<'_> {
    const EVENT: &'static str = "policy.changed";
}

impl AuditRecord for RunFinishedRecord {
    const EVENT: &'static str = "run.finished";
}

impl AuditRecord for LogRepairedRecord<'_> {
    const EVENT: &'static str = "log.repaired";
}

impl AuditRecord for CheckpointRecord<'_> {
    const EVENT: &'static str = "log.checkpoint";
}

pub(super) fn serialize_truncated<S: Serializer>(
    text: &str,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&text[..text.floor_char_boundary(MAX_TEXT_BYTES)])
}

/// Serializes the beginning of a method, which a client may choose freely in a request that is refused.
pub(super) fn serialize_method<S: Serializer>(
    method: &str,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&method[..method.floor_char_boundary(MAX_METHOD_BYTES)])
}

/// Serializes the first [`MAX_LIST_ITEMS`] texts, each truncated.
pub(super) fn serialize_truncated_list<S: Serializer>(
    texts: &&[String],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let cut = |text: &String| text[..text.floor_char_boundary(MAX_TEXT_BYTES)].to_owned();
    serializer.collect_seq(texts.iter().take(MAX_LIST_ITEMS).map(cut))
}

pub(super) fn serialize_truncated_option<S: Serializer>(
    text: &Option<&str>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match text {
        Some(text) => serialize_truncated(text, serializer),
        None => serializer.serialize_none(),
    }
}

/// Serializes milliseconds with three decimals. Nanoseconds would cost ten more bytes in each line.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
fn serialize_rounded_milliseconds<S: Serializer>(
    milliseconds: &f64,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(round_milliseconds(*milliseconds))
}

pub(super) fn round_milliseconds(milliseconds: f64) -> f64 {
    let rounded = (milliseconds * 1000.0).round() / 1000.0;
    // JSON has no infinity: serde would write `null`, which a reader cannot parse as a number.
    if rounded.is_finite() { rounded } else { 0.0 }
}

#[expect(clippy::ref_option, reason = "the signature serde asks for")]
fn serialize_rounded_milliseconds_option<S: Serializer>(
    milliseconds: &Option<f64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match milliseconds {
        Some(milliseconds) => serialize_rounded_milliseconds(milliseconds, serializer),
        None => serializer.serialize_none(),
    }
}

/// The largest length of a text, in bytes. Our choice: the gateway's ids have 36 bytes, and real model names under 100.
pub const MAX_TEXT_BYTES: usize = 256;

/// The largest length of a method, in bytes. Our choice: the longest registered one has 17.
const MAX_METHOD_BYTES: usize = 64;

/// The largest number of texts in a list. Our choice: a record stays below eight KiB.
const MAX_LIST_ITEMS: usize = 20;
