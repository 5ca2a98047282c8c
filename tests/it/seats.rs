//! G1, S1: many runs in one process, each known by a socket of its own, with a budget and an audit log of its own.

use std::sync::Arc;

use cogni_gateway::app::Seats;
use cogni_gateway::audit::verify;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::support::app::configuration;
use crate::support::client::Client;
use crate::support::provider;

/// A hundred runs call at once: each is billed and recorded as itself, and stopped by its own budget.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hundred_runs_in_one_process_never_cross() {
    let upstream = provider::start("").await;
    let directory = tempfile::tempdir().unwrap();
    let base = configuration(directory.path(), upstream.addr);
    let seats = Arc::new(Seats::new(&base).unwrap());
    let runs = (0..100_u64).map(|number| {
        let (seats, base) = (Arc::clone(&seats), base.clone());
        let place = directory.path().join(format!("r{number}"));
        tokio::spawn(async move {
            std::fs::create_dir(&place).unwrap();
            let mut config = base;
            config.identity.run = format!("run-{number}");
            config.identity.account = format!("acct-{number}");
            config.listen.socket_path = place.join("llm.sock");
            config.audit.path = Some(place.join("audit.jsonl"));
            config.budget.max_turns = Some(1 + number % 3);
            let seat = seats.open(config).unwrap();
            let (run, stop) = (Arc::clone(seat.run()), CancellationToken::new());
            let calls = async {
                let mut statuses = vec![];
                for _ in 0..4 {
                    let body = json!({"model": "fake", "messages": []});
                    let client = Client::new(&place.join("llm.sock"));
                    let answer = client.post("/v1/chat/completions", &body).await;
                    statuses.push(answer.status.as_u16());
                }
                stop.cancel();
                statuses
            };
            let (served, statuses) = tokio::join!(seat.serve(stop.clone()), calls);
            served.unwrap();
            let allowed = usize::try_from(1 + number % 3).unwrap();
            assert_eq!(statuses.iter().filter(|status| **status == 200).count(), allowed);
            assert_eq!(run.counts.admitted(), 1 + number % 3);
            let report = verify::verify(&place.join("audit.jsonl"), None).unwrap();
            assert!(report.finished);
            assert_eq!(report.account, format!("acct-{number}"));
        })
    });
    for run in runs.collect::<Vec<_>>() {
        run.await.unwrap();
    }
    assert!(seats.runs().list().is_empty());
    for request in upstream.seen.requests() {
        let account = request.header("x-litellm-end-user-id").unwrap();
        let metadata = request.header("x-litellm-spend-logs-metadata").unwrap();
        let number = account.strip_prefix("acct-").unwrap();
        assert!(metadata.contains(&format!("\"run-{number}\"")), "{metadata}");
    }
}

/// What has ended is no run any more: its name can be used again, and a live one's cannot.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_open_once() {
    let upstream = provider::start("").await;
    let directory = tempfile::tempdir().unwrap();
    let base = configuration(directory.path(), upstream.addr);
    let seats = Seats::new(&base).unwrap();
    let seat = seats.open(base.clone()).unwrap();
    let mut other = base.clone();
    other.listen.socket_path = directory.path().join("other.sock");
    insta::assert_snapshot!(seats.open(other.clone()).err().unwrap(), @"run `run-1` is open already");
    let stop = CancellationToken::new();
    stop.cancel();
    seat.serve(stop).await.unwrap();
    drop(seats.open(other).unwrap());
}
