//! Tests of the tools on a run's socket: who may call, what a call costs, what is recorded, and how a tool ends.

mod approval_list;
mod approvals;
mod approved_programs;
mod budget_questions;
pub(crate) mod connections;
mod explained_requests;
mod mcp;
mod mcp_server;
mod policy;
mod progress;
mod recovery;
mod standing;
mod taint;
mod webhook;

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::process::GatewayProcess;
use cogni_gateway::gateway::run::{AgentToolSettings, ToolSettings};
use cogni_gateway::llm::budget::Nanodollars;
use cogni_gateway::runner::tool_opener::RunToolOpener;
use cogni_gateway::telemetry::access_log::AccessLogDestination;
use futures_util::future::join_all;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};

use crate::support::app::{TestApp, run_config};
use crate::support::client::{TestResponse, UntakenReplies};
use crate::support::raw_upstream;

/// Returns the settings of a `[tools]` table.
/// Returns the settings of an agent whose file lists these tools.
fn agent_listing(tools: &[&str]) -> AgentToolSettings {
    let tools = tools.iter().map(|tool| (*tool).to_owned()).collect();
    AgentToolSettings { tools, ..AgentToolSettings::default() }
}

fn tool_settings(table: &str) -> ToolSettings {
    let table = Some(toml::from_str(table).unwrap());
    ToolSettings {
        table,
        opener: Some(Arc::new(RunToolOpener::default())),
        ..ToolSettings::default()
    }
}

pub(crate) async fn start_app(table: &str) -> TestApp {
    app_with(table, |_| ()).await
}

async fn app_with(table: &str, configure: impl FnOnce(&mut GatewayConfig)) -> TestApp {
    TestApp::with(|config| {
        config.tools = tool_settings(table);
        configure(config);
        config.validate().unwrap();
    })
    .await
}

async fn execute_tool(app: &TestApp, body: Value) -> (StatusCode, Value) {
    read_response(&app.client().post("/tool/exec", &body).await)
}

fn read_response(response: &TestResponse) -> (StatusCode, Value) {
    (response.status, serde_json::from_slice(&response.body).unwrap())
}

/// Accepts one query of the metrics tool, and returns its connection and its first line.
async fn accept_query(listener: &TcpListener) -> (TcpStream, String) {
    let (mut stream, _) = listener.accept().await.unwrap();
    let request = raw_upstream::read_request(&mut stream).await;
    (stream, request.lines().next().unwrap().to_owned())
}

async fn answer_query(stream: &mut TcpStream, body: &str) {
    let length = body.len();
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
    raw_upstream::send_text(stream, &format!("{head}{body}")).await;
}

fn metrics_table(address: impl std::fmt::Display, more: &str) -> String {
    format!("granted = ['core__metrics_query']\nmetrics = {{ url = 'http://{address}', {more} }}\n")
}

/// T1: the list shows what is granted, with the rule and the price; a call returns a result and is found in the audit.
#[tokio::test]
async fn a_granted_tool_is_listed_called_and_recorded() {
    let app = start_app(PRICED_CLOCK).await;
    let (status, listed) = read_response(&app.client().get("/tool/list").await);
    assert_eq!(status, 200);
    insta::assert_json_snapshot!(listed, @r#"
    {
      "tools": [
        {
          "description": "Returns the current time in UTC.",
          "left": {
            "calls": 2,
            "cost_usd": null
          },
          "limits": {
            "calls": 2
          },
          "name": "core__get_current_time",
          "parameters": {
            "type": "object"
          },
          "price_usd": "0.002",
          "rules": [
            "clock"
          ]
        }
      ]
    }
    "#);
    let (status, called) = execute_tool(&app, json!({"tool": CLOCK, "arguments": {}})).await;
    assert_eq!((status, &called["status"]), (StatusCode::OK, &json!("completed")));
    assert!(called["result"]["unix_seconds"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(called["cost_usd"], "0.002");
    // The result can be asked for again.
    let path = format!("/tool/exec/{}", called["id"].as_str().unwrap());
    assert_eq!(read_response(&app.client().get(&path).await), (StatusCode::OK, called.clone()));
    let metrics = app.run.ledger.spent_amount().cost;
    assert_eq!(metrics, Nanodollars(2_000_000));
    let records = app.stop().await;
    let of = |event: &str| records.iter().find(|record| record["event"] == event).unwrap();
    let (admitted, settled) = (of("tool.admitted"), of("tool.settled"));
    assert_eq!((&admitted["call"], &settled["call"]), (&called["id"], &called["id"]));
    assert_eq!(admitted["rules"], json!(["clock"]));
    assert_eq!(
        (&settled["outcome"], &settled["charged"]["cost_usd"]),
        (&json!("completed"), &json!("0.002"))
    );
    assert_eq!(of("run.finished")["spent"]["cost_usd"], "0.002");
}

/// T1: an unknown tool and one that is not granted answer alike; only the operator's records tell the layers.
#[tokio::test]
async fn unknown_and_ungranted_tools_answer_alike() {
    let app = app_with("granted = ['core__get_current_time']", |config| {
        config.tools.agent = Some(agent_listing(&[]).into());
    })
    .await;
    let unlisted = execute_tool(&app, json!({"tool": CLOCK})).await;
    insta::assert_json_snapshot!(unlisted.1, @r#"
    {
      "error": {
        "code": "policy_denied",
        "layer": "run",
        "message": "this run may not call this tool; `GET /tool/list` names the tools that it may call",
        "rule": "granted",
        "type": "tool_error"
      }
    }
    "#);
    assert_eq!(unlisted.0, 403);
    assert_eq!(execute_tool(&app, json!({"tool": "core__metrics_query"})).await, unlisted);
    assert_eq!(
        execute_tool(&app, json!({"tool": "no_such_tool", "arguments": {"a": 1}})).await,
        unlisted
    );
    assert_eq!(read_response(&app.client().get("/tool/list").await).1, json!({"tools": []}));
    let refused: Vec<_> = app.recorded("tool.refused", 3).await;
    assert!(refused.iter().all(|record| record["layer"] == "agent" && record["rule"] == "granted"));
    app.stop().await;
}

/// T1: the socket is the run; what can be read in two ways, or names another run, is refused.
#[tokio::test]
async fn a_doubtful_request_is_refused() {
    let app = start_app(PRICED_CLOCK).await;
    let client = app.client();
    let json_type = [("content-type", "application/json")];
    let mut refused = vec![];
    for body in [
        r#"{"tool":"core__get_current_time","run_id":"run-2"}"#,
        r#"{"tool":"core__get_current_time","tool":"x"}"#,
        r#"{"tool":"core__get_current_time","arguments":{"a":{"b":1,"b":2}}}"#,
        r#"{"tool":"core__get_current_time","arguments":{"a":1}}"#,
        r#"{"tool":"core__get_current_time","argument":{}}"#,
        r#"{"tool":"../etc"}"#,
        r#"{"tool":"core__get_current_time","wait":"forever"}"#,
        r#"{"tool":"core__get_current_time""#,
    ] {
        let (status, answer) =
            read_response(&client.ask(Method::POST, "/tool/exec", body, &json_type).await);
        refused.push(format!("{} {}", status.as_u16(), answer["error"]["code"].as_str().unwrap()));
    }
    insta::assert_snapshot!(refused.join("\n"), @r"
    403 run_mismatch
    400 duplicate_key
    400 duplicate_key
    400 invalid_arguments
    400 invalid_request
    400 invalid_request
    400 invalid_request
    400 invalid_json
    ");
    let own = r#"{"tool":"core__get_current_time","run_id":"run-1"}"#;
    assert_eq!(client.ask(Method::POST, "/tool/exec", own, &json_type).await.status, 200);
    for (method, path) in [
        (Method::GET, "/tool/exec/nothing"),
        (Method::GET, "/tool/"),
        (Method::DELETE, "/tool/exec"),
        (Method::GET, "/tool/%6cist"),
        (Method::GET, "/tool/../run/status"),
    ] {
        assert_eq!(client.ask(method, path, "", &[]).await.status, 404, "{path}");
    }
    let large = json!({"tool": CLOCK, "arguments": {"a": "x".repeat(300_000)}});
    assert_eq!(client.post("/tool/exec", &large).await.status, 413);
    app.stop().await;
}

/// T3: A tool that needs a sandbox of its own stops only those runs without one that may call it.
#[tokio::test]
async fn a_tool_that_needs_a_sandbox_stops_only_runs_that_may_call_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = "name = 't__job'\ndescription = 'A job.'\nargv = ['/usr/bin/true']\n";
    std::fs::write(directory.path().join("t__job.toml"), file).unwrap();
    let shown = directory.path().display();
    let table = format!("granted = ['t__job', 'core__get_current_time']\ndirectory = '{shown}'");
    let settings = |agent: &str| {
        let agent = Some(agent_listing(&[agent]).into());
        ToolSettings { agent, ..tool_settings(&table) }
    };
    let app = TestApp::with(|config| config.tools = settings(CLOCK)).await;
    assert_eq!(execute_tool(&app, json!({"tool": CLOCK})).await.0, 200);
    let mut config = run_config(directory.path(), app.upstream.addr);
    config.tools = settings("t__job");
    let refused = GatewayProcess::build_process(config).map(drop).unwrap_err();
    app.stop().await;
    let refused = format!("{refused:#}");
    assert!(refused.contains("the tool `t__job` needs a sandbox"), "{refused}");
}

/// G15: a reply of a tool is in flight until the client has taken it.
#[tokio::test]
async fn tool_replies_that_no_client_takes_count_as_requests_in_flight() {
    let app = app_with("granted = ['core__get_current_time']", |config| {
        config.server.max_requests = 3;
    })
    .await;
    let lists = UntakenReplies::get(&app.socket, "/tool/list", 3).await;
    let (status, refused) = read_response(&app.client().get("/tool/list").await);
    assert_eq!((status.as_u16(), &refused["error"]["code"]), (429, &json!("overloaded")));
    drop(lists);
    while app.client().get("/tool/list").await.status != 200 {}
    app.stop().await;
}

/// G2: the access log names the route of a tool request, without the parts that a client chooses.
#[tokio::test]
async fn the_access_log_names_the_routes_of_tools() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("access.log");
    let app = app_with(PRICED_CLOCK, |config| {
        config.access_log = AccessLogDestination::File(file.clone());
    })
    .await;
    for path in ["/tool/list", "/tool/exec/secret", "/mcp/secret", "/tool/secret"] {
        app.client().get(path).await;
    }
    assert_eq!(execute_tool(&app, json!({"tool": CLOCK})).await.0, 200);
    app.client().post("/mcp", &json!({"jsonrpc": "2.0", "id": 1, "method": "ping"})).await;
    app.stop().await;
    let log = std::fs::read_to_string(&file).unwrap();
    assert!(!log.contains("secret"), "{log}");
    let words = log.lines().filter_map(|line| line.split(" uri=").nth(1)?.split(' ').next());
    let mut uris: Vec<_> = words.collect();
    uris.sort_unstable();
    assert_eq!(uris, ["-", "/mcp", "/mcp/SERVER", "/tool/exec", "/tool/exec/ID", "/tool/list"]);
}

/// T1: a run without a table of tools has no such routes.
#[tokio::test]
async fn without_tools_there_is_no_route() {
    let app = TestApp::start().await;
    assert_eq!(app.client().get("/tool/list").await.status, 404);
    assert_eq!(app.client().post("/mcp", &json!({})).await.status, 404);
    app.stop().await;
}

/// T5: of many calls at once, no more are admitted than the tool's budget allows.
#[tokio::test]
async fn racing_calls_share_one_budget() {
    let app = start_app(PRICED_CLOCK).await;
    let calls = (0..32).map(|_| execute_tool(&app, json!({"tool": CLOCK})));
    let statuses: Vec<_> = join_all(calls).await.into_iter().map(|(status, _)| status).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 2, "{statuses:?}");
    let (status, answer) = execute_tool(&app, json!({"tool": CLOCK})).await;
    assert_eq!(
        (status, answer["error"]["code"].as_str().unwrap()),
        (StatusCode::PAYMENT_REQUIRED, "tool_call_budget_exhausted")
    );
    app.stop().await;
}

/// T5: tools and models spend one budget of money.
#[tokio::test]
async fn a_tool_cannot_spend_what_a_model_has_spent() {
    let app = app_with(PRICED_CLOCK, |config| {
        config.budget.max_cost_usd = Nanodollars::parse("0.003");
    })
    .await;
    assert_eq!(execute_tool(&app, json!({"tool": CLOCK})).await.0, 200);
    let (status, answer) = execute_tool(&app, json!({"tool": CLOCK})).await;
    assert_eq!(
        (status, answer["error"]["code"].as_str().unwrap()),
        (StatusCode::PAYMENT_REQUIRED, "cost_budget_exhausted")
    );
    assert_eq!(app.run.ledger.spent_amount().cost, Nanodollars(2_000_000));
    app.stop().await;
}

/// T1: the same idempotency key joins the same call, and never another one.
#[tokio::test]
async fn an_idempotency_key_makes_one_call() {
    let (listener, address) = raw_upstream::listen_locally().await;
    let app = start_app(&metrics_table(address, "")).await;
    let body = |query: &str| json!({"tool": METRICS, "arguments": {"query": query}, "idempotency_key": "k", "wait": "0s"});
    let (status, first) = execute_tool(&app, body("up")).await;
    assert_eq!((status, &first["status"]), (StatusCode::ACCEPTED, &json!("pending")));
    assert_eq!(execute_tool(&app, body("up")).await.1["id"], first["id"]);
    let (status, other) = execute_tool(&app, body("down")).await;
    assert_eq!(
        (status, &other["error"]["code"]),
        (StatusCode::CONFLICT, &json!("idempotency_conflict"))
    );
    // The result comes to a client that asks for it later.
    let (mut stream, line) = accept_query(&listener).await;
    assert_eq!(line, "GET /api/v1/query?limit=1000&query=up HTTP/1.1");
    let path = format!("/tool/exec/{}?wait=1m", first["id"].as_str().unwrap());
    let client = app.client();
    let waiting = tokio::spawn(async move { read_response(&client.get(&path).await) });
    answer_query(
        &mut stream,
        r#"{"status":"success","data":{"resultType":"scalar","result":[1,"2"]}}"#,
    )
    .await;
    let (status, ended) = waiting.await.unwrap();
    assert_eq!((status, &ended["result"]["result"]), (StatusCode::OK, &json!([1, "2"])));
    let records = app.stop().await;
    let admitted = records.iter().filter(|record| record["event"] == "tool.admitted").count();
    assert_eq!(admitted, 1);
}

/// T1: a tool that hangs, floods or fails ends with a code, and the run goes on.
#[tokio::test]
async fn a_bad_tool_ends_typed_and_bounded() {
    let (listener, address) = raw_upstream::listen_locally().await;
    let app =
        start_app(&metrics_table(address, "timeout = '300ms', max_result_bytes = 1000")).await;
    let call = || execute_tool(&app, json!({"tool": METRICS, "arguments": {"query": "up"}}));
    let code = |answer: (StatusCode, Value)| {
        format!(
            "{} {} {}",
            answer.0.as_u16(),
            answer.1["status"].as_str().unwrap(),
            answer.1["error"]["code"].as_str().unwrap()
        )
    };
    // The server never answers, answers without an end, refuses, and talks nonsense.
    let (hung, held) = tokio::join!(call(), accept_query(&listener));
    assert_eq!(code(hung), "200 failed tool_timeout");
    drop(held);
    for (answer, expected) in [
        ("x".repeat(50_000), "200 failed tool_output_too_large"),
        (r#"{"status":"error","error":"bad query"}"#.to_owned(), "200 failed tool_failed"),
        ("{".to_owned(), "200 failed tool_failed"),
    ] {
        let serve = async {
            let (mut stream, _) = accept_query(&listener).await;
            answer_query(&mut stream, &answer).await;
        };
        let (answer, ()) = tokio::join!(call(), serve);
        assert_eq!(code(answer), expected);
    }
    assert_eq!(app.client().get("/health").await.status, 200);
    let settled = app.recorded("tool.settled", 4).await;
    let outcomes: Vec<_> = settled.iter().map(|record| record["outcome"].clone()).collect();
    assert_eq!(outcomes, ["timed_out", "output_too_large", "failed", "failed"]);
    app.stop().await;
}

/// T1: a server that sends interim responses without end fails the call, and holds no thread beyond the tool's timeout.
#[tokio::test]
async fn interim_responses_without_end_fail_a_tool_call() {
    let (listener, address) = raw_upstream::listen_locally().await;
    let app = start_app(&metrics_table(address, "timeout = '5s'")).await;
    // A thread of its own goes on while the runtime does not.
    let listener = listener.into_std().unwrap();
    listener.set_nonblocking(false).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let interim = "HTTP/1.1 100 Continue\r\n\r\n".repeat(1000);
        for _ in 0..10_000 {
            if stream.write_all(interim.as_bytes()).is_err() {
                return true;
            }
        }
        false
    });
    let (status, answer) =
        execute_tool(&app, json!({"tool": METRICS, "arguments": {"query": "up"}})).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::OK, &json!("tool_failed")));
    assert!(server.join().unwrap(), "the connection is closed long before the server ends");
    app.stop().await;
}

/// T1: a client that leaves changes nothing: its call ends, is settled once, and can be asked for.
#[tokio::test]
async fn a_client_that_leaves_loses_no_call() {
    let (listener, address) = raw_upstream::listen_locally().await;
    let app = start_app(&metrics_table(address, "")).await;
    let client = app.client();
    let body = json!({"tool": METRICS, "arguments": {"query": "up"}});
    let leaving = tokio::spawn(async move { client.post("/tool/exec", &body).await });
    let (mut stream, _) = accept_query(&listener).await;
    leaving.abort();
    let admitted = app.recorded("tool.admitted", 1).await;
    answer_query(&mut stream, r#"{"status":"success","data":[]}"#).await;
    let path = format!("/tool/exec/{}?wait=1m", admitted[0]["call"].as_str().unwrap());
    assert_eq!(read_response(&app.client().get(&path).await).1["status"], "completed");
    let records = app.stop().await;
    let settled = records.iter().filter(|record| record["event"] == "tool.settled").count();
    assert_eq!(settled, 1);
}

/// T1, G15: open tool calls are bounded, and a call beyond the bound takes nothing.
#[tokio::test]
async fn open_tool_calls_are_bounded() {
    let (listener, address) = raw_upstream::listen_locally().await;
    let app = start_app(&metrics_table(address, "timeout = '10m'")).await;
    let body = json!({"tool": METRICS, "arguments": {"query": "up"}, "wait": "0s"});
    for _ in 0..8 {
        assert_eq!(execute_tool(&app, body.clone()).await.0, 202);
    }
    let (status, answer) = execute_tool(&app, body.clone()).await;
    let code = answer["error"]["code"].as_str().unwrap();
    assert_eq!((status, code), (StatusCode::TOO_MANY_REQUESTS, "too_many_tool_calls"));
    assert_eq!(app.run.ledger.tool_spending()[METRICS].calls, 8);
    // One call ends, and another may begin.
    let (mut stream, _) = accept_query(&listener).await;
    answer_query(&mut stream, r#"{"status":"success","data":1}"#).await;
    app.recorded("tool.settled", 1).await;
    assert_eq!(execute_tool(&app, body).await.0, 202);
    drop(listener);
    app.run.control.abort_calls();
    app.stop().await;
}

/// T1, G15: the ends of the last calls are kept, and older ones are forgotten.
#[tokio::test]
async fn the_oldest_ends_of_tool_calls_are_forgotten() {
    let app = start_app("granted = ['core__get_current_time']").await;
    let mut ids = vec![];
    for _ in 0..66 {
        let (_, called) = execute_tool(&app, json!({"tool": CLOCK})).await;
        ids.push(called["id"].as_str().unwrap().to_owned());
    }
    let client = app.client();
    let status = async |id: &str| client.get(&format!("/tool/exec/{id}")).await.status;
    assert_eq!(
        (status(&ids[1]).await, status(&ids[2]).await),
        (StatusCode::NOT_FOUND, StatusCode::OK)
    );
    app.stop().await;
}

/// T1: an operator who pauses the run pauses its tools, too.
#[tokio::test]
async fn a_paused_run_calls_no_tool() {
    let app = start_app(PRICED_CLOCK).await;
    app.run.control.set_state(cogni_gateway::gateway::run::control::RunControlState::Paused);
    let (status, answer) = execute_tool(&app, json!({"tool": CLOCK})).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (StatusCode::TOO_MANY_REQUESTS, &json!("run_paused"))
    );
    app.run.control.set_state(cogni_gateway::gateway::run::control::RunControlState::Open);
    assert_eq!(execute_tool(&app, json!({"tool": CLOCK})).await.0, 200);
    app.stop().await;
}

/// T1: a run that an operator has ended calls no tool any more, and says so.
#[tokio::test]
async fn an_ended_run_calls_no_tool_any_more() {
    let app = start_app(PRICED_CLOCK).await;
    app.run.control.set_state(cogni_gateway::gateway::run::control::RunControlState::Draining);
    let response = app.client().post("/tool/exec", &json!({"tool": CLOCK})).await;
    assert_eq!(response.headers["x-should-retry"], "false");
    let (status, answer) = read_response(&response);
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::FORBIDDEN, &json!("run_ended")));
    app.stop().await;
}

/// T1, T2: no page of another machine uses the tools, on any of their paths.
#[tokio::test]
async fn a_page_of_another_origin_uses_no_tool() {
    let app = start_app("granted = ['core__get_current_time']").await;
    let list = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
    let call = json!({"tool": CLOCK}).to_string();
    let requests = [
        (Method::POST, "/mcp", list),
        (Method::POST, "/tool/exec", call.as_str()),
        (Method::GET, "/tool/list", ""),
    ];
    let ask = async |origin: &str| {
        let headers = [("content-type", "application/json"), ("origin", origin)];
        let mut statuses = vec![];
        for (method, path, body) in &requests {
            let response = app.client().ask(method.clone(), path, body, &headers).await;
            statuses.push(response.status.as_u16());
        }
        statuses
    };
    for own in
        ["http://localhost", "https://LOCALHOST:8443", "http://127.0.0.1:1", "http://[::1]:80"]
    {
        assert_eq!(ask(own).await, [200, 200, 200], "{own}");
    }
    for foreign in [
        "null",
        "localhost",
        "http://evil.example",
        "chrome-extension://localhost",
        "http://localhost:99999",
        "http://localhost:",
        "http://localhost/x",
        "http://a@localhost",
        "http://localhost.evil.example",
    ] {
        assert_eq!(ask(foreign).await, [403, 403, 403], "{foreign}");
    }
    app.stop().await;
}

/// T5: the end of a run ends its open tool calls, and settles them.
#[tokio::test]
async fn the_end_of_a_run_ends_its_tools() {
    let (listener, address) = raw_upstream::listen_locally().await;
    let app = app_with(&metrics_table(address, "timeout = '10m'"), |config| {
        config.drain_timeout = Duration::from_millis(50);
    })
    .await;
    let body = json!({"tool": METRICS, "arguments": {"query": "up"}, "wait": "0s"});
    assert_eq!(execute_tool(&app, body).await.0, 202);
    let _held = accept_query(&listener).await;
    let records = app.stop().await;
    let settled = records.iter().find(|record| record["event"] == "tool.settled").unwrap();
    assert_eq!(
        (&settled["outcome"], &settled["code"]),
        (&json!("shut_down"), &json!("tool_stopped"))
    );
}

const CLOCK: &str = "core__get_current_time";
const METRICS: &str = "core__metrics_query";

const PRICED_CLOCK: &str = "
    granted = ['core__get_current_time']
    [[rules]]
    name = 'clock'
    tool = 'core__get_current_time'
    price_usd = '0.002'
    budget = { calls = 2 }
";
