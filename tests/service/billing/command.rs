//! B3, B4: Tests of the billing commands: from an audit log to receipts, without a service.

use std::process::{Command, Output};

use cogni_gateway::gateway::upstream::UpstreamKind;
use insta::assert_snapshot;
use serde_json::json;
use tempfile::tempdir;

use super::read_recording;
use crate::support::app::TestApp;

/// B1, B4: A finished run's log is recorded twice; without LiteLLM, the price table gives its receipts.
#[tokio::test]
async fn an_audit_log_becomes_receipts() {
    let app = TestApp::with(|config| config.upstream.kind = UpstreamKind::Anthropic).await;
    let body = json!({ "model": "claude-haiku-4-5", "max_tokens": 100, "messages": [] });
    app.client().post("/v1/messages", &body).await;
    app.recorded("request.settled", 1).await;
    let dir = tempdir().unwrap();
    let log = dir.path().join("audit.jsonl");
    std::fs::copy(app.audit_log(), &log).unwrap();
    app.stop().await;
    let billing = |arguments: &[&str]| run_billing(dir.path(), arguments);

    let messages = [
        billing(&["record", "audit.jsonl"]),
        billing(&["record", "audit.jsonl"]),
        billing(&["receipts", "--run", "run-1"]),
        billing(&["status"]),
        billing(&["status", "--json"]),
        without_date(&billing(&["days"])),
        without_date(&billing(&["days", "--json"])),
        billing(&["days", "--account", "acct-2"]),
    ];
    assert_snapshot!(messages.join("\n"), @r#"
    $ billing record audit.jsonl
    audit.jsonl: 1 calls, 1 of them new
    exit 0
    $ billing record audit.jsonl
    audit.jsonl: 1 calls, 0 of them new
    exit 0
    $ billing receipts --run run-1
    run-1/0/ID  claude-haiku-4-5  11 in, 5 out  $0.000036  price_table
    account acct-1: $0.000036, 1 receipts for 1 billable calls, complete
    exit 0
    $ billing status
    calls     1, 1 receipts, 0 still waited for
    nothing is flagged
    exit 0
    $ billing status --json
    {"calls":1,"receipts":1,"pending_calls":0,"unreceipted_calls":0,"unreceipted_runs":0,"unpriced_calls":0,"conflicting_calls":0,"waiting_notices":0,"deleted_calls":0,"flagged":[]}
    exit 0
    $ billing days
    DATE  acct-1  $0.000036, 1 receipts for 1 billable calls of 1; 11 in, 5 out
    exit 0
    $ billing days --json
    {"day":"DATE","account":"acct-1","calls":1,"billable":1,"receipts":1,"amount_usd":"0.000036","input":11,"output":5,"unreceipted":0,"unpriced":0,"conflicting":0,"deleted_calls":0}
    exit 0
    $ billing days --account acct-2
    exit 0
    "#);
}

/// B2: A batch of notices can be imported by hand; notices of unknown calls wait.
#[test]
fn a_batch_can_be_imported_by_hand() {
    let dir = tempdir().unwrap();
    std::fs::write(dir.path().join("batch.json"), read_recording("callback.json")).unwrap();
    let billing = |arguments: &[&str]| run_billing(dir.path(), arguments);
    let messages = [
        billing(&["ingest", "batch.json"]),
        billing(&["status"]),
        billing(&["receipts", "--run", "run-7"]),
        billing(&["record", "no-such-log"]),
        billing(&["reconcile", "--since", "yesterday"]),
        billing(&["reconcile"]),
    ];
    assert_snapshot!(messages.join("\n"), @r#"
    $ billing ingest batch.json
    {"new":0,"known":0,"unknown":4,"conflicting":0,"unpaid":0,"foreign":0,"invalid":0}
    exit 0
    $ billing status
    calls     0, 0 receipts, 0 still waited for
    waiting   4 calls that LiteLLM has reported and no audit log has
    nothing is flagged
    exit 0
    $ billing receipts --run run-7
    error: the billing records have no call of run `run-7`; if its calls were deleted, `billing days` has their sums
    exit 2
    $ billing record no-such-log
    error: `no-such-log`: No such file or directory (os error 2)
    exit 2
    $ billing reconcile --since yesterday
    error: invalid value 'yesterday' for '--since <TIME|DURATION>': give a time such as 2026-11-22T09:30:00Z, or how long ago, such as 24h

    For more information, try '--help'.
    exit 2
    $ billing reconcile
    error: give `LITELLM_MASTER_KEY`, or its file
    exit 2
    "#);
}

/// A directory without a billing store is reported, and no store is made.
#[test]
fn a_query_creates_no_billing_store() {
    let dir = tempdir().unwrap();
    let billing = |arguments: &[&str]| run_billing(dir.path(), arguments);
    let messages = [
        billing(&["status"]),
        billing(&["receipts", "--run", "run-7"]),
        billing(&["reconcile"]),
        billing(&["status", "--receipt-bound", "200000000000000d"]),
    ];
    assert_snapshot!(messages.join("\n"), @"
    $ billing status
    error: no billing records found: `state/state.db` does not exist; see `--state-dir`
    exit 2
    $ billing receipts --run run-7
    error: no billing records found: `state/state.db` does not exist; see `--state-dir`
    exit 2
    $ billing reconcile
    error: no billing records found: `state/state.db` does not exist; see `--state-dir`
    exit 2
    $ billing status --receipt-bound 200000000000000d
    error: invalid value '200000000000000d' for '--receipt-bound <DURATION>': give a hundred years at most

    For more information, try '--help'.
    exit 2
    ");
    assert!(!dir.path().join("state").exists());
}

/// Returns the command's output and exit status, without call ids.
fn run_billing(place: &std::path::Path, arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
        .arg("billing")
        .args(arguments)
        .current_dir(place)
        .env("COGNI_STATE_DIR", "state")
        .env_remove("LITELLM_MASTER_KEY")
        .output()
        .unwrap();
    let output = [stdout, stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    let id = regex::Regex::new("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").unwrap();
    format!(
        "$ billing {}\n{}exit {}",
        arguments.join(" "),
        id.replace_all(&output, "ID"),
        status.code().unwrap()
    )
}

fn without_date(text: &str) -> String {
    regex::Regex::new("[0-9]{4}-[0-9]{2}-[0-9]{2}").unwrap().replace_all(text, "DATE").into_owned()
}
