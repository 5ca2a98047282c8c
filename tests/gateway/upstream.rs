//! G8: Tests of an upstream that cannot be reached, is silent, or does not speak HTTP.

mod name_resolution;
mod pool;
mod tls;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use cogni_gateway::base::digest::sha256_hex;
use cogni_gateway::base::secret::SecretString;
use cogni_gateway::fakes::model_provider::AnswerEnd;
use rustix::net::{AddressFamily, SocketType};
use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::process::NO_LISTENER;
use crate::support::raw_upstream;

/// G8: No process listens at the upstream's address. Nothing was delivered, so nothing is charged.
#[tokio::test]
async fn an_upstream_that_cannot_be_reached_costs_nothing() {
    let app = TestApp::with(|config| {
        config.upstream.url = NO_LISTENER.to_string().parse().unwrap();
        config.budget.max_turns = Some(1);
    })
    .await;
    // The run has one turn: if the first call were charged, the second would be refused.
    app.client().post("/v1/chat/completions", &unary_body("fake")).await;
    let response = app.client().post("/v1/chat/completions", &unary_body("fake")).await;
    assert_eq!((response.status.as_u16(), response.header("x-should-retry")), (502, None));
    assert_eq!(response.header("x-cogni-budget-turns-left"), Some("1"), "the turn is given back");
    insta::assert_snapshot!(response.text(), @r#"{"error":{"code":"upstream_unreachable","message":"cannot resolve or connect to the upstream","param":null,"type":"server_error"}}"#);
    let settled = app.recorded("request.settled", 2).await;
    assert_eq!(settled[1]["outcome"], "upstream_failed");
    assert_eq!(settled[1]["charged"], json!({"turns": 0, "input": 0, "output": 0}));
    app.stop().await;
}

/// G8: An upstream whose name does not resolve counts as unreachable.
#[tokio::test]
async fn a_name_that_does_not_resolve_cannot_be_reached() {
    let app =
        TestApp::with(|config| config.upstream.url = "nowhere.invalid:4000".parse().unwrap()).await;
    let response = app.client().post("/v1/chat/completions", &unary_body("fake")).await;
    assert_eq!(response.json()["error"]["code"], "upstream_unreachable");
    app.stop().await;
}

/// G8: A host that does not answer the connection attempt is a timeout. Nothing was delivered, so nothing is charged.
#[tokio::test]
async fn an_upstream_that_does_not_accept_is_a_timeout() {
    let (full, _listener, _waiting) = full_backlog();
    let app = TestApp::with(|config| {
        config.upstream.url = full.to_string().parse().unwrap();
        config.upstream.connect_timeout = SHORT;
    })
    .await;
    let response = app.client().post("/v1/chat/completions", &unary_body("fake")).await;
    assert_eq!(response.status, 504);
    assert_eq!(response.json()["error"]["code"], "upstream_connect_timeout");
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(settled["outcome"], "upstream_timeout");
    assert_eq!(settled["charged"], json!({"turns": 0, "input": 0, "output": 0}));
    app.stop().await;
}

/// G8: An upstream that takes the request and sends nothing is a timeout.
#[tokio::test]
async fn silence_before_the_head_is_a_timeout() {
    let app = TestApp::with(|config| config.upstream.first_byte_timeout = SHORT).await;
    let response = app.client().post("/v1/messages", &unary_body("fake/fault=stall@head")).await;
    assert_eq!(response.status, 504);
    insta::assert_snapshot!(response.text(), @r#"{"error":{"code":"upstream_first_byte_timeout","message":"no response from the upstream within 50ms","type":"api_error"},"type":"error"}"#);
    app.upstream
        .seen
        .wait_until(|seen| seen.last_request().unwrap().ended == Some(AnswerEnd::ClientLeft))
        .await;
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(settled["outcome"], "upstream_timeout");
    assert_eq!(settled["charged"]["turns"], 1, "it was delivered, so it may have cost something");
    app.stop().await;
}

/// G8: An upstream that begins its answer and stops is a timeout.
#[tokio::test]
async fn silence_in_a_stream_is_a_timeout() {
    for scheme in ["http", "h2c"] {
        let app = TestApp::with(|config| {
            config.upstream.url = upstream_through(scheme, &config.upstream.url.to_string());
            config.upstream.idle_timeout = SHORT;
        })
        .await;
        let stream = app.client().open("/v1/responses", &streamed_body("fake/fault=stall@1")).await;
        assert_eq!(stream.status, 200);
        let (_, in_order) = stream.rest().await;
        assert!(!in_order);
        let settled = app.recorded("request.settled", 1).await.remove(0);
        assert_eq!(settled["code"], "upstream_idle_timeout", "{scheme}");
        assert_eq!(settled["outcome"], "upstream_timeout", "{scheme}");
        app.upstream
            .seen
            .wait_until(|seen| seen.last_request().unwrap().ended == Some(AnswerEnd::ClientLeft))
            .await;
        app.stop().await;
    }
}

/// G9: The run's deadline also ends its open calls.
#[tokio::test]
async fn the_deadline_cuts_an_open_stream() {
    for scheme in ["http", "h2c"] {
        let (app, stream) = opened_within_the_deadline(scheme, "fake/fault=stall@1").await;
        let (_, in_order) = stream.rest().await;
        assert!(!in_order);
        let settled = app.recorded("request.settled", 1).await.remove(0);
        assert_eq!(settled["code"], "deadline_exceeded", "{scheme}");
        assert_eq!(settled["outcome"], "deadline_exceeded", "{scheme}");
        app.stop().await;
    }
}

/// G9, G10: A call that waits for its answer at the deadline is told not to retry.
#[tokio::test]
async fn the_deadline_cuts_a_call_that_has_no_answer_yet() {
    let (app, stream) = opened_within_the_deadline("http", "fake/fault=stall@head").await;
    assert_eq!(
        (stream.status.as_u16(), &stream.headers["x-should-retry"]),
        (504, &"false".parse().unwrap())
    );
    let response = stream.finish().await.unwrap();
    assert_eq!(response.json()["error"]["code"], "deadline_exceeded");
    app.stop().await;
}

/// G8: An answer that is not HTTP, or that two readers could read differently, is malformed.
#[tokio::test]
async fn an_answer_that_is_not_http_is_malformed() {
    let many_fields = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: y\r\n".repeat(129));
    let large = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(70 * 1024));
    let interim = "HTTP/1.1 103 Early Hints\r\n\r\n".repeat(9);
    let (chunked, length) = ("transfer-encoding: chunked\r\n", "content-length: 2\r\n");
    let ok = |fields: String| format!("HTTP/1.1 200 OK\r\n{fields}\r\n");
    let answers = [
        ("not HTTP at all", "220 mail.example ESMTP\r\n\r\n".to_owned()),
        ("too many fields", many_fields),
        ("a head that never ends", large),
        ("interim answers without end", interim),
        ("a switched protocol", "HTTP/1.1 101 Switching Protocols\r\n\r\n".to_owned()),
        ("chunks and a length", ok(format!("{chunked}{length}"))),
        ("a length and chunks", ok(format!("{length}{chunked}"))),
        ("two lengths", ok(format!("{length}content-length: 3\r\n"))),
        ("a length that is none", ok("content-length: 2, 2\r\n".to_owned())),
        ("an unknown coding", ok("transfer-encoding: gzip, chunked\r\n".to_owned())),
        ("a folded field", ok(format!("{length}x: a\r\n b\r\n"))),
    ];
    let (upstream, address) = raw_upstream::listen_locally().await;
    let app =
        TestApp::with(|config| config.upstream.url = address.to_string().parse().unwrap()).await;
    for (label, answer) in answers {
        let client = app.client();
        let body = unary_body("fake");
        let (response, _connection) = tokio::join!(client.post("/v1/responses", &body), async {
            let (mut connection, _) = upstream.accept().await.unwrap();
            raw_upstream::read_request(&mut connection).await;
            raw_upstream::send_text(&mut connection, &answer).await;
            connection
        });
        assert_eq!((label, response.status.as_u16()), (label, 502));
        assert_eq!(response.json()["error"]["code"], "upstream_malformed", "{label}");
    }
    app.stop().await;
}

/// G8: Chunks may have extensions, but an answer cannot consist of framing only.
#[tokio::test]
async fn framing_without_payload_is_bounded() {
    let (upstream, address) = raw_upstream::listen_locally().await;
    let app =
        TestApp::with(|config| config.upstream.url = address.to_string().parse().unwrap()).await;
    let client = app.client();
    let body = streamed_body("fake");
    let (stream, _connection) = tokio::join!(client.open("/v1/messages", &body), async {
        let (mut connection, _) = upstream.accept().await.unwrap();
        raw_upstream::read_request(&mut connection).await;
        raw_upstream::send_text(&mut connection, raw_upstream::STREAM).await;
        raw_upstream::send_text(&mut connection, &format!("1;{}", "x".repeat(17 * 1024))).await;
        connection
    });
    assert!(!stream.rest().await.1);
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(settled["code"], "upstream_malformed");
    app.stop().await;
}

/// G8: An error of the upstream passes in its own words. It costs a turn, and the input if the upstream may have read
/// it.
#[tokio::test]
async fn an_error_of_the_upstream_passes() {
    let app = TestApp::start().await;
    for status in [400, 408, 429, 500, 503] {
        let body = unary_body(&format!("fake/status={status}"));
        let response = app.client().post("/v1/chat/completions", &body).await;
        assert_eq!(response.status, status);
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with("the fake provider answers"), "{message}");
    }
    let settled = app.recorded("request.settled", 5).await;
    for record in settled {
        assert_eq!(
            (&record["outcome"], &record["charged"]["output"]),
            (&json!("completed"), &json!(0))
        );
        let is_read = matches!(record["status"].as_u64().unwrap(), 408 | 500..);
        assert_eq!(record["charged"]["input"] != 0, is_read, "{record}");
    }
    app.stop().await;
}

/// G3: An upstream error about the gateway's key is for the operator, not for the agent. It costs a turn and no tokens.
#[tokio::test]
async fn an_error_about_the_gateways_key_is_hidden_from_the_agent() {
    let (listener, upstream) = raw_upstream::listen_locally().await;
    let app = TestApp::with(|config| {
        config.upstream.url = upstream.to_string().parse().unwrap();
        config.upstream.api_key = SecretString::new("sk-real-and-secret");
    })
    .await;
    let digest = sha256_hex(b"sk-real-and-secret");
    for (head, status) in [
        ("401 Unauthorized", 502),
        ("403 Forbidden", 502),
        ("400 Bad Request", 400),
        ("500 Oops", 500),
    ] {
        let secret_text = format!("key sk-real-and-secret, hash {digest}");
        let answer = format!(
            "HTTP/1.1 {head}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{secret_text}",
            secret_text.len()
        );
        let upstream = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            raw_upstream::read_request(&mut stream).await;
            // The answer is split in the middle of the key.
            let cut = answer.len() - secret_text.len() + 10;
            raw_upstream::send_text(&mut stream, &answer[..cut]).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
            raw_upstream::send_text(&mut stream, &answer[cut..]).await;
        };
        let body = unary_body("fake");
        let client = app.client();
        let (response, ()) = tokio::join!(client.post("/v1/chat/completions", &body), upstream);
        assert_eq!(response.status, status);
        let text = response.text();
        assert!(!text.contains("sk-real") && !text.contains(&digest), "{text}");
        if status == 502 {
            assert_eq!(response.json()["error"]["code"], "upstream_auth");
            assert_eq!(response.header("x-should-retry"), Some("false"));
        } else {
            assert_eq!(text, format!("key {}, hash {}", "*".repeat(18), "*".repeat(64)));
        }
    }
    for record in app.recorded("request.settled", 4).await.iter().take(2) {
        assert_eq!(record["code"], "upstream_auth");
        assert_eq!(record["charged"], json!({"turns": 1, "input": 0, "output": 0}));
    }
    app.stop().await;
}

/// G9: An overlong error is truncated, and any part that may be an answer is charged.
#[tokio::test]
async fn a_long_error_is_cut_and_charged() {
    let (listener, upstream) = raw_upstream::listen_locally().await;
    let app =
        TestApp::with(|config| config.upstream.url = upstream.to_string().parse().unwrap()).await;
    let answer = "The answer the agent wanted. ".repeat(700);
    let long =
        json!({"type": "error", "error": {"type": "api_error", "message": answer}}).to_string();
    let short = json!({"error": {"message": answer[..300]}}).to_string();
    for (status, error_body) in [(500, &long), (400, &long), (500, &short)] {
        let head = format!(
            "HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            error_body.len()
        );
        let upstream = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            raw_upstream::read_request(&mut stream).await;
            raw_upstream::send_text(&mut stream, &format!("{head}{error_body}")).await;
        };
        let (mut body, client) = (unary_body("fake"), app.client());
        body["max_tokens"] = json!(2000);
        let (response, ()) = tokio::join!(client.post("/v1/messages", &body), upstream);
        assert_eq!(response.status, status);
        if error_body.len() < 4096 {
            assert_eq!(response.text(), *error_body);
            continue;
        }
        let error = response.json();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(
            message.starts_with("The answer") && message.ends_with(" more bytes]"),
            "{message}"
        );
        assert!(message.len() < 4200, "{message}");
        assert_eq!(error["error"]["code"], "upstream_error_cut");
    }
    let settled = app.recorded("request.settled", 3).await;
    let outputs: Vec<_> =
        settled.iter().map(|record| record["charged"]["output"].clone()).collect();
    assert_eq!(outputs, [1195, 1195, 0]);
    app.stop().await;
}

/// G3: The gateway's key appears neither in an error inside a stream, wherever the stream is split, nor in a header
/// that passes, nor in the logs.
#[tokio::test]
async fn the_gateways_key_is_masked_in_a_successful_answer() {
    let (listener, upstream) = raw_upstream::listen_locally().await;
    let app = TestApp::with(|config| {
        config.upstream.url = upstream.to_string().parse().unwrap();
        config.upstream.api_key = SecretString::new("sk-real-and-secret");
    })
    .await;
    let events = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n\
                  data: {\"error\":{\"message\":\"bad key sk-real-and-secret\"}}\n\n";
    let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\
                x-litellm-call-id: Bearer sk-real-and-secret\r\nx-request-id: sk-real-and-secret\r\n\
                x-litellm-response-cost: sk-real-and-secret\r\nrequest-id: kept\r\n\r\n";
    let key = events.find("sk-real").unwrap();
    let cuts = frame_cuts(key, events.len());
    for (cut, is_shown) in cuts.into_iter().flat_map(|cut| [(cut, true), (cut, false)]) {
        let upstream = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            raw_upstream::read_request(&mut stream).await;
            let [first, second] = cut;
            raw_upstream::send_text(&mut stream, &format!("{head}{}", &events[..first])).await;
            for part in [&events[first..second], &events[second..]] {
                tokio::time::sleep(Duration::from_millis(20)).await;
                raw_upstream::send_text(&mut stream, part).await;
            }
        };
        let mut body = streamed_body("fake");
        body["stream_options"] = json!({"include_usage": is_shown});
        let client = app.client();
        let (response, ()) = tokio::join!(client.post("/v1/chat/completions", &body), upstream);
        assert_eq!(
            response.text(),
            events.replace("sk-real-and-secret", &"*".repeat(18)),
            "{cut:?}"
        );
        assert_eq!(response.header("request-id"), Some("kept"));
        for name in ["x-litellm-call-id", "x-request-id"] {
            assert_eq!(response.header(name), None);
        }
    }
    for (path, event) in [
        ("/v1/responses", "response.failed"),
        ("/v1/responses", "error"),
        ("/v1/messages", "error"),
    ] {
        let said = format!(
            "event: {event}\ndata: {{\"type\":\"{event}\",\"m\":\"sk-real-and-secret\"}}\n\n"
        );
        let upstream = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            raw_upstream::read_request(&mut stream).await;
            raw_upstream::send_text(&mut stream, &format!("{head}{said}")).await;
        };
        let (client, body) = (
            app.client(),
            json!({"model": "fake", "stream": true, "max_tokens": 9, "messages": [], "input": "x"}),
        );
        let (response, ()) = tokio::join!(client.post(path, &body), upstream);
        assert_eq!(response.text(), said.replace("sk-real-and-secret", &"*".repeat(18)));
    }
    app.recorded("request.settled", 2 * cuts.len() + 3).await;
    for log in [app.audit_log(), app.access_log()] {
        let said = std::fs::read_to_string(log).unwrap();
        assert!(!said.contains("sk-real"), "{said}");
    }
    app.stop().await;
}

/// Returns the places where a stream is cut into three frames. The key of an error begins at `key`, and 18 bytes are its
/// length.
fn frame_cuts(key: usize, length: usize) -> [[usize; 2]; 11] {
    let one = [0, key - 20, key, key + 9, key + 18, length - 1].map(|cut| [0, cut]);
    // A frame ends in the event before the error, so that the next frame ends one event and begins another.
    let two = [
        [10, key - 20],
        [10, key + 9],
        [key - 20, key + 9],
        [key + 3, key + 9],
        [key + 9, key + 18],
    ];
    [&one[..], &two].concat().try_into().unwrap()
}

/// G3: An upstream may repeat our key as JSON, a URL or base64 has it. No such spelling reaches the client in an error,
/// in an error of a stream or in a header.
#[tokio::test]
async fn our_key_is_masked_however_an_error_spells_it() {
    let (listener, upstream) = raw_upstream::listen_locally().await;
    let app = TestApp::with(|config| {
        config.upstream.url = upstream.to_string().parse().unwrap();
        config.upstream.api_key = SecretString::new("sk-real/and-secret");
    })
    .await;
    let spellings = [
        "sk-real\\/and-secret",
        "\\u0073k-real/and-secret",
        "sk-real%2Fand-secret",
        "%73%6b-real%2fand%2dsecret",
        "Basic dTpzay1yZWFsL2FuZC1zZWNyZXQ=",
        "Basic c2stcmVhbC9hbmQtc2VjcmV0",
    ];
    for spelling in spellings {
        let error = format!("{{\"error\":{{\"message\":\"bad key {spelling}\"}}}}");
        for (status, kind, error_body) in [
            (400, "application/json", error.clone()),
            (200, "text/event-stream", format!("data: {error}\n\n")),
        ] {
            let head = format!(
                "HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-type: {kind}\r\nx-request-id: {spelling}\r\nrequest-id: kept\r\n\r\n"
            );
            let upstream = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                raw_upstream::read_request(&mut stream).await;
                raw_upstream::send_text(&mut stream, &format!("{head}{error_body}")).await;
            };
            let (client, body) = (app.client(), streamed_body("fake"));
            let (response, ()) = tokio::join!(client.post("/v1/chat/completions", &body), upstream);
            assert_eq!(response.status, status);
            assert_eq!(response.header("x-request-id"), None, "{spelling}");
            assert_eq!(response.header("request-id"), Some("kept"));
            let text = response.text();
            let (start, end) = spelling.split_at(spelling.len() / 2);
            assert!(text.contains("bad key "), "{text}");
            assert!(
                !text.contains(&end[..6]) && !text.contains(&start[start.len() - 6..]),
                "{text}"
            );
        }
    }
    app.stop().await;
}

/// Opens a stream before the run's deadline passes, however slow the machine is.
async fn opened_within_the_deadline(
    scheme: &str,
    model: &str,
) -> (TestApp, crate::support::client::ResponseStream) {
    for seconds in [1, 4, 16, 64] {
        let app = TestApp::with(|config| {
            config.upstream.url = upstream_through(scheme, &config.upstream.url.to_string());
            config.budget.deadline = Some(Duration::from_secs(seconds));
        })
        .await;
        let stream = app.client().open("/v1/chat/completions", &streamed_body(model)).await;
        if stream.status != 402 {
            return (app, stream);
        }
        app.stop().await;
    }
    panic!("no call was admitted within a minute");
}

/// Returns a listener whose queue is full, so that the kernel keeps new connections waiting.
fn full_backlog() -> (SocketAddr, TcpListener, Vec<TcpStream>) {
    let listener = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&listener, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let listener = TcpListener::from(listener);
    let address = listener.local_addr().unwrap();
    let mut waiting = vec![];
    while let Ok(stream) = TcpStream::connect_timeout(&address, 10 * SHORT) {
        waiting.push(stream);
    }
    (address, listener, waiting)
}

/// Configures the same upstream with another protocol.
fn upstream_through(scheme: &str, url: &str) -> cogni_gateway::gateway::upstream::UpstreamUrl {
    url.replace("http://", &format!("{scheme}://")).parse().unwrap()
}

fn unary_body(model: &str) -> Value {
    json!({"model": model, "max_tokens": 9, "messages": []})
}

fn streamed_body(model: &str) -> Value {
    json!({"model": model, "stream": true, "messages": []})
}

/// The answer never arrives, so the timeout may be short.
const SHORT: Duration = Duration::from_millis(50);
