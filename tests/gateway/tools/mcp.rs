//! Tests of the endpoint for clients of MCP: both eras, the same policy, budget and records as `/tool/exec`, and every
//! message that could be read in two ways.

use std::fs;
use std::sync::{Arc, Mutex};

use cogni_gateway::gateway::run::ToolSettings;
use cogni_gateway::runner::tool_opener::RunToolOpener;
use cogni_gateway::sandbox::spec::MountAccess;
use cogni_gateway::tools::job::{JobCall, JobFuture, JobRunner};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::{
    CLOCK, METRICS, PRICED_CLOCK, accept_query, answer_query, app_with, execute_tool,
    metrics_table, read_response, start_app,
};
use crate::support::app::TestApp;
use crate::support::client::TestResponse;
use crate::support::raw_upstream;

/// Sends a message of the legacy era.
async fn post_legacy(app: &TestApp, path: &str, method: &str, params: Value) -> TestResponse {
    let message = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    app.client().post_with(path, &message, &[("mcp-protocol-version", "2025-11-25")]).await
}

/// Sends a message of the modern era, with the headers that repeat it.
async fn post_modern(app: &TestApp, path: &str, method: &str, mut params: Value) -> TestResponse {
    params["_meta"] = modern_meta();
    let name = params["name"].as_str().unwrap_or_default().to_owned();
    let message = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    let mut headers = vec![("mcp-protocol-version", "2026-07-28"), ("mcp-method", method)];
    if !name.is_empty() {
        headers.push(("mcp-name", &name));
    }
    app.client().post_with(path, &message, &headers).await
}

fn modern_meta() -> Value {
    json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    })
}

/// Returns the status and the code of a response: of its error, or of its failed call.
fn format_outcome(response: &TestResponse) -> String {
    let status = response.status.as_u16();
    let Ok(answer) = serde_json::from_slice::<Value>(&response.body) else {
        return format!("{status} {}", String::from_utf8_lossy(&response.body)).trim_end().into();
    };
    let code = &answer["error"]["code"];
    match answer["result"]["_meta"]["cogni-gateway/call"]["code"].as_str() {
        Some(code) => format!("{status} {code}"),
        None if code.is_null() => format!("{status} result"),
        None => format!("{status} {}", code.to_string().trim_matches('"')),
    }
}

/// Returns the body of a response without the version of this program.
fn read_without_version(response: &TestResponse) -> Value {
    let text = String::from_utf8(response.body.to_vec()).unwrap();
    serde_json::from_str(&text.replace(env!("CARGO_PKG_VERSION"), "…")).unwrap()
}

/// Sends a body as it stands, with some headers, and returns the outcome.
async fn send(app: &TestApp, body: &str, headers: &[(&str, &str)]) -> String {
    let mut all = vec![("content-type", "application/json")];
    all.extend(headers);
    format_outcome(&app.client().ask(Method::POST, "/mcp", body, &all).await)
}

fn events(records: &[Value], event: &str) -> usize {
    records.iter().filter(|record| record["event"] == event).count()
}

/// T2: a legacy client opens, lists and calls; the endpoint has no session.
#[tokio::test]
async fn a_legacy_client_lists_and_calls() {
    let app = start_app(PRICED_CLOCK).await;
    let opened = app
        .client()
        .post(
            "/mcp",
            &json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
                "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"},
            }}),
        )
        .await;
    assert!(!opened.headers.contains_key("mcp-session-id"));
    insta::assert_json_snapshot!(read_without_version(&opened), @r#"
    {
      "id": 0,
      "jsonrpc": "2.0",
      "result": {
        "capabilities": {
          "tools": {}
        },
        "protocolVersion": "2025-06-18",
        "serverInfo": {
          "name": "cogni-gateway",
          "version": "…"
        }
      }
    }
    "#);
    let initialized = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    let accepted = app.client().post("/mcp", &initialized).await;
    assert_eq!((accepted.status, accepted.body.len()), (StatusCode::ACCEPTED, 0));
    assert!(!accepted.headers.contains_key("content-type"));
    let pong = post_legacy(&app, "/mcp", "ping", json!({})).await;
    assert_eq!(read_response(&pong).1, json!({"jsonrpc": "2.0", "id": 1, "result": {}}));
    insta::assert_json_snapshot!(read_response(&post_legacy(&app, "/mcp", "tools/list", json!({})).await).1, @r#"
    {
      "id": 1,
      "jsonrpc": "2.0",
      "result": {
        "tools": [
          {
            "description": "Returns the current time in UTC.",
            "inputSchema": {
              "additionalProperties": false,
              "type": "object"
            },
            "name": "core__get_current_time"
          }
        ]
      }
    }
    "#);
    let called =
        post_legacy(&app, "/mcp", "tools/call", json!({"name": CLOCK, "arguments": {}})).await;
    let result = &read_response(&called).1["result"];
    assert_eq!(result["isError"], false);
    let text: Value = serde_json::from_str(result["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(text["unix_seconds"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(result["_meta"]["cogni-gateway/call"]["cost_usd"], "0.002");
    assert!(result.get("resultType").is_none());
    app.stop().await;
}

/// T2: a modern client discovers, lists and calls, each request complete in itself.
#[tokio::test]
async fn a_modern_client_lists_and_calls() {
    let app = start_app(PRICED_CLOCK).await;
    let discovered = post_modern(&app, "/mcp", "server/discover", json!({})).await;
    insta::assert_json_snapshot!(read_without_version(&discovered), @r#"
    {
      "id": 1,
      "jsonrpc": "2.0",
      "result": {
        "_meta": {
          "io.modelcontextprotocol/serverInfo": {
            "name": "cogni-gateway",
            "version": "…"
          }
        },
        "cacheScope": "private",
        "capabilities": {
          "tools": {}
        },
        "resultType": "complete",
        "supportedVersions": [
          "2026-07-28",
          "2025-11-25",
          "2025-06-18",
          "2025-03-26",
          "2024-11-05"
        ],
        "ttlMs": 0
      }
    }
    "#);
    let listed = read_response(&post_modern(&app, "/mcp", "tools/list", json!({})).await).1;
    let result = &listed["result"];
    assert_eq!(result["tools"][0]["name"], CLOCK);
    assert_eq!(
        (&result["resultType"], &result["ttlMs"], &result["cacheScope"]),
        (&json!("complete"), &json!(0), &json!("private"))
    );
    let called =
        read_response(&post_modern(&app, "/mcp", "tools/call", json!({"name": CLOCK})).await).1;
    assert_eq!(called["result"]["resultType"], "complete");
    assert_eq!(called["result"]["isError"], false);
    app.stop().await;
}

/// T2, T5: a call has the same records and the same budget, whichever path it takes.
#[tokio::test]
async fn a_call_over_mcp_is_a_call() {
    let app = start_app(PRICED_CLOCK).await;
    assert_eq!(execute_tool(&app, json!({"tool": CLOCK})).await.0, 200);
    let call = json!({"name": CLOCK, "arguments": {}});
    assert_eq!(
        format_outcome(&post_modern(&app, "/mcp", "tools/call", call.clone()).await),
        "200 result"
    );
    let spent = "tool_call_budget_exhausted";
    assert_eq!(
        format_outcome(&post_modern(&app, "/mcp", "tools/call", call.clone()).await),
        format!("200 {spent}")
    );
    assert_eq!(
        format_outcome(&post_legacy(&app, "/mcp", "tools/call", call).await),
        format!("200 {spent}")
    );
    assert_eq!(execute_tool(&app, json!({"tool": CLOCK})).await.1["error"]["code"], spent);
    let records = app.stop().await;
    let of = |event| records.iter().filter(|record| record["event"] == event).collect::<Vec<_>>();
    let without_id = |record: &Value| {
        let mut record = record.clone();
        for name in ["seq", "time", "call", "prev", "hash", "pid"] {
            record.as_object_mut().unwrap().remove(name);
        }
        record
    };
    let admitted = of("tool.admitted");
    assert_eq!(admitted.len(), 2);
    assert_eq!(without_id(admitted[0]), without_id(admitted[1]));
    assert_eq!(of("tool.settled").len(), 2);
    let refused = of("tool.refused");
    assert_eq!(refused.len(), 3);
    assert!(refused.iter().all(|record| without_id(record) == without_id(refused[0])));
}

/// T2, T7: an unknown tool and one that is not granted answer alike; a rule's refusal is a result that the model reads.
#[tokio::test]
async fn the_policy_holds_over_mcp() {
    let (_listener, address) = raw_upstream::listen_locally().await;
    let rule =
        "rules = [{ name = 'own', tool = 'core__metrics_query', when = 'args.query == \"up\"' }]";
    let app =
        start_app(&metrics_table(address, "").replace("granted", &format!("{rule}\ngranted")))
            .await;
    let ask = async |name: &str, arguments: Value| {
        post_modern(&app, "/mcp", "tools/call", json!({"name": name, "arguments": arguments})).await
    };
    let ungranted = ask(CLOCK, json!({})).await;
    insta::assert_json_snapshot!(read_response(&ungranted).1, @r#"
    {
      "error": {
        "code": -32602,
        "message": "unknown tool; `tools/list` names the tools that this run may call"
      },
      "id": 1,
      "jsonrpc": "2.0"
    }
    "#);
    for unknown in ["no_such_tool", "Not A Name", "../etc"] {
        assert_eq!(read_response(&ask(unknown, json!({})).await), read_response(&ungranted));
    }
    let denied = read_response(&ask(METRICS, json!({"query": "secrets"})).await).1;
    insta::assert_json_snapshot!(denied["result"]["content"], @r#"
    [
      {
        "text": "policy_denied: the rule `own` does not allow this call",
        "type": "text"
      }
    ]
    "#);
    insta::assert_json_snapshot!(denied["result"]["_meta"]["cogni-gateway/call"], @r#"
    {
      "code": "policy_denied",
      "layer": "tool",
      "rule": "own"
    }
    "#);
    assert_eq!(denied["result"]["isError"], true);
    assert_eq!(format_outcome(&ask(METRICS, json!({})).await), "200 invalid_arguments");
    assert_eq!(format_outcome(&ask(METRICS, json!([])).await), "400 -32602");
    let records = app.stop().await;
    assert_eq!((events(&records, "tool.refused"), events(&records, "tool.admitted")), (7, 0));
}

/// T2: each server has a path, on which its tools have their own names.
#[tokio::test]
async fn one_server_has_its_own_names() {
    let app = start_app(PRICED_CLOCK).await;
    let names = async |path: &str| {
        let listed = read_response(&post_legacy(&app, path, "tools/list", json!({})).await).1;
        let tools = listed["result"]["tools"].as_array().unwrap().clone();
        tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names("/mcp/core").await, ["get_current_time"]);
    // A server that does not exist answers like one without a granted tool.
    assert_eq!(names("/mcp/github").await, Vec::<String>::new());
    assert_eq!(names("/mcp/cor").await, Vec::<String>::new());
    let call = async |path: &str, name: &str| {
        format_outcome(&post_modern(&app, path, "tools/call", json!({"name": name})).await)
    };
    assert_eq!(call("/mcp/core", "get_current_time").await, "200 result");
    assert_eq!(call("/mcp/core", CLOCK).await, "200 -32602");
    assert_eq!(call("/mcp/github", "get_current_time").await, "200 -32602");
    for path in ["/mcp/", "/mcp/core/", "/mcp/../tool/list", "/mcp/CORE", "/mcp/%63ore", "/mcpx"] {
        assert_eq!(post_legacy(&app, path, "tools/list", json!({})).await.status, 404, "{path}");
    }
    let records = app.stop().await;
    assert_eq!(events(&records, "tool.admitted"), 1);
}

/// T2: no tool runs if a header and the body could be read as two requests.
#[tokio::test]
async fn headers_that_contradict_the_body_run_nothing() {
    let app = start_app(PRICED_CLOCK).await;
    let params = json!({"name": CLOCK, "_meta": modern_meta()});
    let modern =
        json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).to_string();
    let params = json!({"name": CLOCK});
    let legacy =
        json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).to_string();
    let version = ("mcp-protocol-version", "2026-07-28");
    let method = ("mcp-method", "tools/call");
    let name = ("mcp-name", CLOCK);
    let mut outcomes = vec![];
    for (said, headers) in contradicting_headers() {
        outcomes.push(format!("{said}: {}", send(&app, &modern, &headers).await));
    }
    for (said, headers) in [
        ("legacy, modern version", vec![version, method, name]),
        ("legacy, unknown version", vec![("mcp-protocol-version", "2024-01-01")]),
        ("legacy, another method", vec![("mcp-method", "tools/list")]),
        ("legacy, another name", vec![("mcp-name", METRICS)]),
    ] {
        outcomes.push(format!("{said}: {}", send(&app, &legacy, &headers).await));
    }
    insta::assert_snapshot!(outcomes.join("\n"), @r"
    no headers: 400 -32020
    no version: 400 -32020
    no method: 400 -32020
    no name: 400 -32020
    another version: 400 -32020
    an unknown version: 400 -32020
    another method: 400 -32020
    a method in capitals: 400 -32020
    an encoded method: 400 -32020
    another name: 400 -32020
    an empty name: 400 -32020
    another name in Base64: 400 -32020
    Base64 without its end: 400 -32020
    Base64 without padding: 400 -32020
    no Base64: 400 -32020
    text that is not UTF-8: 400 -32020
    two versions: 400 -32020
    two methods: 400 -32020
    two names: 400 -32020
    a name that is not ASCII: 400 -32020
    legacy, modern version: 400 -32602
    legacy, unknown version: 400 -32022
    legacy, another method: 400 -32020
    legacy, another name: 400 -32020
    ");
    // A refused list is no call, and a name that nothing repeats is no contradiction.
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).to_string();
    assert_eq!(send(&app, &list, &[name]).await, "200 result");
    let encoded = ("mcp-name", "=?base64?Y29yZV9fZ2V0X2N1cnJlbnRfdGltZQ==?=");
    assert_eq!(send(&app, &modern, &[version, method, encoded]).await, "200 result");
    let records = app.stop().await;
    assert_eq!(events(&records, "tool.admitted"), 1);
    assert!(events(&records, "tool.refused") >= 20);
}

/// Returns headers of a modern call of [`CLOCK`] that contradict its body, each with a name.
fn contradicting_headers() -> Vec<(&'static str, Vec<(&'static str, &'static str)>)> {
    let version = ("mcp-protocol-version", "2026-07-28");
    let method = ("mcp-method", "tools/call");
    let name = ("mcp-name", CLOCK);
    vec![
        ("no headers", vec![]),
        ("no version", vec![method, name]),
        ("no method", vec![version, name]),
        ("no name", vec![version, method]),
        ("another version", vec![("mcp-protocol-version", "2025-11-25"), method, name]),
        ("an unknown version", vec![("mcp-protocol-version", "2027-01-01"), method, name]),
        ("another method", vec![version, ("mcp-method", "tools/list"), name]),
        ("a method in capitals", vec![version, ("mcp-method", "TOOLS/CALL"), name]),
        ("an encoded method", vec![version, ("mcp-method", "=?base64?dG9vbHMvY2FsbA==?="), name]),
        ("another name", vec![version, method, ("mcp-name", METRICS)]),
        ("an empty name", vec![version, method, ("mcp-name", "")]),
        ("another name in Base64", vec![version, method, ("mcp-name", "=?base64?Y2xvY2s=?=")]),
        (
            "Base64 without its end",
            vec![version, method, ("mcp-name", "=?base64?Y29yZV9fZ2V0X2N1cnJlbnRfdGltZQ==")],
        ),
        (
            "Base64 without padding",
            vec![version, method, ("mcp-name", "=?base64?Y29yZV9fZ2V0X2N1cnJlbnRfdGltZQ?=")],
        ),
        ("no Base64", vec![version, method, ("mcp-name", "=?base64?!?=")]),
        ("text that is not UTF-8", vec![version, method, ("mcp-name", "=?base64?/w==?=")]),
        ("two versions", vec![version, version, method, name]),
        ("two methods", vec![version, method, ("mcp-method", "tools/list"), name]),
        ("two names", vec![version, method, ("mcp-name", METRICS), name]),
        ("a name that is not ASCII", vec![version, method, ("mcp-name", "ü")]),
    ]
}

/// T2: a message that is not exactly one request or notification runs nothing.
#[tokio::test]
async fn a_doubtful_message_runs_nothing() {
    let app = start_app(PRICED_CLOCK).await;
    let mut outcomes = vec![];
    for body in [
        "",
        "null",
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"core__get_current_time"}"#,
        r#"[{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"core__get_current_time"}}]"#,
        r#"{"jsonrpc":"2.0","method":"tools/call","params":{"name":"core__get_current_time"}}"#,
        r#"{"jsonrpc":"2.0","id":null,"method":"tools/call","params":{"name":"core__get_current_time"}}"#,
        r#"{"jsonrpc":"2.0","id":1.5,"method":"tools/call","params":{"name":"core__get_current_time"}}"#,
        r#"{"jsonrpc":"2.0","id":{},"method":"tools/call","params":{"name":"core__get_current_time"}}"#,
        r#"{"jsonrpc":"1.0","id":1,"method":"tools/call","params":{"name":"core__get_current_time"}}"#,
        r#"{"id":1,"method":"tools/call","params":{"name":"core__get_current_time"}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"core__get_current_time"},"result":{}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":["core__get_current_time"]}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":7,"params":{}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","method":"ping","params":{"name":"core__get_current_time"}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"core__get_current_time","arguments":{"a":1,"\u0061":2}}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":7}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"core__get_current_time","_meta":[]}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"core__get_current_time","arguments":"{}"}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"cursor":"2"}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"notifications/initialized"}"#,
    ] {
        outcomes.push(send(&app, body, &[]).await);
    }
    insta::assert_snapshot!(outcomes.join("\n"), @r"
    400 -32700
    400 -32600
    400 -32700
    400 -32600
    400 -32600
    400 -32600
    400 -32600
    400 -32600
    400 -32600
    400 -32600
    400 -32600
    400 -32600
    400 -32600
    400 -32600
    400 -32700
    400 -32700
    400 -32602
    400 -32602
    400 -32602
    400 -32602
    400 -32602
    200 -32601
    ");
    let records = app.stop().await;
    assert_eq!(events(&records, "tool.admitted"), 0);
}

/// T2: a page of another origin, another HTTP method and another content type run nothing.
#[tokio::test]
async fn a_request_of_another_kind_runs_nothing() {
    let app = start_app(PRICED_CLOCK).await;
    let valid = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"core__get_current_time"}}"#;
    for origin in [
        "http://evil.example",
        "null",
        "http://localhost.evil.example",
        "http://evil.example:8080",
        "file://",
    ] {
        assert_eq!(send(&app, valid, &[("origin", origin)]).await, "403 -32600", "{origin}");
    }
    let client = app.client();
    for method in [Method::GET, Method::DELETE, Method::PUT, Method::OPTIONS] {
        let answer = client.ask(method.clone(), "/mcp", "", &[]).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.headers["allow"]),
            (405, &"POST".parse().unwrap()),
            "{method}"
        );
    }
    let text = [("content-type", "text/plain")];
    assert_eq!(client.ask(Method::POST, "/mcp", valid, &text).await.status, 415);
    assert_eq!(send(&app, valid, &[("origin", "http://localhost:8080")]).await, "200 result");
    let records = app.stop().await;
    assert_eq!(events(&records, "tool.admitted"), 1);
}

/// T2: a message's era is in the message, and an unknown version learns which ones are served.
#[tokio::test]
async fn the_era_is_chosen_for_each_message() {
    let app = start_app("granted = ['core__get_current_time']").await;
    let mut outcomes = vec![];
    for (header, version, method) in [
        ("", "", "tools/list"),
        ("2024-11-05", "", "tools/list"),
        ("2025-03-26", "", "ping"),
        ("2025-11-25", "", "resources/list"),
        ("2025-11-25", "", "server/discover"),
        ("2026-07-28", "", "tools/list"),
        ("2026-07-28", "", "initialize"),
        ("2031-01-01", "", "tools/list"),
        ("2026-07-28", "2026-07-28", "tools/list"),
        ("2026-07-28", "2026-07-28", "initialize"),
        ("2026-07-28", "2026-07-28", "ping"),
        ("2026-07-28", "2026-07-28", "resources/list"),
        ("2025-11-25", "2025-11-25", "tools/list"),
        ("2031-01-01", "2031-01-01", "tools/list"),
    ] {
        let mut params = json!({"protocolVersion": "2026-07-28"});
        if !version.is_empty() {
            params["_meta"] = modern_meta();
            params["_meta"]["io.modelcontextprotocol/protocolVersion"] = version.into();
        }
        let body =
            json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string();
        let headers = [("mcp-method", method), ("mcp-protocol-version", header)];
        let headers = if header.is_empty() { &headers[..1] } else { &headers[..] };
        outcomes.push(format!("{header} {version} {method}: {}", send(&app, &body, headers).await));
    }
    insta::assert_snapshot!(outcomes.join("\n"), @r"
      tools/list: 200 result
    2024-11-05  tools/list: 200 result
    2025-03-26  ping: 200 result
    2025-11-25  resources/list: 200 -32601
    2025-11-25  server/discover: 400 -32602
    2026-07-28  tools/list: 400 -32602
    2026-07-28  initialize: 200 result
    2031-01-01  tools/list: 400 -32022
    2026-07-28 2026-07-28 tools/list: 200 result
    2026-07-28 2026-07-28 initialize: 404 -32601
    2026-07-28 2026-07-28 ping: 404 -32601
    2026-07-28 2026-07-28 resources/list: 404 -32601
    2025-11-25 2025-11-25 tools/list: 400 -32022
    2031-01-01 2031-01-01 tools/list: 400 -32022
    ");
    let mut params = json!({"_meta": modern_meta()});
    params["_meta"]["io.modelcontextprotocol/protocolVersion"] = "2031-01-01".into();
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": params});
    let headers = [("mcp-method", "tools/list"), ("mcp-protocol-version", "2031-01-01")];
    let unsupported = app.client().post_with("/mcp", &body, &headers).await;
    insta::assert_json_snapshot!(read_response(&unsupported).1["error"], @r#"
    {
      "code": -32022,
      "data": {
        "requested": "2031-01-01",
        "supported": [
          "2026-07-28",
          "2025-11-25",
          "2025-06-18",
          "2025-03-26",
          "2024-11-05"
        ]
      },
      "message": "this version of the protocol is not served"
    }
    "#);
    // Negotiation is no refusal of a call.
    let records = app.stop().await;
    assert_eq!(events(&records, "tool.refused"), 0);
}

/// T2: the response has the id that the client wrote, digit by digit.
#[tokio::test]
async fn an_id_comes_back_unchanged() {
    let app = start_app("granted = []").await;
    for id in ["0", "-7", "123456789012345678901234567890", r#""a\u0062\"c""#, r#""""#] {
        let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#);
        let json_type = [("content-type", "application/json")];
        let answer = app.client().ask(Method::POST, "/mcp", &body, &json_type).await;
        let text = String::from_utf8(answer.body.to_vec()).unwrap();
        assert_eq!(text, format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{}}}}"#));
    }
    // An error has the id if the id could be read.
    let answer = read_response(&app.client().post("/mcp", &json!({"id": 7})).await).1;
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(7), &json!(-32600)));
    let answer = read_response(&app.client().post("/mcp", &json!({"id": null})).await).1;
    assert!(answer.get("id").is_none(), "{answer}");
    app.stop().await;
}

/// T2: a client that closes its connection loses no call: the call ends, is settled once, and can be asked for.
#[tokio::test]
async fn a_client_of_mcp_that_leaves_loses_no_call() {
    let (listener, address) = raw_upstream::listen_locally().await;
    let app = start_app(&metrics_table(address, "")).await;
    let client = app.client();
    let message = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": METRICS, "arguments": {"query": "up"},
    }});
    let leaving = tokio::spawn(async move { client.post("/mcp", &message).await });
    let (mut stream, _) = accept_query(&listener).await;
    leaving.abort();
    let admitted = app.recorded("tool.admitted", 1).await;
    answer_query(&mut stream, r#"{"status":"success","data":[]}"#).await;
    let path = format!("/tool/exec/{}?wait=1m", admitted[0]["call"].as_str().unwrap());
    assert_eq!(read_response(&app.client().get(&path).await).1["status"], "completed");
    let records = app.stop().await;
    assert_eq!(events(&records, "tool.settled"), 1);
}

/// T2: a tool outside of this process receives the arguments as the client wrote them.
#[tokio::test]
async fn a_job_receives_the_clients_own_bytes() {
    let tools = tempfile::tempdir().unwrap();
    let tool = "name = 'text__count'\ndescription = 'Counts'\nargv = ['/bin/true', '${ARGUMENTS_FILE}']\n[parameters.properties]\nz = { type = 'number' }\na = { type = 'string' }\n";
    fs::write(tools.path().join("text__count.toml"), tool).unwrap();
    let jobs = Arc::new(RecordedJobs::default());
    let opener = RunToolOpener {
        jobs: Some(Arc::clone(&jobs) as Arc<dyn JobRunner>),
        ..RunToolOpener::default()
    };
    let directory = tools.path().display();
    let table = format!("granted = ['text__count']\ndirectory = '{directory}'");
    let app = app_with("", |config| {
        let table = Some(toml::from_str(&table).unwrap());
        config.tools =
            ToolSettings { table, opener: Some(Arc::new(opener)), ..ToolSettings::default() };
    })
    .await;
    let arguments = r#"{ "z":1.50,"a" : "\u0061\/é" }"#;
    let over_mcp = format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"text__count","arguments":{arguments}}}}}"#
    );
    assert_eq!(send(&app, &over_mcp, &[]).await, "200 result");
    let over_exec = format!(r#"{{"tool":"text__count","arguments":{arguments}}}"#);
    let json_type = [("content-type", "application/json")];
    let executed = app.client().ask(Method::POST, "/tool/exec", &over_exec, &json_type).await;
    assert_eq!(executed.status, 200);
    assert_eq!(*jobs.0.lock().unwrap(), [arguments, arguments]);
    let records = app.stop().await;
    let admitted: Vec<_> =
        records.iter().filter(|record| record["event"] == "tool.admitted").collect();
    assert_eq!(admitted[0]["arguments"], admitted[1]["arguments"]);
}

/// A runner of jobs that runs nothing and keeps the arguments of each call.
#[derive(Default)]
struct RecordedJobs(Mutex<Vec<String>>);

impl JobRunner for RecordedJobs {
    fn run_job(&self, call: JobCall) -> JobFuture {
        self.0.lock().unwrap().push(call.arguments);
        Box::pin(async { Ok("\"done\"".to_owned()) })
    }

    fn workspace_access(&self) -> Option<MountAccess> {
        None
    }
}
