//! The events that come too often to be recorded one by one, or that a log without room counts for its end.

use std::time::Instant;

use super::AuditLogState;
use crate::telemetry::audit::connect_records::ConnectRefusalsRepeatedRecord;
use crate::telemetry::audit::records::RefusalsRepeatedRecord;
use crate::telemetry::audit::tool_records::ToolRefusalsRepeatedRecord;

impl AuditLogState {
    /// Returns true below the largest size of the log. Above it, there are only settlements, an operator's actions and
    /// the end, and other events are counted for the end.
    pub(super) fn has_room(&self) -> bool {
        self.tail.len() + (self.lines.len() as u64) < self.max_bytes
    }

    /// Records the counts of events that come too often to be recorded one by one; with `all`, also counts that are not
    /// due.
    pub(super) fn record_floods(&mut self, all: bool) {
        // While the disk fails, a count stays a number in memory. As a record it would make the buffer longer each second,
        // and a full log longer without a bound.
        if (self.failing || !self.has_room()) && !all {
            return;
        }
        let now = Instant::now();
        if let Some(peers) = self.peers.take_due(now, all) {
            self.append_record(&peers);
        }
        let mut refusals = std::mem::take(&mut self.refusals);
        for (code, status, repeats) in refusals.take_due(now, all) {
            self.append_record(&RefusalsRepeatedRecord { code, status, repeats });
        }
        self.refusals = refusals;
        let mut refusals = std::mem::take(&mut self.tool_refusals);
        for (code, status, repeats) in refusals.take_due(now, all) {
            let record = RefusalsRepeatedRecord { code, status, repeats };
            self.append_record(&ToolRefusalsRepeatedRecord(record));
        }
        self.tool_refusals = refusals;
        let mut refusals = std::mem::take(&mut self.connect_refusals);
        for (code, status, repeats) in refusals.take_due(now, all) {
            self.append_record(&ConnectRefusalsRepeatedRecord { code, status, repeats });
        }
        self.connect_refusals = refusals;
    }
}
