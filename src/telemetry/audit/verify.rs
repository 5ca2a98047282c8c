//! Verifies a log, and reports its content.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader};
use std::path::Path;

use super::AuditError;
use super::chain::{ChainBreakReason, MAX_UNSETTLED_CALLS, RecordHash};
use super::connect_records::ConnectOutcome;
use super::key::AuditPublicKey;
use super::read::{
    self, AuditCheckpointEvent, AuditConnectSettlementEvent, AuditEntry, AuditEvent, AuditReader,
    AuditSettlementEvent, AuditToolAdmissionEvent, AuditToolSettlementEvent, ChainBreakError,
};
use super::records::CallOutcome;
use super::tool_records::ToolOutcome;
use crate::base::regular_file::open_regular_file;
use crate::llm::budget::{BudgetAmount, ConnectionSpending, ToolSpending};

/// The content of a verified log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditVerifyReport {
    pub run: String,
    /// The attempt of the last start; `account` is of the last start, too.
    pub attempt: String,
    pub account: String,
    /// The number of processes that wrote the log. More than one means that the log was resumed.
    pub starts: u64,
    pub records: u64,
    /// The times of the first and the last record.
    pub first: String,
    pub last: String,
    pub admitted: u64,
    pub settled: u64,
    /// The settled calls whose real settlement was lost in a crash.
    pub crashed: u64,
    /// The settled tool calls whose real settlement was lost in a crash.
    pub tools_crashed: u64,
    /// Admissions without a settlement: calls in flight, or calls whose process has died.
    pub open: u64,
    /// Settlements without an admission: a fault of the gateway, not of the file.
    pub unmatched: u64,
    pub refused: u64,
    /// The admitted calls of each tool that are settled, and their costs.
    pub tools: BTreeMap<String, ToolSpending>,
    /// The tool calls that were refused.
    pub tool_refused: u64,
    /// The admitted requests over each connection that are settled, with their bytes and costs.
    pub connections: BTreeMap<String, ConnectionSpending>,
    /// The requests over connections that were refused.
    pub connect_refused: u64,
    /// The settled requests over connections whose real settlement was lost in a crash.
    pub connects_crashed: u64,
    /// The answers that were cut because they contained a connection's credential.
    pub credentials_echoed: u64,
    /// The amount that calls, tool calls and requests over connections were charged.
    pub spent: BudgetAmount,
    /// True if the last record is the run's orderly end.
    pub finished: bool,
    /// The hash of the last record, if there is one.
    pub head: Option<RecordHash>,
    pub signatures: CheckpointSignatures,
}

/// The keys that signed a log, and the part of the log that each signature covers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckpointSignatures {
    /// The number of checkpoints that count. With a pinned key, only checkpoints of that key count.
    pub checkpoints: u64,
    /// The number of checkpoints with other keys than the pinned one. Their signatures are valid and prove nothing.
    pub foreign: u64,
    /// The number of the last record that is a counting checkpoint. It covers every record before it.
    pub last: Option<u64>,
    /// The key of the last counting checkpoint.
    pub key: Option<AuditPublicKey>,
}

/// The part of a log that the last counting checkpoint covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointCoverage {
    /// The whole log, which ends with the run's end.
    Complete,
    /// A log that does not end with the run's end. Records may be missing, and those after the checkpoint are unsigned.
    Open,
    /// A log that ends with the run's end, but not that end.
    UnsignedEnd,
}

/// Verifies the log at `path` and reports its content.
///
/// With a pinned key, at least one checkpoint must be signed with that key, and [`AuditVerifyReport::coverage`] states
/// how much of the log the checkpoints cover: a forger can append records that no checkpoint signs. Without a pinned
/// key, signatures are checked against the keys that the file itself names, which finds damage and not a forger.
pub fn verify_file(
    path: &Path,
    pinned: Option<&AuditPublicKey>,
) -> Result<AuditVerifyReport, AuditError> {
    let failed = |source| AuditError::File { path: path.into(), source };
    let file = open_regular_file(path).map_err(failed)?;
    let report = verify_log(BufReader::new(file), pinned)
        .map_err(|error| AuditError::from_read_error(path, error))?;
    match pinned {
        Some(key) if report.signatures.last.is_none() => Err(AuditError::Unsigned { key: *key }),
        _ => Ok(report),
    }
}

/// Verifies a log from any source.
pub fn verify_log(
    log: impl BufRead,
    pinned: Option<&AuditPublicKey>,
) -> Result<AuditVerifyReport, read::AuditReadError> {
    let mut reader = AuditReader::new(log);
    let mut builder = AuditVerifyReportBuilder::new(pinned);
    while let Some(entry) = reader.next_entry()? {
        builder.add_entry(&entry)?;
    }
    let head = Some(*reader.position().chain.last_hash()).filter(|_| builder.report.records > 0);
    Ok(AuditVerifyReport { head, ..builder.into_report() })
}

impl AuditVerifyReport {
    /// Returns how much of the log the last counting checkpoint covers.
    pub fn coverage(&self) -> CheckpointCoverage {
        match (self.finished, self.unsigned_records()) {
            (false, _) => CheckpointCoverage::Open,
            (true, 0) => CheckpointCoverage::Complete,
            (true, _) => CheckpointCoverage::UnsignedEnd,
        }
    }

    /// Returns the number of records that a counting checkpoint covers, that checkpoint included.
    pub fn signed_records(&self) -> u64 {
        self.signatures.last.unwrap_or(0)
    }

    /// Returns the number of records after the last counting checkpoint.
    pub fn unsigned_records(&self) -> u64 {
        self.records - self.signed_records()
    }
}

/// A builder that adds up the records of one log, and checks the conditions that the chain alone does not show.
#[derive(Debug, Default)]
pub(super) struct AuditVerifyReportBuilder {
    report: AuditVerifyReport,
    pinned: Option<AuditPublicKey>,
    open: HashMap<String, UnsettledCall>,
    open_tools: HashMap<String, UnsettledToolCall>,
    open_connects: HashMap<String, UnsettledConnect>,
}

/// An admission without its settlement.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UnsettledCall {
    pub(super) seq: u64,
    pub(super) reserved: BudgetAmount,
}

/// A tool's admission without its settlement.
#[derive(Clone, Debug)]
pub struct UnsettledToolCall {
    pub seq: u64,
    pub call: String,
    pub tool: String,
    pub reserved: BudgetAmount,
}

/// An admission of a request over a connection without its settlement.
#[derive(Clone, Debug)]
pub struct UnsettledConnect {
    pub seq: u64,
    pub request: String,
    pub connection: String,
    pub announced_bytes: u64,
    pub bytes_out_limit: Option<u64>,
    pub bytes_in_limit: Option<u64>,
    pub reserved: BudgetAmount,
}

/// The amounts of a log: spent ones, and reserved ones of calls that are not settled, in the order of admission.
#[derive(Debug)]
pub(super) struct LogAmounts {
    pub(super) spent: BudgetAmount,
    pub(super) open: Vec<(String, BudgetAmount)>,
    pub(super) tools: BTreeMap<String, ToolSpending>,
    pub(super) open_tools: Vec<UnsettledToolCall>,
    pub(super) connections: BTreeMap<String, ConnectionSpending>,
    pub(super) open_connects: Vec<UnsettledConnect>,
}

impl AuditVerifyReportBuilder {
    pub(super) fn new(pinned: Option<&AuditPublicKey>) -> Self {
        Self { pinned: pinned.copied(), ..Self::default() }
    }

    pub(super) fn add_entry(&mut self, entry: &AuditEntry) -> Result<(), ChainBreakError> {
        self.count_entry(entry).map_err(|why| entry.to_chain_break(why))
    }

    pub(super) fn into_report(self) -> AuditVerifyReport {
        let open = self.open_count() as u64;
        AuditVerifyReport { open, ..self.report }
    }

    pub(super) fn run_id(&self) -> &str {
        &self.report.run
    }

    /// Returns the amounts that the next process of the run continues with.
    pub(super) fn into_amounts(self) -> LogAmounts {
        let mut open: Vec<_> = self.open.into_iter().collect();
        open.sort_unstable_by_key(|(_, open)| open.seq);
        let reserved = open.into_iter().map(|(request, open)| (request, open.reserved)).collect();
        let mut open_tools: Vec<_> = self.open_tools.into_values().collect();
        open_tools.sort_unstable_by_key(|open| open.seq);
        let mut open_connects: Vec<_> = self.open_connects.into_values().collect();
        open_connects.sort_unstable_by_key(|open| open.seq);
        let AuditVerifyReport { spent, tools, connections, .. } = self.report;
        LogAmounts { spent, open: reserved, tools, open_tools, connections, open_connects }
    }

    fn count_entry(&mut self, entry: &AuditEntry) -> Result<(), ChainBreakReason> {
        let report = &mut self.report;
        // The chain proves the order of the records, and not that they are of one run: the first record names the run.
        if report.records == 0 {
            report.run.clone_from(&entry.run);
            report.first.clone_from(&entry.time);
        } else if report.run != entry.run {
            return Err(ChainBreakReason::OtherRun(entry.run.clone()));
        }
        report.records = entry.seq;
        report.last.clone_from(&entry.time);
        // A checkpoint may follow the run's end, because it only signs the end.
        report.finished &= matches!(entry.event, AuditEvent::Checkpoint(_));
        match &entry.event {
            // A later process of the run may be another attempt, and for another account. The last one counts.
            AuditEvent::Started(session) => {
                report.starts += 1;
                report.attempt.clone_from(&session.attempt);
                report.account.clone_from(&session.account);
            }
            AuditEvent::Admitted(admission) => {
                report.admitted += 1;
                let open = self.open.entry(admission.request.clone()).or_default();
                open.seq = entry.seq;
                // An id that is admitted twice is a fault of the gateway. Both amounts are added, so that the fault
                // does not lower the spending.
                open.reserved = open.reserved + admission.reserved;
                self.check_unsettled()?;
            }
            AuditEvent::Settled(settlement) => self.count_settlement(settlement),
            AuditEvent::Refused(refusal) => {
                report.refused = report.refused.saturating_add(refusal.repeats);
            }
            AuditEvent::ToolAdmitted(admission) => {
                let AuditToolAdmissionEvent { call, tool, reserved, .. } = admission;
                let (seq, reserved) = (entry.seq, *reserved);
                let open =
                    UnsettledToolCall { seq, call: call.clone(), tool: tool.clone(), reserved };
                self.open_tools.insert(call.clone(), open);
                self.check_unsettled()?;
            }
            AuditEvent::ToolSettled(settlement) => self.count_tool_settlement(settlement),
            AuditEvent::ToolRefused(refusal) => {
                report.tool_refused = report.tool_refused.saturating_add(refusal.repeats);
            }
            AuditEvent::ConnectAdmitted(admission) => {
                let open = UnsettledConnect {
                    seq: entry.seq,
                    request: admission.request.clone(),
                    connection: admission.connection.clone(),
                    announced_bytes: admission.announced_bytes,
                    bytes_out_limit: admission.bytes_out_limit,
                    bytes_in_limit: admission.bytes_in_limit,
                    reserved: admission.reserved,
                };
                self.open_connects.insert(admission.request.clone(), open);
                self.check_unsettled()?;
            }
            AuditEvent::ConnectSettled(settlement) => self.count_connect_settlement(settlement),
            AuditEvent::ConnectRefused(refusal) => {
                report.connect_refused = report.connect_refused.saturating_add(refusal.repeats);
            }
            AuditEvent::Finished(_) => report.finished = true,
            AuditEvent::Checkpoint(checkpoint) => return self.check_checkpoint(entry, checkpoint),
            AuditEvent::Opened(_) | AuditEvent::Repaired(_) | AuditEvent::Other => (),
        }
        Ok(())
    }

    fn count_settlement(&mut self, settlement: &AuditSettlementEvent) {
        let report = &mut self.report;
        report.settled += 1;
        report.crashed += u64::from(settlement.outcome == CallOutcome::Crashed);
        // A settlement without an admission is a fault of the gateway. Its charge counts all the same.
        report.unmatched += u64::from(self.open.remove(&settlement.request).is_none());
        report.spent = report.spent + settlement.charged;
    }

    fn count_tool_settlement(&mut self, settlement: &AuditToolSettlementEvent) {
        let report = &mut self.report;
        let AuditToolSettlementEvent { call, tool, outcome, charged, .. } = settlement;
        report.tools_crashed += u64::from(*outcome == ToolOutcome::Crashed);
        report.unmatched += u64::from(self.open_tools.remove(call).is_none());
        report.spent = report.spent + *charged;
        // A call that did not run does not count towards the tool's budget.
        if *outcome != ToolOutcome::NotSent {
            report.tools.entry(tool.clone()).or_default().add_call(charged.cost);
        }
    }

    fn count_connect_settlement(&mut self, settlement: &AuditConnectSettlementEvent) {
        let report = &mut self.report;
        let AuditConnectSettlementEvent { request, connection, outcome, charged, .. } = settlement;
        report.connects_crashed += u64::from(*outcome == ConnectOutcome::Crashed);
        report.credentials_echoed += u64::from(*outcome == ConnectOutcome::CredentialEchoed);
        report.unmatched += u64::from(self.open_connects.remove(request).is_none());
        report.spent = report.spent + *charged;
        // A request that was not sent does not count towards the connection's budget.
        if *outcome != ConnectOutcome::NotSent {
            let (bytes_out, bytes_in) = (settlement.bytes_out, settlement.bytes_in);
            let used = ConnectionSpending { requests: 1, bytes_out, bytes_in, cost: charged.cost };
            report.connections.entry(connection.clone()).or_default().add_spending(used);
        }
    }

    fn open_count(&self) -> usize {
        self.open.len() + self.open_tools.len() + self.open_connects.len()
    }

    fn check_unsettled(&self) -> Result<(), ChainBreakReason> {
        // A forged log could open calls without end and fill the memory of its reader. The gateway has the same bound.
        if self.open_count() > MAX_UNSETTLED_CALLS {
            return Err(ChainBreakReason::TooManyUnsettled);
        }
        Ok(())
    }

    fn check_checkpoint(
        &mut self,
        entry: &AuditEntry,
        checkpoint: &AuditCheckpointEvent,
    ) -> Result<(), ChainBreakReason> {
        let key = AuditPublicKey::parse_public_key(&checkpoint.public_key)
            .map_err(|_| ChainBreakReason::InvalidSignature)?;
        // The signature is over the hash of the record before. That hash covers all earlier records.
        if !key.verify_checkpoint(&entry.prev, &checkpoint.signature) {
            return Err(ChainBreakReason::InvalidSignature);
        }
        let signatures = &mut self.report.signatures;
        // Another key's checkpoint is no error: the key may have changed between two processes. It proves nothing, either.
        if self.pinned.is_some_and(|pinned| pinned != key) {
            signatures.foreign += 1;
        } else {
            signatures.checkpoints += 1;
            signatures.last = Some(entry.seq);
            signatures.key = Some(key);
        }
        Ok(())
    }
}
