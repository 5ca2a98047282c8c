//! Tests of the request log: which requests arrived and how they ended.

use std::net::SocketAddr;

use cogni_gateway::fakes::model_provider::{
    AnswerEnd, FakeProvider, MAX_KEPT_BODY_BYTES, MAX_KEPT_REQUESTS, ProviderScript,
};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio_util::sync::CancellationToken;

use super::raw_client::{
    call_without_body, get_path, post_json, read_reply, read_until, send_bytes, send_json,
};
use crate::support::model_provider::{start_default, start_provider};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_request_is_recorded_as_it_came() {
    let provider = start_default().await;
    let body = r#"{"model":"m","user":"u"}"#;
    let head = "POST /v1/chat/completions?beta=true HTTP/1.1\r\nHost: fake\r\nX-B: 2\r\n\
                Authorization: Bearer k\r\nX-A: 1\r\nconnection: close\r\ncontent-length: 24\r\n\r\n";
    read_reply(&mut send_bytes(provider.addr, &format!("{head}{body}")).await).await;
    let request = provider.seen.last_request().unwrap();
    let names: Vec<_> = request.headers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["host", "x-b", "authorization", "x-a", "connection", "content-length"]);
    assert_eq!(request.header("authorization"), Some("Bearer k"));
    assert_eq!(request.header("x-litellm-call-id"), None);
    assert_eq!(request.path, "/v1/chat/completions?beta=true");
    assert_eq!((request.number, request.method.as_str(), request.body_bytes), (1, "POST", 24));
    assert_eq!(request.text.as_deref(), Some(body));
    assert_eq!(request.body, Some(json!({ "model": "m", "user": "u" })));
    assert_eq!((request.status, request.ended), (Some(200), Some(AnswerEnd::Completed)));
}

#[tokio::test]
async fn a_client_that_leaves_mid_stream_is_recorded() {
    let provider = start_default().await;
    let body = json!({ "model": "fake/chunks=1000000,size=1KiB", "stream": true });
    let mut client = send_json(provider.addr, CHAT, &body).await;
    read_until(&mut client, "xxx").await;
    drop(client);
    provider
        .seen
        .wait_until(|seen| seen.last_request().is_some_and(|last| last.ended.is_some()))
        .await;
    let request = provider.seen.last_request().unwrap();
    assert_eq!(request.ended, Some(AnswerEnd::ClientLeft));
    assert!(request.sent < 1_000_000);
    provider.seen.wait_until(|seen| seen.open_connections() == 0).await;
}

#[tokio::test]
async fn a_client_that_does_not_read_is_not_sent_everything() {
    let provider = start_default().await;
    let body = json!({ "model": "fake/chunks=1000000,size=1KiB", "stream": true });
    let client = send_json(provider.addr, CHAT, &body).await;
    // The kernel's buffers take some megabytes; then the count stops rising.
    let mut sent = 0;
    loop {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        let now = provider.seen.last_request().map_or(0, |last| last.sent);
        if now > 0 && now == sent {
            break;
        }
        sent = now;
    }
    assert!(sent < 1_000_000, "{sent}");
    drop(client);
}

#[tokio::test]
async fn refused_requests_are_recorded_too() {
    let provider = start_default().await;
    get_path(provider.addr, "/v1/files").await;
    post_json(provider.addr, CHAT, &json!({ "model": "fake/nonsense" })).await;
    let statuses: Vec<_> = provider.seen.requests().iter().map(|request| request.status).collect();
    assert_eq!(statuses, [Some(404), Some(400)]);
}

#[tokio::test]
async fn only_the_last_requests_and_small_bodies_are_kept() {
    let provider = start_default().await;
    let requests = MAX_KEPT_REQUESTS + 10;
    let mut pipeline = "GET /v1/models HTTP/1.1\r\nhost: fake\r\n\r\n".repeat(requests - 1);
    pipeline.push_str("GET /v1/models HTTP/1.1\r\nhost: fake\r\nconnection: close\r\n\r\n");
    let mut client = send_bytes(provider.addr, &pipeline).await;
    read_reply(&mut client).await;
    assert_eq!(provider.seen.requests().len(), MAX_KEPT_REQUESTS);
    assert_eq!(provider.seen.request_count(), requests as u64);
    assert_eq!(provider.seen.connection_count(), 1);

    post_json(
        provider.addr,
        CHAT,
        &json!({ "model": "m", "messages": "x".repeat(MAX_KEPT_BODY_BYTES) }),
    )
    .await;
    let large = provider.seen.last_request().unwrap();
    assert!(large.body_bytes > MAX_KEPT_BODY_BYTES as u64);
    assert_eq!((large.body, large.text), (None, None));
}

#[tokio::test]
async fn the_log_is_served_over_http_and_cleared_on_demand() {
    let provider = start_default().await;
    for model in ["a", "b"] {
        post_json(provider.addr, CHAT, &json!({ "model": model })).await;
    }
    provider.seen.wait_until(|seen| seen.open_connections() == 0).await;
    let seen = get_path(provider.addr, "/_seen?last=1").await.json();
    assert_eq!(seen["count"], 2);
    assert_eq!(seen["connections"], json!({ "accepted": 3, "open": 1 }));
    assert_eq!(seen["requests"][0]["body"]["model"], "b");
    assert_eq!(seen["requests"][1], Value::Null);
    call_without_body(provider.addr, "DELETE", "/_seen", "").await;
    let seen = get_path(provider.addr, "/_seen").await.json();
    assert_eq!((&seen["count"], &seen["requests"]), (&json!(0), &json!([])));
}

#[tokio::test]
async fn each_ended_request_is_a_line_in_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("record.jsonl");
    let addr = SocketAddr::from(([127, 0, 0, 1], 0));
    let provider = FakeProvider::bind(addr, ProviderScript::default()).await.unwrap();
    provider.record_requests_to(std::fs::File::create(&path).unwrap());
    let (addr, stop) = (provider.addr(), CancellationToken::new());
    let client = async {
        for model in ["m", "fake/fault=close@head"] {
            post_json(addr, CHAT, &json!({ "model": model })).await;
        }
        stop.cancel();
    };
    tokio::join!(provider.serve(stop.clone()), client);
    let text = std::fs::read_to_string(path).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ends: Vec<_> = lines.iter().map(|line| (&line["number"], &line["ended"])).collect();
    assert_eq!(ends, [(&json!(1), &json!("completed")), (&json!(2), &json!("broken"))]);
}

#[tokio::test]
async fn a_shutdown_cuts_a_stalled_answer_and_records_it() {
    let provider = start_provider("fault=stall@1").await;
    let mut client = send_json(provider.addr, CHAT, &json!({ "model": "m", "stream": true })).await;
    read_until(&mut client, "hello").await;
    provider.stop.cancel();
    provider
        .seen
        .wait_until(|seen| seen.last_request().is_some_and(|last| last.ended.is_some()))
        .await;
    assert_eq!(provider.seen.last_request().unwrap().ended, Some(AnswerEnd::ShutDown));
    assert!(!read_reply(&mut client).await.whole);
}

#[tokio::test]
async fn a_body_that_breaks_off_is_a_client_that_left() {
    let provider = start_default().await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: fake\r\ncontent-length: 99\r\n\r\n{";
    let mut client = send_bytes(provider.addr, head).await;
    provider.seen.wait_until(|seen| seen.request_count() == 1).await;
    client.shutdown().await.unwrap();
    provider
        .seen
        .wait_until(|seen| seen.last_request().is_some_and(|last| last.ended.is_some()))
        .await;
    assert_eq!(provider.seen.last_request().unwrap().ended, Some(AnswerEnd::ClientLeft));
}
