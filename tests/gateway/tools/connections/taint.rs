//! T9: Tests of taint rules about connections: their use is a mark, and a run that has seen a mark may not use them.

use std::sync::Arc;
use std::time::SystemTime;

use cogni_gateway::runner::tool_opener::RunToolOpener;
use futures_util::future::join_all;
use http::StatusCode;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::super::approvals::{decision, open_store};
use super::super::{CLOCK, execute_tool, tool_settings};
use super::aws::{KEY, KeyFile};
use super::server::{Answer, SecureServer};
use super::tunnel::{HOST, open_tunnel, start_tunnelled};
use super::{app_with, code_of, start_app};

fn rule(marks: &str, tools: &str, effect: &str) -> String {
    format!(
        "[taint]\nmarks = {{ {marks} }}\n[[taint.rules]]\nname = 'no-way-out'\nwhen = 'run.saw.seen'\n\
         tools = [{tools}]\nthen = '{effect}'\nmatch = [['seen']]\nnot_match = [[]]\n"
    )
}

/// A run that has used a marked tool may not use the guarded connection any more, and nothing is sent.
#[tokio::test]
async fn a_run_that_has_seen_a_mark_may_not_use_a_connection() {
    let server = SecureServer::start().await;
    let open = "allow = ['GET /**']\n";
    let tables = server.table("api", open) + &server.table("free", open);
    let taint = rule(&format!("{CLOCK} = 'seen'"), "'connect__api'", "deny");
    let app = start_app(&format!("granted = ['{CLOCK}']\n{tables}{taint}")).await;
    assert_eq!(code_of(&app.client().get("/connect/api/a").await), "200 -");
    assert_eq!(execute_tool(&app, json!({"tool": CLOCK})).await.0, StatusCode::OK);
    for _ in 0..2 {
        let refused = app.client().get("/connect/api/a").await;
        assert_eq!(code_of(&refused), "403 policy_denied");
        let error = &refused.json()["error"];
        assert_eq!((&error["layer"], &error["rule"]), (&json!("connection"), &json!("no-way-out")));
    }
    assert_eq!(code_of(&app.client().get("/connect/free/a").await), "200 -");
    assert_eq!(server.seen().len(), 2);
    // A refused request costs nothing.
    assert_eq!(app.run.ledger.connection_spending()["api"].requests, 1);
    let records = app.stop().await;
    let refused: Vec<_> =
        records.iter().filter(|record| record["event"] == "connect.refused").collect();
    assert!(refused.iter().all(|record| record["rule"] == "no-way-out"), "{refused:?}");
}

trait Stream: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Stream for T {}

/// Writes to an upload, and returns the whole answer if the client asks for it.
async fn finish(stream: &mut Box<dyn Stream>, rest: &str) -> String {
    stream.write_all(rest.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    let mut answer = vec![];
    // A tunnel may end without the farewell of TLS.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

/// T9, G11: a body that was open before the run saw a mark does not carry what the run has seen: directly, in a tunnel,
/// and if it is signed as a whole. Another connection's body goes on, and so does that of a marked connection's first
/// request.
#[tokio::test]
async fn an_open_upload_ends_when_the_run_sees_a_mark() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let (key, open) = (KeyFile::new(&KEY), "allow = ['POST /**']\n");
    let tables = server.table("api", &format!("{open}tunnel = true"))
        + &server.table("aws", &key.lines("execute-api", ""))
        + &server.table("own", open)
        + &server.table("free", open);
    let marks = format!("{CLOCK} = 'seen', connect__own = 'own'");
    let taint = rule(&marks, "'connect__a*'", "deny")
        + "[[taint.rules]]\nname = 'once'\nwhen = 'run.saw.own'\ntools = ['connect__own']\n\
           then = 'deny'\nmatch = [['own']]\n";
    let app = start_tunnelled(&format!("granted = ['{CLOCK}']\n{tables}{taint}")).await;
    let chunked = "transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n";
    let (end, counted) = ("9\r\nprivate-x\r\n0\r\n\r\n", "content-length: 12\r\n\r\nabc");
    let (denied, passed) = ("HTTP/1.1 403", "HTTP/1.1 200");
    let cases = [
        ("/connect/api/a", chunked, end, denied),
        ("/a", chunked, end, denied),
        ("/connect/api/a", counted, "private-x", denied),
        ("/connect/aws/a", counted, "private-x", denied),
        ("/connect/own/a", chunked, end, passed),
        ("/connect/free/a", chunked, end, passed),
    ];
    let mut uploads = vec![];
    for (path, body, rest, expected) in cases {
        let mut stream: Box<dyn Stream> = match path {
            "/a" => Box::new(open_tunnel(&app, &server.authority()).await),
            _ => Box::new(app.client().connect().await),
        };
        let host = if path == "/a" { server.authority() } else { "localhost".to_owned() };
        let head = format!("POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{body}");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        uploads.push((stream, path, rest, expected));
    }
    app.recorded("connect.admitted", uploads.len()).await;
    assert_eq!(execute_tool(&app, json!({"tool": CLOCK})).await.0, StatusCode::OK);
    for (stream, path, rest, expected) in &mut uploads {
        let answer = finish(stream, rest).await;
        assert!(answer.starts_with(*expected), "{path}: {answer}");
        assert_eq!(answer.contains("policy_denied"), *expected == denied, "{path}: {answer}");
    }
    let seen: Vec<_> = server.seen().into_iter().map(|request| request.body).collect();
    assert_eq!(seen, ["abcprivate-x", "abcprivate-x"]);
    let settled = app.recorded("connect.settled", uploads.len()).await;
    let denied: Vec<_> = settled.iter().filter(|record| record["outcome"] == "denied").collect();
    assert!(denied.iter().all(|record| record["bytes_out"].as_u64() <= Some(3)), "{denied:?}");
    assert_eq!(denied.len(), 4, "{settled:?}");
    app.stop().await;
}

/// The use of a marked connection is seen, also if its server does not answer; a refused request is not.
#[tokio::test]
async fn a_connections_use_sets_a_mark() {
    let server = SecureServer::start().await;
    let table = server.table("api", "allow = ['GET /a']\n");
    let taint = rule("connect__api = 'seen'", &format!("'{CLOCK}'"), "deny");
    let app = start_app(&format!("granted = ['{CLOCK}']\n{table}{taint}")).await;
    let call = || execute_tool(&app, json!({"tool": CLOCK}));
    assert_eq!(code_of(&app.client().get("/connect/api/b").await), "403 policy_denied");
    assert_eq!(call().await.0, StatusCode::OK);
    assert_eq!(code_of(&app.client().get("/connect/api/a").await), "200 -");
    let (status, denied) = call().await;
    assert_eq!((status, &denied["error"]["rule"]), (StatusCode::FORBIDDEN, &json!("no-way-out")));
    app.stop().await;
}

/// A run that has used a marked connection asks a person about a tool.
#[tokio::test]
async fn a_tool_asks_when_a_connection_was_used() {
    let server = SecureServer::start().await;
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path());
    let opener = RunToolOpener { approvals: Some(store.clone()), ..RunToolOpener::default() };
    let taint = rule("connect__api = 'seen'", "'core__*'", "ask");
    let table = server.table("api", "allow = ['GET /a']\n");
    let app = app_with(&format!("granted = ['{CLOCK}']\n{table}{taint}"), |config| {
        config.tools.opener = Some(Arc::new(opener));
    })
    .await;
    let call = || execute_tool(&app, json!({"tool": CLOCK, "wait": "0s"}));
    assert_eq!(call().await.0, StatusCode::OK);
    app.client().get("/connect/api/a").await;
    let (status, pending) = call().await;
    assert_eq!(status, StatusCode::ACCEPTED);
    let id = pending["approval"]["id"].as_str().unwrap();
    let row = store.find(id).await.unwrap().unwrap();
    assert_eq!(row.rule, "no-way-out");
    store.decide(id, decision(true, &row.digest), SystemTime::now()).await.unwrap();
    let path = format!("/tool/exec/{}?wait=1m", pending["id"].as_str().unwrap());
    assert_eq!(app.client().get(&path).await.json()["status"], "completed");
    app.stop().await;
}

/// Of racing requests over a connection that may be used only by a run that has not used it, at most one is sent.
#[tokio::test]
async fn racing_requests_see_each_other() {
    let server = SecureServer::start().await;
    let taint = rule("connect__api = 'seen'", "'connect__*'", "deny");
    let app = start_app(&(server.table("api", "allow = ['GET /a']\n") + &taint)).await;
    let client = app.client();
    let asked = join_all((0..24).map(|_| client.get("/connect/api/a"))).await;
    let sent = asked.iter().filter(|answer| answer.status == 200).count();
    assert!(sent <= 1 && server.seen().len() == sent, "{sent} were sent");
    app.stop().await;
}

/// A rule that no connection can follow, and a name that does not exist, are refused when the table is loaded.
#[test]
fn a_wrong_rule_about_a_connection_is_refused() {
    let connection = "[connections.api]\nurl = 'https://api.example.com'\n";
    let with = |marks: &str, tools: &str, effect: &str| {
        format!("granted = ['{CLOCK}']\n{connection}{}", rule(marks, tools, effect))
    };
    let clock = format!("{CLOCK} = 'seen'");
    let tables = [
        with("connect__other = 'seen'", "'*'", "deny"),
        with("api = 'seen'", "'*'", "deny"),
        with(&clock, "'connect__other'", "deny"),
        with(&clock, "'connect__api'", "ask"),
        with(&clock, "'*'", "ask"),
        format!("granted = ['connect__clock']\n{connection}"),
    ];
    let errors: Vec<_> =
        tables.iter().map(|table| tool_settings(table).check().unwrap_err().to_string()).collect();
    insta::assert_snapshot!(errors.join("\n"));
    for (tools, effect) in [("'*'", "deny"), ("'connect__*'", "deny"), ("'core__*'", "ask")] {
        let table = with("connect__api = 'seen'", tools, effect);
        let checked = tool_settings(&table).check();
        assert!(checked.is_ok(), "{tools} {effect}: {checked:?}");
    }
}
