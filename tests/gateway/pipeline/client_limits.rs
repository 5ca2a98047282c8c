//! G14: Tests of limits: everything that a client can send, hold open or leave unread is limited.

use std::time::Duration;

use cogni_gateway::fakes::model_provider::AnswerEnd;
use cogni_gateway::gateway::pipeline::server::LaneMode;
use cogni_gateway::telemetry::audit::verify;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::app::TestApp;
use crate::support::client::{TestResponse, post_request};

/// G14: A head with too many bytes or fields is refused.
#[tokio::test]
async fn a_head_too_large_is_refused() {
    let app = TestApp::start().await;
    // hyper checks its limit before it reads, so one read beyond 64 KiB may pass.
    let over = "y".repeat(192 * 1024);
    let long = format!("GET /health HTTP/1.1\r\nx: {over}\r\n\r\n");
    let many = format!("GET /health HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(101));
    let target = format!("GET /{over} HTTP/1.1\r\n\r\n");
    for head in [long, many, target] {
        let answer = app.client().raw(head.as_bytes()).await;
        let status = answer.lines().next().unwrap_or_default();
        assert!(
            status.starts_with("HTTP/1.1 431") || status.starts_with("HTTP/1.1 414"),
            "{status}"
        );
    }
    let most =
        format!("GET /health HTTP/1.1\r\nconnection: close\r\n{}\r\n", "x: y\r\n".repeat(99));
    assert!(app.client().raw(most.as_bytes()).await.starts_with("HTTP/1.1 200 OK"));
    app.stop().await;
}

/// G14: A connection is closed if its head is not complete in time, or does not begin.
#[tokio::test]
async fn a_head_that_never_ends_is_cut() {
    let app = TestApp::with(|config| config.server.header_timeout = SHORT).await;
    for begun in ["", "P", "PRI * HT", "GET /health HTTP/1.1\r\nhost:"] {
        let answer = app.client().raw(begun.as_bytes()).await;
        assert!(!answer.contains("200 OK"), "{begun:?}: {answer}");
    }
    app.stop().await;
}

/// G5, G14: A body over the limit is refused; if its length is declared, before the client sends it.
#[tokio::test]
async fn a_body_too_large_is_refused() {
    let app = TestApp::with(|config| config.policy.max_body_bytes = 1000).await;
    let head = "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    let declared = app.client().raw(format!("{head}content-length: 1001\r\n\r\n").as_bytes()).await;
    let (status, body) = declared.split_once("\r\n").unwrap();
    assert_eq!(status, "HTTP/1.1 413 Payload Too Large");
    assert!(body.contains("x-should-retry: false"), "{body}");
    insta::assert_snapshot!(body.rsplit_once("\r\n").unwrap().1, @r#"{"error":{"code":"request_too_large","message":"the request body is larger than the limit of 1000 bytes","type":"request_too_large"},"type":"error"}"#);
    let chunk = format!("64\r\n{}\r\n", " ".repeat(100));
    let chunked = format!("{head}transfer-encoding: chunked\r\n\r\n{}", chunk.repeat(11));
    assert!(app.client().raw(chunked.as_bytes()).await.starts_with("HTTP/1.1 413 "));
    assert_eq!(app.upstream.seen.request_count(), 0);
    let most = sized_body(1000);
    assert_eq!(app.client().post("/v1/messages", &most).await.status, 200);
    app.stop().await;
}

/// G10: Codex retries on statuses that other clients treat as final, so every final refusal on its route is a 400.
#[tokio::test]
async fn a_final_refusal_stops_the_clients_of_its_protocol() {
    let app = TestApp::with(|config| {
        config.policy.max_body_bytes = 100;
        config.policy.body.models = vec!["fake".to_owned()];
    })
    .await;
    for (path, [model, size, kind]) in [
        ("/v1/chat/completions", [403, 413, 415]),
        ("/v1/messages", [403, 413, 415]),
        ("/v1/responses", [400, 400, 400]),
    ] {
        let answers = [
            app.client().post(path, &json!({ "model": "other" })).await,
            app.client().post(path, &json!({ "model": "fake", "input": "x".repeat(100) })).await,
            app.client()
                .send(post_request(path, &json!({}), &[("content-type", "text/plain")]))
                .await,
        ];
        for (answer, status) in answers.iter().zip([model, size, kind]) {
            assert_eq!(answer.status, status, "{path}: {}", answer.text());
            assert_eq!(answer.header("x-should-retry"), Some("false"), "{path}");
        }
    }
    app.stop().await;
}

/// G10: Some clients retry on the usual status of their protocol. If their headers identify them, they get a different
/// status.
#[tokio::test]
async fn a_client_that_retries_on_a_status_gets_a_different_one() {
    let app = TestApp::with(|config| {
        config.budget.max_turns = Some(0);
        config.policy.max_body_bytes = 100;
    })
    .await;
    let openai = ("user-agent", "OpenAI/Python 2.20.0");
    let families: [(_, &[_], _); 5] = [
        ("OpenAI's SDK", &[openai], [402, 402, 429]),
        ("LiteLLM by OpenAI's SDK", &[openai, ("x-stainless-raw-response", "true")], [400; 3]),
        ("LiteLLM", &[("user-agent", "litellm/1.109.1")], [400; 3]),
        (
            "AI SDK",
            &[("user-agent", "ai/7.0.173 ai-sdk-provider-utils/5.0.81 node.js/24")],
            [402; 3],
        ),
        ("Codex", &[("user-agent", "codex_exec/0.169.0")], [402, 402, 429]),
    ];
    let paths = ["/v1/chat/completions", "/v1/messages", "/v1/responses"];
    for (family, headers, statuses) in families {
        for (path, status) in paths.into_iter().zip(statuses) {
            let answer = app.client().post_with(path, &json!({ "model": "fake" }), headers).await;
            assert_eq!(answer.status, status, "{family} {path}: {}", answer.text());
            assert_eq!(answer.json()["error"]["code"], "turn_budget_exhausted");
            assert_eq!(answer.header("x-should-retry"), Some("false"));
        }
    }
    app.stop().await;
}

/// G10: A refusal that is temporary tells every kind of client to wait.
#[tokio::test]
async fn a_temporary_refusal_tells_every_client_to_wait() {
    let app = TestApp::with(|config| config.budget.requests_per_minute = Some(1)).await;
    let litellm = [("user-agent", "litellm/1.109.1")];
    for status in [200, 429] {
        let answer = app
            .client()
            .post_with(
                "/v1/chat/completions",
                &json!({ "model": "fake", "messages": [] }),
                &litellm,
            )
            .await;
        assert_eq!(answer.status, status, "{}", answer.text());
    }
    app.stop().await;
}

/// G5: A body with a content encoding is refused with an error that names the encoding.
#[tokio::test]
async fn a_refusal_names_the_encoding_of_the_body() {
    let app = TestApp::start().await;
    let mut messages = String::new();
    for (headers, body) in [
        ("content-encoding: gzip\r\n", &b"\x1f\x8b\x08\x00"[..]),
        ("", b"\x1f\x8b\x08\x00"),
        ("", b"\xef\xbb\xbf{}"),
        ("", b"\xff\xfe{\x00}\x00"),
        ("content-encoding: identity\r\n", b"{}"),
    ] {
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n";
        let head = format!("{head}{headers}content-length: {}\r\n\r\n", body.len());
        let answer = app.client().raw(&[head.as_bytes(), body].concat()).await;
        let status = answer.split(' ').nth(1).unwrap();
        let body = answer.rsplit_once("\r\n").unwrap().1;
        messages.extend([status, " ", body, "\n"]);
    }
    insta::assert_snapshot!(messages, @r#"
    415 {"error":{"code":"unsupported_media_type","message":"the request body has a `content-encoding`; send plain JSON in UTF-8","param":null,"type":"invalid_request_error"}}
    415 {"error":{"code":"unsupported_media_type","message":"the request body is compressed; send plain JSON in UTF-8","param":null,"type":"invalid_request_error"}}
    415 {"error":{"code":"unsupported_media_type","message":"the request body begins with a byte order mark; send plain JSON in UTF-8","param":null,"type":"invalid_request_error"}}
    415 {"error":{"code":"unsupported_media_type","message":"the request body is UTF-16; send plain JSON in UTF-8","param":null,"type":"invalid_request_error"}}
    400 {"error":{"code":"model_required","message":"`model` is missing; name the model","param":"model","type":"invalid_request_error"}}
    "#);
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;
}

/// G3: A request with two hosts is no request (RFC 9112, section 3.2). The lane and hyper refuse it on every path.
#[tokio::test]
async fn a_request_with_two_hosts_is_refused() {
    let app = TestApp::start().await;
    let body = r#"{"model":"m","messages":[]}"#;
    let length = body.len();
    let post = format!("content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}");
    for rest in [format!("connection: close\r\n{post}"), post] {
        let heads = [
            ("POST /v1/chat/completions", rest.as_str()),
            ("GET /health", "connection: close\r\n\r\n"),
        ];
        for (target, rest) in heads {
            let request =
                format!("{target} HTTP/1.1\r\nhost: localhost\r\nHost: localhost\r\n{rest}");
            // The second request ends a connection that the first one keeps open.
            let last = "GET /key/list HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
            let answer = app.client().raw(format!("{request}{last}").as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 400 "), "{target}: {answer}");
            assert!(answer.contains("repeated_host"), "{target}: {answer}");
        }
    }
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;
}

/// G14: A body that does not arrive in time is cut.
#[tokio::test]
async fn a_body_that_never_ends_is_cut() {
    let app = TestApp::with(|config| config.policy.body_timeout = SHORT).await;
    let head = "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    let request = format!("{head}content-length: 100\r\n\r\n{{\"model\":");
    let answer = app.client().raw(request.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    insta::assert_snapshot!(answer.rsplit_once("\r\n").unwrap().1, @r#"{"error":{"code":"request_timeout","message":"the request body did not arrive within 50ms","type":"invalid_request_error"},"type":"error"}"#);
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;
}

/// G14: A client that opens a large answer and reads nothing is cut.
#[tokio::test]
async fn a_reader_that_stalls_is_cut() {
    let app = TestApp::with(|config| config.server.write_timeout = SHORT).await;
    let stalled = app.client().open("/v1/chat/completions", &endless_body()).await;
    app.upstream
        .seen
        .wait_until(|seen| seen.last_request().unwrap().ended == Some(AnswerEnd::ClientLeft))
        .await;
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(settled["outcome"], "client_gone");
    assert!(!stalled.rest().await.1);
    app.stop().await;
}

/// G14: Data that a slow client does not read stays at the provider.
#[tokio::test]
async fn a_slow_reader_costs_bounded_memory() {
    let app = TestApp::start().await;
    let mut slow = app.client().open("/v1/chat/completions", &endless_body()).await;
    assert!(slow.frame().await.unwrap().is_some());
    let sent = || app.upstream.seen.last_request().unwrap().sent;
    let mut before = u64::MAX;
    while sent() != before {
        before = sent();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // The sockets buffer at most a few MiB; the rest of the 4 GiB waits.
    assert!(before < 500, "{before} chunks of 64 KiB have been taken from the provider");
    // The client is slow, not dead: the stream continues when the client reads.
    while sent() < before + 10 {
        assert!(slow.frame().await.unwrap().is_some());
    }
    drop(slow);
    app.stop().await;
}

/// G7, G14: An event of 64 MiB without a line end is cut at 8 MiB.
#[tokio::test]
async fn an_endless_event_is_bounded() {
    for path in ["/v1/chat/completions", "/v1/responses", "/v1/messages"] {
        let app = TestApp::start().await;
        let body = json!({"model": "fake/chunks=1;size=64MiB", "stream": true, "max_tokens": 9, "messages": []});
        let mut stream = app.client().open(path, &body).await;
        let mut read = 0;
        while let Ok(frame) = stream.frame().await {
            read += frame.expect("the stream ended in order").len();
        }
        assert!(read <= 9 << 20, "{path}: {read} bytes went to the client");
        let settled = app.recorded("request.settled", 1).await.remove(0);
        assert_eq!(settled["code"], "upstream_event_too_large", "{path}");
        assert!(settled["response_bytes"].as_u64().unwrap() <= 9 << 20, "{path}");
        app.stop().await;
    }
}

/// G14: The unfinished events of all streams of a run count among its bodies in flight. A stream beyond the limit is cut,
/// and small events go on.
#[tokio::test]
async fn unfinished_events_of_all_streams_are_bounded() {
    for lane in [LaneMode::On, LaneMode::Off] {
        let app = TestApp::with(|config| {
            config.server.lane = lane;
            config.server.max_run_body_bytes = 6 * 1024 * 1024;
            config.policy.max_body_bytes = 1024 * 1024;
        })
        .await;
        let small = json!({"model": "fake/gate=1", "stream": true, "messages": []});
        let small = app.client().open("/v1/chat/completions", &small).await;
        // Each event grows to 8 MiB, more than all streams together may hold.
        let large = json!({"model": "fake/chunks=1;size=64MiB", "stream": true, "max_tokens": 9, "input": "x"});
        let mut streams = vec![];
        for _ in 0..4 {
            streams.push(app.client().open("/v1/responses", &large).await);
        }
        let mut read = 0;
        for mut stream in streams {
            while let Ok(frame) = stream.frame().await {
                read += frame.expect("the stream ended in order").len();
            }
        }
        // The sockets of a stream that is not read hold little.
        assert!(read <= 16 * 1024 * 1024, "{read} bytes went to the client");
        for settled in app.recorded("request.settled", 4).await {
            assert_eq!(
                (&settled["code"], &settled["outcome"]),
                (&json!("overloaded"), &json!("upstream_failed"))
            );
        }
        // All bytes are free again: a body of the largest size fits six times.
        let body = json!({"model": "fake", "messages": [{"role": "user", "content": "x".repeat(1_000_000)}]});
        assert_eq!(app.client().post("/v1/chat/completions", &body).await.status, 200);
        app.upstream.gate.allow_answers(1);
        assert!(small.rest().await.1, "a stream of small events was cut");
        app.stop().await;
    }
}

/// G14: Whatever bytes a client sends, other clients are served.
#[tokio::test]
async fn a_client_that_sends_garbage_harms_no_other_client() {
    let app = TestApp::start().await;
    let open = json!({"model": "fake/gate=1", "stream": true, "messages": []});
    let stream = app.client().open("/v1/chat/completions", &open).await;
    let every_byte: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    let zeros = vec![0; 70_000];
    let tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec();
    let frames = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &every_byte].concat();
    for garbage in [every_byte, zeros, tls, frames, b"\r\n".repeat(40_000)] {
        assert!(!app.client().raw(&garbage).await.contains("200 OK"));
    }
    assert_eq!(app.client().get("/health").await.status, 200);
    app.upstream.gate.allow_answers(1);
    assert!(stream.rest().await.1);
    app.stop().await;
}

/// G11, G14: A flood of refusals is counted instead of recorded one by one.
#[tokio::test]
async fn a_flood_of_refusals_does_not_fill_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("audit.jsonl");
    let app = TestApp::with(|config| config.audit.path = Some(log.clone())).await;
    let request = "GET /v1/keys HTTP/1.1\r\nhost: x\r\n\r\n".repeat(999);
    let last = "GET /v1/keys HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let mut socket = app.client().connect().await;
    let (mut reader, mut writer) = socket.split();
    let requests = [request, last.to_owned()].concat();
    let (mut answers, flood) = (String::new(), writer.write_all(requests.as_bytes()));
    let (read, written) = tokio::join!(reader.read_to_string(&mut answers), flood);
    read.unwrap();
    written.unwrap();
    assert_eq!(answers.matches("HTTP/1.1 404 ").count(), 1000);
    let records = app.stop().await;
    assert_eq!(verify::verify_file(&log, None).unwrap().refused, 1000);
    let lines = records.iter().filter(|record| record["event"] == "request.refused").count();
    assert!(lines < 200, "{lines} lines");
}

/// G14: HTTP/2 has the same limits for heads and bodies.
#[tokio::test]
async fn http2_has_the_same_limits() {
    let app = TestApp::with(|config| config.policy.max_body_bytes = 1000).await;
    let mut connection = app.client().http2().await;
    let request = post_request("http://x/v1/messages", &sized_body(1001), &[]);
    assert_eq!(connection.send_request(request).await.unwrap().status(), 413);
    let long = "y".repeat(65 * 1024);
    let request = post_request("http://x/v1/messages", &sized_body(10), &[("x", &long)]);
    // The server announces its limit, so the client may refuse by itself.
    let refused = connection.send_request(request).await;
    assert!(refused.is_err() || refused.is_ok_and(|response| response.status() == 431));
    assert_eq!(app.upstream.seen.request_count(), 0);
    drop(connection);
    app.stop().await;
}

/// G14: A body that is not JSON is not sent upstream.
#[tokio::test]
async fn only_json_is_taken() {
    let app = TestApp::start().await;
    let mut request = post_request("/v1/messages", &sized_body(100), &[]);
    request.headers_mut().insert("content-type", "text/plain".parse().unwrap());
    let TestResponse { status, .. } = app.client().send(request).await;
    assert_eq!(status, 415);
    for content_type in ["application/json; charset=utf-8", "Application/JSON"] {
        let mut request = post_request("/v1/messages", &sized_body(100), &[]);
        request.headers_mut().insert("content-type", content_type.parse().unwrap());
        assert_eq!(app.client().send(request).await.status, 200);
    }
    assert_eq!(app.upstream.seen.request_count(), 2);
    app.stop().await;
}

/// A request whose body has this many bytes, or the minimum number.
fn sized_body(bytes: usize) -> Value {
    let empty = json!({"model": "fake", "messages": [], "pad": ""}).to_string().len();
    json!({"model": "fake", "messages": [], "pad": " ".repeat(bytes.saturating_sub(empty))})
}

/// 4 GiB in frames.
fn endless_body() -> Value {
    json!({"model": "fake/chunks=65536;size=64KiB", "stream": true, "messages": []})
}

/// The data never arrives, so the timeout may be short.
const SHORT: Duration = Duration::from_millis(50);
