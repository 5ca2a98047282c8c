//! B3, B4: Tests of the reconciliation task: what it requests from LiteLLM, how often, and when it stops.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cogni_gateway::service::billing::reconcile_task::ReconcileTask;
use cogni_gateway::service::billing::{BillingStore, CallUsage};
use cogni_gateway::telemetry::metrics::MetricsRegistry;
use insta::assert_snapshot;
use tempfile::tempdir;

use super::litellm::{LitellmScript, ScriptedLitellm, litellm_client, row_at};
use super::{open_store, time_at, usage_of_call};

/// B4: A clock that was ahead for a moment does not prevent a call from being requested when the clock is right again.
#[tokio::test]
async fn a_call_that_a_wrong_clock_delayed_is_requested() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let now = SystemTime::now();
    store.record_calls(&[usage_of_call("call-1", now)]).await.unwrap();
    let since = now - Duration::from_hours(48);
    let open = store.calls_without_receipt(since, now).await.unwrap();
    assert_eq!(open.len(), 1);
    store.mark_queried(&open, now + Duration::from_hours(20)).await.unwrap();
    assert_eq!(
        store.calls_without_receipt(since, now).await.unwrap(),
        [],
        "it is put off by its age"
    );
    store.mark_queried(&open, now + Duration::from_hours(24 * 100)).await.unwrap();
    assert_eq!(store.calls_without_receipt(since, now).await.unwrap(), open);
}

/// B3: After two days LiteLLM will not write a missing row any more; the call stays flagged.
#[tokio::test]
async fn a_call_that_ended_long_ago_is_not_requested() {
    let litellm = ScriptedLitellm::start(LitellmScript::Rows(vec![]));
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    store
        .record_calls(&[usage_ended_at("old", SystemTime::now() - whole_hours(49))])
        .await
        .unwrap();
    start_task(&store, &litellm).run_once().await;
    assert_eq!(litellm.asked(), Vec::<String>::new());
    assert_eq!(store.totals(SystemTime::now()).await.unwrap().unreceipted_calls, 1);
}

/// B3: A call that LiteLLM does not know is not requested again at once.
#[tokio::test]
async fn an_unknown_call_is_not_requested_again_at_once() {
    let litellm = ScriptedLitellm::start(LitellmScript::Rows(vec![]));
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    store
        .record_calls(&[usage_ended_at("lost", SystemTime::now() - whole_hours(1))])
        .await
        .unwrap();
    let watch = start_task(&store, &litellm);
    for _ in 0..3 {
        watch.run_once().await;
    }
    assert_eq!(litellm.asked().len(), 1, "{:?}", litellm.asked());
}

/// B3: A call is requested again whenever its age has doubled, some ten times in two days, however often the task runs.
#[tokio::test]
async fn a_call_without_a_receipt_is_requested_less_and_less_often() {
    let litellm = ScriptedLitellm::start(LitellmScript::Rows(vec![]));
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let ended = time_at("09:00:00");
    store.record_calls(&[usage_ended_at("lost", ended)]).await.unwrap();
    let watch = start_task(&store, &litellm);
    let mut minutes = vec![];
    for age in (1..50 * 60).step_by(15) {
        let before = litellm.asked().len();
        watch.run_once_at(ended + Duration::from_mins(age)).await;
        if litellm.asked().len() > before {
            minutes.push(age);
        }
    }
    assert_eq!(minutes, [1, 16, 46, 106, 226, 466, 946, 1906]);
    assert_eq!(litellm.asked().len(), minutes.len());
}

/// B3: If LiteLLM does not answer, that does not count as one of the call's requests.
#[tokio::test]
async fn a_failed_request_is_repeated_at_the_next_interval() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    store.record_calls(&[usage_ended_at("call-1", time_at("09:00:00"))]).await.unwrap();
    let broken = ScriptedLitellm::start(LitellmScript::Says(500, "{}"));
    start_task(&store, &broken).run_once_at(time_at("09:30:00")).await;
    assert_eq!(broken.asked().len(), 1);
    let litellm =
        ScriptedLitellm::start(LitellmScript::Rows(vec![row_at("call-1", time_at("09:00:00"))]));
    start_task(&store, &litellm).run_once_at(time_at("09:30:01")).await;
    assert_eq!(store.receipts_of_run("run-7").await.unwrap().len(), 1);
}

/// B3: A few of the oldest calls are requested by id, and the rest by their time; each call is requested once.
#[tokio::test]
async fn the_oldest_calls_are_requested_by_id_and_many_by_time() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let old = usage_ended_at("call-old", time_at("01:00:00"));
    let recent: Vec<_> = (0..60)
        .map(|n| usage_ended_at(&format!("call-{n}"), time_at("09:30:00") + Duration::from_secs(n)))
        .collect();
    let rows = recent.iter().chain([&old]).map(|fact| row_at(&fact.call_id, fact.started));
    let litellm = ScriptedLitellm::start(LitellmScript::Rows(rows.collect()));
    store.record_calls(&[&[old], &*recent].concat()).await.unwrap();
    start_task(&store, &litellm).run_once_at(time_at("10:00:00")).await;
    let requests = litellm.asked();
    assert_eq!(requests.len(), 21, "{requests:?}");
    assert_snapshot!(format!("{}\n{}", requests[0], requests[20]), @r#"
    /spend/logs/v2?start_date=2026-11-21%2000:59:59&end_date=2026-11-23%2000:59:59&page=1&page_size=500&sort_by=startTime&sort_order=asc&request_id=call-old
    /spend/logs/v2?start_date=2026-11-22%2009:20:18&end_date=2026-11-22%2009:40:58&page=1&page_size=500&sort_by=startTime&sort_order=asc
    "#);
    assert_eq!(store.receipts_of_run("run-7").await.unwrap().len(), 61);
}

/// B3: A LiteLLM without pages cannot be asked for one call, so whole days are read.
#[tokio::test]
async fn without_pages_a_few_are_found_in_their_days() {
    let litellm =
        ScriptedLitellm::start(LitellmScript::DaysOf(vec![row_at("call-1", time_at("09:00:00"))]));
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    store.record_calls(&[usage_ended_at("call-1", time_at("09:00:00"))]).await.unwrap();
    start_task(&store, &litellm).run_once_at(time_at("10:00:00")).await;
    assert_eq!(store.receipts_of_run("run-7").await.unwrap().len(), 1);
}

/// B3, B4: The service reconciles automatically, from the oldest call without a receipt on, and updates the metrics.
#[tokio::test]
async fn the_task_fetches_missing_charges_and_counts_the_rest() {
    let now = SystemTime::now();
    let rows = vec![
        row_at("call-1", now - Duration::from_mins(1)),
        row_at("call-2", now - Duration::from_mins(1)),
    ];
    let litellm = ScriptedLitellm::start(LitellmScript::Rows(rows));
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let call = |id: &str, ago| CallUsage {
        run: "run-7".to_owned(),
        ..usage_of_call(id, now - Duration::from_secs(ago))
    };
    store.record_calls(&[call("call-1", 60), call("old", 3600)]).await.unwrap();
    let metrics = Arc::new(MetricsRegistry::new("litellm").unwrap());
    let watch = ReconcileTask {
        billing: store.clone(),
        litellm: Some(litellm_client(litellm.address)),
        metrics: Arc::clone(&metrics),
        every: Duration::from_secs(1),
    };
    watch.run_once().await;
    assert_eq!(store.receipts_of_run("run-7").await.unwrap().len(), 1);
    let text = String::from_utf8(metrics.render_text()).unwrap();
    let is_ours = |line: &&str| line.starts_with("cogni_gateway_billing_");
    let samples: Vec<_> = text.lines().filter(is_ours).collect();
    assert_snapshot!(samples.join("\n"), @r#"
    cogni_gateway_billing_calls{state="conflicting"} 0
    cogni_gateway_billing_calls{state="pending"} 0
    cogni_gateway_billing_calls{state="unpriced"} 0
    cogni_gateway_billing_reconcile_failed 0
    cogni_gateway_billing_unreceipted_calls 1
    cogni_gateway_billing_unreceipted_runs 1
    "#);
}

fn start_task(store: &BillingStore, litellm: &ScriptedLitellm) -> ReconcileTask {
    ReconcileTask {
        billing: store.clone(),
        litellm: Some(litellm_client(litellm.address)),
        metrics: Arc::new(MetricsRegistry::new("litellm").unwrap()),
        every: Duration::from_secs(1),
    }
}

/// A call of the run that LiteLLM's rows name.
fn usage_ended_at(id: &str, ended: SystemTime) -> CallUsage {
    CallUsage { run: "run-7".to_owned(), ..usage_of_call(id, ended) }
}

fn whole_hours(count: u64) -> Duration {
    Duration::from_hours(count)
}
