//! Tests of concurrent writes, under each durability, without allocation.

use std::sync::Arc;
use std::thread;

use cogni_gateway::telemetry::audit::AuditDurability;
use cogni_gateway::telemetry::audit::read::AuditEvent;
use tokio::task::JoinSet;

use super::*;
use crate::support::allocations;

/// G11: The records of many threads form one chain, and each call is admitted before it is settled.
#[test]
fn eight_threads_write_one_chain() {
    let log_dir = LogDir::new();
    let (log, _) = log_dir.open();
    thread::scope(|scope| {
        for writer in 0..8 {
            let log = &log;
            scope.spawn(move || {
                for call in 0..1000 {
                    let name = format!("{writer}/{call}");
                    at_once(log.record_admission(&admitted_record(&name))).unwrap();
                    log.record_settlement(&settled_record(&name));
                    if call % 50 == 0 {
                        log.flush_buffered();
                    }
                }
            });
        }
    });
    drop(log);
    let report = log_dir.verify();
    assert_eq!((report.admitted, report.settled), (8000, 8000));
    assert_eq!((report.open, report.unmatched), (0, 0));
}

/// G11: A text that a client chooses is truncated to its limit, between two characters.
#[test]
fn a_long_text_is_cut() {
    let log_dir = LogDir::new();
    let (log, _) = log_dir.open();
    let (long_model, cut_model) =
        (format!("m{}", "ü".repeat(1000)), format!("m{}", "ü".repeat(127)));
    at_once(log.record_admission(&CallAdmittedRecord {
        model: Some(&long_model),
        ..admitted_record("1")
    }))
    .unwrap();
    log.record_settlement(&settled_record("1"));
    drop(log);
    log_dir.verify();
    let models = log_dir.entries().into_iter().filter_map(|entry| match entry.event {
        AuditEvent::Admitted(admission) => admission.model,
        _ => None,
    });
    assert_eq!(models.collect::<Vec<_>>(), [cut_model]);
}

/// G11: When an admission is acknowledged, it is in the file, and so are all earlier records.
#[test]
fn an_admission_takes_everything_before_it_to_the_file() {
    let log_dir = LogDir::new();
    let (log, _) = log_dir.open();
    log.record_refusal(&refused_record("call-1", "route_not_served"));
    at_once(log.record_admission(&admitted_record("call-2"))).unwrap();
    let report = log_dir.verify();
    assert_eq!((report.records, report.refused, report.open), (3, 1, 1));

    log.record_settlement(&settled_record("call-2"));
    assert_eq!((log_dir.verify().records, log.lag().records), (3, 1));
    log.flush_buffered();
    assert_eq!((log_dir.verify().records, log.lag().records), (4, 0));
}

/// G11: `fsync` acknowledges every admission, and admissions that wait share one sync.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_admissions_share_a_sync() {
    let log_dir = LogDir::new();
    let config = AuditConfig { durability: AuditDurability::Fsync, ..audit_config(&log_dir.log()) };
    let log = Arc::new(AuditLog::open_log(&config, &started_record()).unwrap().0);
    let mut calls = JoinSet::new();
    for call in 0..200 {
        let log = Arc::clone(&log);
        calls.spawn(async move {
            let name = call.to_string();
            log.record_admission(&admitted_record(&name)).await.unwrap();
            log.record_settlement(&settled_record(&name));
        });
    }
    calls.join_all().await;
    log.finish_log(&RunFinishedRecord { spent: budget_amount(0, 0, 0), admitted: 200, refused: 0 })
        .unwrap();
    let report = log_dir.verify();
    assert_eq!((report.admitted, report.settled, report.finished), (200, 200, true));
}

/// G11: A client that disconnects while its admission becomes durable is charged nothing.
#[test]
fn an_abandoned_admission_is_settled_as_not_sent() {
    let log_dir = LogDir::new();
    let config = AuditConfig { durability: AuditDurability::Fsync, ..audit_config(&log_dir.log()) };
    let (log, _) = AuditLog::open_log(&config, &started_record()).unwrap();
    // The sync may be done before the first poll; then the call cannot be abandoned.
    let left = (0..1000).map(|call| call.to_string()).find(|call| {
        let record = admitted_record(call);
        let waiting = pin!(log.record_admission(&record));
        let done = waiting.poll(&mut Context::from_waker(Waker::noop())).is_ready();
        if done {
            log.record_settlement(&settled_record(call));
        }
        !done
    });
    drop(log);
    let last = log_dir.entries().pop().unwrap();
    let AuditEvent::Settled(settlement) = last.event else { panic!("{last:?}") };
    assert_eq!(Some(settlement.request), left);
    assert_eq!(
        (settlement.outcome, settlement.charged),
        (CallOutcome::NotSent, BudgetAmount::default())
    );
    assert_eq!(log_dir.verify().open, 0);
}

/// G11: `group` syncs in the background and never delays an admission.
#[test]
fn grouped_admissions_do_not_wait() {
    let log_dir = LogDir::new();
    let config = AuditConfig { durability: AuditDurability::Group, ..audit_config(&log_dir.log()) };
    let (log, _) = AuditLog::open_log(&config, &started_record()).unwrap();
    for call in 0..100 {
        at_once(log.record_admission(&admitted_record(&call.to_string()))).unwrap();
    }
    drop(log);
    assert_eq!(log_dir.verify().admitted, 100);
}

/// G11: Recording a call allocates nothing, including signed checkpoints.
#[test]
fn a_recorded_call_does_not_allocate() {
    let log_dir = LogDir::new();
    let signed = AuditConfig { checkpoint_every: 256, ..audit_config(&log_dir.log()) };
    let (log, _) = AuditLog::open_log(&signed, &started_record()).unwrap();
    let calls = |count: u64| {
        for _ in 0..count {
            at_once(log.record_admission(&admitted_record("0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b")))
                .unwrap();
            log.record_settlement(&settled_record("0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b"));
        }
    };
    calls(300);
    assert_eq!(allocations::count_allocations(|| calls(1000)), 0);
}

#[test]
fn without_a_path_everything_is_accepted_and_nothing_kept() {
    let (log, recovered) = AuditLog::open_log(&AuditConfig::default(), &started_record()).unwrap();
    at_once(log.record_admission(&admitted_record("call-1"))).unwrap();
    log.record_settlement(&settled_record("call-1"));
    log.record_refusal(&refused_record("call-2", "route_not_served"));
    log.flush_buffered();
    log.finish_log(&RunFinishedRecord { spent: budget_amount(0, 0, 0), admitted: 1, refused: 1 })
        .unwrap();
    assert_eq!((recovered, log.lag()), Default::default());
}

#[test]
fn configuration_is_read_from_toml_and_unknown_keys_are_refused() {
    let config: AuditConfig = toml::from_str(
        r#"
        path = "/var/log/audit.jsonl"
        durability = "group"
        sync_every = "20ms"
        "#,
    )
    .unwrap();
    assert_eq!(config.durability, AuditDurability::Group);
    assert_eq!(config.sync_every.as_millis(), 20);
    assert_eq!((config.checkpoint_interval.as_secs(), config.checkpoint_every), (10, 4096));
    assert!(toml::from_str::<AuditConfig>("fsync = true").is_err());
}
