//! G7: Tests of streams: frames are forwarded when they arrive, and they are counted.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::raw_upstream;

/// G7: The first frame is delivered before the second one exists.
#[tokio::test]
async fn a_frame_is_delivered_before_the_next_one_is_sent() {
    let app = TestApp::start().await;
    let body = json!({"model": "fake/chunks=2;gate=1", "stream": true, "messages": []});
    let mut stream = app.client().open("/v1/chat/completions", &body).await;
    let first = stream.frame().await.unwrap().unwrap();
    assert!(first.starts_with(b"data: {"));
    app.upstream.gate.wait_for_waiting(1).await;
    assert_eq!(app.upstream.seen.last_request().unwrap().sent, 1);
    app.upstream.gate.allow_answers(1);
    let (rest, in_order) = stream.rest().await;
    assert!(in_order && rest.ends_with("data: [DONE]\n\n"));
    app.stop().await;
}

/// G7: A stream reaches the client byte for byte, and its usage reaches the records.
#[tokio::test]
async fn a_stream_passes_byte_for_byte_and_is_counted() {
    for (path, events) in STREAMS {
        let (upstream, address) = raw_upstream::listen_locally().await;
        let app =
            TestApp::with(|config| config.upstream.url = address.to_string().parse().unwrap())
                .await;
        let client = app.client();
        let body = streamed_body("m");
        let (answer, ()) = tokio::join!(client.post(path, &body), async {
            let (mut connection, _) = upstream.accept().await.unwrap();
            raw_upstream::read_request(&mut connection).await;
            raw_upstream::send_text(&mut connection, raw_upstream::STREAM).await;
            // The stream is split into chunks of three bytes, where no event ends.
            for piece in events.as_bytes().chunks(3) {
                let piece = std::str::from_utf8(piece).unwrap();
                raw_upstream::send_text(
                    &mut connection,
                    &format!("{:x}\r\n{piece}\r\n", piece.len()),
                )
                .await;
            }
            raw_upstream::send_text(&mut connection, "0\r\n\r\n").await;
        });
        assert_eq!(answer.text(), *events, "{path}");
        let settled = app.recorded("request.settled", 1).await.remove(0);
        assert_eq!(settled["outcome"], "completed", "{path}");
        let usage = json!({"input": 21, "output": 7, "source": "provider"});
        assert_eq!(settled["usage"], usage, "{path}");
        assert_eq!(settled["charged"], json!({"turns": 1, "input": 21, "output": 7}), "{path}");
        app.stop().await;
    }
}

/// G7: If the upstream breaks off, no client can take the incomplete stream for a complete one.
#[tokio::test]
async fn a_broken_stream_is_never_ended_in_order() {
    let faults = [
        ("close", "upstream_closed"),
        ("reset", "upstream_closed"),
        ("garbage", "upstream_malformed"),
    ];
    for (path, _) in STREAMS {
        for (fault, code) in faults {
            let app = TestApp::start().await;
            // The gate prevents a reset from overtaking the data before it.
            let body = streamed_body(&format!("fake/gate=2;fault={fault}@2"));
            let mut stream = app.client().open(path, &body).await;
            assert_eq!(stream.status, 200);
            assert!(stream.frame().await.unwrap().is_some());
            app.upstream.gate.allow_answers(1);
            let (rest, in_order) = stream.rest().await;
            assert!(!in_order, "{path} {fault}: {rest}");
            for end in ["[DONE]", "message_stop", "response.completed", "finish_reason\":\"stop"] {
                assert!(!rest.contains(end), "{path} {fault}: {rest}");
            }
            let settled = app.recorded("request.settled", 1).await.remove(0);
            let recorded = (&settled["outcome"], &settled["code"], &settled["status"]);
            assert_eq!(recorded, (&json!("upstream_failed"), &json!(code), &json!(200)), "{path}");
            assert_eq!(settled["usage"]["source"], "estimated");
            app.stop().await;
        }
    }
}

/// G7: Data that the upstream sent before it broke off was paid for, and is delivered.
#[tokio::test]
async fn data_before_a_break_is_delivered() {
    let app = TestApp::start().await;
    for _ in 0..10 {
        let body = streamed_body("fake/chunks=9;fault=close@9");
        let (events, in_order) = app.client().open("/v1/messages", &body).await.rest().await;
        assert!(!in_order);
        assert_eq!(events.matches("\"text_delta\"").count(), 9, "{events}");
    }
    app.stop().await;
}

/// G7: Events without a terminator are forwarded unchanged; the gateway adds no terminator.
#[tokio::test]
async fn the_gateway_adds_no_missing_terminator() {
    let app = TestApp::start().await;
    let stream = app.client().open("/v1/messages", &streamed_body("fake/fault=truncate@2")).await;
    let (events, in_order) = stream.rest().await;
    assert!(in_order && !events.contains("message_stop"), "{events}");
    assert_eq!(events.matches("content_block_delta").count(), 2 * 2, "{events}");
    // G15: Without a usage report, the reservation is charged.
    let settled = app.recorded("request.settled", 1).await.remove(0);
    let usage = &settled["usage"];
    assert_eq!((&usage["output"], &usage["source"]), (&json!(100), &json!("estimated")));
    app.stop().await;
}

/// G7: The client can see that a unary answer broke off.
#[tokio::test]
async fn a_broken_unary_answer_is_never_ended_in_order() {
    let app = TestApp::start().await;
    let body = json!({"model": "fake/fault=close@end", "messages": []});
    let stream = app.client().open("/v1/chat/completions", &body).await;
    let (text, in_order) = stream.rest().await;
    assert!(!in_order && serde_json::from_str::<Value>(&text).is_err());
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(settled["outcome"], "upstream_failed");
    app.stop().await;
}

/// A streaming request that fits all protocols, and asks for everything that a stream can contain.
fn streamed_body(model: &str) -> Value {
    json!({
        "model": model,
        "stream": true,
        "stream_options": {"include_usage": true},
        "max_tokens": 100,
        "input": "x",
        "messages": [],
    })
}

/// Each stream has 21 input tokens and 7 output tokens.
const STREAMS: &[(&str, &str)] = &[
    (
        "/v1/chat/completions",
        "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"he\"}}]}\n\n\
         : a comment\r\n\r\n\
         data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n\
         data: {\"id\":\"c\",\"choices\":[],\"usage\":{\"prompt_tokens\":21,\"completion_tokens\":7}}\n\n\
         data: [DONE]\n\n",
    ),
    (
        "/v1/responses",
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"usage\":null}}\n\n\
         event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"usage\":{\
         \"input_tokens\":21,\"output_tokens\":7,\"total_tokens\":28}}}\n\n",
    ),
    (
        "/v1/messages",
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\
         \"input_tokens\":21,\"output_tokens\":1}}}\n\n\
         event: ping\ndata: {\"type\": \"ping\"}\n\n\
         event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\
         \"usage\":{\"output_tokens\":7}}\n\n\
         event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    ),
];
