//! The records of a request over a connection, one type for each event.
//!
//! **Invariant:** no field can hold a credential, a path, a query, a header or a body. A path is there as a salted digest,
//! so that a reader cannot guess a short path from it.
#![expect(clippy::ref_option_ref, reason = "serde hands a field to its function by reference")]

use serde::{Deserialize, Serialize};

use super::records::{
    AuditRecord, RefusalsRepeatedRecord, serialize_method, serialize_truncated,
    serialize_truncated_option,
};
use crate::llm::budget::BudgetAmount;

/// Written, durably, before a request goes to a connection's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ConnectAdmittedRecord<'a> {
    /// The id of the request, which is unique within the run.
    #[serde(serialize_with = "serialize_truncated")]
    pub request: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub connection: &'a str,
    #[serde(serialize_with = "serialize_method")]
    pub method: &'a str,
    /// The salted digest of the path and the query.
    #[serde(serialize_with = "serialize_truncated")]
    pub path: &'a str,
    /// The rule that allows the request.
    #[serde(serialize_with = "serialize_truncated")]
    pub rule: &'a str,
    /// The announced length of the body, which is reserved; 0 if no length is announced.
    pub announced_bytes: u64,
    /// The limit of the bytes of all request bodies over the connection, if this body announces no length. A crash that
    /// loses the settlement uses up what is left of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_out_limit: Option<u64>,
    /// The limit of the bytes of all answers over the connection, of which a crash uses up the rest, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_in_limit: Option<u64>,
    /// The process that made the request, if the kernel reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The largest amount that the request may spend. It is charged in full if a crash loses the settlement.
    pub reserved: BudgetAmount,
}

/// Written exactly once for each admitted request, whatever its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ConnectSettledRecord<'a> {
    #[serde(serialize_with = "serialize_truncated")]
    pub request: &'a str,
    #[serde(serialize_with = "serialize_truncated")]
    pub connection: &'a str,
    pub outcome: ConnectOutcome,
    /// The status of the server's answer; 0 if there was none.
    pub status: u16,
    /// The bytes of the request's body that were sent.
    pub bytes_out: u64,
    /// The bytes of the answer's body that were received and allowed.
    pub bytes_in: u64,
    /// The amount that the ledger charged.
    pub charged: BudgetAmount,
    pub duration_ms: u64,
}

/// Written for a request over a connection that was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ConnectRefusedRecord<'a> {
    pub code: &'static str,
    pub status: u16,
    /// The connection, if the request named one that the configuration has.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub connection: Option<&'a str>,
    #[serde(serialize_with = "serialize_method")]
    pub method: &'a str,
    /// The layer of the policy that decided: `agent`, `run` or `connection`; absent if no policy decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<&'static str>,
    /// The rule that decided.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub rule: Option<&'a str>,
    /// The salted digest of the path and the query.
    #[serde(
        serialize_with = "serialize_truncated_option",
        skip_serializing_if = "Option::is_none"
    )]
    pub path: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// Written in place of many [`ConnectRefusedRecord`] with the same code.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub(super) struct ConnectRefusalsRepeatedRecord(pub(super) RefusalsRepeatedRecord);

/// The end of an admitted request over a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConnectOutcome {
    /// The whole answer has passed.
    Completed,
    /// The server could not be reached, or broke the connection off.
    UpstreamFailed,
    /// The server's name leads to no address that the connection allows.
    AddressRefused,
    /// The server was silent for too long, or the run's time was over.
    TimedOut,
    /// The client left before the end of the answer.
    ClientGone,
    /// The budget of bytes was spent in the middle of the request.
    BudgetCut,
    /// A rule about what the run has seen denied the rest of the request's body.
    Denied,
    /// The answer contained the connection's credential. The answer was cut off before it.
    CredentialEchoed,
    /// The answer was encoded although no encoding was accepted, so that the credential could not be searched for.
    EncodedResponse,
    /// A shutdown or an operator ended the request.
    ShutDown,
    /// A crash lost the settlement; the reserved amount is charged, and the bytes are the most that can have passed.
    Crashed,
    /// The admission was written but nothing was sent. Nothing is charged.
    NotSent,
}

impl ConnectOutcome {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::UpstreamFailed => "upstream_failed",
            Self::AddressRefused => "address_refused",
            Self::TimedOut => "timed_out",
            Self::ClientGone => "client_gone",
            Self::BudgetCut => "budget_cut",
            Self::Denied => "denied",
            Self::CredentialEchoed => "credential_echoed",
            Self::EncodedResponse => "encoded_response",
            Self::ShutDown => "shut_down",
            Self::Crashed => "crashed",
            Self::NotSent => "not_sent",
        }
    }
}

impl<'a> ConnectSettledRecord<'a> {
    /// Creates a settlement for a request that was not sent, or whose settlement was lost.
    pub fn for_lost_request(
        (request, connection): (&'a str, &'a str),
        outcome: ConnectOutcome,
        (charged, bytes_out, bytes_in): (BudgetAmount, u64, u64),
    ) -> Self {
        let (status, duration_ms) = (0, 0);
        Self { request, connection, outcome, status, bytes_out, bytes_in, charged, duration_ms }
    }
}

impl AuditRecord for ConnectAdmittedRecord<'_> {
    const EVENT: &'static str = "connect.admitted";
}

impl AuditRecord for ConnectSettledRecord<'_> {
    const EVENT: &'static str = "connect.settled";
}

impl AuditRecord for ConnectRefusedRecord<'_> {
    const EVENT: &'static str = "connect.refused";
}

impl AuditRecord for ConnectRefusalsRepeatedRecord {
    const EVENT: &'static str = "connect.refused";
}
