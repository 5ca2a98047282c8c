//! Tests of servers that attack the gateway: its memory, its log, its credential and its rules.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fs, str};

use base64::prelude::*;
use cogni_gateway::tools::exec_request::ToolExecRequest;
use cogni_gateway::tools::mcp_server::lock_file::definition_digest;
use cogni_gateway::tools::pinned_tool::PinnedTool;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use super::{FakeServer, search, search_over_mcp};
use crate::support::allocations::peak_bytes;
use crate::tools::{app_with, execute_tool, read_response, start_app};

/// Returns a page with one tool whose definition has as many values as fit into 900 KiB.
fn heavy_page(name: &str) -> String {
    let values = vec![r#"{"":0}"#; (900 << 10) / 7].join(",");
    format!(r#"{{"name":"{name}","x":[{values}]}}"#)
}

/// Starts a server in a thread of its own, so that a test sees the gateway's side of a call alone.
fn start_on_own_thread() -> (Runtime, FakeServer) {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = runtime.block_on(FakeServer::start());
    (runtime, server)
}

fn pinned_tool(digest: String) -> PinnedTool {
    PinnedTool {
        server: "tracker".to_owned(),
        name: "search".to_owned(),
        digest,
        input_schema: json!({}),
        job: None,
    }
}

/// The log of a test.
#[derive(Clone, Default)]
struct LogBuffer(Arc<Mutex<Vec<u8>>>);

impl Write for LogBuffer {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// T2: a list of tools costs the gateway a bounded number of bytes and of requests, wherever the tool stands in it.
#[tokio::test]
async fn a_long_list_of_tools_is_not_read_to_its_end() {
    let server = FakeServer::start().await;
    let app = server.lock_and_serve().await;
    // No page behind the tool is asked for.
    server.change(|state| {
        state.pages = (0..10).map(|page| heavy_page(&format!("t{page}"))).collect();
    });
    assert_eq!(search(&app).await["status"], "completed");
    assert_eq!(server.seen("tools/list").len(), 1);
    // A tool that does not come within 4 MiB is not found: after the first page there are four whole ones.
    server.change(|state| state.definition["name"] = json!("other"));
    let failed = search(&app).await;
    assert_eq!(failed["error"]["message"], "the tool's server does not answer as it should");
    assert_eq!(server.seen("tools/list").len(), 1 + 6);
    // A page has no more than 1 MiB.
    server.change(|state| state.pages = vec![[heavy_page("t"), heavy_page("u")].join(",")]);
    assert_eq!(search(&app).await["error"]["code"], "tool_failed");
    assert_eq!(server.seen("tools/call").len(), 1);
    app.stop().await;
}

/// T2: a definition with many values is not parsed, whatever the rest of it says.
#[tokio::test]
async fn a_definition_with_too_many_values_runs_nothing() {
    let server = FakeServer::start().await;
    let app = server.lock_and_serve().await;
    server.change(|state| state.definition["_meta"] = json!(vec![0; 8000]));
    assert_eq!(search(&app).await["status"], "completed");
    server.change(|state| state.definition["_meta"] = json!(vec![0; 9000]));
    assert_eq!(search(&app).await["error"]["code"], "tool_failed");
    assert_eq!(server.seen("tools/call").len(), 1);
    let listed = server.client().list_tools().await.unwrap_err();
    insta::assert_snapshot!(listed, @"the server's answer is not valid: a tool's definition, which is too large");
    app.stop().await;
}

/// T2: the memory of a call is a small multiple of what a server may send, however the list is made.
#[test]
fn a_list_of_tools_takes_little_memory() {
    let (_others, server) = start_on_own_thread();
    server.change(|state| {
        state.definition["name"] = json!("other");
        state.pages = (0..3).map(|page| heavy_page(&format!("t{page}"))).collect();
    });
    let own = Builder::new_current_thread().enable_all().build().unwrap();
    let tool = pinned_tool(String::new());
    let client = server.client();
    let called = peak_bytes(|| {
        let error = own.block_on(client.call_tool(&tool, "{}", 1024)).unwrap_err();
        assert_eq!(error.code, "tool_definition_changed");
    });
    assert!(called < 12 << 20, "{called} bytes for a call");
    let listed = peak_bytes(|| drop(own.block_on(client.list_tools()).unwrap_err()));
    assert!(listed < 12 << 20, "{listed} bytes for a list");
}

/// T6: a server that repeats a part of its header fails the call, however it spells the part and wherever it cuts it.
#[tokio::test]
async fn no_spelling_of_a_credential_reaches_the_agent() {
    let server = FakeServer::start().await;
    let app = server.lock_and_serve().await;
    let set_header =
        |value: &str| fs::write(server.directory.path().join("key"), format!("{value}\n")).unwrap();
    let text = |text: &str| json!({"content": [{"type": "text", "text": text}]});
    let (bearer, key) = ("Bearer ghp_SECRET_SECRET_01", "ghp_SECRET_SECRET_01");
    let cookie = "session=ghp_SECRET_SECRET_01; theme=dark1";
    let basic = format!("Basic {}", BASE64_STANDARD.encode("admin:hunter2-hunter2"));
    let in_json = json!({"headers": {"a": bearer}}).to_string().replace('_', "\\u005f");
    let mut padded = json!({"isError": true});
    padded["content"] = text(&format!("{}{key}", "x".repeat(4097 - key.len())))["content"].clone();
    let repeated = [
        (bearer, text(bearer)),
        ("Bearer ghp_SECRET_SECRET_01 ", text(bearer)),
        (cookie, text("session=ghp_SECRET_SECRET_01")),
        (bearer, text(&BASE64_STANDARD.encode(bearer))),
        (bearer, text(&BASE64_STANDARD.encode(format!("authorization: {bearer}")))),
        (bearer, text(&BASE64_URL_SAFE_NO_PAD.encode(format!("{{\"k\":\"{key}\"}}")))),
        (&basic, text("admin:hunter2-hunter2")),
        (&basic, text("the password is hunter2-hunter2")),
        (bearer, text(&in_json)),
        (bearer, text(&json!(in_json).to_string())),
        (bearer, text(&key.replace('_', "%5F"))),
        (bearer, json!({"structuredContent": {"a": [{key: true}]}})),
        (bearer, padded),
    ];
    for (header, result) in repeated {
        set_header(header);
        server.change(|state| state.result = result.clone());
        let failed = search(&app).await;
        let message = "the tool's server does not answer as it should";
        assert_eq!(failed["error"]["message"], message, "{header}: {result}");
        let over_mcp = search_over_mcp(&app).await.to_string();
        assert!(!over_mcp.contains("SECRET") && !over_mcp.contains("hunter2"), "{over_mcp}");
    }
    // What is around a secret is none.
    set_header(cookie);
    server.change(|state| state.result = text("Bearer session theme=dark1 ghp_SECRET"));
    assert_eq!(search(&app).await["status"], "completed");
    app.stop().await;
}

/// T6: a server that repeats the header in the error of its protocol gives the agent nothing either.
#[tokio::test]
async fn a_refusal_repeats_no_credential() {
    let server = FakeServer::start().await;
    let app = server.lock_and_serve().await;
    let key = "sk-upstream-0123456789";
    for message in [key.to_owned(), format!("{}{key}", "x".repeat(513 - key.len()))] {
        server.change(|state| state.refusal = Some(json!({"code": -32000, "message": message})));
        let failed = search(&app).await;
        assert!(!failed.to_string().contains("sk-up"), "{failed}");
    }
    server
        .change(|state| state.refusal = Some(json!({"code": -32000, "message": "no such issue"})));
    assert_eq!(search(&app).await["error"]["message"], "the tool's server refuses: no such issue");
    app.stop().await;
}

/// T2: the log of failed calls has a line a minute for each kind of failure, and no text of the server or the agent.
#[test]
fn a_server_cannot_write_the_log() {
    let (_others, server) = start_on_own_thread();
    let digest = definition_digest(&server.state.lock().unwrap().definition);
    let (client, tool) = (server.client(), pinned_tool(digest));
    let own = Builder::new_current_thread().enable_all().build().unwrap();
    let text = "forged\u{1b}[2J line ".repeat(10_000);
    let log = LogBuffer::default();
    let writer = log.clone();
    let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
    tracing::subscriber::with_default(lines.finish(), || {
        for _ in 0..3 {
            server.change(|state| state.refusal = Some(json!({"code": -32000, "message": text})));
            let refused = own.block_on(client.call_tool(&tool, "{}", 1 << 20)).unwrap_err();
            assert!(refused.message.len() < 600, "{}", refused.message.len());
            server.change(|state| {
                state.refusal = None;
                state.result =
                    json!({"isError": true, "content": [{"type": "text", "text": text}]});
            });
            own.block_on(client.call_tool(&tool, "{}", 1 << 20)).unwrap_err();
        }
    });
    let log = log.0.lock().unwrap();
    let log = str::from_utf8(&log).unwrap();
    assert_eq!(log.lines().count(), 2, "{log}");
    assert!(log.len() < 1000 && !log.contains("forged"), "{log}");
    assert!(log.contains("-32000") && log.contains("tool_failed"), "{log}");
}

/// G15: the arguments of an open call count among the bytes of the run's bodies, also when its client has left.
#[tokio::test]
async fn the_arguments_of_open_calls_are_counted() {
    let server = FakeServer::start().await;
    server.lock().await;
    let app = app_with(&server.table(), |config| {
        config.policy.max_body_bytes = 1 << 20;
        config.server.max_run_body_bytes = 1 << 20;
    })
    .await;
    server.change(|state| state.is_hanging = true);
    let arguments = json!({"query": "x".repeat(200_000)});
    let call = json!({"tool": "tracker__search", "arguments": arguments, "wait": "0s"});
    let over_mcp = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": "tracker__search", "arguments": arguments,
    }});
    let mut open = vec![];
    for _ in 0..3 {
        let (status, started) = execute_tool(&app, call.clone()).await;
        assert_eq!(status, 202, "{started}");
        open.push(started["id"].as_str().unwrap().to_owned());
    }
    // A client of MCP leaves when its call has begun.
    let client = app.client();
    let leaving = tokio::spawn(async move { client.post("/mcp", &over_mcp).await });
    while server.seen("tools/list").len() < 1 + 4 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    leaving.abort();
    let (status, refused) = execute_tool(&app, call.clone()).await;
    assert_eq!((status.as_u16(), &refused["error"]["code"]), (429, &json!("overloaded")));
    // Each call that ends makes room.
    server.change(|state| state.is_hanging = false);
    for id in open {
        let ended = app.client().get(&format!("/tool/exec/{id}?wait=10s")).await;
        assert_eq!(read_response(&ended).1["status"], "completed");
    }
    assert_eq!(search(&app).await["status"], "completed");
    app.stop().await;
}

/// G15: requests that wait hold the text of their arguments, and not the values.
#[test]
fn waiting_arguments_take_the_memory_of_their_text() {
    let body = |values: usize| {
        let values = vec![r#"{"":0}"#; values / 2].join(",");
        format!(r#"{{"tool":"a__b","arguments":{{"x":[{values}]}}}}"#)
    };
    let small = body(8000);
    let taken = peak_bytes(|| {
        let held: Vec<_> =
            (0..64).map(|_| ToolExecRequest::parse_body(small.as_bytes(), "r").unwrap()).collect();
        assert!(held.iter().all(|request| request.arguments.members().len() == 1));
    });
    assert!(taken < 12 << 20, "{taken} bytes");
    let refused = ToolExecRequest::parse_body(body(9000).as_bytes(), "r").unwrap_err();
    insta::assert_snapshot!(format!("{} {refused}", refused.code()), @"json_too_complex the request body is not acceptable JSON: more than 8192 values");
}

/// T2: a call has only the arguments that the pinned schema allows, under the names that a condition reads.
#[tokio::test]
async fn an_argument_has_one_name() {
    let server = FakeServer::start().await;
    let mut schema = json!({
        "type": "object",
        "properties": {"owner": {"type": "string"}, "page-size": {"type": "integer"}},
    });
    for (is_closed, more, is_allowed) in [
        (false, json!({}), true),
        (false, json!({"page-size": 7}), true),
        (false, json!({"other": 1}), true),
        (false, json!({"Owner": "evil"}), false),
        (false, json!({"o_wner": "evil"}), false),
        (false, json!({"page-\u{17f}ize": 7}), false),
        (true, json!({"page-size": 7}), true),
        (true, json!({"Owner": "evil"}), false),
        (true, json!({"other": 1}), false),
    ] {
        schema["additionalProperties"] = (!is_closed).into();
        server.change(|state| state.definition["inputSchema"] = schema.clone());
        server.lock().await;
        let rule =
            "[[rules]]\nname = 'mine'\ntool = 'tracker__search'\nwhen = 'args.owner == \"acme\"'\n";
        let app = start_app(&(server.table() + rule)).await;
        let mut arguments = json!({"owner": "acme"});
        arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let call = json!({"tool": "tracker__search", "arguments": arguments});
        let (status, answer) = execute_tool(&app, call).await;
        let code = if is_allowed { Value::Null } else { json!("invalid_arguments") };
        assert_eq!(answer["error"]["code"], code, "{arguments}: {status} {answer}");
        app.stop().await;
    }
}
