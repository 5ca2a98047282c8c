//! G1, G13, S1: Tests of many runs in one process. Each run has its own socket, budget and audit log.

use std::fs;
use std::sync::Arc;

use cogni_gateway::gateway::process::{GatewayHost, RunShutdown};
use cogni_gateway::telemetry::audit::delivery_records::WorkHeldRecord;
use cogni_gateway::telemetry::audit::verify;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::support::app::run_config;
use crate::support::client::TestClient;
use crate::support::model_provider;
use crate::support::process::wait_until;

/// A hundred runs call at the same time. Each run is billed and recorded under its own name, and stopped by its own
/// budget.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hundred_runs_in_one_process_never_cross() {
    let upstream = model_provider::start_default().await;
    let directory = tempfile::tempdir().unwrap();
    let base = run_config(directory.path(), upstream.addr);
    let seats = Arc::new(GatewayHost::new(&base).unwrap());
    let runs = (0..100_u64).map(|number| {
        let (seats, base) = (Arc::clone(&seats), base.clone());
        let dir = directory.path().join(format!("r{number}"));
        tokio::spawn(async move {
            fs::create_dir(&dir).unwrap();
            let mut config = base;
            config.identity.run = format!("run-{number}");
            config.identity.account = format!("acct-{number}");
            config.listen.socket_path = dir.join("llm.sock");
            config.audit.path = Some(dir.join("audit.jsonl"));
            config.budget.max_turns = Some(1 + number % 3);
            let gateway = seats.open_gateway(config).unwrap();
            let (run, stop) = (Arc::clone(gateway.run()), CancellationToken::new());
            let calls = async {
                let mut statuses = vec![];
                for _ in 0..4 {
                    let body = json!({"model": "fake", "messages": []});
                    let client = TestClient::new(&dir.join("llm.sock"));
                    let answer = client.post("/v1/chat/completions", &body).await;
                    statuses.push(answer.status.as_u16());
                }
                stop.cancel();
                statuses
            };
            let (served, statuses) =
                tokio::join!(gateway.serve_until_cancelled(stop.clone()), calls);
            served.unwrap();
            let allowed = usize::try_from(1 + number % 3).unwrap();
            assert_eq!(statuses.iter().filter(|status| **status == 200).count(), allowed);
            assert_eq!(run.counts.admitted_calls(), 1 + number % 3);
            let report = verify::verify_file(&dir.join("audit.jsonl"), None).unwrap();
            assert!(report.finished);
            assert_eq!(report.account, format!("acct-{number}"));
        })
    });
    for run in runs.collect::<Vec<_>>() {
        run.await.unwrap();
    }
    assert!(seats.run_manager().list_runs().is_empty());
    for request in upstream.seen.requests() {
        let account = request.header("x-litellm-end-user-id").unwrap();
        let metadata = request.header("x-litellm-spend-logs-metadata").unwrap();
        let number = account.strip_prefix("acct-").unwrap();
        assert!(metadata.contains(&format!("\"run-{number}\"")), "{metadata}");
    }
}

/// The name of an open run cannot be used again. As soon as the end of a run is reported, its name and its log can.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_open_once() {
    let upstream = model_provider::start_default().await;
    let directory = tempfile::tempdir().unwrap();
    let base = run_config(directory.path(), upstream.addr);
    let seats = GatewayHost::new(&base).unwrap();
    let gateway = seats.open_gateway(base.clone()).unwrap();
    let mut other = base.clone();
    other.listen.socket_path = directory.path().join("other.sock");
    insta::assert_snapshot!(seats.open_gateway(other.clone()).err().unwrap(), @"run `run-1` is open already");
    let stop = CancellationToken::new();
    stop.cancel();
    gateway.serve_until_cancelled(stop.clone()).await.unwrap();
    for _ in 0..50 {
        let again = seats.open_gateway(other.clone()).unwrap();
        again.serve_until_cancelled(stop.clone()).await.unwrap();
    }
}

/// G13: A run's prices are those that were read when the settings were loaded, whichever other policy the run has and
/// whatever happened to the price file since.
#[tokio::test(flavor = "multi_thread")]
async fn prices_are_read_when_the_settings_are_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let prices = directory.path().join("prices.toml");
    let mut base = run_config(directory.path(), model_provider::start_default().await.addr);
    base.prices.file = Some(prices.clone());
    let table = fs::read_to_string("config/prices.toml").unwrap();
    fs::write(&prices, &table).unwrap();
    let seats = GatewayHost::new(&base).unwrap();
    // Opens a run whose policy differs from that of the other runs.
    let opened = |run: &str| {
        let mut config = base.clone();
        config.identity.run = run.to_owned();
        config.policy.body.models = vec![run.to_owned()];
        config.listen.socket_path = directory.path().join(format!("{run}.sock"));
        config.audit.path = Some(directory.path().join(run));
        drop(seats.open_gateway(config).unwrap());
        let log = fs::read_to_string(directory.path().join(run)).unwrap();
        let started: serde_json::Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
        started["prices"].clone()
    };
    let first = opened("run-1");
    fs::write(&prices, "[half").unwrap();
    assert_eq!(opened("run-2"), first);
    let refused = format!("{:#}", seats.reload_defaults(&base).unwrap_err());
    assert!(refused.starts_with("the prices cannot be used: "), "{refused}");
    assert_eq!(opened("run-3"), first, "what was refused is in force");
    fs::write(&prices, format!("{table}\n# changed\n")).unwrap();
    assert_eq!(opened("run-4"), first, "the policy that is not in force is");
    seats.reload_defaults(&base).unwrap();
    assert_ne!(opened("run-5"), first);
}

/// G11: A run that was opened and then abandoned is closed before its owner reads its records.
#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_run_is_closed() {
    let directory = tempfile::tempdir().unwrap();
    let base = run_config(directory.path(), model_provider::start_default().await.addr);
    let log = base.audit.path.clone().unwrap();
    let seats = GatewayHost::new(&base).unwrap();
    drop(seats.open_gateway(base.clone()).unwrap());
    assert!(verify::verify_file(&log, None).unwrap().finished);
    assert!(
        seats.run_manager().list_runs().is_empty() && seats.run_manager().list_handles().is_empty()
    );

    let mut gateway = None;
    let open = || {
        gateway = seats.open_gateway(base.clone()).ok();
        gateway.is_some()
    };
    tokio::task::block_in_place(|| wait_until(open, || "it cannot be opened again".to_owned()));
    let served = tokio::spawn(gateway.unwrap().serve_until_cancelled(CancellationToken::new()));
    let client = TestClient::new(&directory.path().join("llm.sock"));
    assert_eq!(client.get("/health").await.status, 200);
    served.abort();
    let is_closed = || verify::verify_file(&log, None).is_ok_and(|report| report.finished);
    tokio::task::block_in_place(|| wait_until(is_closed, || "it is open for ever".to_owned()));
    seats.finish_all().await.unwrap();
    assert!(
        seats.run_manager().list_runs().is_empty() && seats.run_manager().list_handles().is_empty()
    );
}

/// R5, L3: After the last call has ended, the log stays open for the records of the run's delivery.
#[tokio::test(flavor = "multi_thread")]
async fn calls_end_before_the_records_do() {
    let upstream = model_provider::start_default().await;
    let directory = tempfile::tempdir().unwrap();
    let config = run_config(directory.path(), upstream.addr);
    let (socket, log) = (config.listen.socket_path.clone(), config.audit.path.clone().unwrap());
    let gateway = GatewayHost::new(&config).unwrap().open_gateway(config).unwrap();
    let (run, closing) = (Arc::clone(gateway.run()), RunShutdown::default());
    let serve_and_check = async {
        let client = TestClient::new(&socket);
        let body = json!({"model": "fake", "messages": []});
        assert_eq!(client.post("/v1/chat/completions", &body).await.status, 200);
        closing.calls.cancel();
        closing.calls_ended.cancelled().await;
        assert!(std::os::unix::net::UnixStream::connect(&socket).is_err(), "it is still served");
        let held = WorkHeldRecord { relay: "relay-1", code: "objects" };
        run.audit.record_delivery(&held);
        let is_written = || fs::read_to_string(&log).unwrap().contains("relay.held");
        wait_until(is_written, || "what is told after the calls is not written out".to_owned());
        closing.records.cancel();
    };
    let served = tokio::spawn(gateway.serve_in_two_steps(closing.clone()));
    serve_and_check.await;
    served.await.unwrap().unwrap();
    assert!(verify::verify_file(&log, None).unwrap().finished);
}
