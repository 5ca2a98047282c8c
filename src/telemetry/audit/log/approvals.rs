//! The questions about a run's tool calls and budget in its log.

use super::AuditLog;
use crate::telemetry::audit::approval_records::{
    ApprovalProposedRecord, ApprovalRequestedRecord, ApprovalResolvedRecord, ApprovalUsedRecord,
    BudgetQuestionRecord, BudgetRaisedRecord,
};
use crate::telemetry::audit::records::AuditRecord;

impl AuditLog {
    /// Records that a person is asked. The number of questions of a run is bounded, so the buffer is. Never fails and
    /// does no I/O.
    pub fn record_approval_request(&self, record: &ApprovalRequestedRecord<'_>) {
        self.buffer_record(record);
    }

    /// Records that a person is asked about a spent limit. The number of questions of a run is bounded. Never fails and
    /// does no I/O.
    pub fn record_budget_question(&self, record: &BudgetQuestionRecord<'_>) {
        self.buffer_record(record);
    }

    /// Records that a person has raised limits. A call that the raise lets begin writes its admission after this record.
    /// Never fails and does no I/O.
    pub fn record_budget_raise(&self, record: &BudgetRaisedRecord<'_>) {
        self.buffer_record(record);
    }

    /// Records that a question is closed. The admission of an approved call writes this record before its own. Never
    /// fails and does no I/O.
    pub fn record_approval_result(&self, record: &ApprovalResolvedRecord<'_>) {
        self.buffer_record(record);
    }

    /// Records that a denied call is proposed to a person. The number of proposals of a run is bounded. Never fails and does
    /// no I/O.
    pub fn record_approval_proposal(&self, record: &ApprovalProposedRecord<'_>) {
        self.buffer_record(record);
    }

    /// Records the use of a standing approval. The admission of the call writes this record before its own. Never fails and
    /// does no I/O.
    pub fn record_approval_use(&self, record: &ApprovalUsedRecord<'_>) {
        self.buffer_record(record);
    }

    fn buffer_record(&self, record: &impl AuditRecord) {
        if let Some(open) = &self.0 {
            open.lock_state().append_record(record);
            open.unflushed.notify_one();
        }
    }
}
