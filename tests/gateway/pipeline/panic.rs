//! G14: A panic in one connection affects only that connection.
//!
//! The log observer of the test panics once in the middle of a call, so the gateway needs no test hook.

use std::env;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::task;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::support::app::TestApp;
use crate::support::client::post_request;

/// G14: A panic ends its connection, settles the calls on it and returns its connection slot. Other connections
/// continue.
#[tokio::test]
async fn a_panic_in_one_connection_harms_no_other() {
    // The observer sees the connections of all tests in its process, so the test runs in a process of its own.
    if env::var_os(IS_ALONE).is_none() {
        let mut alone = Command::new(env::current_exe().unwrap());
        alone.args(["--exact", "pipeline::panic::a_panic_in_one_connection_harms_no_other"]);
        let ended = alone.env(IS_ALONE, "1").output().await.unwrap();
        let output = String::from_utf8_lossy(&ended.stdout);
        assert!(ended.status.success() && output.contains("1 passed"), "{output}");
        return;
    }
    tracing::subscriber::set_global_default(PanickingObserver).unwrap();
    let app = TestApp::with(|config| {
        config.workers = 1;
        config.server.max_connections = 2;
    })
    .await;
    let other = app.client().open("/v1/chat/completions", &streamed_body()).await;
    let socket = TokioIo::new(app.client().connect().await);
    let (mut client, connection) = http2::handshake(TokioExecutor::new(), socket).await.unwrap();
    CLIENT.set(tokio::spawn(connection).id()).unwrap();
    let request = || post_request("http://x/v1/chat/completions", &streamed_body(), &[]);
    let open = client.send_request(request()).await.unwrap();
    app.upstream.gate.wait_for_waiting(2).await;

    PANICS.store(true, Ordering::Relaxed);
    assert!(client.send_request(request()).await.is_err(), "the connection has gone on");
    assert!(!PANICS.load(Ordering::Relaxed), "nothing has panicked");
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!((&settled["outcome"], &settled["status"]), (&json!("client_gone"), &json!(200)));
    drop(open);
    // The slot of the lost connection becomes free, but perhaps not immediately.
    let health = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    while !app.client().raw(health).await.starts_with("HTTP/1.1 200") {
        task::yield_now().await;
    }

    app.upstream.gate.allow_answers(2);
    let (text, in_order) = other.rest().await;
    assert!(in_order && text.ends_with("data: [DONE]\n\n"), "{text}");
    let settled = app.recorded("request.settled", 2).await.remove(1);
    assert_eq!(settled["outcome"], "completed");
    app.stop().await;
}

fn streamed_body() -> Value {
    json!({"model": "fake/chunks=2;gate=1", "stream": true, "max_tokens": 100, "messages": []})
}

/// The variable that the test sets for its own process.
const IS_ALONE: &str = "COGNI_TEST_IS_ALONE";

/// Panics, when armed, at the next HTTP/2 frame that the gateway's side reads.
struct PanickingObserver;

static PANICS: AtomicBool = AtomicBool::new(false);

/// The task of the client's side of the connection.
static CLIENT: OnceLock<task::Id> = OnceLock::new();

impl Subscriber for PanickingObserver {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "h2::codec::framed_read"
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, _event: &Event<'_>) {
        let is_ours = task::try_id().is_some_and(|task| CLIENT.get() != Some(&task));
        assert!(!(is_ours && PANICS.swap(false, Ordering::Relaxed)), "on purpose");
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}
