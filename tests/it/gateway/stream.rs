//! G7: frames pass when they arrive, and what passes is counted.

use serde_json::json;

use crate::support::app::TestApp;

/// G7: the second frame does not exist yet when the first one is delivered.
#[tokio::test]
async fn a_frame_is_delivered_before_the_next_one_is_sent() {
    let app = TestApp::start().await;
    let body = json!({"model": "fake/chunks=2,gate=1", "stream": true, "messages": []});
    let mut stream = app.client().open("/v1/chat/completions", &body).await;
    let first = stream.frame().await.unwrap().unwrap();
    assert!(first.starts_with(b"data: {"));
    app.upstream.gate.reached(1).await;
    assert_eq!(app.upstream.seen.last().unwrap().sent, 1);
    app.upstream.gate.open(1);
    let (rest, in_order) = stream.rest().await;
    assert!(in_order && rest.ends_with("data: [DONE]\n\n"));
    app.stop().await;
}
