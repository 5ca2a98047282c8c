//! A4, R5: Tests of queued runs that an earlier process has accepted: they can be cancelled, and a shutdown leaves them
//! to the next process.

use std::fs;

use cogni_gateway::base::db::SqliteDatabase;
use cogni_gateway::runner::agents;
use cogni_gateway::service::runs::RunSubmission;
use cogni_gateway::service::store::{self, NewRunRow, RunStore, SpendingCaps};
use serde_json::{Value, json};

use super::super::{ServiceSetup, conversation_body};
use super::{assert_once, event_kinds, read_until, watch_run};
use crate::support::service::ServiceProcess;

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_waits_is_cancelled_or_left_but_never_lost() {
    let setup = ServiceSetup::new("gate=head").await;
    setup.set_max_runs(1);
    accept_runs(&setup, &["run-1", "run-2", "run-3"]).await;
    let mut service = setup.start();
    setup.provider.gate.wait_for_waiting(1).await;
    let waiting = of_state(&service, "queued").await;
    assert_eq!(waiting.len(), 2, "{waiting:?}");

    let mut watched = watch_run(&service, &waiting[0], None).await;
    let left = watch_run(&service, &waiting[1], None).await;
    service.post(&format!("/api/v1/runs/{}/cancel", waiting[0]), &json!({})).await;
    read_until(&mut watched, "final").await;
    let events = service.events(&waiting[0]).await;
    assert_eq!(event_kinds(&events), ["queued", "error", "done", "final"]);
    assert_eq!(
        events[1].data,
        json!({"code": "cancelled", "message": "the run was cancelled before it began"})
    );

    let begun = of_state(&service, "running").await;
    service.process.signal("TERM");
    // Its watchers are disconnected and may reconnect.
    let (printed, is_over) = left.rest().await;
    assert!(
        is_over && printed.contains("event: queued") && !printed.contains("final"),
        "{printed}"
    );
    setup.provider.gate.allow_answers(2);
    assert!(tokio::task::block_in_place(|| service.process.wait()).success());
    let mut service = setup.start();
    for run in [&begun[0], &waiting[1]] {
        let events = service.events(run).await;
        assert_once(&events);
        assert_eq!(events.last().unwrap().data["ok"], true, "{run}: {events:?}");
    }
    service.process.terminate();
    setup.assert_nothing_is_left();
}

/// Stores runs as a process leaves them that is killed before it begins them.
async fn accept_runs(setup: &ServiceSetup, runs: &[&str]) {
    let database =
        SqliteDatabase::open_database(&setup.state_dir().join("state.db"), &[store::SCHEMA]);
    let journal = RunStore::new(database.unwrap());
    // The grant's id is not known here; an admin sees all runs.
    for run in runs {
        let wanted = json!({
            "grant": "g1",
            "agent": "sandbox:agent",
            "model": "fake",
            "messages": [{"role": "user", "content": "hello"}],
            "account": "acct-1",
        });
        serde_json::from_value::<RunSubmission>(wanted.clone()).unwrap();
        let new = NewRunRow {
            id: (*run).to_owned(),
            grant: "g1".to_owned(),
            idempotency_key: None,
            caps: SpendingCaps::default(),
            max_cost_usd: None,
            digest: (*run).to_owned(),
            agent: "sandbox:agent".to_owned(),
            account: "acct-1".to_owned(),
            model: "fake".to_owned(),
            submission: wanted.to_string(),
        };
        journal.add_run(new).await.unwrap();
    }
}

async fn of_state(service: &ServiceProcess, state: &str) -> Vec<String> {
    let listed = service.get(&format!("/api/v1/runs?state={state}")).await.json();
    let ids = listed["runs"].as_array().unwrap().iter();
    ids.map(|run| Value::as_str(&run["id"]).unwrap().to_owned()).collect()
}

/// Starts a service whose runs of one branch share a long-running sandbox.
async fn with_shared_sandbox() -> ServiceSetup {
    let setup = ServiceSetup::new("gate=head").await;
    let agents = setup.path().join("agents");
    fs::create_dir(&agents).unwrap();
    let entry = agents::builtin_file("sandbox:agent").unwrap();
    let entry = format!("mode = \"long_running\"\n{entry}");
    fs::write(agents.join("sandbox-agent.toml"), entry).unwrap();
    setup.write_config(&format!("agents_dir = \"{}\"", agents.display()));
    setup
}

/// R7: While a run waits for an earlier run of its branch, another run may use its permit; waiting runs are counted,
/// too.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_waits_for_another_holds_no_permit() {
    let setup = with_shared_sandbox().await;
    setup.set_max_runs(2);
    let mut service = setup.start();
    let on = |branch: &str| {
        let mut body = conversation_body("hello");
        body["branch_key"] = json!(branch);
        body
    };
    let first = service.run(&on("line-1")).await;
    setup.provider.gate.wait_for_waiting(1).await;
    // Each of them lends its place, so that the next one begins.
    let waiting = [service.run(&on("line-1")).await, service.run(&on("line-1")).await];
    let other = service.run(&on("line-2")).await;
    setup.provider.gate.wait_for_waiting(2).await;
    setup.provider.gate.allow_answers(1000);
    for run in [&first, &other, &waiting[0], &waiting[1]] {
        assert_eq!(service.ended(run).await["error_code"], Value::Null);
    }
    service.process.terminate();
    setup.assert_nothing_is_left();
}

/// R7: A run that waits for its branch's sandbox can be cancelled at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_waits_for_another_is_cancelled_at_once() {
    let setup = with_shared_sandbox().await;
    let mut service = setup.start();
    let mut body = conversation_body("hello");
    body["branch_key"] = json!("line-1");
    let first = service.run(&body).await;
    setup.provider.gate.wait_for_waiting(1).await;
    let second = service.run(&body).await;
    let mut watched = watch_run(&service, &second, None).await;
    read_until(&mut watched, "run_started").await;
    service.post(&format!("/api/v1/runs/{second}/cancel"), &json!({})).await;
    read_until(&mut watched, "final").await;
    assert_once(&service.events(&second).await);
    assert_eq!(service.ended(&second).await["error_code"], "cancelled");
    assert_eq!(of_state(&service, "running").await, [first.as_str()]);
    setup.provider.gate.allow_answers(1);
    assert_eq!(service.ended(&first).await["error_code"], Value::Null);
    service.process.terminate();
    setup.assert_nothing_is_left();
}

/// The runs are cancelled as soon as they are accepted, while they are being started.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_starting_is_cancelled() {
    let setup = ServiceSetup::new("gate=head").await;
    let mut service = setup.start();
    for _ in 0..10 {
        let run = service.run(&conversation_body("hello")).await;
        let cancelled = service.post(&format!("/api/v1/runs/{run}/cancel"), &json!({})).await;
        assert_eq!(cancelled.status, 202, "{}", cancelled.text());
        let events = service.events(&run).await;
        assert_once(&events);
        assert_eq!(events.last().unwrap().data["error_code"], "cancelled", "{events:?}");
    }
    service.process.terminate();
    setup.assert_nothing_is_left();
}
