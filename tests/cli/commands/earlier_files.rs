//! Tests of files that an earlier version has written.

use std::fs;
use std::process::Command;

use serde_json::Value;

use super::BINARY;
use crate::support::process::ChildProcess;

/// G11, G13: The log of a killed process of an earlier version, with the earlier names of types and fields, is
/// continued. The same settings have the same digest, the open call is settled, and the budget continues.
#[test]
fn an_audit_log_and_a_configuration_of_an_earlier_program_are_taken_up() {
    let place = tempfile::tempdir().unwrap();
    let (log, file) = (place.path().join("audit.jsonl"), place.path().join("gateway.toml"));
    let prices = place.path().join("prices.toml");
    fs::write(&prices, include_str!("../../fixtures/earlier/prices.toml")).unwrap();
    fs::write(&log, include_str!("../../fixtures/earlier/audit.jsonl")).unwrap();
    fs::write(&file, include_str!("../../fixtures/earlier/gateway.toml")).unwrap();
    let mut command = Command::new(BINARY);
    command
        .arg("proxy")
        .arg("--config")
        .arg(&file)
        .env_clear()
        .env("RUN_ID", "run-earlier")
        .env("BILLING_ACCOUNT_ID", "acct-7")
        .env("LITELLM_MASTER_KEY", "sk-demo")
        .env("LITELLM_HOST", "127.0.0.1:4999")
        .env("SOCKET_PATH", place.path().join("llm.sock"))
        .env("PRICES_FILE", &prices)
        .env("AUDIT_LOG_PATH", &log);
    let mut gateway = ChildProcess::start(&mut command, "build it with cargo");
    gateway.until(|text| text.contains("ready"));
    assert!(gateway.terminate().success());
    let text = fs::read_to_string(&log).unwrap();
    let records: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let started: Vec<_> =
        records.iter().filter(|record| record["event"] == "run.started").collect();
    assert_eq!(started.len(), 2);
    assert_eq!(started[1]["policy"], started[0]["policy"], "the digest of the same settings");
    assert_eq!(started[1]["prices"], started[0]["prices"], "the digest of the same prices");
    let crashed = records.iter().find(|record| record["outcome"] == "crashed").unwrap();
    assert_eq!(crashed["event"], "request.settled");
    let verified = Command::new(BINARY).args(["audit", "verify"]).arg(&log).output().unwrap();
    let report = String::from_utf8_lossy(&verified.stdout);
    assert!(verified.status.success() && report.contains("2 turns"), "{report}");
}
