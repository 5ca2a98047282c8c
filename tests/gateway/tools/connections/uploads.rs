//! G15: Tests of clients that send a whole body before they read the answer: the answer reaches them, also if the body is
//! not wanted.

use std::future::pending;

use http::Method;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::aws::{KEY, KeyFile};
use super::raw_server::{RawServer, read_head};
use super::server::{Answer, SecureServer};
use super::tunnel::{HOST, open_tunnel, start_tunnelled};
use super::{code_of, start_app};
use crate::support::app::TestApp;

/// A body that no buffer on the way holds.
const BODY_BYTES: usize = 8 << 20;

/// Sends a request with its whole body, and returns the answer's status and code.
async fn upload(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    path: &str,
    host: &str,
) -> String {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {BODY_BYTES}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let chunk = vec![b' '; 64 << 10];
    for _ in 0..BODY_BYTES / chunk.len() {
        stream.write_all(&chunk).await.unwrap();
    }
    stream.flush().await.unwrap();
    let mut head = vec![];
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.split("content-length: ").nth(1).unwrap().split("\r\n").next().unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body).await.unwrap();
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    let code = body["error"]["code"].as_str().unwrap_or("-");
    format!("{} {code}", head.split(' ').nth(1).unwrap())
}

async fn upload_to(app: &TestApp, path: &str) -> String {
    let mut stream = app.client().connect().await;
    let first = upload(&mut stream, path, "localhost").await;
    // The connection goes on.
    assert_eq!(upload(&mut stream, path, "localhost").await, first, "{path}");
    first
}

/// The rest of a refused body is read and thrown away, on every path of connections and tools.
#[tokio::test]
async fn a_refused_upload_is_read_and_thrown_away() {
    let (server, key) = (SecureServer::start().await, KeyFile::new(&KEY));
    let table = server.table("api", "allow = ['POST /a']\nbudget = { bytes_out = '1m' }\n")
        + &server.table("aws", &key.lines("execute-api", ""));
    let app = start_app(&table).await;
    for (path, expected) in [
        ("/connect/none/a", "403 policy_denied"),
        ("/connect/api/b", "403 policy_denied"),
        ("/connect/api/a", "402 connection_byte_budget_exhausted"),
        ("/connect/aws/a", "413 request_too_large"),
        ("/connect", "404 not_found"),
        ("/tool/exec", "413 request_too_large"),
        ("/mcp", "413 request_too_large"),
        ("/tool/exec?a=b", "413 request_too_large"),
    ] {
        assert_eq!(upload_to(&app, path).await, expected, "{path}");
    }
    // A client that waits for `100 Continue` is answered at once, and need not send its body.
    let expecting = format!(
        "POST /connect/api/b HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nconnection: close\r\ncontent-length: {BODY_BYTES}\r\n\r\n"
    );
    assert!(app.client().raw(expecting.as_bytes()).await.starts_with("HTTP/1.1 403"));
    assert!(server.seen().is_empty());
    app.stop().await;
}

/// A body that the budget cuts on its way is thrown away from there.
#[tokio::test]
async fn an_upload_that_is_cut_is_read_to_its_end() {
    let server = SecureServer::start().await;
    let app =
        start_app(&server.table("api", "allow = ['* /**']\nbudget = { bytes_out = '1m' }")).await;
    let mut stream = app.client().connect().await;
    let head = "POST /connect/api/a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let chunk = format!("{:x}\r\n{}\r\n", 64 << 10, " ".repeat(64 << 10));
    for _ in 0..BODY_BYTES >> 16 {
        stream.write_all(chunk.as_bytes()).await.unwrap();
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 402"), "{answer}");
    app.stop().await;
}

/// A server that answers before the upload's end is heard, whether it closes or stays silent. The request is charged once.
#[tokio::test]
async fn an_early_answer_reaches_its_client() {
    for (is_open, connection) in [(false, "connection: close\r\n"), (true, "")] {
        let server = RawServer::start("").await;
        let app = start_app(&server.table).await;
        let serve = async {
            let mut stream = server.accept().await;
            read_head(&mut stream).await;
            let answer = format!("HTTP/1.1 403 No\r\ncontent-length: 2\r\n{connection}\r\nno");
            stream.write_all(answer.as_bytes()).await.unwrap();
            stream.flush().await.unwrap();
            if !is_open {
                stream.shutdown().await.unwrap();
            }
            // The answer must not be lost in a reset.
            let _ = stream.read_to_end(&mut vec![]).await;
        };
        let client = async {
            let mut stream = app.client().connect().await;
            let answer = upload(&mut stream, "/connect/api/a", "localhost").await;
            let settled = app.recorded("connect.settled", 1).await;
            (answer, settled[0]["outcome"].clone())
        };
        let answered = tokio::select! {
            biased;
            answered = client => answered,
            never = async { serve.await; pending().await } => never,
        };
        assert_eq!(answered, ("403 -".to_owned(), json!("completed")), "{connection}");
        assert_eq!(app.run.ledger.connection_spending()["api"].requests, 1);
        app.stop().await;
    }
}

/// A client that leaves in the middle of its body is no failure of the server, also while the body is kept to be signed, and
/// in a body that breaks the rules of its encoding.
#[tokio::test]
async fn a_client_that_leaves_its_upload_is_recorded_as_such() {
    let (server, key) = (SecureServer::start().await, KeyFile::new(&KEY));
    let app = start_app(&key.tables_of_each_kind(&server)).await;
    let announced = "content-length: 100\r\n\r\nbegun";
    let chunked = "transfer-encoding: chunked\r\n\r\n5\r\nbegun\r\nnonsense\r\n";
    let cases = [("api", announced), ("s3", announced), ("other", announced), ("api", chunked)];
    for (number, (name, rest)) in cases.into_iter().enumerate() {
        let mut stream = app.client().connect().await;
        let head = format!("POST /connect/{name}/a HTTP/1.1\r\nhost: x\r\n{rest}");
        stream.write_all(head.as_bytes()).await.unwrap();
        app.recorded("connect.admitted", number + 1).await;
        drop(stream);
        let settled = app.recorded("connect.settled", number + 1).await;
        assert_eq!(settled[number]["outcome"], "client_gone", "{name} {rest}");
    }
    app.stop().await;
}

/// The rest of a refused body in a tunnel, and of a request for a tunnel, is thrown away.
#[tokio::test]
async fn a_refused_upload_in_a_tunnel_is_thrown_away() {
    let server =
        SecureServer::named(HOST, |_| Answer::text("ok").with("content-length", "2")).await;
    let app = start_tunnelled(&server.table("api", "allow = ['POST /a']\ntunnel = true\n")).await;
    let authority = server.authority();
    let mut tunnel = open_tunnel(&app, &authority).await;
    for _ in 0..2 {
        assert_eq!(upload(&mut tunnel, "/b", &authority).await, "403 policy_denied");
    }
    assert_eq!(upload(&mut tunnel, "/a", &authority).await, "200 -");
    let asked = app.client().ask(Method::GET, "/connect", "", &[]).await;
    assert_eq!(code_of(&asked), "200 -");
    assert_eq!(server.seen().len(), 1);
    app.stop().await;
}
