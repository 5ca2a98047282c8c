//! G1: Tests of runs that are opened and closed while other runs are served.

use std::time::Duration;

use cogni_gateway::base::task_group::ShutdownOutcome;
use cogni_gateway::gateway::process::ChangeSource;
use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::telemetry::audit::records::PolicyChangedRecord;
use cogni_gateway::telemetry::audit::verify;
use serde_json::json;

use super::chat_body;
use crate::support::shared_app::{SharedApp, run_spec};

/// G1, G11: An open run is served; a closed run is unknown, and its records are complete.
#[tokio::test]
async fn runs_come_and_go() {
    let app = SharedApp::start().await;
    let token = app.token("run-3");
    assert_eq!(app.call(&token, "/v1/messages", &chat_body()).await.status, 401);
    app.runs.open_run(run_spec("run-3", "acct-3")).unwrap();
    assert_eq!(app.call(&token, "/v1/messages", &chat_body()).await.status, 200);
    assert_eq!(app.runs.close_run("run-3").await.unwrap(), ShutdownOutcome::Graceful);
    let refusal = app.call(&token, "/v1/messages", &chat_body()).await;
    assert_eq!(
        (refusal.status.as_u16(), &refusal.json()["error"]["code"]),
        (401, &json!("unknown_run"))
    );
    let report = verify::verify_file(&app.audit_log("run-3"), None).unwrap();
    assert!(report.finished && report.admitted == 1, "{report:?}");
    let mut names: Vec<_> =
        app.runs.list_runs().iter().map(|run| run.identity.run.clone()).collect();
    names.sort();
    assert_eq!(names, ["run-1", "run-2"]);
    app.stop().await;
}

/// G9: A run that is closed and opened again does not get its budget back.
#[tokio::test]
async fn a_run_that_is_opened_again_goes_on_where_it_was() {
    let app = SharedApp::with(|config, _| config.budget.max_turns = Some(1)).await;
    let token = app.token("run-1");
    assert_eq!(app.call(&token, "/v1/messages", &chat_body()).await.status, 200);
    app.runs.close_run("run-1").await.unwrap();
    app.runs.open_run(run_spec("run-1", "acct-1")).unwrap();
    assert_eq!(app.call(&token, "/v1/messages", &chat_body()).await.status, 402);
    app.stop().await;
}

/// G1: An open stream may end before its run is closed; a stream that does not end is cut and settled.
#[tokio::test]
async fn closing_a_run_drains_it_and_leaves_the_others_alone() {
    for (grace, drained) in [
        (Duration::from_hours(1), ShutdownOutcome::Graceful),
        (Duration::ZERO, ShutdownOutcome::Aborted),
    ] {
        let app = SharedApp::with(|config, _| config.drain_timeout = grace).await;
        let gated =
            json!({"model": "fake/gate=1", "stream": true, "max_tokens": 5, "messages": []});
        let mut one = app.open(&app.token("run-1"), "/v1/messages", &gated).await;
        let mut two = app.open(&app.token("run-2"), "/v1/messages", &gated).await;
        assert!(one.frame().await.unwrap().is_some() && two.frame().await.unwrap().is_some());
        app.upstream.gate.wait_for_waiting(2).await;
        let runs = app.runs.clone();
        let closing = tokio::spawn(async move { runs.close_run("run-1").await.unwrap() });
        let refused = loop {
            let answer = app.call(&app.token("run-1"), "/v1/messages", &chat_body()).await;
            if answer.status != 200 {
                break answer;
            }
        };
        assert_eq!(refused.status, 401);
        if drained == ShutdownOutcome::Aborted {
            assert_eq!(closing.await.unwrap(), drained);
            assert!(!one.rest().await.1, "what was cut does not end in order");
            app.upstream.gate.allow_answers(2);
        } else {
            app.upstream.gate.allow_answers(2);
            assert!(one.rest().await.1);
            assert_eq!(closing.await.unwrap(), drained);
        }
        assert!(two.rest().await.1, "the other run's stream goes on");
        let records = app.records("run-1");
        let settled = records.iter().find(|record| record["event"] == "request.settled").unwrap();
        let outcome = if drained == ShutdownOutcome::Aborted { "shut_down" } else { "completed" };
        assert_eq!(settled["outcome"], outcome);
        app.stop().await;
    }
}

/// G13: A reload applies to every run or to none, including a run that is being opened.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_reaches_a_run_that_is_being_opened() {
    let mut given = None;
    let app = SharedApp::with(|config, _| given = Some(config.clone())).await;
    let mut config = given.unwrap();
    // A run with a long log takes a while to open.
    let long = app.runs.open_run(run_spec("run-3", "acct-3")).unwrap();
    for version in 0..5000 {
        long.audit.record_operator_action(&PolicyChangedRecord {
            version,
            policy: "p",
            prices: "p",
            by: "admin",
        });
    }
    drop(long);
    app.runs.close_run("run-3").await.unwrap();
    for turn in 1..=10 {
        let runs = app.runs.clone();
        let open = move || runs.open_run(run_spec("run-3", "acct-3")).unwrap();
        let opening = tokio::task::spawn_blocking(open);
        let mut reloads = 0;
        while !opening.is_finished() {
            reloads += 1;
            config.budget.max_turns = Some(turn * 1_000_000 + reloads);
            app.runs.reload_runs(ChangeSource::Signal, config.clone()).unwrap();
        }
        opening.await.unwrap();
        let (found, _) = app.runs.find_handle("run-3").unwrap().config_and_version();
        assert_eq!(found.budget.max_turns, config.budget.max_turns);
        app.runs.close_run("run-3").await.unwrap();
    }
    app.stop().await;
}

/// G13: An operator's change of one run survives a reload, and never exceeds the reloaded limits.
#[tokio::test]
async fn an_operators_changes_outlive_a_reload() {
    let mut given = None;
    let app = SharedApp::with(|config, _| given = Some(config.clone())).await;
    let mut config = given.unwrap();
    config.budget.max_turns = Some(50);
    app.runs.reload_runs(ChangeSource::Signal, config.clone()).unwrap();
    let (control, other) =
        (app.runs.find_handle("run-1").unwrap(), app.runs.find_handle("run-2").unwrap());
    let change = |turns: Option<u64>, models: &[&str]| {
        let models: Vec<_> = models.iter().map(|model| (*model).to_owned()).collect();
        control.change_config(ChangeSource::Admin, move |config| {
            config.budget.max_turns = turns;
            config.policy.body.models = models;
            Ok(())
        })
    };
    change(Some(3), &["gpt-4o-mini"]).unwrap();
    let in_force = || {
        let (config, _) = control.config_and_version();
        (config.budget.max_turns, config.budget.max_total_tokens, config.policy.body.models)
    };
    for again in 0..2 {
        config.budget.max_total_tokens = Some(Tokens(1000 + again));
        app.runs.reload_runs(ChangeSource::Signal, config.clone()).unwrap();
        let models = vec!["gpt-4o-mini".to_owned()];
        assert_eq!(in_force(), (Some(3), Some(Tokens(1000 + again)), models));
        assert_eq!(other.config_and_version().0.budget.max_turns, Some(50));
        assert_eq!((control.is_overridden(), other.is_overridden()), (true, false));
    }
    // A raised limit stays while the files are unchanged, and follows the files when they change.
    change(Some(80), &[]).unwrap();
    app.runs.reload_runs(ChangeSource::Admin, config.clone()).unwrap();
    assert_eq!(in_force().0, Some(80));
    config.budget.max_turns = Some(20);
    app.runs.reload_runs(ChangeSource::Admin, config).unwrap();
    assert_eq!((in_force().0, control.is_overridden()), (Some(20), false));
    app.stop().await;
}

/// G13: A setting that needs a restart is refused, also without open runs.
#[tokio::test]
async fn a_setting_that_needs_a_restart_is_refused_without_runs() {
    let mut given = None;
    let app = SharedApp::with(|config, _| given = Some(config.clone())).await;
    for run in ["run-1", "run-2"] {
        app.runs.close_run(run).await.unwrap();
    }
    let mut config = given.unwrap();
    config.upstream.url = "elsewhere:4000".parse().unwrap();
    let refused = app.runs.reload_runs(ChangeSource::Signal, config).unwrap_err();
    insta::assert_snapshot!(refused, @"`upstream` cannot change while a run is served; restart for that, or take it back");
    app.stop().await;
}

/// G1: A run that cannot be opened leaves nothing behind.
#[tokio::test]
async fn a_run_is_opened_once_and_well_described() {
    let app = SharedApp::start().await;
    let error = |run: &str, account: &str| {
        let error = format!("{:#}", app.runs.open_run(run_spec(run, account)).err().unwrap());
        error.replace(app.directory.path().to_str().unwrap(), "[dir]")
    };
    let messages = [error("run-1", "acct-1"), error("run 3", "acct-3"), error("run-3", "")];
    insta::assert_snapshot!(messages.join("\n"), @r"
    run `run-1` is open already
    `run 3` is not a valid run id; use 1 to 128 letters, digits, `.`, `_`, `:`, `@`, `/` or `-`
    run `run-3` has no `account`; LiteLLM bills it as the end user
    ");
    let missing = format!("{:#}", app.runs.close_run("run-3").await.unwrap_err());
    insta::assert_snapshot!(missing, @"run `run-3` is not open");
    assert_eq!(app.runs.list_runs().len(), 2);
    app.stop().await;
}

/// G11: A run's id names a file in the audit directory, and never a file elsewhere.
#[tokio::test]
async fn an_audit_file_stays_in_its_directory() {
    let app = SharedApp::start().await;
    for run in ["../run", "/etc/run", "..", "a/../../b"] {
        app.runs.open_run(run_spec(run, "acct-3")).unwrap();
        assert_eq!(app.call(&app.token(run), "/v1/messages", &chat_body()).await.status, 200);
    }
    let directory = app.stop().await;
    let mut names: Vec<_> = std::fs::read_dir(directory.path().join("audit"))
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [
            "%2Fetc%2Frun.jsonl",
            "..%2Frun.jsonl",
            "...jsonl",
            "a%2F..%2F..%2Fb.jsonl",
            "run-1.jsonl",
            "run-2.jsonl",
        ]
    );
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 3, "audit, keys, access log");
}

/// G14: A thousand idle runs cost little memory and few descriptors.
#[test]
fn an_idle_run_costs_little() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let app = SharedApp::start().await;
        let open = |from: usize| {
            for number in from..from + 100 {
                app.runs.open_run(run_spec(&format!("many-{number}"), "acct")).unwrap();
            }
        };
        // The first runs pay for buffers that grow in steps.
        open(0);
        let bytes_per_run = allocation_counter::measure(|| open(100)).bytes_current;
        let each = u64::try_from(bytes_per_run).unwrap() / 100;
        assert!(each <= MOST_FOR_A_RUN, "{each} bytes for each run");
        app.stop().await;
    });
}

/// Measured: see the decision record on shared listeners.
const MOST_FOR_A_RUN: u64 = 12_288;
