//! G8: Tests of clients that disconnect, and of a gateway that shuts down during calls.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cogni_gateway::fakes::model_provider::AnswerEnd;
use cogni_gateway::gateway::pipeline::policy::OnClientGone;
use cogni_gateway::gateway::upstream::UpstreamKind;
use http::Request;
use hyper::body::{Body, Frame};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};

use crate::support::app::TestApp;
use crate::support::raw_upstream;

/// G8: When the client disconnects, the upstream's connection is closed at once.
#[tokio::test]
async fn a_client_that_leaves_cancels_the_call() {
    let app = TestApp::start().await;
    let stream = app.client().open("/v1/chat/completions", &streamed_body("fake/gate=2")).await;
    app.upstream.gate.wait_for_waiting(1).await;
    drop(stream);
    wait_until_left(&app).await;
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!((&settled["outcome"], &settled["status"]), (&json!("client_gone"), &json!(200)));
    assert_eq!(settled["usage"]["source"], "estimated");
    assert_ne!(settled["charged"]["output"], 0, "what was delivered is not free");
    app.stop().await;
}

/// G8: When the client resets an HTTP/2 stream, the call is cancelled and the connection stays open.
#[tokio::test]
async fn a_client_that_resets_a_stream_cancels_the_call() {
    let app = TestApp::start().await;
    let mut connection = app.client().http2().await;
    let body = streamed_body("fake/gate=2");
    let request = crate::support::client::post_request("http://x/v1/chat/completions", &body, &[]);
    let response = connection.send_request(request).await.unwrap();
    app.upstream.gate.wait_for_waiting(1).await;
    drop(response);
    wait_until_left(&app).await;
    assert_eq!(app.recorded("request.settled", 1).await[0]["outcome"], "client_gone");
    drop(connection);
    app.stop().await;
}

/// G8, G15: A client that disconnects before the answer begins pays for what the upstream writes without it.
#[tokio::test]
async fn a_client_that_leaves_before_the_answer_cancels_the_call() {
    let app = TestApp::with(|config| config.policy.on_client_gone = OnClientGone::Cancel).await;
    let body = json!({"model": "fake/fault=stall@head", "max_tokens": 5000, "messages": []});
    let gone = send_request(&app, "/v1/messages", &body).await;
    app.upstream.seen.wait_until(|seen| seen.request_count() == 1).await;
    drop(gone);
    wait_until_left(&app).await;
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!((&settled["outcome"], &settled["status"]), (&json!("client_gone"), &json!(0)));
    assert_eq!(settled["charged"]["output"], 5000, "{settled}");
    app.stop().await;
}

/// G8, G15: After a disconnect, a call that the upstream continues is charged its reservation, and a call that the
/// upstream stops is charged what was received. A drain, which is the default for the first kind, learns the true
/// usage.
#[tokio::test]
async fn an_abandoned_call_is_charged_for_what_the_upstream_continues() {
    for kind in [UpstreamKind::Litellm, UpstreamKind::Openai] {
        for policy in [OnClientGone::Cancel, OnClientGone::Auto] {
            let app = TestApp::with(|config| {
                config.upstream.kind = kind;
                config.policy.on_client_gone = policy;
            })
            .await;
            let mut calls = 0;
            for path in ["/v1/chat/completions", "/v1/responses", "/v1/messages"] {
                for (is_stream, gate) in [(false, "head"), (false, "2"), (true, "2")] {
                    calls += 1;
                    let goes_on = !is_stream
                        || (kind == UpstreamKind::Litellm && path != "/v1/chat/completions");
                    let drains = goes_on && policy == OnClientGone::Auto;
                    let at = (is_stream, gate);
                    let settled = Box::pin(disconnect_client(&app, path, at, drains, calls)).await;
                    let charged = settled["charged"]["output"].as_u64().unwrap();
                    let at = format!("{kind:?} {policy:?} {path} {is_stream} {gate}: {settled}");
                    match (goes_on, policy) {
                        (true, OnClientGone::Cancel) => assert_eq!(charged, 5000, "{at}"),
                        (true, _) => {
                            assert_eq!(
                                (charged, &settled["usage"]["source"]),
                                (77, &json!("drained")),
                                "{at}"
                            );
                        }
                        (false, _) => assert!((2..2000).contains(&charged), "{at}"),
                    }
                }
            }
            app.stop().await;
        }
    }
}

/// Makes a call and disconnects, either before the head or after the first two words.
async fn disconnect_client(
    app: &TestApp,
    path: &str,
    at: (bool, &str),
    drains: bool,
    calls: usize,
) -> Value {
    let (is_stream, gate) = at;
    let limit = if path == "/v1/responses" { "max_output_tokens" } else { "max_tokens" };
    let model = format!("fake/gate={gate};output=77");
    let body =
        json!({"model": model, "stream": is_stream, limit: 5000, "messages": [], "input": "x"});
    let mut gone = send_request(app, path, &body).await;
    app.upstream.gate.wait_for_waiting(1).await;
    let mut heard = String::new();
    while is_stream && !heard.contains("from ") {
        let mut buffer = [0; 4096];
        let read = gone.read(&mut buffer).await.unwrap();
        heard.push_str(str::from_utf8(&buffer[..read]).unwrap());
    }
    drop(gone);
    if drains {
        // When the gateway serves the next request, it has noticed that the client disconnected.
        app.client().get("/health").await;
        app.upstream.gate.allow_answers(1);
    }
    app.recorded("request.settled", calls).await.pop().unwrap()
}

/// Sends a request; the caller holds the connection and reads the answer.
async fn send_request(app: &TestApp, path: &str, body: &Value) -> impl AsyncRead + Unpin + use<> {
    let mut socket = app.client().connect().await;
    let body = body.to_string();
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json");
    let request = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    socket.write_all(request.as_bytes()).await.unwrap();
    socket
}

/// G8, G15: A client leaves a stream whose answers have ended, before the usage: the stream is read to its usage, and
/// charged as reported. A stream with an open answer is cancelled.
#[tokio::test]
async fn a_stream_whose_text_has_ended_is_read_to_its_usage() {
    let chunk = |choices: &str| format!("data: {{\"id\":\"c\",\"choices\":[{choices}]}}\n\n");
    let text = chunk(r#"{"index":0,"delta":{"content":"word"},"finish_reason":null}"#);
    let finish =
        |index| chunk(&format!(r#"{{"index":{index},"delta":{{}},"finish_reason":"stop"}}"#));
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":8,\"completion_tokens\":300}}\n\ndata: [DONE]\n\n";
    let message = concat!(
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":8,\"output_tokens\":1}}}\n\n",
        "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":300}}\n\n",
    );
    let stop = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    let (chat, messages) = ("/v1/chat/completions", "/v1/messages");
    for (path, choices, seen, rest, is_read) in [
        (chat, 1, format!("{text}{}", finish(0)), usage, true),
        (chat, 2, format!("{text}{}{}", finish(0), finish(1)), usage, true),
        (chat, 2, format!("{text}{}", finish(0)), usage, false),
        (chat, 1, format!("{text}{}", finish(0).replace("stop", "")), usage, false),
        (messages, 1, message.to_owned(), stop, true),
        (messages, 1, message.replace("\"end_turn\"", "null"), stop, false),
    ] {
        let (listener, address) = raw_upstream::listen_locally().await;
        let app = TestApp::with(|config| {
            config.upstream.kind = UpstreamKind::Openai;
            config.upstream.url = address.to_string().parse().unwrap();
        })
        .await;
        let mut body = streamed_body("m");
        if path == chat {
            body["n"] = json!(choices);
        }
        body["max_tokens"] = json!(1000);
        let mut client = send_request(&app, path, &body).await;
        let (mut upstream, _) = listener.accept().await.unwrap();
        raw_upstream::read_request(&mut upstream).await;
        let frame = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
        raw_upstream::send_text(&mut upstream, raw_upstream::STREAM).await;
        raw_upstream::send_text(&mut upstream, &frame(&seen)).await;
        let (mut heard, last) = (String::new(), seen.trim_end().rsplit('\n').next().unwrap());
        while !heard.contains(last) {
            let mut buffer = [0; 4096];
            let read = client.read(&mut buffer).await.unwrap();
            heard.push_str(str::from_utf8(&buffer[..read]).unwrap());
        }
        drop(client);
        // When the gateway serves the next request, it has noticed that the client disconnected.
        app.client().get("/health").await;
        if is_read {
            raw_upstream::send_text(&mut upstream, &frame(rest)).await;
            raw_upstream::send_text(&mut upstream, "0\r\n\r\n").await;
        }
        let settled = app.recorded("request.settled", 1).await.remove(0);
        assert_eq!(settled["outcome"], "client_gone", "{settled}");
        if is_read {
            let usage = json!({"input": 8, "output": 300, "source": "drained"});
            assert_eq!(settled["usage"], usage, "{seen}");
        } else {
            assert_eq!(settled["usage"]["source"], "estimated", "{seen}");
        }
        app.stop().await;
    }
}

/// G15: A run drains a limited number of abandoned calls; further ones are charged their reservation.
#[tokio::test]
async fn the_drains_of_a_run_are_bounded() {
    let app = TestApp::start().await;
    let body = json!({"model": "fake/gate=head;output=77", "max_tokens": 5000, "messages": []});
    let mut gone = vec![];
    for _ in 0..66 {
        gone.push(send_request(&app, "/v1/messages", &body).await);
    }
    app.upstream.gate.wait_for_waiting(66).await;
    drop(gone);
    let settled = app.recorded("request.settled", 2).await;
    assert!(settled.iter().all(|settled| settled["charged"]["output"] == 5000), "{settled:?}");
    assert_eq!(settled.len(), 2);
    app.upstream.seen.wait_until(|_| app.upstream.gate.waiting_answers() == 64).await;
    app.upstream.gate.allow_answers(64);
    let settled = app.recorded("request.settled", 66).await;
    let drained = settled.iter().filter(|settled| settled["usage"]["source"] == "drained");
    assert_eq!(drained.count(), 64);
    app.stop().await;
}

/// G15: The memory of an abandoned request counts for its run until the request is sent and its answer has begun, so a
/// run that abandons calls stays within its bound.
#[tokio::test]
async fn the_memory_of_a_drained_call_counts_for_its_run() {
    let app = TestApp::with(|config| config.server.max_run_body_bytes = 2_000_000).await;
    let body = |model: &str| {
        let messages = json!([{"role": "user", "content": "x".repeat(900_000)}]);
        json!({"model": model, "max_tokens": 5000, "messages": messages})
    };
    for round in 1..3 {
        let mut gone = vec![];
        for _ in 0..2 {
            gone.push(send_request(&app, "/v1/messages", &body("fake/gate=head;output=77")).await);
        }
        app.upstream.gate.wait_for_waiting(2).await;
        drop(gone);
        let refused = app.client().post("/v1/messages", &body("fake")).await;
        assert_eq!(refused.status.as_u16(), 429, "{}", refused.text());
        assert!(refused.text().contains("bodies in flight"), "{}", refused.text());
        let small = json!({"model": "fake", "messages": []});
        assert_eq!(app.client().post("/v1/messages", &small).await.status, 200);
        app.upstream.gate.allow_answers(2);
        // Two drained calls, and the small one.
        let settled = app.recorded("request.settled", 3 * round).await;
        let drained = settled.iter().filter(|settled| settled["usage"]["source"] == "drained");
        assert_eq!(drained.count(), 2 * round, "{settled:?}");
    }
    assert_eq!(app.client().post("/v1/messages", &body("fake")).await.status, 200);
    app.stop().await;
}

/// G11: A client that disconnects in the middle of its request is recorded, and nothing is sent upstream.
#[tokio::test]
async fn a_client_that_leaves_mid_request_is_recorded() {
    let app = TestApp::start().await;
    let mut socket = app.client().connect().await;
    let head = "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-type: application/json";
    let request = format!("{head}\r\ncontent-length: 100\r\n\r\n{{\"model\":");
    socket.write_all(request.as_bytes()).await.unwrap();
    drop(socket);
    let refused = app.recorded("request.refused", 1).await.remove(0);
    assert_eq!(refused["code"], "client_gone");
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;
}

/// G8: A drain reads the answer without the client, and learns the true usage.
#[tokio::test]
async fn a_drain_learns_the_true_usage() {
    let app = TestApp::with(|config| config.policy.on_client_gone = OnClientGone::Drain).await;
    let stream =
        app.client().open("/v1/chat/completions", &streamed_body("fake/gate=2;output=77")).await;
    app.upstream.gate.wait_for_waiting(1).await;
    drop(stream);
    app.upstream.gate.allow_answers(1);
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(settled["outcome"], "client_gone");
    assert_eq!(settled["usage"], json!({"input": 11, "output": 77, "source": "drained"}));
    assert_eq!(settled["charged"], json!({"turns": 1, "input": 11, "output": 77}));
    assert_eq!(app.upstream.seen.last_request().unwrap().ended, Some(AnswerEnd::Completed));
    app.stop().await;
}

/// G8: A drain also works if the client disconnected before the head, which for a unary answer is the whole time.
#[tokio::test]
async fn a_drain_waits_for_an_answer_that_has_not_begun() {
    let app = TestApp::with(|config| config.policy.on_client_gone = OnClientGone::Drain).await;
    let mut socket = app.client().connect().await;
    let body = json!({"model": "fake/gate=head;output=77", "messages": []}).to_string();
    let head = "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-type: application/json";
    let request = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    socket.write_all(request.as_bytes()).await.unwrap();
    app.upstream.gate.wait_for_waiting(1).await;
    drop(socket);
    // When the gateway serves the next request, it has noticed that the client disconnected.
    app.client().get("/health").await;
    app.upstream.gate.allow_answers(1);
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!((&settled["outcome"], &settled["status"]), (&json!("client_gone"), &json!(200)));
    assert_eq!(settled["usage"], json!({"input": 11, "output": 77, "source": "drained"}));
    app.stop().await;
}

/// G8: A drain that breaks off is charged by estimate.
#[tokio::test]
async fn a_drain_that_breaks_off_is_an_estimate() {
    let app = TestApp::with(|config| config.policy.on_client_gone = OnClientGone::Drain).await;
    let body = streamed_body("fake/gate=2;fault=close@3");
    let stream = app.client().open("/v1/messages", &body).await;
    app.upstream.gate.wait_for_waiting(1).await;
    drop(stream);
    app.upstream.gate.allow_answers(1);
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(
        (&settled["outcome"], &settled["usage"]["source"]),
        (&json!("client_gone"), &json!("estimated"))
    );
    app.stop().await;
}

/// G8: A drain reads at most a few megabytes.
#[tokio::test]
async fn a_drain_is_bounded() {
    let app = TestApp::with(|config| config.policy.on_client_gone = OnClientGone::Drain).await;
    let body = streamed_body("fake/gate=2;chunks=65536;size=64KiB");
    let stream = app.client().open("/v1/messages", &body).await;
    app.upstream.gate.wait_for_waiting(1).await;
    drop(stream);
    app.upstream.gate.allow_answers(1);
    wait_until_left(&app).await;
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(settled["usage"]["source"], "estimated");
    assert!(settled["response_bytes"].as_u64().unwrap() < 9 << 20, "{settled}");
    app.stop().await;
}

/// G2: A shutdown lets open calls end first.
#[tokio::test]
async fn a_shutdown_waits_for_an_open_stream() {
    let app = TestApp::with(|config| config.drain_timeout = Duration::from_hours(1)).await;
    let stream = app.client().open("/v1/chat/completions", &streamed_body("fake/gate=2")).await;
    app.upstream.gate.wait_for_waiting(1).await;
    app.begin_stop();
    app.upstream.gate.allow_answers(1);
    let (rest, in_order) = stream.rest().await;
    assert!(in_order && rest.ends_with("data: [DONE]\n\n"), "{rest}");
    let records = app.stop().await;
    assert_eq!(settled_record(&records)["outcome"], "completed");
}

/// G2, G11: A call that is open at the end of the drain timeout is cut, and recorded as cut.
#[tokio::test]
async fn a_shutdown_cuts_calls_that_do_not_end() {
    for (fault, status) in [("stall@1", 200), ("stall@head", 0)] {
        let app = TestApp::with(|config| config.drain_timeout = Duration::ZERO).await;
        let client = app.client();
        let body = streamed_body(&format!("fake/fault={fault}"));
        let call = tokio::spawn(async move {
            client.start(crate::support::client::post_request("/v1/messages", &body, &[])).await
        });
        app.upstream.seen.wait_until(|seen| seen.request_count() == 1).await;
        let stream = if status == 200 { Some(call.await.unwrap().unwrap()) } else { None };
        let records = app.stop().await;
        let settled = settled_record(&records);
        assert_eq!(
            (&settled["outcome"], &settled["status"]),
            (&json!("shut_down"), &json!(status))
        );
        if let Some(stream) = stream {
            assert!(!stream.rest().await.1, "the client takes the part for the whole");
        }
    }
}

/// G2, G11: A shutdown that cuts a request whose body is still arriving records the shutdown, not a client that left.
#[tokio::test]
async fn a_shutdown_cuts_a_request_that_is_still_arriving() {
    for is_http2 in [false, true] {
        let app = TestApp::with(|config| config.drain_timeout = Duration::ZERO).await;
        let mut socket = app.client().connect().await;
        let request =
            Request::post("http://x/v1/messages").header("content-type", "application/json");
        let request = request.body(UnendedBody(Some(Bytes::from_static(b"{\"model\":")))).unwrap();
        let _client = if is_http2 {
            let (mut sender, connection) =
                http2::handshake(TokioExecutor::new(), TokioIo::new(socket)).await.unwrap();
            tokio::spawn(connection);
            tokio::spawn(async move { drop(sender.send_request(request).await) })
        } else {
            let head = "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-type: application/json";
            let part = format!("{head}\r\ncontent-length: 100\r\n\r\n{{\"model\":");
            socket.write_all(part.as_bytes()).await.unwrap();
            tokio::spawn(async move { drop(socket.read_u8().await) })
        };
        while app.run.ledger.budget_status().open_calls == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let records = app.stop().await;
        let refused = records.iter().find(|record| record["event"] == "request.refused").unwrap();
        assert_eq!(refused["code"], "shut_down", "HTTP/2: {is_http2}");
    }
}

/// G8: A drain does not extend the shutdown beyond the drain timeout. This drain would otherwise take 30 s.
#[tokio::test]
async fn a_shutdown_does_not_wait_for_a_drain() {
    let app = TestApp::with(|config| {
        config.policy.on_client_gone = OnClientGone::Drain;
        config.drain_timeout = Duration::ZERO;
    })
    .await;
    let stream = app.client().open("/v1/messages", &streamed_body("fake/fault=stall@2")).await;
    drop(stream);
    // When the gateway serves the next request, it has noticed that the client disconnected.
    app.client().get("/health").await;
    let begun = Instant::now();
    app.stop().await;
    assert!(begun.elapsed() < Duration::from_secs(25), "the drain has run its full time");
}

/// A body that yields one frame and never ends.
struct UnendedBody(Option<Bytes>);

impl Body for UnendedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.take().map_or(Poll::Pending, |frame| Poll::Ready(Some(Ok(Frame::data(frame)))))
    }
}

async fn wait_until_left(app: &TestApp) {
    app.upstream
        .seen
        .wait_until(|seen| seen.last_request().unwrap().ended == Some(AnswerEnd::ClientLeft))
        .await;
}

fn settled_record(records: &[Value]) -> &Value {
    records.iter().find(|record| record["event"] == "request.settled").unwrap()
}

fn streamed_body(model: &str) -> Value {
    json!({"model": model, "stream": true, "max_tokens": 100, "messages": []})
}
