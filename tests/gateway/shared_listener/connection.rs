//! G1: Tests of TLS, client certificates, HTTP/1.1, HTTP/2, and unauthenticated clients that occupy connections.

use std::time::Duration;

use bytes::Bytes;
use cogni_gateway::base::task_group::ShutdownOutcome;
use http::Request;
use http_body_util::Full;
use hyper::client::conn::http1;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::chat_body;
use crate::support::client::{ResponseStream, post_request};
use crate::support::shared_app::SharedApp;
use crate::support::test_ca::TestCa;

/// G1: A stream and a unary call work over each protocol that TLS negotiates.
#[tokio::test]
async fn calls_are_served_over_tls() {
    let app = SharedApp::start().await;
    let key = app.token("run-1");
    let streamed = json!({"model": "fake", "stream": true, "max_tokens": 5, "messages": []});
    let request =
        |body| post_request("https://127.0.0.1/v1/messages", body, &[("x-api-key", &key)]);
    let mut http2 = app.http2().await;
    for (body, end) in [(&chat_body(), "}"), (&streamed, "\n\n")] {
        let answer = app.call(&key, "/v1/messages", body).await;
        assert!(answer.status == 200 && answer.text().ends_with(end), "{}", answer.text());
        let answer = ResponseStream::from(http2.send_request(request(body)).await.unwrap());
        let (text, in_order) = answer.rest().await;
        assert!(in_order && text.ends_with(end), "{text}");
    }
    app.stop().await;
}

/// G1: If a client CA is configured, a client without a certificate of that CA is rejected.
#[tokio::test]
async fn clients_show_a_certificate_where_they_must() {
    let strangers = TestCa::new();
    let app = SharedApp::with(|config, authority| {
        config.shared.as_mut().unwrap().client_ca_file = Some(authority.file.clone());
    })
    .await;
    let (own_files, other_files) = (app.authority.files("agent"), strangers.files("agent"));
    for (files, is_served) in [(Some(&own_files), true), (Some(&other_files), false), (None, false)]
    {
        // In TLS 1.3 the client finishes before the server has checked its certificate.
        let answer = match app.tls(files, &["http/1.1"]).await {
            Ok(mut stream) => {
                let _ = stream.write_all(HEALTH).await;
                let mut answer = vec![];
                let _ = stream.read_to_end(&mut answer).await;
                answer
            }
            Err(_refused) => vec![],
        };
        assert_eq!(answer.starts_with(b"HTTP/1.1 200 "), is_served, "{answer:?}");
        assert_eq!(answer.is_empty(), !is_served);
    }
    app.stop().await;
}

/// G1: A connection without TLS gets no plaintext answer.
#[tokio::test]
async fn plain_text_is_not_answered() {
    let app = SharedApp::start().await;
    let answer = send_plaintext(&app, HEALTH).await;
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
    app.stop().await;
}

/// G1: An operator may turn TLS off for connections on the machine itself; tokens are checked in the same way.
#[tokio::test]
async fn plain_text_is_served_if_the_operator_allows_it() {
    let app = SharedApp::with(without_tls).await;
    assert!(send_plaintext(&app, HEALTH).await.starts_with(b"HTTP/1.1 200 "));
    let request = |key: &str| {
        format!(
            "GET /run/status HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-api-key: {key}\r\n\r\n"
        )
    };
    let answer = send_plaintext(&app, request(&app.token("run-2")).as_bytes()).await;
    assert!(String::from_utf8_lossy(&answer).contains("\"runId\":\"run-2\""));
    let answer = send_plaintext(&app, request("sk-x").as_bytes()).await;
    assert!(answer.starts_with(b"HTTP/1.1 401 "));
    app.stop().await;
}

/// G1: Closing a run ends a call whose body is still arriving; the closing does not wait for the body's time.
#[tokio::test]
async fn closing_a_run_ends_a_call_whose_body_is_arriving() {
    let app = SharedApp::with(|config, authority| {
        without_tls(config, authority);
        config.drain_timeout = Duration::ZERO;
        config.policy.body_timeout = PAUSE * 10;
    })
    .await;
    let mut stream = TcpStream::connect(app.address).await.unwrap();
    let head = format!(
        "POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {}\r\ncontent-type: application/json\r\n\
         content-length: 100\r\n\r\n{{",
        app.token("run-1")
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let runs = app.runs.list_runs();
    let run = runs.iter().find(|run| &*run.identity.run == "run-1").unwrap();
    while run.ledger.budget_status().open_calls == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(app.runs.close_run("run-1").await.unwrap(), ShutdownOutcome::Aborted);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains(r#""code":"cut_by_operator""#), "{answer}");
    assert!(app.records("run-1").iter().any(|record| record["event"] == "run.finished"));
    app.stop().await;
}

/// G14: A client that does not finish its handshake is disconnected.
#[tokio::test]
async fn a_handshake_that_never_ends_is_cut() {
    let app = SharedApp::with(|config, _| {
        config.shared.as_mut().unwrap().handshake_timeout = SHORT;
    })
    .await;
    let mut stream = TcpStream::connect(app.address).await.unwrap();
    let mut answer = vec![];
    stream.read_to_end(&mut answer).await.unwrap();
    assert!(answer.is_empty());
    app.stop().await;
}

/// G14: A client without a valid token is disconnected in time, however busy its connection is. A run's client is not.
#[tokio::test]
async fn an_unauthenticated_client_is_disconnected_in_time_and_a_run_is_not() {
    let app = SharedApp::with(|config, authority| {
        without_tls(config, authority);
        config.server.header_timeout = PAUSE;
        config.shared.as_mut().unwrap().handshake_timeout = PAUSE;
    })
    .await;
    let ask =
        |key: &str| format!("GET /run/status HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n\r\n");
    let mut stranger = TcpStream::connect(app.address).await.unwrap();
    let mut answer = vec![0; 4096];
    loop {
        let _ = stranger.write_all(ask("sk-x").as_bytes()).await;
        match stranger.read(&mut answer).await {
            Ok(0) | Err(_) => break,
            Ok(_) => tokio::time::sleep(PAUSE / 50).await,
        }
    }
    let mut known = TcpStream::connect(app.address).await.unwrap();
    for _ in 0..150 {
        known.write_all(ask(&app.token("run-1")).as_bytes()).await.unwrap();
        assert!(known.read(&mut answer).await.unwrap() > 0);
        tokio::time::sleep(PAUSE / 50).await;
    }
    drop(known);
    app.stop().await;
}

/// G14: A connection over the limit gets an error if the client can read one.
#[tokio::test]
async fn a_connection_too_many_is_turned_away() {
    let app = SharedApp::with(|config, authority| {
        without_tls(config, authority);
        config.shared.as_mut().unwrap().max_connections = 1;
    })
    .await;
    let mut first = TcpStream::connect(app.address).await.unwrap();
    first.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    assert!(first.read(&mut [0; 4096]).await.unwrap() > 0);
    let refusal = send_plaintext(&app, HEALTH).await;
    assert!(refusal.starts_with(b"HTTP/1.1 503 "), "{}", String::from_utf8_lossy(&refusal));
    drop(first);
    app.stop().await;
}

/// G14: A run with its maximum number of connections gets no more; another run still gets its own.
#[tokio::test]
async fn a_run_cannot_take_all_connections() {
    let app = SharedApp::with(|config, _| config.server.max_connections = 2).await;
    let (one, two) = (app.token("run-1"), app.token("run-2"));
    let ask = async |connection: &mut http1::SendRequest<Full<Bytes>>, key: &str| {
        connection.ready().await.unwrap();
        let request = Request::get("/run/status").header("host", "x").header("x-api-key", key);
        let answer = connection.send_request(request.body(Full::default()).unwrap()).await;
        ResponseStream::from(answer.unwrap()).finish().await.unwrap()
    };
    let (mut first, mut second) = (app.http1().await, app.http1().await);
    let mut third = app.http1().await;
    for _ in 0..2 {
        assert_eq!(ask(&mut first, &one).await.status, 200);
        assert_eq!(ask(&mut second, &one).await.status, 200);
    }
    let refusal = ask(&mut third, &one).await;
    assert_eq!((refusal.status.as_u16(), refusal.header("retry-after")), (503, Some("1")));
    assert_eq!(refusal.json()["error"]["code"], "too_many_connections");
    assert_eq!(ask(&mut third, &two).await.status, 200, "of another run it is welcome");
    drop(first);
    while ask(&mut third, &one).await.status != 200 {
        tokio::time::sleep(SHORT / 100).await;
    }
    app.stop().await;
}

/// G14: A connection beyond its run's limit is closed soon, so that one run cannot occupy the listener's connections.
#[tokio::test]
async fn a_connection_that_its_run_has_no_place_for_is_closed() {
    let app = SharedApp::with(|config, authority| {
        without_tls(config, authority);
        config.server.max_connections = 1;
        // The limit for unauthenticated clients does not end the connection.
        config.server.header_timeout = Duration::from_mins(10);
    })
    .await;
    let ask =
        format!("GET /run/status HTTP/1.1\r\nhost: x\r\nx-api-key: {}\r\n\r\n", app.token("run-1"));
    let mut first = TcpStream::connect(app.address).await.unwrap();
    first.write_all(ask.as_bytes()).await.unwrap();
    let length = first.read(&mut [0; 4096]).await.unwrap();
    assert!(length > 0);
    let refusal =
        tokio::time::timeout(Duration::from_mins(1), send_plaintext(&app, ask.as_bytes())).await;
    let refusal = refusal.expect("the connection is closed");
    assert!(refusal.starts_with(b"HTTP/1.1 503 "), "{}", String::from_utf8_lossy(&refusal));
    first.write_all(ask.as_bytes()).await.unwrap();
    assert!(
        first.read(&mut [0; 4096]).await.unwrap() > 0,
        "the run keeps the connection that it has"
    );
    app.stop().await;
}

fn without_tls(config: &mut cogni_gateway::gateway::config::GatewayConfig, _: &TestCa) {
    let shared = config.shared.as_mut().unwrap();
    (shared.tls_cert_file, shared.tls_key_file) = (None, None);
    shared.plaintext = true;
}

/// Sends plaintext bytes, and returns everything that arrives until the gateway closes the connection.
async fn send_plaintext(app: &SharedApp, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(app.address).await.unwrap();
    let _ = stream.write_all(bytes).await;
    let mut answer = vec![];
    let _ = stream.read_to_end(&mut answer).await;
    answer
}

const HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
const SHORT: Duration = Duration::from_millis(200);
/// Longer than any pause on a busy machine.
const PAUSE: Duration = Duration::from_secs(1);
