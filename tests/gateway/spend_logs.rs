//! Tests of billing against a real LiteLLM, which keeps its spend in a real Postgres and reports each call by callback.

mod setup;
mod whole_chat;

use std::process::{Command, Output};

use cogni_gateway::base::db::SqliteDatabase;
use cogni_gateway::service::billing::{self, BillState, BillingStore, ChargeSource};
use serde_json::{Value, json};
use tempfile::tempdir;

use crate::peers::setup::{KEY, ProxySetup, curl_arguments, peers_file, start_provider};
use crate::support::process::{ChildProcess, wait_until};
use setup::{CallbackReceiver, LitellmWithDatabase, PostgresServer, SECRET};

/// B1 to B4: The audit log, LiteLLM's callback and its spend logs agree about the same calls.
#[test]
fn the_billing_store_and_litellm_agree() {
    let provider = start_provider("input=11,output=7");
    let postgres = PostgresServer::start();
    let state = tempdir().unwrap();
    let receiver = CallbackReceiver::start(open_store(state.path()));
    let litellm =
        LitellmWithDatabase::start(&provider.address, &postgres, (&receiver.endpoint(), SECRET));
    let prices = peers_file("prices.toml").display().to_string();
    let setup = ProxySetup::start(&litellm.address, &[("PRICES_FILE", &prices)]);

    let whole = [("mock", false), ("mock", true), ("gpt", false), ("gpt", true)];
    let called: Vec<_> = whole.iter().map(|(model, stream)| setup.chat(model, *stream)).collect();
    make_call(
        &setup,
        "/v1/messages",
        &json!({ "model": "claude", "stream": true, "max_tokens": 50, "messages": hello_body() }),
    );
    make_call(&setup, "/v1/responses", &json!({ "model": "gpt", "input": "hello" }));
    make_call(&setup, "/v1/embeddings", &json!({ "model": "gpt", "input": "hello" }));
    make_call(
        &setup,
        "/v1/chat/completions",
        &json!({ "model": "no-such-model", "messages": hello_body() }),
    );
    leave_stream(&setup);
    setup.ends_with_a_whole_record();
    let log = setup.audit_log().display().to_string();

    // The callback is quick, but LiteLLM drops calls that end while it posts earlier ones.
    let output = run(state.path(), &litellm, &["record", &log]);
    assert!(output.ends_with("9 calls, 9 of them new\nexit 0"), "{output}");
    let by_callback = || list_receipts(&receiver).len() as u64;
    wait_until(|| by_callback() > 0, || format!("{}; {}", receiver.told(), litellm.output()));
    assert!(
        list_receipts(&receiver)
            .iter()
            .all(|(_, source, _)| *source == ChargeSource::LitellmCallback)
    );

    // The spend logs have every call, also for a billing store that no callback reaches.
    let other = tempdir().unwrap();
    run(other.path(), &litellm, &["record", &log]);
    let (report, written) = wait_until_settled(other.path(), &litellm, "run-7", CALLS);
    assert_eq!((&report["way"], &report["pending"], written), (&json!("pages"), &json!(0), CALLS));
    for none in ["missing", "unknown", "conflicting"] {
        assert_eq!(report[none], json!([]), "{report}");
    }
    // A client that disconnected has no usage report; for all other calls both sides agree.
    let different = report["different"].as_array().unwrap();
    let is_of_who_left = |one: &Value| one["is_estimate"] == true && one["model"] == "slow";
    assert!(different.iter().all(is_of_who_left), "{report}");

    // Each call is billed once, at the same price, whichever way its charge arrived.
    let (_report, written) = wait_until_settled(state.path(), &litellm, "run-7", CALLS);
    assert!(written < CALLS, "{written} of them had no receipt");
    let by_rows = CallbackReceiver::start(open_store(other.path()));
    let prices = |receiver| {
        let receipts = list_receipts(receiver).into_iter();
        receipts.map(|(id, _, amount)| (id, amount)).collect::<Vec<_>>()
    };
    assert_eq!(prices(&receiver), prices(&by_rows));
    assert!(called.iter().all(|call| prices(&receiver).iter().any(|(id, _)| id == call)));
    let bill = receiver.block_on(receiver.books().run_bill("run-7")).unwrap();
    assert_eq!((bill.calls, bill.receipts, bill.billable), (CALLS, CALLS, CALLS - 1));
    assert_eq!((bill.state, bill.flags), (BillState::Complete, vec![]));
    let output = run(state.path(), &litellm, &["status"]);
    assert!(output.ends_with("nothing is flagged\nexit 0"), "{output}");
}

/// Reconciles until LiteLLM has written every call, which takes seconds. Returns the last report and the number of
/// receipts that were written on the way.
fn wait_until_settled(
    state: &std::path::Path,
    litellm: &LitellmWithDatabase,
    named: &str,
    calls: u64,
) -> (Value, u64) {
    let (mut last, mut written) = (Value::Null, 0);
    let mut reconcile = || {
        let output = run(state, litellm, &["reconcile", "--since", "1h", "--run", named, "--json"]);
        let (report, exit) = output.split_once('\n').unwrap();
        assert_eq!(exit, "exit 0", "{output}");
        last = serde_json::from_str(report).unwrap();
        written += last["receipts_written"].as_u64().unwrap();
        last["matched"] == calls && last["pending"] == 0
    };
    wait_until(&mut reconcile, || litellm.output());
    (last, written)
}

/// Begins a slow stream and disconnects.
fn leave_stream(setup: &ProxySetup) {
    let body =
        json!({ "model": "slow", "stream": true, "max_tokens": 1000, "messages": hello_body() })
            .to_string();
    let url = "http://localhost/v1/chat/completions";
    let arguments = curl_arguments(
        &setup.socket(),
        &["--no-buffer", url, "--header", "content-type: application/json", "--data", &body],
    );
    let mut client = ChildProcess::start(Command::new("curl").args(arguments), "");
    client.until(|output| output.matches("data: ").count() > 3);
}

fn make_call(setup: &ProxySetup, path: &str, body: &Value) {
    let (url, body) = (format!("http://localhost{path}"), body.to_string());
    let arguments = [
        "--output",
        "/dev/null",
        &url,
        "--header",
        "content-type: application/json",
        "--data",
        &body,
    ];
    assert!(
        Command::new("curl")
            .args(curl_arguments(&setup.socket(), &arguments))
            .status()
            .unwrap()
            .success()
    );
}

fn hello_body() -> Value {
    json!([{ "role": "user", "content": "hello" }])
}

fn open_store(state: &std::path::Path) -> BillingStore {
    BillingStore::new(
        SqliteDatabase::open_database(&state.join("state.db"), &[billing::SCHEMA]).unwrap(),
    )
}

fn list_receipts(receiver: &CallbackReceiver) -> Vec<(String, ChargeSource, u64)> {
    let receipts = receiver.block_on(receiver.books().receipts_of_run("run-7")).unwrap();
    receipts
        .into_iter()
        .map(|receipt| (receipt.call_id, receipt.source, receipt.amount.0))
        .collect()
}

/// Runs `cogni-gateway billing`; returns its output and exit status.
fn run(state: &std::path::Path, litellm: &LitellmWithDatabase, arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
        .arg("billing")
        .args(arguments)
        .env("COGNI_STATE_DIR", state)
        .env("LITELLM_HOST", &litellm.address)
        .env("LITELLM_MASTER_KEY", KEY)
        .output()
        .unwrap();
    let output = [stdout, stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    format!("{output}exit {}", status.code().unwrap())
}

/// The number of calls that the test makes.
const CALLS: u64 = 9;
