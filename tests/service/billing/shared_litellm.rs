//! B2, B3: Tests of gateways that share one LiteLLM: each billing store has only its own gateway's calls.

use std::time::{Duration, SystemTime};

use cogni_gateway::service::billing::store::{CallFilter, IngestOutcome};
use cogni_gateway::service::billing::{CallUsage, ChargeNotice};
use serde_json::{Value, json};
use tempfile::tempdir;

use super::litellm::{LitellmScript, ScriptedLitellm, litellm_client, spend_row};
use super::{charge_notice, open_store, read_recording, time_at, usage_of_call};

/// B2: A billing store gets its name when it is first opened, and keeps it.
#[tokio::test]
async fn a_billing_store_keeps_its_name() {
    let (dir, other) = (tempdir().unwrap(), tempdir().unwrap());
    let name = open_store(dir.path()).deployment_id().await.unwrap();
    assert_eq!(
        (name.len(), open_store(dir.path()).deployment_id().await.unwrap()),
        (16, name.clone())
    );
    assert_ne!(open_store(other.path()).deployment_id().await.unwrap(), name);
}

/// B2: A notice for another billing store is not stored. A notice for this store, or for none, waits for its call.
#[tokio::test]
async fn a_notice_for_another_store_is_not_stored() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let deployment = store.deployment_id().await.unwrap();
    let mut items: Vec<Value> = serde_json::from_slice(&read_recording("callback.json")).unwrap();
    items.truncate(3);
    for (item, name) in items.iter_mut().zip([json!("another"), json!(deployment), Value::Null]) {
        item["metadata"]["spend_logs_metadata"]["cogni_deployment_id"] = name;
    }
    let items_text = Value::from(items).to_string();
    for _again in 0..2 {
        let ingested = store.ingest(items_text.clone()).await.unwrap();
        assert_eq!((ingested.foreign, ingested.unknown + ingested.known), (1, 2));
    }
    assert_eq!(store.totals(SystemTime::now()).await.unwrap().waiting_notices, 2);
}

/// B4: A call that was recorded in another store than its gateway's own is charged there.
#[tokio::test]
async fn a_recorded_call_is_charged_in_its_store() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let named = |call: &str| ChargeNotice {
        deployment: Some("another".to_owned()),
        ..charge_notice(call, 7)
    };
    store.record_calls(&[usage_of_call("call-1", time_at("09:30:01"))]).await.unwrap();
    let outcomes = store.ingest_notices(vec![named("call-1"), named("call-2")]).await.unwrap();
    assert_eq!(outcomes, [IngestOutcome::New, IngestOutcome::OtherDeployment]);
}

/// B2: A notice that has waited for two days is deleted, and nothing else is.
#[tokio::test]
async fn a_notice_without_a_call_expires() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    store
        .ingest_notices(vec![charge_notice("call-1", 7), charge_notice("call-2", 7)])
        .await
        .unwrap();
    store.record_calls(&[usage_of_call("call-1", time_at("09:30:01"))]).await.unwrap();
    let now = SystemTime::now();
    assert_eq!(store.purge_waiting(now + Duration::from_hours(47)).await.unwrap(), 0);
    assert_eq!(store.purge_waiting(now + Duration::from_hours(49)).await.unwrap(), 1);
    assert_eq!(store.totals(now).await.unwrap().waiting_notices, 0);
    assert_eq!(store.receipts_of_run("run-1").await.unwrap().len(), 1);
    assert_eq!(
        store.ingest_notices(vec![charge_notice("call-1", 7)]).await.unwrap(),
        [IngestOutcome::Known]
    );
}

/// B2: Contradictions of a notice without a call are deleted with the notice; contradictions of known calls stay.
#[tokio::test]
async fn contradictions_of_unknown_calls_are_deleted() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    store.record_calls(&[usage_of_call("call-1", time_at("09:30:01"))]).await.unwrap();
    let mut notices: Vec<_> = (1..5).map(|price| charge_notice("call-1", price * 1000)).collect();
    notices.extend((0..700).flat_map(|call| {
        let id = format!("never-{call}");
        [charge_notice(&id, 1000), charge_notice(&id, 2000)]
    }));
    store.ingest_notices(notices).await.unwrap();
    let file = rusqlite::Connection::open(dir.path().join("state.db")).unwrap();
    let conflicts = || {
        let count = "SELECT count(*) FROM billing_conflict";
        file.query_row(count, [], |row| row.get::<_, i64>(0)).unwrap()
    };
    assert_eq!(conflicts(), 703);
    let now = SystemTime::now();
    store.purge_waiting(now + Duration::from_hours(47)).await.unwrap();
    assert_eq!(conflicts(), 703, "they may still come");
    assert_eq!(store.purge_waiting(now + Duration::from_hours(49)).await.unwrap(), 700);
    assert_eq!((conflicts(), store.totals(now).await.unwrap().conflicting_calls), (3, 1));
}

/// B3: Rows for another store, or for an unknown run, belong to others and do not count as unknown.
#[tokio::test]
async fn rows_for_another_store_are_not_unknown() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let deployment = store.deployment_id().await.unwrap();
    store
        .record_calls(&[CallUsage {
            run: "run-7".to_owned(),
            ..usage_of_call("call-1", time_at("09:30:54"))
        }])
        .await
        .unwrap();
    let named = |call: &str, run: &str, name: &str| {
        let mut row = spend_row(call, run);
        row["metadata"]["spend_logs_metadata"]["cogni_deployment_id"] = name.into();
        row
    };
    let litellm = ScriptedLitellm::start(LitellmScript::Rows(vec![
        named("call-1", "run-7", &deployment),
        named("of-another", "run-7", "another"),
        named("lost-record", "run-8", &deployment),
        spend_row("lost-record-too", "run-7"),
        spend_row("of-another-user", "run-9"),
    ]));
    let day = CallFilter {
        since: time_at("09:00:00"),
        until: time_at("10:00:00"),
        account: None,
        run: None,
    };
    let report =
        store.reconcile(&litellm_client(litellm.address), &day, time_at("10:00:00")).await.unwrap();
    let unknown: Vec<_> = report.unknown.iter().map(|item| &*item.call_id).collect();
    assert_eq!((report.matched, &*unknown), (1, &["lost-record", "lost-record-too"][..]));
}
