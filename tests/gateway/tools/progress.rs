//! T2, T4: Tests of the progress of calls over MCP that take long: what the client is told, how often, and that the events
//! end with the call or with the client.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use cogni_gateway::llm::budget::{Nanodollars, SpendingLimits};
use cogni_gateway::tools::approval::store::{ApprovalDecision, ApprovalFilter, ApprovalStore};
use cogni_gateway::tools::approval::{ApprovalRow, ApprovalState};
use futures_util::future::join_all;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};

use super::approvals::{AskingApp, decision};
use super::budget_questions::AskingBudget;
use super::{CLOCK, METRICS, PRICED_CLOCK, accept_query, answer_query, metrics_table, start_app};
use crate::support::app::TestApp;
use crate::support::client::{ResponseStream, TestResponse, post_request};
use crate::support::raw_upstream;

/// The message and the headers of a call.
struct CallMessage<'a> {
    body: Value,
    headers: Vec<(&'a str, &'a str)>,
}

impl<'a> CallMessage<'a> {
    /// Makes the message in the era that `version` belongs to.
    fn new(version: &'a str, tool: &'a str, arguments: &Value, token: &Value) -> Self {
        let mut meta = json!({"progressToken": token});
        let mut headers = vec![("mcp-protocol-version", version), ("accept", BOTH)];
        if version == MODERN {
            meta["io.modelcontextprotocol/protocolVersion"] = version.into();
            meta["io.modelcontextprotocol/clientCapabilities"] = json!({});
            headers.extend([("mcp-method", "tools/call"), ("mcp-name", tool)]);
        }
        let params = json!({"name": tool, "arguments": arguments, "_meta": meta});
        let body =
            json!({"jsonrpc": "2.0", "id": "call-1", "method": "tools/call", "params": params});
        Self { body, headers }
    }

    fn clock(version: &'a str) -> Self {
        Self::new(version, CLOCK, &json!({}), &json!("t-1"))
    }

    async fn open(&self, app: &TestApp) -> ResponseStream {
        app.client().open_with("/mcp", &self.body, &self.headers).await
    }

    async fn send(&self, app: &TestApp) -> TestResponse {
        self.open(app).await.finish().await.unwrap()
    }
}

/// The events of a response, read byte by byte: a frame of HTTP may end anywhere in an event.
struct EventReader {
    response: ResponseStream,
    unread: VecDeque<u8>,
}

impl EventReader {
    fn new(response: ResponseStream) -> Self {
        assert_eq!(response.status, 200);
        assert_eq!(response.headers["content-type"], "text/event-stream");
        Self { response, unread: VecDeque::new() }
    }

    /// Returns the message of the next event; `None` at an orderly end.
    async fn next(&mut self) -> Option<Value> {
        let mut event = vec![];
        loop {
            let Some(byte) = self.unread.pop_front() else {
                let Some(frame) = self.response.frame().await.unwrap() else {
                    assert!(event.is_empty(), "the events end within an event");
                    return None;
                };
                self.unread.extend(frame);
                continue;
            };
            event.push(byte);
            if event.ends_with(b"\n\n") {
                return Some(read_event(std::str::from_utf8(&event).unwrap()));
            }
        }
    }

    /// Returns the messages of all further events.
    async fn rest(mut self) -> Vec<Value> {
        let mut messages = vec![];
        while let Some(message) = self.next().await {
            messages.push(message);
        }
        messages
    }
}

fn read_event(event: &str) -> Value {
    let mut lines = event.lines();
    assert_eq!(lines.next(), Some("event: message"));
    let data: Vec<_> = lines.filter_map(|line| line.strip_prefix("data: ")).collect();
    serde_json::from_str(&data.join("\n")).unwrap()
}

/// Returns the number and the text of a notification.
fn progress(message: &Value) -> (u64, &str) {
    assert_eq!(
        [&message["jsonrpc"], &message["method"], &message["params"]["progressToken"]],
        [&json!("2.0"), &json!("notifications/progress"), &json!("t-1")]
    );
    let params = &message["params"];
    (params["progress"].as_u64().unwrap(), params["message"].as_str().unwrap())
}

/// Returns the text of a result, and whether it is an error.
fn result_text(message: &Value) -> (&str, bool) {
    assert_eq!(message["id"], "call-1", "{message}");
    let result = &message["result"];
    (result["content"][0]["text"].as_str().unwrap(), result["isError"].as_bool().unwrap())
}

/// Waits until a person is asked, and returns the question.
async fn wait_for_question(store: &ApprovalStore) -> ApprovalRow {
    loop {
        let filter = ApprovalFilter { limit: 9, ..ApprovalFilter::default() };
        let rows = store.list(filter).await.unwrap();
        if let Some(row) = rows.into_iter().find(|row| row.state == ApprovalState::Pending) {
            return row;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn decide(store: &ApprovalStore, answer: impl FnOnce(&ApprovalRow) -> ApprovalDecision) {
    let row = wait_for_question(store).await;
    store.decide(&row.id, answer(&row), store.read_time()).await.unwrap();
}

async fn answer(store: &ApprovalStore, is_approved: bool) {
    decide(store, |row| decision(is_approved, &row.digest)).await;
}

/// Waits until the access log has a text so often, and returns the log.
async fn wait_for_log(app: &TestApp, text: &str, times: usize) -> String {
    loop {
        let log = std::fs::read_to_string(app.socket.with_file_name("access.log")).unwrap();
        if log.matches(text).count() >= times {
            return log;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A client with a token is told that its call waits, at once and then every five seconds, and receives the result of the one
/// execution as the last event. `hold` ends no such wait.
#[tokio::test]
async fn a_waiting_call_tells_its_progress_in_both_eras() {
    let watch = async |version| {
        let asking = AskingApp::start("").await;
        let response = CallMessage::clock(version).open(&asking.app).await;
        assert_eq!(response.headers["x-accel-buffering"], "no");
        assert_eq!(response.headers["cache-control"], "no-store");
        let mut events = EventReader::new(response);
        let first = events.next().await.unwrap();
        let told = Instant::now();
        let id = wait_for_question(&asking.store).await.id;
        let (number, text) = progress(&first);
        let expected = format!("waiting for a person to allow the call: {id} until ");
        assert!(number == 1 && text.starts_with(&expected), "{first}");
        assert_eq!(progress(&events.next().await.unwrap()), (2, text));
        assert!(told.elapsed() >= Duration::from_millis(4500), "{:?}", told.elapsed());
        assert_eq!(asking.executions(), 0);
        answer(&asking.store, true).await;
        let rest = events.rest().await;
        let (text, is_error) = result_text(rest.last().unwrap());
        assert!(!is_error && text.contains("unix_seconds"), "{text}");
        let is_modern = version == MODERN;
        assert_eq!(rest.last().unwrap()["result"]["resultType"] == "complete", is_modern);
        // The answer may come when a notification is due.
        assert!(rest.len() <= 2, "{rest:?}");
        assert_eq!(asking.executions(), 1);
        let log = wait_for_log(&asking.app, "outcome=tool", 1).await;
        assert!(log.contains("uri=/mcp status=200"), "{log}");
        let AskingApp { app, directory: _directory, .. } = asking;
        let records = app.stop().await;
        assert_eq!(records.iter().filter(|record| record["event"] == "tool.settled").count(), 1);
    };
    tokio::join!(watch(MODERN), watch("2025-11-25"), watch("2025-03-26"));
}

/// A call that ends at once is one reply, and so is one whose client has no token or takes no events.
#[tokio::test]
async fn a_call_without_a_wait_or_without_a_token_is_one_reply() {
    let app = start_app(PRICED_CLOCK).await;
    let quick = CallMessage::clock(MODERN).send(&app).await;
    assert_eq!(quick.headers["content-type"], "application/json");
    assert!(!result_text(&quick.json()).1, "{}", quick.text());
    app.stop().await;

    let asking = AskingApp::start("[approvals]\nhold = '2s'\n").await;
    let mut without_events = CallMessage::clock("2025-11-25");
    without_events.headers[1] = ("accept", "application/json");
    let mut without_token = CallMessage::clock("2025-11-25");
    without_token.body["params"]["_meta"] = json!({});
    for message in [without_events, without_token] {
        let reply = message.send(&asking.app).await;
        assert_eq!(reply.headers["content-type"], "application/json");
        let reply = reply.json();
        let (text, is_error) = result_text(&reply);
        assert!(is_error && text.starts_with("waiting for approval:"), "{text}");
    }
}

/// A token that is neither a string nor a whole number, or is too long, starts no call.
#[tokio::test]
async fn a_wrong_token_starts_no_call() {
    let app = start_app(PRICED_CLOCK).await;
    for token in [json!(1.5), json!(null), json!({}), json!(true), json!("x".repeat(300))] {
        let message = CallMessage::new("2025-11-25", CLOCK, &json!({}), &token);
        let refused = message.send(&app).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.json()["error"]["code"]),
            (400, &json!(-32602))
        );
    }
    assert!(app.records().iter().all(|record| record["event"] != "tool.admitted"));
    app.stop().await;
}

/// A call that a person denies, and one that no person answers, end the events with the reason.
#[tokio::test]
async fn a_call_without_a_yes_ends_its_events_with_the_reason() {
    let denied = async {
        let asking = AskingApp::start("").await;
        let mut events = EventReader::new(CallMessage::clock(MODERN).open(&asking.app).await);
        progress(&events.next().await.unwrap());
        answer(&asking.store, false).await;
        let rest = events.rest().await;
        let message = "approval_denied: a person has denied this call: because";
        assert_eq!(result_text(rest.last().unwrap()), (message, true));
        assert_eq!(asking.executions(), 0);
    };
    let expired = async {
        let asking = AskingApp::start("[approvals]\nttl = '3s'\n").await;
        let mut events = EventReader::new(CallMessage::clock(MODERN).open(&asking.app).await);
        progress(&events.next().await.unwrap());
        let rest = events.rest().await;
        let (text, is_error) = result_text(rest.last().unwrap());
        assert!(is_error && text.starts_with("approval_expired: "), "{text}");
        assert_eq!(asking.executions(), 0);
    };
    tokio::join!(denied, expired);
}

/// The end of a run ends the events of its waiting call.
#[tokio::test]
async fn the_end_of_a_run_ends_the_events() {
    let asking = AskingApp::start("").await;
    let mut events = EventReader::new(CallMessage::clock(MODERN).open(&asking.app).await);
    progress(&events.next().await.unwrap());
    let AskingApp { app, directory: _directory, .. } = asking;
    let (rest, records) = tokio::join!(events.rest(), app.stop());
    let (text, is_error) = result_text(rest.last().unwrap());
    assert!(is_error && text.starts_with("approval_withdrawn: "), "{text}");
    assert!(records.iter().all(|record| record["event"] != "tool.admitted"));
}

/// A client that leaves its events ends them and gives its place back. Its call waits on, runs once, and the same call
/// receives the result.
#[tokio::test]
async fn a_client_that_leaves_its_events_loses_no_call() {
    let asking = AskingApp::start("").await;
    let message = CallMessage::clock("2025-11-25");
    // Eight requests wait for the same answer, and a further one is told so at once.
    let held = join_all((0..8).map(|_| message.open(&asking.app))).await;
    let held: Vec<_> = held.into_iter().map(EventReader::new).collect();
    let told = message.send(&asking.app).await.json();
    assert!(result_text(&told).0.starts_with("waiting for approval:"), "{told}");
    drop(held);
    // The places come back when the server sees that the clients have left.
    let mut response = message.open(&asking.app).await;
    while response.headers["content-type"] != "text/event-stream" {
        response = message.open(&asking.app).await;
    }
    drop(response);
    answer(&asking.store, true).await;
    asking.app.recorded("tool.settled", 1).await;
    let reply = message.send(&asking.app).await;
    assert_eq!(reply.headers["content-type"], "application/json");
    assert!(!result_text(&reply.json()).1, "{}", reply.text());
    assert_eq!(asking.executions(), 1);
    wait_for_log(&asking.app, "outcome=client_gone", 9).await;
}

/// A client that does not read gets two notifications, however long it waits: one that it was sent, and one that the
/// connection holds.
#[tokio::test]
async fn events_that_no_client_takes_are_not_made() {
    let asking = AskingApp::start("").await;
    let io = TokioIo::new(asking.app.client().connect().await);
    let mut client = http2::Builder::new(TokioExecutor::new());
    // The window is smaller than an event.
    let (mut sender, connection) =
        client.initial_stream_window_size(64).handshake(io).await.unwrap();
    let connection = tokio::spawn(connection);
    let CallMessage { body, headers } = CallMessage::clock("2025-11-25");
    let mut request = post_request("http://localhost/mcp", &body, &headers);
    request.headers_mut().remove("host");
    let response = sender.send_request(request).await.unwrap();
    tokio::time::sleep(Duration::from_secs(12)).await;
    answer(&asking.store, true).await;
    let messages = EventReader::new(response.into()).rest().await;
    let (result, notifications) = messages.split_last().unwrap();
    assert!(!result_text(result).1, "{messages:?}");
    // Three were due, at 1, 6 and 11 seconds.
    let numbers: Vec<_> = notifications.iter().map(|message| progress(message).0).collect();
    assert_eq!(numbers, [1, 2]);
    connection.abort();
}

/// A client is told that its tool runs, and that a person may raise the budget that its call waits for.
#[tokio::test]
async fn the_text_tells_why_a_call_takes_long() {
    let running = async {
        let (listener, address) = raw_upstream::listen_locally().await;
        let app = start_app(&metrics_table(address, "")).await;
        let arguments = json!({"query": "up"});
        let message = CallMessage::new(MODERN, METRICS, &arguments, &json!("t-1"));
        let called = async {
            let mut events = EventReader::new(message.open(&app).await);
            (events.next().await.unwrap(), events)
        };
        let ((first, events), (mut stream, _)) = tokio::join!(called, accept_query(&listener));
        assert_eq!(progress(&first), (1, "the tool runs"));
        answer_query(&mut stream, r#"{"status":"success","data":[]}"#).await;
        assert!(!result_text(events.rest().await.last().unwrap()).1);
        app.stop().await;
    };
    let unfunded = async {
        let asking = AskingBudget::with_unfunded_clock().await;
        let mut events = EventReader::new(CallMessage::clock(MODERN).open(&asking.app).await);
        let first = events.next().await.unwrap();
        assert_eq!(progress(&first), (1, "waiting: a person may raise the run's budget"));
        let raise =
            SpendingLimits { max_cost_usd: Nanodollars::parse("1"), ..SpendingLimits::default() };
        decide(&asking.store, |row| ApprovalDecision {
            raise: Some(raise),
            reason: None,
            ..decision(true, &row.digest)
        })
        .await;
        assert!(!result_text(events.rest().await.last().unwrap()).1);
    };
    tokio::join!(running, unfunded);
}

const MODERN: &str = "2026-07-28";
const BOTH: &str = "application/json, text/event-stream";
