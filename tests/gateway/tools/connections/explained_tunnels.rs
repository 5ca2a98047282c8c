//! `explain` and a served run give the same answer to requests for tunnels, and to the requests in them.

use std::iter;
use std::sync::Arc;

use cogni_gateway::llm::budget::Nanodollars;
use cogni_gateway::runner::tool_opener::RunToolOpener;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use super::server::{Answer, SecureServer};
use super::tunnel::{HOST, ask, connect, local_lookup};
use crate::support::app::TestApp;
use crate::tools::app_with;
use crate::tools::explained_requests::explain_in_table;

/// The host of a connection that costs more than the run may spend. Nothing listens there.
const DEAR_HOST: &str = "dear.example.test:9";

/// Asserts that the answer of a served run is the one that `explain` predicts. Returns true if the answer is a refusal.
fn assert_predicted(table: &str, request: &str, answer: &str) -> bool {
    let (explained, code) = explain_in_table(table, request);
    let is_allowed = answer.starts_with("HTTP/1.1 200");
    let predicted = (&explained["allowed"], code);
    assert_eq!(predicted, (&json!(is_allowed), u8::from(!is_allowed)), "{request}\n{answer}");
    if !is_allowed {
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        let body: Value = serde_json::from_str(body).unwrap();
        for part in ["code", "message"] {
            assert_eq!(body["error"][part], explained[part], "{request}");
        }
    }
    !is_allowed
}

async fn start_run(table: &str) -> TestApp {
    app_with(table, |config| {
        config.budget.max_cost_usd = Some(Nanodollars(1_000_000_000));
        let opener = RunToolOpener { lookup: Some(local_lookup()), ..RunToolOpener::default() };
        config.tools.opener = Some(Arc::new(opener));
    })
    .await
}

fn connect_request(target: &str, headers: &str) -> String {
    format!("CONNECT {target} HTTP/1.1\r\n{headers}\r\n")
}

fn tunnel_table(server: &SecureServer) -> String {
    let more = "allow = ['GET /a', 'GET /connect/*']\ntunnel = true\nprice_usd = '0.01'";
    server.table("api", more)
        + &format!(
            "[connections.dear]\nurl = 'https://{DEAR_HOST}'\nallow_private_addresses = true\n\
             allow = ['GET /a']\ntunnel = true\nprice_usd = '5'\n"
        )
}

/// G13, T6: for each request for a tunnel, `explain` gives the code and the message of the socket.
#[tokio::test]
async fn explain_predicts_which_tunnels_open() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let (table, own) = (tunnel_table(&server), server.authority());
    let app = start_run(&table).await;
    let requests = [
        connect_request(&own, ""),
        connect_request(&own.to_uppercase(), ""),
        connect_request(&own, "content-length: 0\r\n"),
        connect_request(DEAR_HOST, ""),
        connect_request("other.example.test:443", ""),
        connect_request(&format!("{HOST}:443"), ""),
        connect_request("127.0.0.1:9", ""),
        connect_request(&format!("user@{own}"), ""),
        connect_request(HOST, ""),
        connect_request("/connect/api/a", ""),
        connect_request(&format!("https://{own}/"), ""),
        connect_request(&own, "host: a\r\nhost: b\r\n"),
        connect_request(&own, "content-length: 3\r\n"),
        connect_request(&own, "transfer-encoding: chunked\r\n"),
        connect_request(&own, "origin: https://evil.example\r\n"),
        connect_request(&own, "connection: upgrade\r\nupgrade: websocket\r\n"),
        connect_request(&own, "connection: upgrade\r\nupgrade: h2c\r\n"),
    ];
    let mut refused = 0;
    for request in requests {
        let (mut stream, mut answer) = connect(&app, &request).await;
        if !answer.starts_with("HTTP/1.1 200") {
            let length = answer.split("content-length: ").nth(1).unwrap();
            let mut body = vec![0; length.split("\r\n").next().unwrap().parse().unwrap()];
            stream.read_exact(&mut body).await.unwrap();
            answer += &String::from_utf8(body).unwrap();
        }
        refused += u32::from(assert_predicted(&table, &request, &answer));
    }
    assert_eq!(refused, 12);
    app.stop().await;
}

/// G13, T6: for each request in a tunnel, `explain` gives the code and the message of the socket.
#[tokio::test]
async fn explain_predicts_the_answers_in_a_tunnel() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let (table, own) = (tunnel_table(&server), server.authority());
    let app = start_run(&table).await;
    let get = |target: &str, headers: &str| {
        format!("GET {target} HTTP/1.1\r\n{headers}connection: close\r\n\r\n")
    };
    let host = format!("host: {own}\r\n");
    let requests = [
        get("/a", &host),
        get("/connect/ca.pem", &host),
        get("/b", &host),
        get("/tool/list", &host),
        get("/a//b", &host),
        get("/a?access_token=x", &host),
        get("/a", ""),
        get("/a", "host: other.example.test\r\n"),
        get("/a", &host.repeat(2)),
        get("/a", &format!("{host}origin: https://evil.example\r\n")),
        get("/a", &format!("{host}origin: https://{own}\r\n")),
        get("/a", &format!("{host}upgrade: websocket\r\n")),
        get(&format!("https://{own}/a"), &host),
        get("http://localhost/a", &host),
        get("/a", &host).replacen("GET", "DELETE", 1),
        get(&own, &host).replacen("GET", "CONNECT", 1),
    ];
    // A message about the budget names what is spent, so the dear request comes before those that are made.
    let dear = (DEAR_HOST, get("/a", &format!("host: {DEAR_HOST}\r\n")));
    let others = requests.into_iter().map(|request| (&*own, request));
    let mut refused = 0;
    for (authority, request) in iter::once(dear).chain(others) {
        let answer = ask(&app, authority, &request).await;
        let whole = connect_request(authority, "") + &request;
        refused += u32::from(assert_predicted(&table, &whole, &answer));
    }
    assert_eq!(refused, 14);
    app.stop().await;
}
