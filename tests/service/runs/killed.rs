//! R5, L7, B4: Tests of a service that is killed again and again: every accepted run ends exactly once.

mod delivering;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cogni_gateway::telemetry::audit::verify;
use futures_util::future::join_all;

use super::{ServiceSetup, conversation_body};
use crate::support::process::pause_for;
use crate::support::service::ServiceProcess;

/// The service is killed at fifty moments, a prime number of milliseconds apart, so that they hit every step of a run.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_killed_fifty_times_loses_no_run() {
    let setup = ServiceSetup::new("").await;
    let mut runs = BTreeMap::new();
    for round in 0..50_u64 {
        let mut service = setup.start();
        for number in 0..3 {
            let key = format!("{round}-{number}");
            let run = accept_run(&service, &key).await;
            // A repeated request with the same key returns the same run, whichever process was killed.
            assert_eq!(accept_run(&service, &key).await, run);
            runs.insert(key, run);
        }
        tokio::task::block_in_place(|| pause_for(Duration::from_millis(round * 37 % 400)));
        service.process.signal("KILL");
        service.process.wait();
    }
    let mut service = setup.start();
    // This process is not killed, however slow the machine is.
    runs.insert("last".to_owned(), accept_run(&service, "last").await);
    let rows = join_all(runs.values().map(|run| service.ended(run))).await;
    let distinct: BTreeSet<_> = runs.values().collect();
    assert_eq!(distinct.len(), runs.len());
    for row in &rows {
        assert_eq!(row["state"], "ended", "{row}");
        let code = row["error_code"].as_str().unwrap_or("ok");
        assert!(["ok", "interrupted"].contains(&code), "{row}");
        let run = row["id"].as_str().unwrap();
        let events = service.events(run).await;
        let finals = events.iter().filter(|event| event.kind == "final").count();
        assert_eq!(finals, 1, "{run}: {events:?}");
        assert!(events.windows(2).all(|pair| pair[0].seq < pair[1].seq), "{run}: {events:?}");
        let log = setup.audit_log(run);
        if log.exists() {
            let report = verify::verify_file(&log, None).unwrap();
            assert!(report.finished && report.open == 0, "{run}: {report:?}");
        }
    }
    assert!(rows.iter().any(|row| row["error_code"].is_null()), "none was ok");
    assert!(rows.iter().any(|row| row["error_code"] == "interrupted"), "none was interrupted");
    service.process.terminate();
    setup.assert_nothing_is_left();
}

async fn accept_run(service: &ServiceProcess, key: &str) -> String {
    let answer = service
        .post_with("/api/v1/runs", &conversation_body(key), &[("idempotency-key", key)])
        .await;
    assert!(answer.status.is_success(), "{} {}", answer.status, answer.text());
    answer.json()["id"].as_str().unwrap().to_owned()
}
