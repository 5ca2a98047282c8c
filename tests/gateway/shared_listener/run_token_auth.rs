//! G1: Tests of invalid tokens: they are refused in the shape of the protocol, as a final refusal.

use std::time::{Duration, SystemTime};

use cogni_gateway::gateway::run::token::RunTokenKeys;
use http::Request;
use http_body_util::Full;
use serde_json::{Value, json};

use super::chat_body;
use crate::support::client::{ResponseStream, TestResponse};
use crate::support::shared_app::{SharedApp, token_keys};

/// G1, G10: Each client gets a refusal in its protocol's shape, which tells it not to retry.
#[tokio::test]
async fn a_bad_token_is_refused_in_the_protocols_shape() {
    let app = SharedApp::start().await;
    let response_to = async |key: &str, path: &str| {
        let answer = app.call(key, path, &chat_body()).await;
        assert_eq!(answer.header("x-should-retry"), Some("false"));
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        format!("{} {}", answer.status.as_u16(), answer.text())
    };
    let strangers = RunTokenKeys::parse_keys(&format!("k1 = {}", "22".repeat(32))).unwrap();
    let now = SystemTime::now();
    let forged = strangers.mint_token("run-1", Duration::from_hours(1), None, now).unwrap();
    let (expired, unknown) = (app.token_until("run-1", -1), app.token("run-3"));
    let messages = [
        response_to("sk-1234", "/v1/chat/completions").await,
        response_to("sk-1234", "/v1/messages").await,
        response_to("sk-1234", "/v1/responses").await,
        response_to("sk-1234", "/nothing").await,
        response_to(&forged, "/v1/chat/completions").await,
        response_to(&expired, "/v1/messages").await,
        response_to(&unknown, "/v1/messages").await,
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
    401 {"error":{"code":"run_token_missing","message":"the request has no run token; send the run token as the API key","param":null,"type":"authentication_error"}}
    401 {"error":{"code":"run_token_missing","message":"the request has no run token; send the run token as the API key","type":"authentication_error"},"type":"error"}
    401 {"error":{"code":"run_token_missing","message":"the request has no run token; send the run token as the API key","param":null,"type":"authentication_error"}}
    401 {"error":{"code":"run_token_missing","message":"the request has no run token; send the run token as the API key","param":null,"type":"authentication_error"}}
    401 {"error":{"code":"run_token_invalid","message":"the run token is not valid","param":null,"type":"authentication_error"}}
    401 {"error":{"code":"run_token_expired","message":"the run token has expired","type":"authentication_error"},"type":"error"}
    401 {"error":{"code":"unknown_run","message":"the run of this token is not served here, or is no longer served","type":"authentication_error"},"type":"error"}
    "#);
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;
}

/// G1: A token for another installation, or for none, is invalid here.
#[tokio::test]
async fn a_token_of_another_installation_is_refused() {
    let app = SharedApp::with(|config, _| {
        config.shared.as_mut().unwrap().token_audience = Some("eu-1".to_owned());
    })
    .await;
    for (audience, status) in [(Some("eu-1"), 200), (Some("us-1"), 401), (None, 401)] {
        let keys = token_keys().for_audience(audience);
        let token =
            keys.mint_token("run-1", Duration::from_hours(1), None, SystemTime::now()).unwrap();
        let answer = app.call(&token, "/v1/chat/completions", &chat_body()).await;
        assert_eq!(answer.status, status, "{audience:?}");
    }
    assert_eq!(app.upstream.seen.request_count(), 1);
    app.stop().await;
}

/// G12: Refusals are counted; those without a run are counted by code alone.
#[tokio::test]
async fn unauthenticated_requests_are_counted_and_logged() {
    let app = SharedApp::with(|config, _| {
        config.metrics.address = Some(([127, 0, 0, 1], 0).into());
    })
    .await;
    app.call("sk-1", "/v1/messages", &chat_body()).await;
    app.call("cgr1.k1.x.y", "/v1/messages", &chat_body()).await;
    app.call(&app.token_until("run-1", -1), "/v1/messages", &chat_body()).await;
    app.call(&app.token("run-3"), "/v1/messages", &chat_body()).await;
    let metrics = app.scrape().await;
    for code in ["run_token_missing", "run_token_invalid", "run_token_expired", "unknown_run"] {
        let series = format!("cogni_gateway_refusals_total{{code=\"{code}\"}} 1\n");
        assert!(metrics.contains(&series), "{code}: {metrics}");
    }
    assert!(!metrics.contains("run=\"run-3\""), "who makes names up makes no series");
    let log = app.access_log();
    let directory = app.stop().await;
    let lines = std::fs::read_to_string(log).unwrap();
    assert_eq!((lines.matches("runId=- ").count(), lines.matches("runId=run-1 ").count()), (3, 1));
    drop(directory);
}

/// G1: A token is invalid from the second of its expiry on, and the run's records show its reuse.
#[tokio::test]
async fn a_replay_after_expiry_is_refused_and_recorded() {
    let app = SharedApp::start().await;
    let token = good_for_a_moment(&app).await;
    let refusal = loop {
        let answer = app.call(&token, "/v1/messages", &chat_body()).await;
        if answer.status != 200 {
            break answer;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(
        (refusal.status.as_u16(), &refusal.json()["error"]["code"]),
        (401, &json!("run_token_expired"))
    );
    let directory = app.stop().await;
    let text = std::fs::read_to_string(directory.path().join("audit/run-1.jsonl")).unwrap();
    assert!(text.contains(r#""code":"run_token_expired","status":401"#), "{text}");
}

/// Returns a token that was valid when it was used, however slow the machine is, and expires soon.
async fn good_for_a_moment(app: &SharedApp) -> String {
    for seconds in [2, 8, 32] {
        let token = app.token_until("run-1", seconds);
        if app.call(&token, "/v1/messages", &chat_body()).await.status == 200 {
            return token;
        }
    }
    panic!("no call was made within half a minute");
}

/// G1: A token with any byte changed gets a 401, also on a connection where valid tokens came before.
#[tokio::test]
async fn a_token_with_any_other_byte_is_refused() {
    let app = SharedApp::start().await;
    let token = app.token("run-1");
    let mut connection = app.http1().await;
    let mut ask = async |key: &[u8]| {
        connection.ready().await.unwrap();
        let request = Request::get("/run/status").header("host", "x").header("x-api-key", key);
        let answer = connection.send_request(request.body(Full::default()).unwrap()).await;
        ResponseStream::from(answer.unwrap()).finish().await.unwrap().status.as_u16()
    };
    for at in 0..token.len() {
        let mut changed = token.clone().into_bytes();
        // The replacement is another letter, digit or character of the alphabet, close to the original.
        changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
        assert_eq!(ask(&changed).await, 401, "byte {at}");
        changed[at] = token.as_bytes()[at] ^ 1;
        assert_eq!(ask(&changed).await, 401, "byte {at}");
        if at % 10 == 0 {
            assert_eq!(ask(token.as_bytes()).await, 200);
        }
    }
    app.stop().await;
}

/// G1: Each request is authenticated by its own token, not by earlier tokens on its connection.
#[tokio::test]
async fn requests_on_one_connection_may_be_of_different_runs() {
    let app = SharedApp::start().await;
    let (one, two) = (app.token("run-1"), app.token("run-2"));
    let keys = [(&*one, "run-1"), (&*two, "run-2"), ("sk-x", "-"), (&*one, "run-1")];
    let mut http1 = app.http1().await;
    let mut http2 = app.http2().await;
    for (key, run) in keys {
        http1.ready().await.unwrap();
        let answer = http1.send_request(status_request("", key)).await.unwrap();
        check_answer(&ResponseStream::from(answer).finish().await.unwrap(), run);
    }
    // The requests are also made concurrently.
    let answers =
        keys.map(|(key, run)| (http2.send_request(status_request("https://127.0.0.1", key)), run));
    for (answer, run) in answers {
        check_answer(&ResponseStream::from(answer.await.unwrap()).finish().await.unwrap(), run);
    }
    app.stop().await;
}

/// G1: A load balancer has no token; its health check succeeds and reveals nothing about the runs.
#[tokio::test]
async fn health_needs_no_token() {
    let app = SharedApp::start().await;
    let get = async |headers: &[(&str, &str)]| {
        let mut request = Request::get("/health").header("host", "x");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = app.send(request.body(Full::default()).unwrap()).await.finish().await.unwrap();
        format!("{} {}", answer.status.as_u16(), answer.text())
    };
    assert_eq!(get(&[]).await, r#"200 {"status":"ok"}"#);
    assert_eq!(
        get(&[("x-api-key", &app.token("run-1"))]).await,
        r#"200 {"status":"ok","runId":"run-1"}"#
    );
    assert!(get(&[("x-api-key", "cgr1.k1.x.y")]).await.starts_with("401 "));
    app.stop().await;
}

fn status_request(origin: &str, key: &str) -> Request<Full<bytes::Bytes>> {
    let request = Request::get(format!("{origin}/run/status")).header("x-api-key", key);
    request.body(Full::default()).unwrap()
}

fn check_answer(answer: &TestResponse, run: &str) {
    if run == "-" {
        assert_eq!(answer.status, 401);
    } else {
        assert_eq!(answer.json()["runId"], Value::from(run));
    }
}
