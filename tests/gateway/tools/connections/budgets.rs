//! T6, T5: Tests of a connection's budget: requests, rate, bytes in both directions, and money.

use std::collections::BTreeMap;

use cogni_gateway::llm::budget::{BudgetAmount, ConnectionSpending, Nanodollars};
use cogni_gateway::telemetry::audit::connect_records::{
    ConnectAdmittedRecord, ConnectOutcome, ConnectSettledRecord,
};
use cogni_gateway::telemetry::audit::records::RunStartedRecord;
use cogni_gateway::telemetry::audit::{AuditConfig, AuditLog};
use futures_util::future::join_all;
use http::Method;
use serde_json::json;
use tokio::io::AsyncWriteExt;

use super::server::{Answer, SecureServer};
use super::{SECRET, SecretFile, app_with, code_of, start_open};

/// T5: of many requests at once, no more are sent than the connection's budget allows.
#[tokio::test]
async fn racing_requests_share_one_budget() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "budget = { requests = 3 }").await;
    let client = app.client();
    let asked = join_all((0..24).map(|_| client.get("/connect/api/a"))).await;
    let sent = asked.iter().filter(|response| response.status == 200).count();
    assert_eq!((sent, server.seen().len()), (3, 3));
    let refused = app.client().get("/connect/api/a").await;
    assert_eq!(code_of(&refused), "402 connection_request_budget_exhausted");
    assert_eq!(refused.header("x-should-retry"), Some("false"));
    app.stop().await;
}

/// T5: a connection has a rate of its own.
#[tokio::test]
async fn a_rate_is_answered_with_a_delay() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "budget = { per_minute = 1 }").await;
    assert_eq!(app.client().get("/connect/api/a").await.status, 200);
    let refused = app.client().get("/connect/api/a").await;
    assert_eq!(code_of(&refused), "429 rate_limited");
    assert!(refused.header("retry-after").is_some());
    app.stop().await;
}

/// T5: an announced body that is too large is not sent at all; one without a length is cut at the limit.
#[tokio::test]
async fn bytes_to_the_server_are_bounded() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "budget = { bytes_out = '10' }").await;
    let post = async |body: &str| {
        let client = app.client();
        code_of(&client.ask(Method::POST, "/connect/api/a", body, &[]).await)
    };
    assert_eq!(post("12345678901").await, "402 connection_byte_budget_exhausted");
    assert!(server.seen().is_empty());
    assert_eq!(post("123456").await, "200 -");
    let chunked = "POST /connect/api/a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n";
    let answer = app.client().raw(chunked.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 402") && answer.contains("byte_budget"), "{answer}");
    // Three bytes had passed when the limit was reached, and the rest of the budget can be used.
    let spent = app.run.ledger.connection_spending()["api"];
    assert!(spent.bytes_out <= 10, "{spent:?}");
    assert_eq!(server.seen().len(), 1);
    let settled = app.recorded("connect.settled", 2).await;
    assert_eq!(settled[1]["outcome"], "budget_cut");
    app.stop().await;
}

/// T5: an answer is cut before the byte that the budget does not have, and a spent budget sends nothing.
#[tokio::test]
async fn bytes_from_the_server_are_bounded() {
    let server = SecureServer::answering(|_| {
        let frames = vec![b"12345".to_vec(), b"67890".to_vec(), b"x".to_vec()];
        Answer { frames, ..Answer::text("") }
    })
    .await;
    let secret = SecretFile::new(SECRET, "");
    let app = start_open(&server, &secret, "budget = { bytes_in = '10' }").await;
    let (text, is_whole) = app.client().open("/connect/api/a", &json!({})).await.rest().await;
    assert!(!is_whole && "1234567890".starts_with(&text), "{text}");
    let settled = app.recorded("connect.settled", 1).await;
    assert_eq!(settled[0]["outcome"], "budget_cut");
    let spent = app.run.ledger.connection_spending()["api"];
    assert!(spent.bytes_in <= 10, "{spent:?}");
    app.stop().await;
}

/// T5: connections, tools and models spend one budget of money.
#[tokio::test]
async fn connections_spend_the_money_of_the_run() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, "");
    let table = format!(
        "granted = ['core__get_current_time']\n[[rules]]\nname = 'clock'\ntool = 'core__get_current_time'\nprice_usd = '0.002'\n{}",
        server.table("api", &format!("{}allow = ['GET /**']\nprice_usd = '0.002'", secret.line))
    );
    let app = app_with(&table, |config| {
        config.budget.max_cost_usd = Nanodollars::parse("0.005");
    })
    .await;
    let tool = json!({"tool": "core__get_current_time"});
    assert_eq!(app.client().post("/tool/exec", &tool).await.status, 200);
    assert_eq!(app.client().get("/connect/api/a").await.status, 200);
    let refused = app.client().get("/connect/api/a").await;
    assert_eq!(code_of(&refused), "402 cost_budget_exhausted");
    assert_eq!(app.client().post("/tool/exec", &tool).await.status, 402);
    assert_eq!(app.run.ledger.spent_amount().cost, Nanodollars(4_000_000));
    let records = app.stop().await;
    let finished = records.iter().find(|record| record["event"] == "run.finished").unwrap();
    assert_eq!(finished["spent"]["cost_usd"], "0.004");
}

fn started() -> RunStartedRecord {
    RunStartedRecord {
        run: "run-1".to_owned(),
        attempt: "0".to_owned(),
        account: "acct-1".to_owned(),
        version: "1".to_owned(),
        policy: "p".to_owned(),
        prices: "p".to_owned(),
        trace: None,
        upstream: "litellm",
    }
}

/// G11: a crash gives no bytes back: a request without a length, and every answer, use up the rest of their limits, once
/// and for good.
#[tokio::test]
async fn a_crash_uses_up_the_limits_of_bytes() {
    let server = SecureServer::answering(|_| Answer { is_open: true, ..Answer::text("12345") });
    let server = server.await;
    let secret = SecretFile::new(SECRET, "");
    let limits = "budget = { bytes_out = '10', bytes_in = '20' }";
    let app = start_open(&server, &secret, limits).await;
    // The answers stay open, so that the requests are not settled.
    let mut open = app.client().connect().await;
    let chunked = "POST /connect/api/a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    open.write_all(chunked.as_bytes()).await.unwrap();
    let mut second = app.client().connect().await;
    second.write_all(b"GET /connect/api/a HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    app.recorded("connect.admitted", 2).await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("audit.jsonl");
    // The log as a kill leaves it.
    std::fs::copy(app.audit_log(), &path).unwrap();
    let config = AuditConfig { path: Some(path.clone()), ..AuditConfig::default() };
    for crashed in [2, 0] {
        let started = RunStartedRecord { run: app.run.identity.run.clone(), ..started() };
        let (log, recovered) = AuditLog::open_log(&config, &started).unwrap();
        assert_eq!(recovered.crashed, crashed);
        let spent = recovered.connections["api"];
        assert_eq!((spent.requests, spent.bytes_out, spent.bytes_in), (2, 10, 20));
        drop(log);
    }
    let report = cogni_gateway::telemetry::audit::verify::verify_file(&path, None).unwrap();
    assert_eq!((report.open, report.unmatched, report.connects_crashed), (0, 0, 2));
    drop((open, second));
    app.stop().await;
}

/// T5: a request whose settlement a crash has lost is charged by the next process, and no limit begins anew.
#[tokio::test]
async fn a_crash_charges_an_open_request() {
    let directory = tempfile::tempdir().unwrap();
    let path = Some(directory.path().join("audit.jsonl"));
    let config = AuditConfig { path, ..AuditConfig::default() };
    let cost = BudgetAmount { cost: Nanodollars(5), ..BudgetAmount::default() };
    let admitted = |request| ConnectAdmittedRecord {
        request,
        connection: "api",
        method: "POST",
        path: "d",
        rule: "allow[0]",
        announced_bytes: 100,
        bytes_out_limit: None,
        bytes_in_limit: None,
        pid: None,
        reserved: cost,
    };
    let (log, _) = AuditLog::open_log(&config, &started()).unwrap();
    log.record_connect_admission(&admitted("cr-1")).await.unwrap();
    log.record_connect_settlement(&ConnectSettledRecord {
        request: "cr-1",
        connection: "api",
        outcome: ConnectOutcome::Completed,
        status: 200,
        bytes_out: 100,
        bytes_in: 7,
        charged: cost,
        duration_ms: 1,
    });
    log.record_connect_admission(&admitted("cr-2")).await.unwrap();
    drop(log);
    let (log, recovered) = AuditLog::open_log(&config, &started()).unwrap();
    let spent =
        ConnectionSpending { requests: 2, bytes_out: 200, bytes_in: 7, cost: Nanodollars(10) };
    assert_eq!((recovered.crashed, recovered.spent.cost), (1, Nanodollars(10)));
    assert_eq!(recovered.connections, BTreeMap::from([("api".to_owned(), spent)]));
    assert_eq!(recovered.recent_connections, BTreeMap::from([("api".to_owned(), 2)]));
    drop(log);
    let report =
        cogni_gateway::telemetry::audit::verify::verify_file(config.path.as_deref().unwrap(), None);
    let report = report.unwrap();
    assert_eq!((report.open, report.unmatched, report.connects_crashed), (0, 0, 1));
}
