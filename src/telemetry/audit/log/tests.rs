//! Tests of the log's private state.

use std::fs::File;
use std::io::Seek;

use super::*;
use crate::telemetry::audit::verify;

/// G11: once a sync has failed, no call is admitted, and a client that waited for the sync is charged nothing.
/// `/dev/null` exists everywhere, can be opened, and cannot be synced.
#[tokio::test]
async fn a_failed_sync_ends_admissions() {
    let mut file = tempfile::tempfile().unwrap();
    let tail = AuditLogFile::new(Arc::new(file.try_clone().unwrap()), 0);
    let state =
        AuditLogState::new(tail, ChainTip::START, AuditSigningKey::new(None).unwrap(), "run-1");
    let unsyncable = File::options().write(true).open("/dev/null").unwrap();
    let log = AuditLog(Some(OpenAuditLog {
        state: Mutex::new(state),
        unflushed: Notify::new(),
        syncer: Some(FsyncThread::start_thread(Arc::new(unsyncable), Duration::ZERO).unwrap()),
        durability: AuditDurability::Fsync,
    }));
    for _ in 0..2 {
        let error = log.record_admission(&admitted()).await.unwrap_err();
        assert!(matches!(error, AuditError::SyncFailed));
    }
    assert!(log.lag().failing);
    drop(log);

    file.rewind().unwrap();
    let report = verify::verify_log(BufReader::new(file), None).unwrap();
    assert_eq!((report.admitted, report.settled, report.spent), (1, 1, BudgetAmount::default()));
}

fn admitted() -> CallAdmittedRecord<'static> {
    CallAdmittedRecord {
        request: "call-1",
        route: "chat_completions",
        model: None,
        rules: &[],
        stream: false,
        request_bytes: 0,
        pid: None,
        reserved: BudgetAmount { turns: 1, ..BudgetAmount::default() },
    }
}
