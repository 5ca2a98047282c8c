//! G11: Tests of the admission record: it is written before the call is sent, and no call is sent without it.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::raw_upstream;
use crate::support::small_disk::SmallDisk;

/// G11: The admission is in the file before the upstream receives the first byte.
#[tokio::test]
async fn an_admission_is_on_disk_before_the_call_is_sent() {
    let (upstream, address) = raw_upstream::listen_locally().await;
    let app =
        TestApp::with(|config| config.upstream.url = address.to_string().parse().unwrap()).await;
    let client = app.client();
    let body = streamed_body("fake");
    for calls in 1..=3 {
        let (_, request) = tokio::join!(client.post("/v1/messages", &body), async {
            let (mut connection, _) = upstream.accept().await.unwrap();
            // The provider has read nothing of the request yet.
            let admitted = app.records().into_iter().filter(|r| r["event"] == "request.admitted");
            let admitted: Vec<_> = admitted.collect();
            assert_eq!(admitted.len(), calls);
            let request = raw_upstream::read_request(&mut connection).await;
            let id = admitted[calls - 1]["request"].as_str().unwrap();
            assert!(request.contains(&format!("x-litellm-call-id: {id}\r\n")), "{request}");
            raw_upstream::send_text(&mut connection, raw_upstream::ANSWER).await;
            request
        });
        assert!(request.starts_with("POST /v1/messages HTTP/1.1\r\n"));
    }
    app.stop().await;
}

/// G11: The admission record has what the call may spend and the settlement record has what it spent; neither has any
/// prompt or answer.
#[tokio::test]
async fn a_call_is_two_records() {
    let app = TestApp::start().await;
    let body = json!({"model": "fake/input=11;output=5", "max_tokens": 100, "messages": [{"role": "user", "content": "hush"}]});
    app.client().post("/v1/messages", &body).await;
    let records = app.stop().await;
    let names: Vec<_> = records.iter().map(|record| record["event"].as_str().unwrap()).collect();
    insta::assert_debug_snapshot!(names, @r#"
    [
        "run.started",
        "connection.opened",
        "request.admitted",
        "request.settled",
        "run.finished",
        "log.checkpoint",
    ]
    "#);
    let text = serde_json::to_string(&records).unwrap();
    for secret in ["hush", "hello from", "sk-real"] {
        assert!(!text.contains(secret), "{secret} is in the records");
    }
}

/// G11: While records cannot be written, no call is admitted, and open streams continue.
#[tokio::test]
async fn a_full_disk_stops_calls_and_no_stream() {
    let disk = SmallDisk::mount(256 * 1024);
    let log = disk.path("audit.jsonl");
    let app = TestApp::with(|config| config.audit.path = Some(log.clone())).await;
    let stream = app.client().open("/v1/chat/completions", &streamed_body("fake/gate=1")).await;
    app.upstream.gate.wait_for_waiting(1).await;
    disk.fill();
    // The rest of the last page has room for a few more admissions.
    let refused = loop {
        let response = app.client().post("/v1/messages", &unary_body("fake")).await;
        if response.status != 200 {
            break response;
        }
    };
    assert_eq!((refused.status.as_u16(), refused.header("x-should-retry")), (503, None));
    insta::assert_snapshot!(refused.text(), @r#"{"error":{"code":"audit_unavailable","message":"the audit log cannot be written","type":"api_error"},"type":"error"}"#);
    let calls = app.upstream.seen.request_count();
    app.client().post("/v1/messages", &unary_body("fake")).await;
    assert_eq!(
        app.upstream.seen.request_count(),
        calls,
        "a call that is not recorded went upstream"
    );
    app.upstream.gate.allow_answers(1);
    let (events, in_order) = stream.rest().await;
    assert!(in_order && events.ends_with("data: [DONE]\n\n"), "{events}");
    disk.free();
    let response = app.client().post("/v1/messages", &unary_body("fake")).await;
    assert_eq!(response.status, 200);
    app.stop().await;
}

fn unary_body(model: &str) -> Value {
    json!({"model": model, "max_tokens": 100, "messages": []})
}

fn streamed_body(model: &str) -> Value {
    json!({"model": model, "max_tokens": 100, "stream": true, "messages": []})
}
