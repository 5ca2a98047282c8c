//! G8: Tests of the pool: connections are reused, and a call is retried only if nothing of it was delivered.

use std::net::SocketAddr;
use std::time::Duration;

use cogni_gateway::gateway::upstream;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::app::TestApp;
use crate::support::process::TEST_TIMEOUT;
use crate::support::raw_upstream;

/// G8: One connection carries one call after the other, unary and streamed, successful and failed.
#[tokio::test]
async fn a_connection_is_used_again() {
    let app = TestApp::with(|config| config.upstream.pool_idle_timeout = LONG).await;
    for _ in 0..5 {
        for model in ["fake", "fake/status=500", "fake/chunks=50;coalesce=7"] {
            for stream in [false, true] {
                let body = json!({"model": model, "stream": stream, "messages": []});
                app.client().post("/v1/chat/completions", &body).await;
            }
        }
        app.client().get("/v1/models").await;
    }
    assert_eq!((app.upstream.seen.request_count(), app.upstream.seen.connection_count()), (35, 1));
    app.stop().await;
}

/// G8: Concurrent calls have separate connections, which later calls reuse.
#[tokio::test]
async fn calls_side_by_side_have_connections_of_their_own() {
    let app = TestApp::with(|config| config.upstream.pool_idle_timeout = LONG).await;
    for _ in 0..2 {
        let mut streams = vec![];
        for _ in 0..10 {
            let body = json!({"model": "fake/gate=1", "stream": true, "messages": []});
            streams.push(app.client().open("/v1/chat/completions", &body).await);
        }
        app.upstream.gate.wait_for_waiting(10).await;
        app.upstream.gate.allow_answers(10);
        for stream in streams {
            stream.finish().await.unwrap();
        }
    }
    assert_eq!(app.upstream.seen.connection_count(), 10);
    app.stop().await;
}

/// G8: A connection that the server closed while it was idle is not used, and the call is made once.
#[tokio::test]
async fn a_dead_connection_is_replaced_once() {
    let (upstream, address) = raw_upstream::listen_locally().await;
    let app = TestApp::with(|config| configure_upstream(&mut config.upstream, address)).await;
    let client = app.client();
    let body = unary_body();
    for _ in 0..3 {
        let (answer, request) = tokio::join!(client.post("/v1/messages", &body), async {
            let (mut connection, _) = upstream.accept().await.unwrap();
            let request = raw_upstream::read_request(&mut connection).await;
            // The response head promises to keep the connection open; dropping it closes it all the same.
            raw_upstream::send_text(&mut connection, raw_upstream::ANSWER).await;
            request
        });
        assert_eq!((answer.status.as_u16(), request.matches("HTTP/1.1").count()), (200, 1));
    }
    app.stop().await;
}

/// G8: The gateway closes an idle connection before the server does.
#[tokio::test]
async fn a_connection_that_was_idle_for_too_long_is_not_used() {
    let app = TestApp::with(|config| config.upstream.pool_idle_timeout = Duration::ZERO).await;
    for connections in 1..=3 {
        app.client().post("/v1/messages", &unary_body()).await;
        assert_eq!(app.upstream.seen.connection_count(), connections);
    }
    app.stop().await;
}

/// G8: An idle connection is closed when its time is over, even if no further call is made.
#[tokio::test]
async fn idle_connections_are_closed_without_another_call() {
    let (upstream, address) = raw_upstream::listen_locally().await;
    let app = TestApp::with(|config| {
        configure_upstream(&mut config.upstream, address);
        config.upstream.pool_idle_timeout = Duration::from_millis(200);
    })
    .await;
    let (client, body) = (app.client(), unary_body());
    for _ in 0..2 {
        let (_, mut connection) = tokio::join!(client.post("/v1/messages", &body), async {
            let (mut connection, _) = upstream.accept().await.unwrap();
            raw_upstream::read_request(&mut connection).await;
            raw_upstream::send_text(&mut connection, raw_upstream::ANSWER).await;
            connection
        });
        let closed = tokio::time::timeout(TEST_TIMEOUT, connection.read(&mut [0])).await;
        assert_eq!(closed.expect("it stays open").unwrap(), 0);
    }
    app.stop().await;
}

/// G8: An idle connection on which the server sent bytes is not used, because those bytes would answer the next call.
#[tokio::test]
async fn a_connection_that_speaks_unasked_is_not_used() {
    let (upstream, address) = raw_upstream::listen_locally().await;
    let app = TestApp::with(|config| configure_upstream(&mut config.upstream, address)).await;
    let client = app.client();
    let body = unary_body();
    let (_, mut first) = tokio::join!(client.post("/v1/messages", &body), async {
        let (mut connection, _) = upstream.accept().await.unwrap();
        raw_upstream::read_request(&mut connection).await;
        raw_upstream::send_text(&mut connection, raw_upstream::ANSWER).await;
        connection
    });
    let poison = raw_upstream::ANSWER.replace("{}", "[]");
    raw_upstream::send_text(&mut first, &poison).await;
    let (answer, ()) = tokio::join!(client.post("/v1/messages", &body), async {
        let (mut connection, _) = upstream.accept().await.unwrap();
        raw_upstream::read_request(&mut connection).await;
        raw_upstream::send_text(&mut connection, raw_upstream::ANSWER).await;
    });
    assert_eq!(answer.text(), "{}");
    app.stop().await;
}

/// G8: Bytes after the end of an answer never become part of another answer.
#[tokio::test]
async fn bytes_after_an_answer_are_not_the_next_answer() {
    let (upstream, address) = raw_upstream::listen_locally().await;
    let app = TestApp::with(|config| configure_upstream(&mut config.upstream, address)).await;
    let client = app.client();
    let body = unary_body();
    for _ in 0..2 {
        let (answer, _connection) = tokio::join!(client.post("/v1/messages", &body), async {
            let (mut connection, _) = upstream.accept().await.unwrap();
            raw_upstream::read_request(&mut connection).await;
            raw_upstream::send_text(
                &mut connection,
                &raw_upstream::ANSWER.repeat(2).replacen("{}", "[]", 1),
            )
            .await;
            connection
        });
        assert_eq!(answer.text(), "[]");
    }
    app.stop().await;
}

/// G8: A delivered call is never repeated, neither on a new connection nor on a reused one.
#[tokio::test]
async fn a_delivered_call_is_not_repeated() {
    for (fault, code) in [
        ("close", "upstream_closed"),
        ("reset", "upstream_closed"),
        ("garbage", "upstream_malformed"),
    ] {
        for calls_before in [0, 1] {
            let app = TestApp::with(|config| config.upstream.pool_idle_timeout = LONG).await;
            for _ in 0..calls_before {
                app.client().post("/v1/messages", &unary_body()).await;
            }
            let body = json!({"model": format!("fake/fault={fault}@head"), "messages": []});
            let response = app.client().post("/v1/messages", &body).await;
            assert_eq!((fault, response.status.as_u16()), (fault, 502));
            assert_eq!(response.json()["error"]["code"], code, "{fault}");
            assert_eq!(app.upstream.seen.request_count(), calls_before + 1, "{fault}");
            let settled = app.recorded("request.settled", 1).await.pop().unwrap();
            assert_eq!(settled["charged"]["turns"], 1, "{fault}");
            app.stop().await;
        }
    }
}

/// G8: An upstream may refuse a large request before it has read it.
#[tokio::test]
async fn an_answer_may_come_before_the_request_is_sent() {
    let (upstream, address) = raw_upstream::listen_locally().await;
    let app = TestApp::with(|config| configure_upstream(&mut config.upstream, address)).await;
    let client = app.client();
    let body = large_body();
    for _ in 0..2 {
        // This upstream neither reads on nor closes, so a client that only writes would wait forever. The rest of this
        // request must not become part of the next one, so a second call uses another connection.
        let (answer, _connection) = tokio::join!(client.post("/v1/messages", &body), async {
            let (mut connection, _) = upstream.accept().await.unwrap();
            let mut head = [0; 512];
            connection.read_exact(&mut head).await.unwrap();
            let refusal = "HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\n{}";
            connection.write_all(refusal.as_bytes()).await.unwrap();
            connection
        });
        assert_eq!((answer.status.as_u16(), answer.text()), (413, "{}"));
    }
    app.stop().await;
}

/// G8: An interim answer does not stop the request.
#[tokio::test]
async fn an_interim_answer_does_not_stop_the_request() {
    let (upstream, address) = raw_upstream::listen_locally().await;
    let app = TestApp::with(|config| configure_upstream(&mut config.upstream, address)).await;
    let client = app.client();
    let body = large_body();
    let (answer, request) = tokio::join!(client.post("/v1/messages", &body), async {
        let (mut connection, _) = upstream.accept().await.unwrap();
        raw_upstream::send_text(&mut connection, "HTTP/1.1 100 Continue\r\n\r\n").await;
        let request = raw_upstream::read_request(&mut connection).await;
        raw_upstream::send_text(&mut connection, raw_upstream::ANSWER).await;
        request
    });
    assert_eq!(answer.status, 200);
    assert!(request.ends_with(&body.to_string()));
    app.stop().await;
}

/// Configures a listener that the test plays as the upstream, with a long idle time.
fn configure_upstream(config: &mut upstream::UpstreamConfig, address: SocketAddr) {
    config.url = address.to_string().parse().unwrap();
    config.pool_idle_timeout = LONG;
}

fn unary_body() -> Value {
    json!({"model": "fake", "messages": []})
}

/// Larger than the socket buffers of both ends together.
fn large_body() -> Value {
    json!({"model": "fake", "messages": [{"role": "user", "content": "x".repeat(20 << 20)}]})
}

const LONG: Duration = Duration::from_hours(1);
