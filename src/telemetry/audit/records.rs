//! The records of a run, one type for each event.
//!
//! **Invariant:** no field can hold a prompt, a completion or a secret: only ids, counts, codes,
//! names, sizes and times. Text that a client or an upstream chose is truncated to [`MAX_TEXT_BYTES`] bytes, so
//! that a record stays far below [`MAX_LINE`](super::read::MAX_LINE_BYTES) for every input.
#![expect(clippy::ref_option_ref, reason = "serde hands a field to its function by reference")]

use std::ops::Not;
use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer};

use super::fields;
use crate::llm::budget::{BudgetAmount, Nanodollars, TokenUsage};

/// Something that happened and has a name; what the log can hold.
pub trait AuditRecord: Serialize {
    /// The `event` of the line.
    const EVENT: &'static str;

    /// Appends the record as a JSON object: what serde makes of it, by whatever way.
    fn append_json(&self, line: &mut Vec<u8>) {
        serde_json::to_writer(line, self).expect("a record has string keys, a Vec room");
    }
}

/// Written when a process starts serving a run, and again when a restart resumes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunStartedRecord {
    /// Every line carries it, so this one does not repeat it.
    #[serde(skip)]
    pub run: String,
    pub attempt: String,
    /// The billing account the run's calls are charged to.
    pub account: String,
    /// The gateway's version.
    pub version: String,
    /// Hash of the effective configuration (secrets left out), so that two runs can be compared.
    pub policy: String,
    /// Hash of the price table.
    pub prices: String,
    /// The W3C id of the trace that the run is part of; a call's span in it is the end of its request's id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
    /// The kind of upstream: `litellm`, `openai` or `anthropic`. It decides which source states the cost of a call.
    pub upstream: &'static str,
}

/// Written when an operator has changed what a run is judged by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PolicyChangedRecord<'a> {
    /// Counts the changes since the process began; what it began with is 0.
    pub version: u64,
    pub policy: &'a str,
    pub prices: &'a str,
    /// The source of the change: `signal` or `admin`.
    pub by: &'static str,
}

/// [`RunStartedRecord`], with what only the log knows.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SessionStartedRecord<'a> {
    #[serde(flatten)]
    pub(super) started: &'a RunStartedRecord,
    /// The key this process signs with, in hexadecimal.
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
    /// Read from `/proc` where it can be; the process may have ended before.
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
    /// Our request id; LiteLLM knows it as `litellm_call_id`. Unique within the run.
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
    /// The process that called, where the kernel can name it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The most that the call may spend. The amount is charged in full if a crash loses the settlement.
    pub reserved: BudgetAmount,
}

/// Written exactly once for each admitted call, whatever became of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallSettledRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub request: &'a str,
    pub outcome: CallOutcome,
    /// The status sent to the client; 0 where the client left before one was sent.
    pub status: u16,
    /// The code of the error, where there was one.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub code: Option<&'a str>,
    pub usage: TokenUsage,
    /// The amount that the ledger charged.
    pub charged: BudgetAmount,
    pub response_bytes: u64,
    /// Body frames passed on.
    pub frames: u64,
    /// The call id LiteLLM answered with, where it differs from ours it is worth an alarm.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub litellm_call_id: Option<&'a str>,
    /// LiteLLM's own figure, in dollars, as it was sent.
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
    #[serde(serialize_with = "serialize_truncated")]
    pub method: &'a str,
    /// The route's name, or `-` where the path is not served. Never the client's own text.
    pub route: &'static str,
    #[serde(serialize_with = "serialize_truncated_option")]
    pub model: Option<&'a str>,
    /// The operator's rule that refused it, where one did.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub rules: &'a [Arc<str>],
    pub request_bytes: u64,
    /// No further call of the run will be let through, so the run is at its end.
    #[serde(skip_serializing_if = "Not::not")]
    pub exhausted: bool,
    /// The process id, like [`CallAdmittedRecord::pid`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// Written in place of a flood of [`CallRefusedRecord`] of one code.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct RefusalsRepeatedRecord {
    pub(super) code: &'static str,
    /// The status of the last of them.
    pub(super) status: u16,
    /// The number of refusals that this record stands for.
    pub(super) repeats: u64,
}

/// Written when the run ends in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFinishedRecord {
    pub spent: BudgetAmount,
    pub admitted: u64,
    pub refused: u64,
}

/// Written when a crash had cut the last line short.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct LogRepairedRecord<'a> {
    pub(super) torn_bytes: u64,
    /// The file, beside the log, that now holds those bytes.
    pub(super) kept_in: &'a str,
}

/// Vouches for every record before it: a signature of its own `prev`.
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
    /// The client left first.
    ClientGone,
    /// The upstream could not be reached, broke off, or sent what is not HTTP.
    UpstreamFailed,
    /// The upstream was silent for longer than a timeout allows.
    UpstreamTimeout,
    /// The run's deadline cut the call.
    DeadlineExceeded,
    /// Its stream went on after it had written what the call was granted, and was cut.
    CutOff,
    /// Shutdown or an operator cut the call.
    ShutDown,
    /// A crash lost the settlement; charged what was reserved.
    Crashed,
    /// The admission was written but never became durable, or its client left before it did:
    /// nothing went upstream, nothing is charged. Written by the log itself.
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
    /// A settlement by the log itself, of a call it knows nothing more about.
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

impl AuditRecord for CallAdmittedRecord<'_> {
    const EVENT: &'static str = "request.admitted";

    fn append_json(&self, line: &mut Vec<u8>) {
        fields::append_admitted(self, line);
    }
}

impl AuditRecord for CallSettledRecord<'_> {
    const EVENT: &'static str = "request.settled";

    fn append_json(&self, line: &mut Vec<u8>) {
        fields::append_settled(self, line);
    }
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
    /// The user whose process asked for it; `None` where the kernel did not say.
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

/// The first few.
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
    // JSON has no infinity; what serde would write instead could not be read back.
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

/// Bytes kept of any one text. Our ids have 36, real model names under 100.
pub const MAX_TEXT_BYTES: usize = 256;

/// Texts of a list: a record stays below eight KiB.
const MAX_LIST_ITEMS: usize = 20;
