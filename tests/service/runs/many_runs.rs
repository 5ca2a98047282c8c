//! S1, G9: Tests of two hundred concurrent runs in one process: each has its own identity, and none is charged for
//! another.

use std::collections::{BTreeMap, BTreeSet};

use cogni_gateway::telemetry::audit::verify;
use futures_util::future::join_all;
use serde_json::json;

use super::{ServiceSetup, conversation_body};

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_runs_at_once_never_cross() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let asked = (0..200).map(|number| {
        let mut body = conversation_body(&format!("I am number {number}"));
        body["account"] = json!(format!("acct-{number}"));
        // Every second run may make no call.
        body["budget"] = json!({"max_turns": number % 2});
        let service = &service;
        async move { (number, service.run(&body).await) }
    });
    let runs: BTreeMap<_, _> = join_all(asked).await.into_iter().collect();
    let ended = join_all(runs.values().map(|run| service.ended(run))).await;
    for (number, row) in ended.iter().enumerate() {
        let code = if number % 2 == 1 { json!(null) } else { json!("budget_exhausted") };
        assert_eq!(row["error_code"], code, "{row}");
        assert_eq!(row["account"], format!("acct-{number}"), "{row}");
    }
    let mut seen = BTreeSet::new();
    for request in setup.provider.seen.requests() {
        let account = request.header("x-litellm-end-user-id").unwrap().to_owned();
        let number: usize = account.strip_prefix("acct-").unwrap().parse().unwrap();
        let metadata = request.header("x-litellm-spend-logs-metadata").unwrap();
        assert!(metadata.contains(&runs[&number]), "{account}: {metadata}");
        let body = request.body.unwrap().to_string();
        assert!(body.contains(&format!("I am number {number}\"")), "{account}: {body}");
        assert!(seen.insert(number), "{account} has called twice");
    }
    assert_eq!(seen.len(), 100);
    for (number, run) in &runs {
        let report = verify::verify_file(&setup.audit_log(run), None).unwrap();
        assert!(report.finished && report.open == 0, "{report:?}");
        assert_eq!(report.admitted, u64::from(number % 2 == 1));
    }
    setup.assert_nothing_is_left();
}
