//! Reads a log record by record, checks each record, and uses bounded memory.

use std::io::{self, BufRead, Read};

use serde::Deserialize;

use super::chain::{ChainBreakReason, ChainTip, RecordHash};
use super::connect_records::{self, ConnectOutcome};
use super::records::{self, AuditRecord as _, CallOutcome, RunFinishedRecord};
use super::tool_records::{self, ToolOutcome};
use crate::llm::budget::{BudgetAmount, Nanodollars, TokenUsage};

/// A reader that returns the records of a log in order, after it has checked that each continues the chain.
#[derive(Debug)]
pub struct AuditReader<R> {
    source: R,
    chain: ChainTip,
    line: Vec<u8>,
    /// The offset of the next line.
    offset: u64,
}

/// One record.
#[derive(Debug)]
pub struct AuditEntry {
    pub seq: u64,
    /// The offset of the record's line in the file.
    pub offset: u64,
    /// The hash of the record before it.
    pub(super) prev: RecordHash,
    pub time: String,
    pub run: String,
    /// The name of the event, which may be unknown to this version.
    pub name: String,
    pub event: AuditEvent,
}

/// The content of a record. Unknown events of later versions have no content.
#[derive(Debug)]
pub enum AuditEvent {
    Started(AuditSessionEvent),
    Opened(AuditConnectionEvent),
    Admitted(AuditAdmissionEvent),
    Settled(AuditSettlementEvent),
    Refused(AuditRefusalEvent),
    ToolAdmitted(AuditToolAdmissionEvent),
    ToolSettled(AuditToolSettlementEvent),
    ToolRefused(AuditToolRefusalEvent),
    ConnectAdmitted(AuditConnectAdmissionEvent),
    ConnectSettled(AuditConnectSettlementEvent),
    ConnectRefused(AuditConnectRefusalEvent),
    Finished(RunFinishedRecord),
    Checkpoint(AuditCheckpointEvent),
    Repaired(AuditRepairEvent),
    /// An event of a later version. It is checked and counted like any other, but its fields are not parsed.
    Other,
}

#[derive(Debug, Deserialize)]
pub struct AuditSessionEvent {
    pub attempt: String,
    pub account: String,
    pub version: String,
    pub policy: String,
    pub public_key: String,
    pub resumed: bool,
    /// The kind of upstream. It is absent in the logs of the first versions, which supported LiteLLM only.
    #[serde(default = "default_upstream")]
    pub upstream: String,
}

/// The peer of a connection; only [`AuditConnectionEvent::repeats`] if the record stands for many connections.
#[derive(Debug, Deserialize)]
pub struct AuditConnectionEvent {
    pub pid: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub cgroup: Option<String>,
    #[serde(default = "default_repeats")]
    pub repeats: u64,
}

#[derive(Debug, Deserialize)]
pub struct AuditAdmissionEvent {
    pub request: String,
    pub route: String,
    pub model: Option<String>,
    pub stream: bool,
    pub reserved: BudgetAmount,
}

#[derive(Debug, Deserialize)]
pub struct AuditSettlementEvent {
    pub request: String,
    pub outcome: CallOutcome,
    pub status: u16,
    pub code: Option<String>,
    pub usage: TokenUsage,
    pub charged: BudgetAmount,
    pub litellm_response_cost: Option<String>,
    pub reported_cost_usd: Option<Nanodollars>,
    pub duration_ms: f64,
}

#[derive(Debug, Deserialize)]
pub struct AuditRefusalEvent {
    /// The request id; absent if the record stands for many refusals.
    pub request: Option<String>,
    pub code: String,
    pub status: u16,
    pub route: Option<String>,
    pub model: Option<String>,
    #[serde(default = "default_repeats")]
    pub repeats: u64,
}

#[derive(Debug, Deserialize)]
pub struct AuditToolAdmissionEvent {
    pub call: String,
    pub tool: String,
    #[serde(default)]
    pub rules: Vec<String>,
    pub reserved: BudgetAmount,
}

#[derive(Debug, Deserialize)]
pub struct AuditToolSettlementEvent {
    pub call: String,
    pub tool: String,
    pub outcome: ToolOutcome,
    pub code: Option<String>,
    pub charged: BudgetAmount,
    pub result_bytes: u64,
    pub duration_ms: u64,
}

#[derive(Debug, Deserialize)]
pub struct AuditToolRefusalEvent {
    pub code: String,
    pub status: u16,
    pub tool: Option<String>,
    pub layer: Option<String>,
    pub rule: Option<String>,
    #[serde(default = "default_repeats")]
    pub repeats: u64,
}

#[derive(Debug, Deserialize)]
pub struct AuditConnectAdmissionEvent {
    pub request: String,
    pub connection: String,
    pub method: String,
    pub rule: String,
    pub announced_bytes: u64,
    pub bytes_out_limit: Option<u64>,
    pub bytes_in_limit: Option<u64>,
    pub reserved: BudgetAmount,
}

#[derive(Debug, Deserialize)]
pub struct AuditConnectSettlementEvent {
    pub request: String,
    pub connection: String,
    pub outcome: ConnectOutcome,
    pub status: u16,
    pub bytes_out: u64,
    pub bytes_in: u64,
    pub charged: BudgetAmount,
    pub duration_ms: u64,
}

#[derive(Debug, Deserialize)]
pub struct AuditConnectRefusalEvent {
    pub code: String,
    pub status: u16,
    pub connection: Option<String>,
    pub layer: Option<String>,
    pub rule: Option<String>,
    #[serde(default = "default_repeats")]
    pub repeats: u64,
}

#[derive(Debug, Deserialize)]
pub struct AuditCheckpointEvent {
    pub signature: String,
    pub public_key: String,
}

#[derive(Debug, Deserialize)]
pub struct AuditRepairEvent {
    pub torn_bytes: u64,
    pub kept_in: String,
}

/// An error for the first record that breaks the chain.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("record {seq} (line {seq}, byte {offset}): {why}")]
pub struct ChainBreakError {
    /// The number of the expected record. Records count from 1, so this is also the number of the line.
    pub seq: u64,
    /// The offset of the faulty line.
    pub offset: u64,
    pub why: ChainBreakReason,
}

/// The reason why reading ended early.
#[derive(Debug, thiserror::Error)]
pub enum AuditReadError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Broken(#[from] ChainBreakError),
}

/// The position of a reader. Every record before the position is proved.
#[derive(Clone, Copy, Debug)]
pub struct AuditReadPosition {
    pub(super) chain: ChainTip,
    pub(super) offset: u64,
}

impl<R: BufRead> AuditReader<R> {
    pub fn new(from: R) -> Self {
        Self::resume_at(from, AuditReadPosition::START)
    }

    /// Continues at the position of an earlier reader of the same log. `source` must begin at that position.
    pub fn resume_at(source: R, AuditReadPosition { chain, offset }: AuditReadPosition) -> Self {
        Self { source, chain, line: vec![], offset }
    }

    /// Returns the next record; `None` at the end of the log. After an error the reader must not be used again.
    pub fn next_entry(&mut self) -> Result<Option<AuditEntry>, AuditReadError> {
        self.line.clear();
        // One byte more: the line feed of a line that just fits.
        let limit = MAX_LINE_BYTES + 1;
        let length = self.source.by_ref().take(limit).read_until(b'\n', &mut self.line)?;
        if length == 0 {
            return Ok(None);
        }
        let AuditReadPosition { mut chain, offset } = self.position();
        let entry = read_entry(&mut chain, &self.line, offset).map_err(|why| ChainBreakError {
            seq: chain.next_seq(),
            offset,
            why,
        })?;
        // The position moves only behind a record that is proved.
        self.chain = chain;
        self.offset += length as u64;
        Ok(Some(entry))
    }

    /// Returns the position after the last returned record.
    pub fn position(&self) -> AuditReadPosition {
        AuditReadPosition { chain: self.chain, offset: self.offset }
    }
}

impl AuditReadPosition {
    /// The position before the first record.
    pub const START: Self = Self { chain: ChainTip::START, offset: 0 };

    /// Returns the position's offset in the file.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl AuditEvent {
    fn parse_event(name: &str, line: &[u8]) -> serde_json::Result<Self> {
        Ok(match name {
            records::SessionStartedRecord::EVENT => Self::Started(serde_json::from_slice(line)?),
            records::PeerConnectedRecord::EVENT => Self::Opened(serde_json::from_slice(line)?),
            records::CallAdmittedRecord::EVENT => Self::Admitted(serde_json::from_slice(line)?),
            records::CallSettledRecord::EVENT => Self::Settled(serde_json::from_slice(line)?),
            records::CallRefusedRecord::EVENT => Self::Refused(serde_json::from_slice(line)?),
            tool_records::ToolAdmittedRecord::EVENT => {
                Self::ToolAdmitted(serde_json::from_slice(line)?)
            }
            tool_records::ToolSettledRecord::EVENT => {
                Self::ToolSettled(serde_json::from_slice(line)?)
            }
            tool_records::ToolRefusedRecord::EVENT => {
                Self::ToolRefused(serde_json::from_slice(line)?)
            }
            connect_records::ConnectAdmittedRecord::EVENT => {
                Self::ConnectAdmitted(serde_json::from_slice(line)?)
            }
            connect_records::ConnectSettledRecord::EVENT => {
                Self::ConnectSettled(serde_json::from_slice(line)?)
            }
            connect_records::ConnectRefusedRecord::EVENT => {
                Self::ConnectRefused(serde_json::from_slice(line)?)
            }
            RunFinishedRecord::EVENT => Self::Finished(serde_json::from_slice(line)?),
            records::CheckpointRecord::EVENT => Self::Checkpoint(serde_json::from_slice(line)?),
            records::LogRepairedRecord::EVENT => Self::Repaired(serde_json::from_slice(line)?),
            _ => Self::Other,
        })
    }
}

impl AuditEntry {
    /// Returns the error for a log that is broken at this record.
    pub(super) fn to_chain_break(&self, why: ChainBreakReason) -> ChainBreakError {
        ChainBreakError { seq: self.seq, offset: self.offset, why }
    }
}

fn read_entry(
    chain: &mut ChainTip,
    line: &[u8],
    offset: u64,
) -> Result<AuditEntry, ChainBreakReason> {
    // 1. The line must have its end. The last write of a process that was killed may be a part of a line.
    let Some((b'\n', content)) = line.split_last() else {
        return Err(classify_partial_line(chain, line));
    };
    // 2. The chain proves the bytes. It comes before the fields, so that no unproved text is parsed.
    let (seq, prev) = (chain.next_seq(), *chain.last_hash());
    let mut next = *chain;
    next.verify_next(content)?;
    // 3. The event's fields. An event that this version does not know is no error: a later version wrote it.
    let unreadable = |error: serde_json::Error| ChainBreakReason::InvalidFields(error.to_string());
    let AuditEntryHeader { time, run, event: name } =
        serde_json::from_slice(content).map_err(unreadable)?;
    let event = AuditEvent::parse_event(&name, content).map_err(unreadable)?;
    *chain = next;
    Ok(AuditEntry { seq, offset, prev, time, run, name, event })
}

/// Returns the reason for a line without an end.
fn classify_partial_line(chain: &ChainTip, line: &[u8]) -> ChainBreakReason {
    if line.len() as u64 > MAX_LINE_BYTES {
        ChainBreakReason::TooLong
    } else if chain.next_seq() == 1 && !chain.could_begin_with(line) {
        // No earlier record proves that this file is a log. It may be any file without a line feed.
        ChainBreakReason::Malformed
    } else {
        ChainBreakReason::Torn
    }
}

#[derive(Deserialize)]
struct AuditEntryHeader {
    time: String,
    run: String,
    event: String,
}

fn default_repeats() -> u64 {
    1
}

fn default_upstream() -> String {
    "litellm".to_owned()
}

/// The longest line that a reader accepts, in bytes. Our choice: this version's lines are under 8 KiB, and later
/// versions may have longer events.
pub const MAX_LINE_BYTES: u64 = 1 << 20;
