//! The tool calls of a run in its log: an admission before the tool runs, one settlement after it.

use super::{AuditLog, OpenAuditLog};
use crate::llm::budget::BudgetAmount;
use crate::telemetry::audit::tool_records::{
    ToolAdmittedRecord, ToolOutcome, ToolRefusedRecord, ToolSettledRecord,
};
use crate::telemetry::audit::{AuditDurability, AuditError};

impl AuditLog {
    /// Records that a tool may run, and returns when the record is durable, like
    /// [`record_admission`](Self::record_admission). After an error the tool must not run.
    pub async fn record_tool_admission(
        &self,
        record: &ToolAdmittedRecord<'_>,
    ) -> Result<(), AuditError> {
        let Some(log) = &self.0 else { return Ok(()) };
        let end = log.write_admission(record)?;
        if let (Some(syncer), AuditDurability::Fsync) = (&log.syncer, log.durability) {
            let mut unsent = UnsentToolCallGuard { log, call: Some((record.call, record.tool)) };
            syncer.wait_synced(end).await.map_err(|_| AuditError::SyncFailed)?;
            unsent.call = None;
        }
        Ok(())
    }

    /// Records the end of an admitted tool call. Never fails and does no I/O.
    pub fn record_tool_settlement(&self, record: &ToolSettledRecord<'_>) {
        if let Some(open) = &self.0 {
            open.lock_state().append_settlement(record);
            open.unflushed.notify_one();
        }
    }

    /// Records a tool call that was refused, with the limits of [`record_refusal`](Self::record_refusal). Never fails
    /// and does no I/O.
    pub fn record_tool_refusal(&self, record: &ToolRefusedRecord<'_>) {
        if let Some(open) = &self.0 {
            let mut state = open.lock_state();
            let has_room = state.has_room();
            if state.tool_refusals.count_refusal(record.code, record.status, has_room) {
                state.append_record(record);
            }
            drop(state);
            open.unflushed.notify_one();
        }
    }
}

/// A guard for an admission that is not durable yet. Unless it is disarmed, the call is settled as not sent.
struct UnsentToolCallGuard<'a> {
    log: &'a OpenAuditLog,
    call: Option<(&'a str, &'a str)>,
}

impl Drop for UnsentToolCallGuard<'_> {
    fn drop(&mut self) {
        if let Some(call) = self.call {
            let (outcome, charged) = (ToolOutcome::NotSent, BudgetAmount::default());
            let record = ToolSettledRecord::for_lost_call(call, outcome, charged);
            self.log.lock_state().append_settlement(&record);
        }
    }
}
