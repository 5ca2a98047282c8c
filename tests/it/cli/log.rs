//! G12: our own log, for machines.

use std::process::Command;

use serde_json::Value;

use super::BINARY;
use crate::support::process::Process;
use crate::support::provider;

/// G12: each line is one flat object, with the run and its trace where it is about a run.
#[tokio::test(flavor = "multi_thread")]
async fn a_line_of_json_says_whose_run_and_trace_it_is_about() {
    let upstream = provider::start("").await;
    let place = tempfile::tempdir().unwrap();
    let mut command = Command::new(BINARY);
    command
        .arg("proxy")
        .env_clear()
        .env("RUN_ID", "run-1")
        .env("BILLING_ACCOUNT_ID", "acct-1")
        .env("LITELLM_MASTER_KEY", "sk-very-secret")
        .env("LITELLM_HOST", upstream.addr.to_string())
        .env("SOCKET_PATH", place.path().join("llm.sock"))
        .env("ACCESS_LOG_PATH", "off")
        .env("TRACEPARENT", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        .env("LOG_FORMAT", "json");
    let mut gateway = Process::start(&mut command, "build it with cargo");
    gateway.until(|said| said.contains(r#""message":"ready""#));
    assert!(gateway.terminate().success());
    let lines: Vec<Value> =
        gateway.said().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &lines {
        humantime::parse_rfc3339(line["time"].as_str().unwrap()).unwrap();
    }
    let shown: Vec<_> = lines.iter().map(Value::to_string).collect();
    insta::with_settings!({filters => [
        (r#""time":"[^"]+""#, r#""time":"[time]""#),
        (r#""socket":"[^"]+""#, r#""socket":"[socket]""#),
        (r"http://127\.0\.0\.1:\d+", "[upstream]"),
    ]}, {
        insta::assert_snapshot!(shown.join("\n"), @r#"
        {"level":"INFO","message":"ready","run":"run-1","runs":1,"socket":"[socket]","target":"cogni_gateway::app","time":"[time]","trace_id":"0af7651916cd43dd8448eb211c80319c","upstream":"[upstream]"}
        {"level":"INFO","message":"draining","run":"run-1","target":"cogni_gateway::app","time":"[time]","trace_id":"0af7651916cd43dd8448eb211c80319c"}
        {"level":"INFO","message":"stopped","run":"run-1","target":"cogni_gateway::app","time":"[time]","trace_id":"0af7651916cd43dd8448eb211c80319c"}
        "#);
    });
}
