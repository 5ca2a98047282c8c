//! `explain` and a served run give the same answer to requests to the tools and over connections.

use std::fs;

use cogni_gateway::cli::explain;
use cogni_gateway::llm::budget::Nanodollars;
use serde_json::{Value, json};

use super::{CLOCK, app_with};

/// G13, T7: for each request, `explain` gives the code and the message of the socket.
#[tokio::test]
async fn explain_predicts_the_answers_of_the_tools() {
    let app = app_with(TABLE, |config| config.budget.max_cost_usd = Some(ONE_DOLLAR)).await;
    let mut refused = 0;
    for request in requests() {
        let answer = app.client().raw(request.as_bytes()).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let (explained, code) = explain_request(&request, &[]);
        if head.starts_with("HTTP/1.1 2") {
            assert_eq!((&explained["allowed"], code), (&json!(true), 0), "{request}\n{answer}");
            continue;
        }
        refused += 1;
        assert_eq!((&explained["allowed"], code), (&json!(false), 1), "{request}\n{answer}");
        let body: Value = serde_json::from_str(body).unwrap();
        // An error of JSON-RPC has a number for a code.
        if body["jsonrpc"].is_null() {
            assert_eq!(body["error"]["code"], explained["code"], "{request}");
        }
        assert_eq!(body["error"]["message"], explained["message"], "{request}");
    }
    assert!(refused > 15, "{refused}");
    app.stop().await;
}

/// G13: `--set` is what the run has spent, also for a tool and a connection.
#[test]
fn earlier_usage_counts_for_tools_and_connections() {
    for request in [execute(CLOCK), get("/connect/cheap/x")] {
        let (explained, code) = explain_request(&request, &[]);
        assert_eq!((&explained["allowed"], code), (&json!(true), 0), "{explained}");
        let (explained, code) = explain_request(&request, &["--set", "usage.cost_usd=0.9"]);
        assert_eq!((&explained["code"], code), (&json!("cost_budget_exhausted"), 1));
    }
}

/// T7: the list of tools and a message of MCP are explained for people, too.
#[test]
fn a_request_without_a_call_is_explained() {
    let text = |request: &str| explain_text(request, &[]).0;
    insta::assert_snapshot!(text(&get("/tool/list")), @r"
    tools of the run
    allowed   lists: core__get_current_time, core__metrics_query
    reserves  nothing
    ");
    insta::assert_snapshot!(text(&message("ping", "{}")), @r"
    tools of the run
    allowed   answered without a call
    reserves  nothing
    ");
    insta::assert_snapshot!(text(&get("/tool/exec")), @r"
    tools of the run
    refused   not_found
              the path is not served; there are `GET /tool/list`, `POST /tool/exec`, `GET /tool/exec/ID` and `POST /mcp`
    ");
}

fn requests() -> Vec<String> {
    let call = json!({"tool": CLOCK, "arguments": {}}).to_string();
    let dear = json!({"tool": "core__metrics_query", "arguments": {"query": "up"}}).to_string();
    vec![
        // A message about the budget names what is spent, so these come before the calls that are made.
        post("/tool/exec", &dear),
        get("/connect/dear/x"),
        get("/tool/list"),
        post("/tool/exec", &call),
        get("/tool/exec"),
        get("/tool/exec/tc-none"),
        get("/tool/exec/tc-none?wait=99h"),
        get("/tool/exec/tc-none?x=y"),
        post("/tool/list", "{}"),
        post("/tool/other", "{}"),
        post("/tool/exec", &call).replacen("POST", "PUT", 1),
        post("/tool/exec", &call).replacen("application/json", "text/plain", 1),
        post("/tool/exec", &call).replacen("host:", "content-encoding: gzip\r\nhost:", 1),
        post("/tool/exec", &call).replacen("host:", "origin: https://evil.example\r\nhost:", 1),
        post("/tool/exec", &format!("{call}{}", " ".repeat(300_000))),
        post("/tool/exec", "\u{feff}{}"),
        post("/tool/exec", r#"{"tool":"no_such_tool"}"#),
        message("ping", "{}"),
        message("tools/list", "{}"),
        message("tools/list", r#"{"cursor":"x"}"#),
        message("tools/call", &format!(r#"{{"name":"{CLOCK}","arguments":{{}}}}"#)),
        message("no/method", "{}").replacen("/mcp", "/mcp/a/b", 1),
        post("/mcp", "[]"),
        get("/mcp"),
        get("/connect"),
        get("/connect/"),
        get("/connect/cheap"),
        get("/connect/other/x"),
        post("/connect/cheap/x", "{}"),
        post("/connect", "{}"),
    ]
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
}

fn post(path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

fn execute(tool: &str) -> String {
    post("/tool/exec", &json!({"tool": tool, "arguments": {}}).to_string())
}

/// Returns a request of MCP.
fn message(method: &str, params: &str) -> String {
    let body = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{params}}}"#);
    post("/mcp", &body)
}

fn explain_request(request: &str, flags: &[&str]) -> (Value, u8) {
    let (output, code) = explain_text(request, &[&["--json"], flags].concat());
    (serde_json::from_str(&output).unwrap(), code)
}

/// Returns what `explain` says about a request to a run with a table `[tools]` and a dollar, and the exit status.
pub(super) fn explain_in_table(table: &str, request: &str) -> (Value, u8) {
    let (output, code) = run_explain(table, request, &["--json"]);
    (serde_json::from_str(&output).unwrap(), code)
}

fn explain_text(request: &str, flags: &[&str]) -> (String, u8) {
    run_explain(TABLE, request, flags)
}

fn run_explain(table: &str, request: &str, flags: &[&str]) -> (String, u8) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gateway.toml");
    let mut config = toml::Table::new();
    config.insert("tools".to_owned(), toml::Value::Table(toml::from_str(table).unwrap()));
    config.insert("budget".to_owned(), toml::Value::Table(toml::toml! { max_cost_usd = "1" }));
    fs::write(&file, config.to_string()).unwrap();
    let arguments = [&["explain", "-", "--config", file.to_str().unwrap()], flags].concat();
    let matches = explain::command().try_get_matches_from(arguments).unwrap();
    let mut output = vec![];
    let code = explain::run(&matches, request.as_bytes(), &mut output).unwrap();
    let code = [0, 1].into_iter().find(|known| code == (*known).into()).unwrap();
    (String::from_utf8(output).unwrap(), code)
}

const ONE_DOLLAR: Nanodollars = Nanodollars(1_000_000_000);

const TABLE: &str = r#"
granted = ["core__get_current_time", "core__metrics_query"]
metrics = { url = "http://127.0.0.1:9" }
[[rules]]
name = "clock"
tool = "core__get_current_time"
price_usd = "0.2"
[[rules]]
name = "dear"
tool = "core__metrics_query"
price_usd = "5"
[connections.dear]
url = "https://localhost:9"
allow_private_addresses = true
allow = ["GET /**"]
price_usd = "5"
[connections.cheap]
url = "https://localhost:9"
allow_private_addresses = true
allow = ["GET /x"]
price_usd = "0.2"
"#;
