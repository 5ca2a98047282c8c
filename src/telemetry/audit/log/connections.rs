//! The requests over a run's connections in its log: an admission before anything is sent, one settlement after it.

use std::collections::BTreeMap;

use super::{AuditLog, AuditLogState, OpenAuditLog};
use crate::llm::budget::{BudgetAmount, ConnectionSpending};
use crate::telemetry::audit::connect_records::{
    ConnectAdmittedRecord, ConnectOutcome, ConnectRefusedRecord, ConnectSettledRecord,
};
use crate::telemetry::audit::recover::AuditLogScan;
use crate::telemetry::audit::{AuditDurability, AuditError};

impl AuditLog {
    /// Records that a request may be sent, and returns when the record is durable, like
    /// [`record_admission`](Self::record_admission). After an error nothing must be sent.
    pub async fn record_connect_admission(
        &self,
        record: &ConnectAdmittedRecord<'_>,
    ) -> Result<(), AuditError> {
        let Some(log) = &self.0 else { return Ok(()) };
        let end = log.write_admission(record)?;
        if let (Some(syncer), AuditDurability::Fsync) = (&log.syncer, log.durability) {
            let request = Some((record.request, record.connection));
            let mut unsent = UnsentConnectGuard { log, request };
            syncer.wait_synced(end).await.map_err(|_| AuditError::SyncFailed)?;
            unsent.request = None;
        }
        Ok(())
    }

    /// Records the end of an admitted request. Never fails and does no I/O.
    pub fn record_connect_settlement(&self, record: &ConnectSettledRecord<'_>) {
        if let Some(open) = &self.0 {
            open.lock_state().append_settlement(record);
            open.unflushed.notify_one();
        }
    }

    /// Records a request that was refused, with the limits of [`record_refusal`](Self::record_refusal). Never fails and
    /// does no I/O.
    pub fn record_connect_refusal(&self, record: &ConnectRefusedRecord<'_>) {
        if let Some(open) = &self.0 {
            let mut state = open.lock_state();
            let has_room = state.has_room();
            if state.connect_refusals.count_refusal(record.code, record.status, has_room) {
                state.append_record(record);
            }
            drop(state);
            open.unflushed.notify_one();
        }
    }
}

impl AuditLogState {
    /// Settles the requests whose settlement a crash has lost, at what they had reserved. Of a limit of bytes that nothing
    /// was reserved of, they use up the rest. Returns the use of each connection.
    pub(super) fn settle_lost_requests(
        &mut self,
        scan: &AuditLogScan,
        spent: &mut BudgetAmount,
    ) -> BTreeMap<String, ConnectionSpending> {
        let mut connections = scan.connections.clone();
        for lost in &scan.open_connects {
            let request = (lost.request.as_str(), lost.connection.as_str());
            let account = connections.entry(lost.connection.clone()).or_default();
            let left = |limit: Option<u64>, spent| limit.unwrap_or_default().saturating_sub(spent);
            let bytes_out = left(lost.bytes_out_limit, account.bytes_out).max(lost.announced_bytes);
            let bytes_in = left(lost.bytes_in_limit, account.bytes_in);
            let charge = (lost.reserved, bytes_out, bytes_in);
            self.append_record(&ConnectSettledRecord::for_lost_request(
                request,
                ConnectOutcome::Crashed,
                charge,
            ));
            *spent = *spent + lost.reserved;
            let cost = lost.reserved.cost;
            account.add_spending(ConnectionSpending { requests: 1, bytes_out, bytes_in, cost });
        }
        connections
    }
}

/// A guard for an admission that is not durable yet. Unless it is disarmed, the request is settled as not sent.
struct UnsentConnectGuard<'a> {
    log: &'a OpenAuditLog,
    request: Option<(&'a str, &'a str)>,
}

impl Drop for UnsentConnectGuard<'_> {
    fn drop(&mut self) {
        if let Some(request) = self.request {
            let (outcome, nothing) = (ConnectOutcome::NotSent, (BudgetAmount::default(), 0, 0));
            let record = ConnectSettledRecord::for_lost_request(request, outcome, nothing);
            self.log.lock_state().append_settlement(&record);
        }
    }
}
