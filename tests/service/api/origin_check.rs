//! A3: Tests of a service without grants: a web page in a browser on this machine cannot use it.

use serde_json::json;

use crate::support::client::TestClient;
use crate::support::service::ServiceSetup;

/// DNS rebinding sends the page's own host name, and a form sends the page's origin. Both are refused before any
/// effect.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_in_a_browser_cannot_use_a_service_without_grants() {
    let setup = ServiceSetup::new("").await;
    setup.write_config("insecure_no_auth = true");
    let service = setup.start();
    let client = setup.client();
    for (head, status) in [
        ("GET /api/v1/runs HTTP/1.1\r\nhost: localhost:7070", 200),
        ("GET /api/v1/runs HTTP/1.1\r\nhost: 127.0.0.2", 200),
        ("GET /api/v1/runs HTTP/1.1\r\nhost: [::1]:7070", 200),
        ("GET /api/v1/runs HTTP/1.0", 200),
        ("GET /api/v1/runs HTTP/1.1\r\nhost: evil.example:7070", 403),
        ("GET /api/v1/runs HTTP/1.1\r\nhost: localhost.evil.example", 403),
        ("GET /api/v1/runs HTTP/1.1\r\nhost: 10.0.0.1:7070", 403),
        ("GET /readyz HTTP/1.1\r\nhost: evil.example", 403),
        ("POST /api/v1/runs/run-1/cancel HTTP/1.1\r\nhost: localhost", 404),
        (
            "POST /api/v1/runs/run-1/cancel HTTP/1.1\r\nhost: localhost:7070\r\norigin: http://LOCALHOST:7070",
            404,
        ),
        (
            "POST /api/v1/runs/run-1/cancel HTTP/1.1\r\nhost: localhost:7070\r\norigin: http://localhost:3000",
            403,
        ),
        (
            "POST /api/v1/runs/run-1/cancel HTTP/1.1\r\nhost: localhost:7070\r\norigin: https://evil.example",
            403,
        ),
        ("POST /api/v1/runs/run-1/cancel HTTP/1.1\r\nhost: localhost\r\norigin: null", 403),
    ] {
        assert_eq!(send_raw(&client, head, "").await.0, status, "{head}");
    }
    let run = asked_by("http://evil.example");
    let (_, body) = send_raw(&client, &run.0, &run.1).await;
    insta::assert_snapshot!(body, @r#"{"error":{"code":"forbidden_origin","message":"the request's origin is refused: a service without grants serves no pages of other origins"}}"#);
    let (_, body) = send_raw(&client, "GET /healthz HTTP/1.1\r\nhost: evil.example", "").await;
    insta::assert_snapshot!(body, @r#"{"error":{"code":"forbidden_host","message":"the request's host is refused: a service without grants serves only requests to `localhost` or a loopback address"}}"#);
    let listed = client.get("/api/v1/runs").await.json();
    assert_eq!(listed["runs"], json!([]), "nothing has begun");
    setup.stop(service);
}

/// A form can send text without a preflight request. A caller with a grant may have any host name and origin.
#[tokio::test(flavor = "multi_thread")]
async fn charges_must_be_sent_as_json() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    for (kind, status) in [
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=utf-8", 200),
        ("application/x-ndjson", 200),
    ] {
        let head = format!(
            "POST /api/internal/billing/ingest HTTP/1.1\r\nhost: cogni.example\r\norigin: https://cogni.example\r\n\
             authorization: Bearer {}\r\ncontent-type: {kind}",
            setup.owner.token
        );
        assert_eq!(send_raw(&setup.client(), &head, "[]").await.0, status, "{kind}");
    }
    setup.stop(service);
}

fn asked_by(origin: &str) -> (String, String) {
    let body = super::run_body("fake").to_string();
    let head = "POST /api/v1/runs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json";
    (format!("{head}\r\norigin: {origin}"), body)
}

/// Returns the status and the body.
async fn send_raw(client: &TestClient, head: &str, body: &str) -> (u16, String) {
    let length = body.len();
    let request = format!("{head}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
    let answer = client.raw(request.as_bytes()).await;
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
    (status.expect(&answer), body.unwrap_or_default())
}
