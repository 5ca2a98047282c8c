//! Tests of the fake provider's faults, as its client observes them.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use cogni_gateway::fakes::model_provider::AnswerEnd;
use serde_json::json;
use tokio::io::AsyncReadExt as _;

use super::raw_client::{RawReply, post_json, read_reply, read_until, send_json};
use crate::support::model_provider::{RunningProvider, start_default};

const CHAT: &str = "/v1/chat/completions";

async fn stream_with_fault(addr: SocketAddr, fault: &str) -> RawReply {
    let model = format!("fake/chunks=3,fault={fault}");
    post_json(addr, CHAT, &json!({ "model": model, "stream": true })).await
}

async fn call_with_fault(addr: SocketAddr, fault: &str) -> RawReply {
    post_json(addr, CHAT, &json!({ "model": format!("fake/fault={fault}") })).await
}

/// Counts the content chunks that arrived.
fn count_arrived(reply: &RawReply) -> usize {
    reply.text().matches("\"delta\":{\"content\":").count()
        - reply.text().matches("\"content\":\"\"").count()
}

async fn answer_end(provider: &RunningProvider) -> AnswerEnd {
    provider
        .seen
        .wait_until(|seen| seen.last_request().is_some_and(|last| last.ended.is_some()))
        .await;
    provider.seen.last_request().unwrap().ended.unwrap()
}

#[tokio::test]
async fn a_reset_is_an_rst_after_so_many_chunks() {
    let provider = start_default().await;
    for sent in 0..=3 {
        let reply = stream_with_fault(provider.addr, &format!("reset@{sent}")).await;
        assert_eq!(reply.error, Some(ErrorKind::ConnectionReset));
        assert_eq!((count_arrived(&reply), reply.whole), (sent, false));
        assert_eq!(answer_end(&provider).await, AnswerEnd::Broken);
    }
    let reply = stream_with_fault(provider.addr, "reset@head").await;
    assert_eq!((reply.error, reply.head.as_str()), (Some(ErrorKind::ConnectionReset), ""));
    assert_eq!(answer_end(&provider).await, AnswerEnd::Broken);
}

#[tokio::test]
async fn a_close_is_a_fin_where_the_body_goes_on() {
    let provider = start_default().await;
    for sent in 0..=3 {
        let reply = stream_with_fault(provider.addr, &format!("close@{sent}")).await;
        assert_eq!((reply.error, reply.whole, count_arrived(&reply)), (None, false, sent));
        assert!(!reply.text().contains("[DONE]"));
        assert_eq!(answer_end(&provider).await, AnswerEnd::Broken);
    }
    let reply = stream_with_fault(provider.addr, "close@end").await;
    assert!(reply.text().ends_with("[DONE]\n\n") && !reply.whole);
    let reply = stream_with_fault(provider.addr, "close@head").await;
    assert_eq!((reply.error, reply.head.as_str()), (None, ""));
}

#[tokio::test]
async fn a_truncated_stream_ends_its_body_and_not_its_events() {
    let provider = start_default().await;
    let reply = stream_with_fault(provider.addr, "truncate@2").await;
    assert_eq!((reply.whole, count_arrived(&reply)), (true, 2));
    assert!(!reply.text().contains("[DONE]"));
    assert_eq!(answer_end(&provider).await, AnswerEnd::Completed);
}

#[tokio::test]
async fn an_error_is_an_event_in_the_protocols_own_shape() {
    let provider = start_default().await;
    let cases = [
        (CHAT, "data: {\"error\":", "data: [DONE]\n\n"),
        ("/v1/messages", "event: error\n", "\n\n"),
        ("/v1/responses", "event: response.failed\n", "\n\n"),
    ];
    for (path, error, end) in cases {
        let model = "fake/chunks=3,fault=error@1";
        let reply =
            post_json(provider.addr, path, &json!({ "model": model, "stream": true })).await;
        let text = reply.text();
        let (before, after) = text.split_once(error).unwrap();
        assert_eq!(before.matches("hello").count(), 1);
        assert!(after.ends_with(end) && !after.contains("completed") && reply.whole, "{after}");
    }
    assert_eq!(stream_with_fault(provider.addr, "error@head").await.status(), 500);
    assert_eq!(call_with_fault(provider.addr, "error@1").await.status(), 500);
}

#[tokio::test]
async fn garbage_is_neither_a_head_nor_a_chunk() {
    let provider = start_default().await;
    let reply = stream_with_fault(provider.addr, "garbage@1").await;
    assert_eq!(count_arrived(&reply), 1);
    assert!(reply.garbage.starts_with(b"\x00\xff"));
    let reply = stream_with_fault(provider.addr, "garbage@head").await;
    assert!(!reply.head.starts_with("HTTP/"));
}

#[tokio::test]
async fn a_unary_body_breaks_half_way() {
    let provider = start_default().await;
    for (fault, error) in [("close@1", None), ("reset@end", Some(ErrorKind::ConnectionReset))] {
        let reply = call_with_fault(provider.addr, fault).await;
        let length: usize = reply.header("content-length").unwrap().parse().unwrap();
        assert_eq!((reply.status(), reply.error, reply.whole), (200, error, false));
        assert_eq!(reply.chunks[0].len(), length / 2);
        assert_eq!(answer_end(&provider).await, AnswerEnd::Broken);
    }
}

#[tokio::test]
async fn a_stall_lasts_until_the_client_leaves() {
    let provider = start_default().await;
    for (fault, before) in [("stall@head", None), ("stall@1", Some("hello"))] {
        let model = format!("fake/chunks=3,fault={fault}");
        let body = json!({ "model": model, "stream": true });
        let mut client = send_json(provider.addr, CHAT, &body).await;
        if let Some(before) = before {
            read_until(&mut client, before).await;
        }
        let mut buffer = [0; 999];
        let more = client.read(&mut buffer);
        let silence = tokio::time::timeout(Duration::from_millis(50), more).await;
        silence.expect_err("the answer went on");
        drop(client);
        assert_eq!(answer_end(&provider).await, AnswerEnd::ClientLeft);
    }
}

#[tokio::test]
async fn a_gate_holds_back_what_comes_after_it() {
    let provider = start_default().await;
    let body = json!({ "model": "fake/chunks=3,gate=1", "stream": true });
    let mut client = send_json(provider.addr, CHAT, &body).await;
    let early = read_until(&mut client, "hello").await;
    provider.gate.wait_for_waiting(1).await;
    assert_eq!(provider.seen.last_request().unwrap().sent, 1);
    assert!(!early.contains("from"), "{early}");
    provider.gate.allow_answers(1);
    let late = read_until(&mut client, "[DONE]").await;
    assert!(late.contains("from"), "{late}");
    assert_eq!(provider.gate.waiting_answers(), 0);
}

#[tokio::test]
async fn a_gate_before_the_head_is_opened_over_http() {
    let provider = start_default().await;
    let mut client = send_json(provider.addr, CHAT, &json!({ "model": "fake/gate=head" })).await;
    provider.gate.wait_for_waiting(1).await;
    assert_eq!(provider.seen.last_request().unwrap().status, None);
    let opened = post_json(provider.addr, "/_gate", &json!({})).await;
    assert_eq!(opened.json(), json!({ "waiting": 1 }));
    assert_eq!(read_reply(&mut client).await.status(), 200);
}
