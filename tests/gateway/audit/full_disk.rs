//! Tests of a full disk: no call is admitted, no record is lost, and the gateway recovers by itself.

use cogni_gateway::base::unix::PeerCredentials;
use cogni_gateway::telemetry::audit::AuditError;
use cogni_gateway::telemetry::audit::chain::MAX_UNSETTLED_CALLS;
use cogni_gateway::telemetry::audit::read::AuditEvent;

use super::*;
use crate::support::small_disk::SmallDisk;

/// G11: While the log cannot be written, no call is admitted, and no record of an open stream is lost.
#[test]
fn a_full_disk_stops_admissions_and_loses_nothing() {
    let disk = SmallDisk::mount(256 * 1024);
    let path = disk.path("audit.jsonl");
    let (log, _) = AuditLog::open_log(&signed_often(&path), &started_record()).unwrap();
    for call in 0..20 {
        at_once(log.record_admission(&admitted_record(&format!("early-{call}")))).unwrap();
    }
    disk.fill();
    let mut late = 0;
    while at_once(log.record_admission(&admitted_record(&format!("late-{late}")))).is_ok() {
        late += 1;
    }
    for again in 0..10 {
        let error =
            at_once(log.record_admission(&admitted_record(&format!("never-{again}")))).unwrap_err();
        assert!(matches!(error, AuditError::Write(_)), "{error}");
    }

    for call in 0..20 {
        log.record_settlement(&settled_record(&format!("early-{call}")));
        log.flush_buffered();
        let whole = verify::verify_file(&path, None).unwrap();
        assert_eq!(whole.admitted, 20 + late, "the file ends with a whole record");
    }
    // A flood of refusals does not grow the backlog.
    for call in 0..1000 {
        log.record_refusal(&refused_record(&format!("refused-{call}"), "audit_unavailable"));
        log.flush_buffered();
    }
    let lag = log.lag();
    assert!(lag.failing);
    let waiting = 20 + 64;
    assert!((64..=waiting + waiting / 3).contains(&lag.records), "{lag:?}");

    disk.free();
    at_once(log.record_admission(&admitted_record("after"))).unwrap();
    assert!(!log.lag().failing);
    log.flush_buffered();
    log.finish_log(&RunFinishedRecord { spent: budget_amount(0, 0, 0), admitted: 0, refused: 0 })
        .unwrap();
    let report = verify::verify_file(&path, None).unwrap();
    assert_eq!((report.admitted, report.settled), (21 + late, 20));
    assert_eq!((report.refused, report.unmatched, report.finished), (1000, 0, true));
    let text = fs::read_to_string(&path).unwrap();
    let (before, _) = text.split_once("\"request\":\"after\"").unwrap();
    assert!(!before.contains("\"repeats\""), "they were only counted while the disk was full");
}

/// G11: A write that stops in the middle of a record leaves no part of the record.
#[test]
fn a_disk_with_room_for_one_page_at_a_time_is_used_and_never_torn() {
    let disk = SmallDisk::mount(256 * 1024);
    let path = disk.path("audit.jsonl");
    let (log, _) = AuditLog::open_log(&signed_often(&path), &started_record()).unwrap();
    for call in 0..40 {
        at_once(log.record_admission(&admitted_record(&format!("call-{call}")))).unwrap();
    }
    disk.fill();
    for call in 0..40 {
        log.record_settlement(&settled_record(&format!("call-{call}")));
    }
    let mut left = vec![];
    while log.lag().records > 0 {
        log.flush_buffered();
        left.push(log.lag().records);
        assert_eq!(verify::verify_file(&path, None).unwrap().admitted, 40);
        disk.free_one_page();
    }
    assert!(left.len() > 3, "it went in steps: {left:?}");
    assert!(left.is_sorted_by(|before, after| before >= after), "{left:?}");
    let report = verify::verify_file(&path, None).unwrap();
    assert_eq!((report.settled, report.open), (40, 0));
}

/// G11: If a full disk has no room for a run's end record, that record is written once there is room.
#[test]
fn the_end_that_a_full_disk_did_not_take_is_written_later() {
    let disk = SmallDisk::mount(256 * 1024);
    let path = disk.path("audit.jsonl");
    let (log, _) = AuditLog::open_log(&signed_often(&path), &started_record()).unwrap();
    for call in 0..40 {
        at_once(log.record_admission(&admitted_record(&format!("call-{call}")))).unwrap();
    }
    disk.fill();
    for call in 0..40 {
        log.record_settlement(&settled_record(&format!("call-{call}")));
    }
    let end = RunFinishedRecord { spent: budget_amount(0, 0, 0), admitted: 40, refused: 0 };
    assert!(matches!(log.finish_log(&end), Err(AuditError::Write(_))));
    assert!(matches!(log.write_and_sync(), Err(AuditError::Write(_))));
    assert!(!verify::verify_file(&path, None).unwrap().finished);
    disk.free();
    log.write_and_sync().unwrap();
    let text = fs::read_to_string(&path).unwrap();
    let report = verify::verify_file(&path, None).unwrap();
    assert_eq!((report.settled, report.open, report.finished), (40, 0, true));
    assert_eq!(report.signatures.last, Some(report.records));
    assert_eq!(text.matches("\"run.finished\"").count(), 1);
}

/// G11: A run cannot start on a disk without room for its first record.
#[test]
fn a_log_that_cannot_take_its_first_record_does_not_open() {
    let disk = SmallDisk::mount(64 * 1024);
    disk.fill();
    let error = AuditLog::open_log(&audit_config(&disk.path("audit.jsonl")), &started_record())
        .err()
        .unwrap();
    assert!(matches!(error, AuditError::File { .. }), "{error}");
    assert!(!disk.path("audit.jsonl").exists(), "an empty file is left, as of a log that was cut");
    // A file that existed before must not be removed.
    fs::write(disk.path("other.jsonl"), "").unwrap();
    assert!(
        AuditLog::open_log(&audit_config(&disk.path("other.jsonl")), &started_record()).is_err()
    );
    assert!(disk.path("other.jsonl").exists());
    disk.free();
    let (_, recovered) =
        AuditLog::open_log(&audit_config(&disk.path("audit.jsonl")), &started_record()).unwrap();
    assert_eq!(recovered, RecoveredRun::default());
}

/// G11: The backlog for a full disk is bounded because the calls in flight are bounded.
#[test]
fn too_many_calls_without_an_end_are_not_admitted() {
    let log_dir = LogDir::new();
    let (log, _) = log_dir.open();
    for call in 0..MAX_UNSETTLED_CALLS {
        at_once(log.record_admission(&admitted_record(&call.to_string()))).unwrap();
    }
    let error = at_once(log.record_admission(&admitted_record("one more"))).unwrap_err();
    insta::assert_snapshot!(error, @"16384 calls are waiting for their end already; let some end first");
    log.record_settlement(&settled_record("0"));
    at_once(log.record_admission(&admitted_record("one more"))).unwrap();
}

/// G11: A flood of refusals does not fill the disk, and every refusal is counted.
#[test]
fn refusals_of_one_code_are_counted_after_the_first_64() {
    let log_dir = LogDir::new();
    let (log, _) = log_dir.open();
    for call in 0..10_000 {
        let code = if call % 10 == 0 { "rate_limited" } else { "route_not_served" };
        log.record_refusal(&refused_record(&call.to_string(), code));
        if call % 100 == 0 {
            log.flush_buffered();
        }
    }
    log.finish_log(&RunFinishedRecord {
        spent: budget_amount(0, 0, 0),
        admitted: 0,
        refused: 10_000,
    })
    .unwrap();
    drop(log);

    let mut singly = 0;
    let mut counted = vec![];
    for entry in log_dir.entries() {
        match entry.event {
            AuditEvent::Refused(refusal) if refusal.request.is_some() => singly += refusal.repeats,
            AuditEvent::Refused(refusal) => counted.push((refusal.code, refusal.repeats)),
            _ => (),
        }
    }
    assert_eq!(singly, 2 * 64);
    for (code, all) in [("rate_limited", 1000), ("route_not_served", 9000)] {
        let of_code = counted.iter().filter(|(counted, _)| counted == code);
        assert_eq!(of_code.map(|(_, repeats)| repeats).sum::<u64>() + 64, all);
    }
    assert_eq!(log_dir.verify().refused, 10_000);
}

/// G15: The log of one run has a maximum size, and calls that were admitted are settled all the same. The backlog may
/// hold checkpoints, too.
#[test]
fn a_log_at_its_limit_admits_nothing_more() {
    let log_dir = LogDir::new();
    let config = AuditConfig { max_bytes: 20_000, ..audit_config(&log_dir.log()) };
    let (log, _) = AuditLog::open_log(&config, &started_record()).unwrap();
    let mut calls = 0;
    let error = loop {
        let call = format!("call-{calls}");
        match at_once(log.record_admission(&admitted_record(&call))) {
            Ok(()) => log.record_settlement(&settled_record(&call)),
            Err(error) => break error,
        }
        calls += 1;
    };
    assert!(matches!(error, AuditError::Full { limit: 20_000 }), "{error}");
    assert!(calls > 5, "{calls}");
    // Refusals and connections make the log no longer: their numbers are in its last records.
    log.flush_buffered();
    let full = fs::metadata(log_dir.log()).unwrap().len();
    for code in ["rate_limited", "bad_request", "policy_denied"] {
        for _ in 0..100 {
            log.record_refusal(&refused_record("late", code));
            log.flush_buffered();
        }
    }
    for pid in 1..100 {
        log.record_connection(PeerCredentials { pid: Some(pid), uid: 0, gid: 0 });
        log.flush_buffered();
    }
    assert_eq!(fs::metadata(log_dir.log()).unwrap().len(), full);
    log.finish_log(&RunFinishedRecord { spent: budget_amount(0, 0, 0), admitted: 0, refused: 0 })
        .unwrap();
    drop(log);
    let report = log_dir.verify();
    assert_eq!((report.admitted, report.settled, report.open), (calls, calls, 0));
    assert_eq!(report.refused, 300);
    assert!(fs::metadata(log_dir.log()).unwrap().len() < 24_000);
}

fn signed_often(path: &Path) -> AuditConfig {
    AuditConfig { checkpoint_every: 4, ..audit_config(path) }
}
