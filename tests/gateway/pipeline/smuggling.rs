//! G3: Tests of request smuggling: one request of the client is one request for the upstream.

use crate::support::app::TestApp;

/// G3: A request with an ambiguous length never becomes two requests.
#[tokio::test]
async fn an_ambiguous_length_smuggles_nothing() {
    for (attempt, head) in AMBIGUOUS {
        let app = TestApp::start().await;
        let answer = app.client().raw(&smuggled_request(head)).await;
        let statuses: Vec<_> = answer.split("HTTP/1.1 ").skip(1).map(|text| &text[..3]).collect();
        assert!(statuses.len() <= 1, "{attempt}: {answer}");
        let seen = app.upstream.seen.requests();
        assert!(seen.iter().all(|request| request.path == "/v1/messages"), "{attempt}: {seen:?}");
        // If the request is served at all, the gateway frames what goes upstream.
        assert!(seen.len() <= 1, "{attempt}: {seen:?}");
        for request in seen {
            assert_eq!(request.text.as_deref(), Some(BODY), "{attempt}");
            assert_eq!(request.header("content-length"), Some("30"), "{attempt}");
            assert_eq!(request.header("transfer-encoding"), None, "{attempt}");
        }
        app.stop().await;
    }
}

/// G3: A head that a lenient server would repair is refused, and the connection is closed.
#[tokio::test]
async fn a_malformed_head_is_refused() {
    for (attempt, head) in MALFORMED {
        let app = TestApp::start().await;
        let bytes = [head.as_bytes(), b"\r\n\r\n", BODY.as_bytes(), SECOND.as_bytes()].concat();
        let answer = app.client().raw(&bytes).await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{attempt}: {answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{attempt}: {answer}");
        assert_eq!(app.upstream.seen.request_count(), 0, "{attempt}");
        app.stop().await;
    }
}

/// A body that is also chunked, followed by another request.
fn smuggled_request(head: &str) -> Vec<u8> {
    let chunked = format!("1e\r\n{BODY}\r\n0\r\n\r\n");
    let body = if head.contains("hunked") { &chunked } else { BODY };
    format!(
        "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{head}\r\n\r\n{body}{SECOND}"
    )
    .into_bytes()
}

const BODY: &str = r#"{"model":"fake","messages":[]}"#;

/// The request that the attacker wants the upstream to see, or to confuse the answers with.
const SECOND: &str = "GET /key/list HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";

pub(crate) const AMBIGUOUS: &[(&str, &str)] = &[
    ("length and chunks", "content-length: 30\r\ntransfer-encoding: chunked"),
    ("chunks and length", "transfer-encoding: chunked\r\ncontent-length: 30"),
    ("chunks and a short length", "transfer-encoding: chunked\r\ncontent-length: 4"),
    ("two lengths", "content-length: 30\r\ncontent-length: 31"),
    ("a list of lengths", "content-length: 30, 31"),
    ("a signed length", "content-length: +30"),
    ("a length in hexadecimal", "content-length: 0x1e"),
    ("an unknown coding", "transfer-encoding: xchunked"),
    ("a coding after chunked", "transfer-encoding: chunked, identity"),
    ("a coding with a space before the colon", "transfer-encoding : chunked"),
    ("a coding with a tab", "transfer-encoding:\tchunked\r\ncontent-length: 30"),
];

pub(crate) const MALFORMED: &[(&str, &str)] = &[
    ("a folded field", "POST /v1/messages HTTP/1.1\r\nhost: x\r\nx: a\r\n b\r\ncontent-length: 30"),
    ("a space before the colon", "POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length : 30"),
    ("a field without a colon", "POST /v1/messages HTTP/1.1\r\nhost x"),
    ("a null in a value", "POST /v1/messages HTTP/1.1\r\nhost: x\0y"),
    ("a carriage return in a value", "POST /v1/messages HTTP/1.1\r\nhost: x\ry: z"),
    ("a space in the path", "POST /v1/messages /x HTTP/1.1\r\nhost: x"),
    ("an unknown version", "POST /v1/messages HTTP/1.2\r\nhost: x"),
    ("no version", "POST /v1/messages\r\nhost: x"),
    ("what is not HTTP", "\x16\x03\x01 hello"),
];
