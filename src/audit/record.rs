//! What is written down, one type per event.
//!
//! **Invariant:** no field can hold a prompt, a completion or a secret: only ids, counts, codes,
//! names, sizes and times.

use serde::{Deserialize, Serialize};

use crate::budget::{Amount, Usage};

/// Written when a process starts serving a run, and again when a restart resumes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    pub run: String,
    pub attempt: String,
    /// The billing account the run's calls are charged to.
    pub account: String,
    /// The gateway's version.
    pub version: String,
    /// Hash of the effective configuration (secrets left out), so that two runs can be compared.
    pub policy: String,
}

/// Written, durably, before the first byte of a call goes upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Admitted<'a> {
    /// Our request id; LiteLLM knows it as `litellm_call_id`.
    pub request: &'a str,
    pub route: &'static str,
    pub model: Option<&'a str>,
    pub stream: bool,
    pub request_bytes: u64,
    /// What the call may spend at most; charged in full if its settlement is lost in a crash.
    pub reserved: Amount,
}

/// Written exactly once for each admitted call, whatever became of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Settled<'a> {
    pub request: &'a str,
    pub outcome: Outcome,
    /// The status sent to the client; 0 where the client left before one was sent.
    pub status: u16,
    /// The code of the error, where there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<&'a str>,
    pub usage: Usage,
    /// What the ledger charged.
    pub charged: Amount,
    pub response_bytes: u64,
    /// Body frames passed on.
    pub frames: u64,
    /// The call id LiteLLM answered with, where it differs from ours it is worth an alarm.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub litellm_call_id: Option<&'a str>,
    /// LiteLLM's own figure, in dollars, as it was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub litellm_response_cost: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_byte_ms: Option<f64>,
    pub duration_ms: f64,
}

/// Written for a request that never reached the upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Refused<'a> {
    pub request: &'a str,
    pub code: &'static str,
    pub status: u16,
    pub method: &'a str,
    /// The route's name, or `-` where the path is not served. Never the client's own text.
    pub route: &'static str,
    pub model: Option<&'a str>,
    pub request_bytes: u64,
}

/// Written when the run ends in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finished {
    pub spent: Amount,
    pub admitted: u64,
    pub refused: u64,
}

/// How an admitted call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
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
    /// Shutdown cut the call.
    ShutDown,
    /// A crash lost the settlement; charged what was reserved.
    Crashed,
}
