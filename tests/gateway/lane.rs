//! G3: The lane serves plain calls on a run's socket in front of hyper, and no client can observe a difference.

mod oracle;

use std::time::Duration;

use bytes::Bytes;
use cogni_gateway::gateway::pipeline::server::LaneMode;
use cogni_gateway::gateway::pipeline::server::lane::head;
use proptest::prelude::*;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::pipeline::smuggling::{AMBIGUOUS, MALFORMED};
use crate::support::app::TestApp;
use oracle::ConversationEnd::{EndOfWriting, LastRequest};

/// G3: The lane serves the request heads that common clients send.
#[test]
fn the_lane_accepts_the_heads_of_common_clients() {
    for head in [CLAUDE_CODE, OPENAI_PYTHON, "POST /v1/responses HTTP/1.1\r\n"] {
        let bytes =
            format!("{head}Content-Type: application/json\r\ncontent-length: 2\r\n\r\n{{}}");
        let mut received = Bytes::from(bytes);
        let request = head::parse_head(&mut received, 100, 1000);
        assert_eq!(request.map(|request| request.length), Some(2), "{head}");
        assert_eq!(received, "{}");
    }
}

/// G3: The lane hands an ambiguous request to hyper, with all its bytes.
#[test]
fn an_ambiguous_request_is_handed_to_hyper() {
    let ambiguous = AMBIGUOUS.iter().map(|(label, head)| {
        (*label, format!("POST /v1/messages HTTP/1.1\r\nhost: x\r\n{JSON}\r\n{head}"))
    });
    let malformed =
        MALFORMED.iter().map(|(label, head)| (*label, format!("{head}\r\n{JSON}\r\n{LENGTH}")));
    let unusual = UNUSUAL.iter().map(|(label, head)| (*label, (*head).to_owned()));
    for (label, head) in ambiguous.chain(malformed).chain(unusual) {
        let bytes = Bytes::from(format!("{head}\r\n\r\n{{}}"));
        let mut received = bytes.clone();
        assert!(head::parse_head(&mut received, 64, 1000).is_none(), "{label}");
        assert_eq!(received, bytes, "{label}");
    }
    let many =
        format!("POST /v1/messages HTTP/1.1\r\n{JSON}\r\n{LENGTH}\r\n{}\r\n", "x: y\r\n".repeat(9));
    assert!(head::parse_head(&mut Bytes::from(many.clone()), 11, 1000).is_some());
    assert!(
        head::parse_head(&mut Bytes::from(many), 10, 1000).is_none(),
        "more fields than are allowed"
    );
}

/// G3: The lane takes no incomplete head.
#[test]
fn the_lane_takes_no_incomplete_head() {
    let whole = format!("{CLAUDE_CODE}{JSON}\r\n{LENGTH}\r\n\r\n");
    for length in 0..whole.len() {
        assert!(
            head::parse_head(&mut Bytes::copy_from_slice(&whole.as_bytes()[..length]), 64, 99)
                .is_none()
        );
    }
    assert!(head::parse_head(&mut Bytes::from(whole), 64, 99).is_some());
}

/// G3: The corpus of smuggled requests gets the same answers with and without the lane.
#[tokio::test]
async fn smuggled_requests_are_answered_alike() {
    for (_, head) in AMBIGUOUS {
        let request =
            format!("POST /v1/messages HTTP/1.1\r\nhost: x\r\n{JSON}\r\n{head}\r\n\r\n{BODY}");
        oracle::compare_servers(&[request.as_bytes(), SECOND], LastRequest).await;
    }
    for (_, head) in MALFORMED {
        oracle::compare_servers(&[format!("{head}\r\n\r\n{BODY}").as_bytes(), SECOND], LastRequest)
            .await;
    }
}

/// G3: A client that ends its writing side inside the body gets the same refusal with and without the lane.
#[tokio::test]
async fn an_end_of_writing_inside_a_body_is_answered_alike() {
    let whole = plain_request(BODY);
    let head = whole.len() - BODY.len();
    for length in head..whole.len() {
        let traces = oracle::compare_servers(&[&whole.as_bytes()[..length]], EndOfWriting).await;
        assert!(traces.answers[0].contains("client_gone"), "{:?}", traces.answers);
    }
}

/// G3, G5: A client that ends its writing side behind a whole request leaves. Its call costs something exactly if the
/// call was sent.
#[tokio::test]
async fn an_end_of_writing_behind_a_request_is_a_departure() {
    for mode in [LaneMode::On, LaneMode::Off] {
        for model in ["fake", "fake/fault=stall@head"] {
            let request = plain_request(&json!({"model": model, "messages": []}).to_string());
            let traces = oracle::run_conversation(mode, &[request.as_bytes()], EndOfWriting).await;
            let charged: u64 = traces
                .records
                .iter()
                .filter_map(|record| record["charged"]["input"].as_u64())
                .sum();
            assert_eq!(charged > 0, !traces.upstream.is_empty(), "{mode:?} {traces:?}");
        }
    }
}

/// G3, G11: Pipelined requests of all kinds, split in any way, get the same answers with and without the lane.
#[test]
fn all_requests_are_answered_alike() {
    let config =
        ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(requests in prop::collection::vec(generate_request(), 1..4), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4))| {
        let bytes = requests.concat();
        let mut at: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
        at.extend([0, bytes.len()]);
        at.sort_unstable();
        let pieces: Vec<_> = at.windows(2).map(|cut| &bytes.as_bytes()[cut[0]..cut[1]]).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(oracle::compare_servers(&pieces, LastRequest));
    });
}

fn generate_request() -> impl Strategy<Value = String> {
    let target = prop_oneof![
        4 => Just("/v1/chat/completions"),
        4 => Just("/v1/messages?beta=true"),
        2 => Just("/v1/responses"),
        1 => Just("/v1/embeddings"),
        1 => Just("/v1/models"),
        1 => Just("/v1/messages?a=%20"),
    ];
    let field = prop_oneof![
        4 => Just("anthropic-beta: x, claude-code-20250219"),
        4 => Just("anthropic-version: 2023-06-01"),
        2 => Just("Accept: application/json"),
        2 => Just("OpenAI-Beta: responses=experimental"),
        2 => Just("Connection: keep-alive"),
        1 => Just("connection: close"),
        1 => Just("expect: 100-continue"),
        1 => Just("x: \u{e9}"),
        1 => Just("x:\ty"),
        1 => Just("authorization: Bearer evil"),
        1 => Just("User-Agent: OpenAI/Python 2.20.0\r\nX-Stainless-Raw-Response: true"),
        1 => Just("user-agent: ai/7.0.173 ai-sdk-provider-utils/5.0.81"),
        1 => Just("content-encoding: br"),
    ];
    let model = prop_oneof![
        6 => Just("fake"),
        2 => Just("fake/chunks=3;size=20000"),
        1 => Just("fake/status=500"),
        1 => Just("fake/status=429;retry_after=2"),
        1 => Just("fake/status=401"),
        1 => Just("fake/fault=close@1"),
        1 => Just("fake/fault=stall@head"),
    ];
    let fields = prop::collection::vec(field, 0..4);
    // The difference between the announced and the actual length.
    let length = prop_oneof![12 => Just(0_i32), 1 => Just(-1), 1 => Just(3)];
    (target, fields, model, any::<bool>(), length, 0..4_u8).prop_map(
        |(target, fields, model, stream, more, kind)| {
            let body = match kind {
                3 => "{\"model\":".to_owned(),
                _ => json!({"model": model, "stream": stream, "max_tokens": 50, "messages": [], "input": "x"})
                    .to_string(),
            };
            let length = i32::try_from(body.len()).unwrap() + more;
            let fields: String = fields.iter().flat_map(|field| [*field, "\r\n"]).collect();
            format!("POST {target} HTTP/1.1\r\nhost: x\r\n{fields}{JSON}\r\ncontent-length: {length}\r\n\r\n{body}")
        },
    )
}

/// G14: A connection that waits too long for its next request is closed.
#[tokio::test]
async fn a_connection_that_stays_idle_is_closed() {
    for mode in [LaneMode::On, LaneMode::Off] {
        let app = TestApp::with(|config| {
            config.server.lane = mode;
            config.server.header_timeout = Duration::from_millis(50);
        })
        .await;
        let answers = app.client().raw(plain_request(BODY).as_bytes()).await;
        assert!(answers.starts_with("HTTP/1.1 200 OK\r\n"), "{answers}");
        assert_eq!(answers.matches("HTTP/1.1 ").count(), 1);
        assert!(app.client().raw(b"").await.is_empty());
        app.stop().await;
    }
}

/// G14: The rest of a refused body is read and discarded, and the connection continues.
#[tokio::test]
async fn a_refused_body_is_no_end_of_the_connection() {
    for mode in [LaneMode::On, LaneMode::Off] {
        let app = TestApp::with(|config| {
            config.server.lane = mode;
            config.budget.max_turns = Some(0);
        })
        .await;
        let large = format!("{{\"model\":\"{}\"}}", "x".repeat(4 << 20));
        let mut socket = app.client().connect().await;
        for _ in 0..2 {
            socket.write_all(plain_request(&large).as_bytes()).await.unwrap();
        }
        let last = plain_request(BODY).replace("host: x", "host: x\r\nconnection: close");
        socket.write_all(last.as_bytes()).await.unwrap();
        let mut answers = String::new();
        socket.read_to_string(&mut answers).await.unwrap();
        assert_eq!(answers.matches("HTTP/1.1 402 ").count(), 3, "{mode:?}: {answers}");
        app.stop().await;
    }
}

/// G2: An answer during the drain announces that the connection closes.
#[tokio::test]
async fn an_answer_in_the_drain_says_that_the_connection_ends() {
    for mode in [LaneMode::On, LaneMode::Off] {
        let app = TestApp::with(|config| config.server.lane = mode).await;
        let mut socket = app.client().connect().await;
        let body = json!({"model": "fake/gate=head", "messages": []}).to_string();
        socket.write_all(plain_request(&body).as_bytes()).await.unwrap();
        app.upstream.gate.wait_for_waiting(1).await;
        app.begin_stop();
        // The listener closes when the gateway drains.
        while app.client().is_served().await {
            tokio::task::yield_now().await;
        }
        app.upstream.gate.allow_answers(1);
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("\r\nconnection: close\r\n"), "{mode:?}: {answer}");
        app.stop().await;
    }
}

/// G12: An operator's cut does not wait for a client that reads nothing.
#[tokio::test]
async fn a_cut_reaches_a_call_whose_reader_stalls() {
    let app = TestApp::with(|config| config.server.lane = LaneMode::On).await;
    let body = json!({"model": "fake/chunks=65536;size=64KiB", "stream": true, "messages": []});
    let stalled = app.client().open("/v1/chat/completions", &body).await;
    let sent = || app.upstream.seen.last_request().unwrap().sent;
    let mut before = u64::MAX;
    while sent() != before {
        before = sent();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    app.run.control.abort_calls();
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(settled["outcome"], "shut_down", "{settled}");
    assert_eq!(settled["code"], "cut_by_operator", "{settled}");
    assert!(!stalled.rest().await.1, "the client takes the part for the whole");
    app.stop().await;
}

/// G12: An operator's cut ends the open call of a connection, and no call that the connection makes later.
#[tokio::test]
async fn a_cut_ends_only_the_open_call_of_a_connection() {
    for mode in [LaneMode::On, LaneMode::Off] {
        let app = TestApp::with(|config| config.server.lane = mode).await;
        let mut socket = app.client().connect().await;
        for calls in 1..=2 {
            socket.write_all(plain_request(BODY).as_bytes()).await.unwrap();
            app.recorded("request.settled", calls).await;
            app.run.control.abort_calls();
        }
        let body = json!({"model": "fake/gate=head", "messages": []}).to_string();
        socket.write_all(plain_request(&body).as_bytes()).await.unwrap();
        app.upstream.gate.wait_for_waiting(1).await;
        app.run.control.abort_calls();
        let settled = app.recorded("request.settled", 3).await;
        let outcomes: Vec<_> = settled.iter().map(|record| record["outcome"].as_str()).collect();
        assert_eq!(outcomes, [Some("completed"), Some("completed"), Some("shut_down")], "{mode:?}");
        app.upstream.gate.allow_answers(1);
        drop(socket);
        app.stop().await;
    }
}

fn plain_request(body: &str) -> String {
    let length = body.len();
    format!(
        "POST /v1/messages HTTP/1.1\r\nhost: x\r\n{JSON}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

const JSON: &str = "content-type: application/json";
const LENGTH: &str = "content-length: 2";
const BODY: &str = r#"{"model":"fake","messages":[]}"#;
const SECOND: &[u8] = b"GET /key/list HTTP/1.1\r\nhost: x\r\n\r\n";

const CLAUDE_CODE: &str = "POST /v1/messages?beta=true HTTP/1.1\r\n\
    Accept: application/json\r\n\
    Authorization: Bearer none\r\n\
    User-Agent: claude-cli/2.0.1 (external, cli)\r\n\
    X-Stainless-Arch: x64\r\n\
    anthropic-beta: claude-code-20250219,interleaved-thinking-2025-05-14\r\n\
    anthropic-dangerous-direct-browser-access: true\r\n\
    anthropic-version: 2023-06-01\r\n\
    connection: keep-alive\r\n\
    accept-language: *\r\n\
    accept-encoding: gzip, deflate\r\n";

const OPENAI_PYTHON: &str = "POST /v1/chat/completions HTTP/1.1\r\n\
    Host: localhost\r\n\
    Accept-Encoding: gzip, deflate\r\n\
    Connection: keep-alive\r\n\
    Accept: application/json\r\n\
    OpenAI-Beta: responses=experimental\r\n\
    X-Stainless-Read-Timeout: 600\r\n";

/// Heads without the final empty line.
const UNUSUAL: &[(&str, &str)] = &[
    (
        "another method",
        "GET /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2",
    ),
    (
        "an old version",
        "POST /v1/messages HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: 2",
    ),
    (
        "a line before",
        "\r\nPOST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2",
    ),
    (
        "a bare line feed",
        "POST /v1/messages HTTP/1.1\ncontent-type: application/json\r\ncontent-length: 2",
    ),
    (
        "an absolute target",
        "POST http://x/v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2",
    ),
    (
        "another path",
        "POST /v1/keys HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2",
    ),
    (
        "an escape in the path",
        "POST /v1/%6dessages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2",
    ),
    (
        "an escape in the query",
        "POST /v1/messages?a=%20 HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2",
    ),
    (
        "an empty query",
        "POST /v1/messages? HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2",
    ),
    (
        "a fragment",
        "POST /v1/messages#x HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2",
    ),
    ("no content type", "POST /v1/messages HTTP/1.1\r\ncontent-length: 2"),
    (
        "another content type",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: text/plain\r\ncontent-length: 2",
    ),
    (
        "two content types",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-type: application/json\r\ncontent-length: 2",
    ),
    ("no length", "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json"),
    (
        "the same length twice",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\ncontent-length: 2",
    ),
    (
        "a length of nothing",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 0",
    ),
    (
        "a length with a zero before",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 02",
    ),
    (
        "a length over the limit",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 1001",
    ),
    (
        "an endless length",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 18446744073709551618",
    ),
    (
        "an end after the answer",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: close",
    ),
    (
        "two options",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: keep-alive, x",
    ),
    (
        "an option twice",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: keep-alive\r\nconnection: keep-alive",
    ),
    (
        "an upgrade",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\nupgrade: h2c",
    ),
    (
        "an expectation",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\nexpect: 100-continue",
    ),
    (
        "two versions of the API",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\nanthropic-version: a\r\nanthropic-version: b",
    ),
    (
        "letters that are not ASCII",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\nx: \u{e9}",
    ),
    (
        "a tab",
        "POST /v1/messages HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\nx: a\tb",
    ),
];
