//! The events that come too often to be recorded one by one, or that a log without room counts for its end.

use std::time::Instant;

use super::{AuditLog, AuditLogState};
use crate::base::unix::PeerCredentials;
use crate::telemetry::audit::connect_records::ConnectRefusalsRepeatedRecord;
use crate::telemetry::audit::records::{PeerConnectedRecord, RefusalsRepeatedRecord};
use crate::telemetry::audit::tool_records::ToolRefusalsRepeatedRecord;

impl AuditLog {
    /// Records each process that connects, once. The first 64 processes are recorded one by one. The connections of
    /// later ones are counted, with a record at most once a second. Never fails; reads `/proc` for a new process.
    pub fn record_connection(&self, peer: PeerCredentials) {
        let Some(open) = &self.0 else { return };
        let (is_recorded, is_counting) = {
            let mut state = open.lock_state();
            let has_room = state.has_room();
            let peers = &mut state.peers;
            (peers.count_connection(peer, has_room), peers.is_counting())
        };
        if is_recorded {
            let PeerCredentials { pid, uid, gid } = peer;
            let cgroup = peer.cgroup_path();
            open.lock_state().append_record(&PeerConnectedRecord {
                pid,
                uid,
                gid,
                cgroup: cgroup.as_deref(),
            });
        }
        if is_recorded || is_counting {
            open.unflushed.notify_one();
        }
    }
}

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
            let record = RefusalsRepeatedRecord { code, status, repeats };
            self.append_record(&ConnectRefusalsRepeatedRecord(record));
        }
        self.connect_refusals = refusals;
    }
}
