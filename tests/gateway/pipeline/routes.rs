//! G2, G3: Tests of routes: exactly these routes are served, compared byte by byte.

use serde_json::json;

use crate::support::app::TestApp;
use crate::support::client::post_request;

/// G2: Health checks compare the whole body.
#[tokio::test]
async fn health_names_the_run() {
    let app = TestApp::start().await;
    let response = app.client().get("/health").await;
    assert_eq!(
        (response.status.as_u16(), response.text()),
        (200, r#"{"status":"ok","runId":"run-1"}"#)
    );
    assert_eq!(response.header("content-type"), Some("application/json"));
    app.stop().await;
}

/// G2: Every path that is not served gets the same answer.
#[tokio::test]
async fn every_other_path_is_not_found() {
    let app = TestApp::start().await;
    let response = app.client().get("/v1/keys").await;
    assert_eq!((response.status.as_u16(), response.text()), (404, r#"{"error":"not_found"}"#));
    let records = app.stop().await;
    let refused: Vec<_> = records.iter().filter(|r| r["event"] == "request.refused").collect();
    assert_eq!(refused.len(), 1);
    assert_eq!((&refused[0]["code"], &refused[0]["route"]), (&json!("not_found"), &json!("-")));
}

/// G2: Each request writes one line, in a format that readers of the old log understand.
#[tokio::test]
async fn each_request_leaves_a_line_in_the_access_log() {
    let app = TestApp::start().await;
    app.client().get("/health").await;
    app.client().get("/nothing").await;
    let body = json!({"model": "fake", "messages": []});
    let answer = app.client().post("/v1/chat/completions", &body).await;
    let path = app.access_log();
    let log_dir = tempfile::tempdir().unwrap();
    let copy = log_dir.path().join("access.log");
    std::fs::hard_link(path, &copy).unwrap();
    app.stop().await;
    let log = std::fs::read_to_string(copy).unwrap();
    let lines: Vec<_> = log.lines().map(split_pairs).collect();
    let column = |key| lines.iter().map(|line| find_value(line, key)).collect::<Vec<_>>();
    assert_eq!(column("status"), ["200", "404", "200"]);
    assert_eq!(column("runId"), ["run-1"; 3]);
    assert_eq!(column("attempt"), ["0"; 3]);
    let call = answer.header("x-litellm-call-id").unwrap();
    assert_eq!(column("litellm_call_id"), ["-", "-", call]);
    assert_eq!(column("bytes")[2], answer.body.len().to_string());
    for key in ["time", "model", "litellm_response_cost", "upstream_time"] {
        assert!(column(key).iter().all(|value| !value.is_empty()), "{key}");
    }
}

/// G3: The allowlist has each route with its methods.
#[tokio::test]
async fn every_listed_route_is_served() {
    let app = TestApp::start().await;
    for path in GENERATING {
        let body = json!({"model": "fake", "messages": [], "input": "x"});
        let response = app.client().post(path, &body).await;
        assert_eq!((path, response.status.as_u16()), (path, 200));
        assert_eq!(app.upstream.seen.last_request().unwrap().path, path);
    }
    for path in ["/health", "/run/status", "/v1/models"] {
        assert_eq!((path, app.client().get(path).await.status.as_u16()), (path, 200));
    }
    app.stop().await;
}

/// G3: A path that only resembles a route is not served, however an upstream server would normalise it.
#[tokio::test]
async fn a_path_that_is_not_a_route_byte_for_byte_is_not_found() {
    let app = TestApp::start().await;
    for (method, target) in NOT_ROUTES {
        let answer = app.client().raw(&closing_request(method, target, "host: localhost")).await;
        assert!(answer.starts_with("HTTP/1.1 404 "), "{method} {target}: {answer}");
        assert!(answer.ends_with(r#"{"error":"not_found"}"#), "{method} {target}: {answer}");
    }
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;
}

/// G3: No connection is upgraded, so no other protocol passes.
#[tokio::test]
async fn an_upgrade_is_not_found() {
    let app = TestApp::start().await;
    for protocols in ["websocket", "h2c, websocket", "h2c\r\nupgrade: websocket", "h2", ""] {
        let upgrade =
            format!("host: localhost\r\nconnection: upgrade, close\r\nupgrade: {protocols}");
        let answer = app.client().raw(&closing_request("POST", "/v1/messages", &upgrade)).await;
        assert!(answer.starts_with("HTTP/1.1 404 "), "{protocols}: {answer}");
    }
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;
}

/// G3: Java's client offers h2c with its first requests; the offer is ignored.
#[tokio::test]
async fn an_offer_of_h2c_is_ignored() {
    let app = TestApp::start().await;
    let offer = "connection: Upgrade, HTTP2-Settings, close\r\nhost: localhost:8080\r\n\
                 http2-settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAABgAGAAA\r\n\
                 upgrade: h2c\r\nuser-agent: Java-http-client/21";
    for (method, path) in [("POST", "/v1/messages"), ("GET", "/health")] {
        let answer = app.client().raw(&closing_request(method, path, offer)).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert!(!answer.contains("upgrade"), "{answer}");
    }
    let seen = app.upstream.seen.last_request().unwrap();
    for name in ["upgrade", "http2-settings"] {
        assert_eq!(seen.header(name), None);
    }
    app.stop().await;
}

/// G3: A single model is answered like the list: by the gateway if the run has its own list, otherwise by the upstream.
#[tokio::test]
async fn one_model_is_answered_like_the_list() {
    let app = TestApp::with(|config| {
        config.policy.body.models = vec!["gpt-5".to_owned(), "openai/gpt-5:free".to_owned()];
    })
    .await;
    for name in ["gpt-5", "openai/gpt-5:free"] {
        let answer = app.client().get(&format!("/v1/models/{name}")).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["id"]), (200, &json!(name)));
    }
    let answer = app.client().get("/v1/models/gpt-6").await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["code"]),
        (404, &json!("model_not_found"))
    );
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;

    let app = TestApp::start().await;
    let answer = app.client().get("/v1/models/openai/gpt-5:free").await;
    assert_eq!((answer.status.as_u16(), &answer.json()["id"]), (200, &json!("openai/gpt-5:free")));
    assert_eq!(app.upstream.seen.last_request().unwrap().path, "/v1/models/openai/gpt-5:free");
    for odd in ["", "a,b", "a//b", "a/", "../a", "a/./b", "a%2fb", "a;b", &"a".repeat(257)] {
        let answer = app
            .client()
            .raw(&closing_request("GET", &format!("/v1/models/{odd}"), "host: localhost"))
            .await;
        assert!(answer.starts_with("HTTP/1.1 404 "), "{odd}: {answer}");
    }
    let answer =
        app.client().raw(&closing_request("POST", "/v1/models/a", "host: localhost")).await;
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
    assert_eq!(app.upstream.seen.request_count(), 1);
    app.stop().await;
}

/// G3: An absolute target that names this host is served, and the upstream receives only the path.
#[tokio::test]
async fn an_absolute_target_that_names_this_host_is_served() {
    let app = TestApp::start().await;
    for authority in ["localhost", "LocalHost:8080", "127.0.0.1:8080", "[::1]:1", "localhost:80"] {
        let target = format!("http://{authority}/v1/messages");
        let answer = app.client().raw(&closing_request("POST", &target, "host: localhost")).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{target}: {answer}");
        let seen = app.upstream.seen.last_request().unwrap();
        assert_eq!(seen.path, "/v1/messages");
        assert_eq!(seen.header("host"), Some(app.upstream.addr.to_string().as_str()));
    }
    app.stop().await;
}

/// G3: A query that is not listed is dropped, and the call continues without it.
#[tokio::test]
async fn only_a_listed_query_goes_upstream() {
    let app = TestApp::start().await;
    let body = json!({"model": "fake", "messages": []});
    for (query, forwarded) in [
        ("", ""),
        ("?beta=true", "?beta=true"),
        ("?beta=true&api_base=http://evil", ""),
        ("?beta=false", ""),
        ("?BETA=true", ""),
        ("?", ""),
    ] {
        let response = app.client().post(&format!("/v1/messages{query}"), &body).await;
        assert_eq!((query, response.status.as_u16()), (query, 200));
        assert_eq!(
            app.upstream.seen.last_request().unwrap().path,
            format!("/v1/messages{forwarded}")
        );
    }
    app.stop().await;
}

/// G3: The host header that goes upstream comes from the configuration.
#[tokio::test]
async fn the_host_comes_from_the_configuration() {
    let app = TestApp::start().await;
    for host in ["host: evil.example", "host: evil.example:4000\r\nx-forwarded-host: evil", ""] {
        let host = if host.is_empty() { "accept: */*" } else { host };
        let answer = app.client().raw(&closing_request("POST", "/v1/messages", host)).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        let seen = app.upstream.seen.last_request().unwrap();
        assert_eq!(seen.header("host"), Some(app.upstream.addr.to_string().as_str()));
        assert!(!seen.headers.iter().any(|(_, value)| value.contains("evil")));
    }
    app.stop().await;
}

/// G3: HTTP/2 has an authority in every request, and it has no effect either.
#[tokio::test]
async fn the_authority_of_an_http2_request_is_irrelevant() {
    let app = TestApp::start().await;
    let mut connection = app.client().http2().await;
    let body = json!({"model": "fake", "messages": []});
    let request = post_request("http://evil.example/v1/messages", &body, &[]);
    assert_eq!(connection.send_request(request).await.unwrap().status(), 200);
    let seen = app.upstream.seen.last_request().unwrap();
    assert_eq!(seen.header("host"), Some(app.upstream.addr.to_string().as_str()));
    app.stop().await;
}

/// G3: The gateway itself answers a run's own model list, in the shape of the client's protocol.
#[tokio::test]
async fn the_models_of_a_run_are_listed_in_both_shapes() {
    let app = TestApp::with(|config| {
        config.policy.body.models = vec!["small".to_owned(), "large".to_owned()];
    })
    .await;
    insta::assert_json_snapshot!(app.client().get("/v1/models").await.json(), @r#"
    {
      "data": [
        {
          "created": 0,
          "id": "small",
          "object": "model",
          "owned_by": "cogni-gateway"
        },
        {
          "created": 0,
          "id": "large",
          "object": "model",
          "owned_by": "cogni-gateway"
        }
      ],
      "object": "list"
    }
    "#);
    let anthropic = "host: localhost\r\nanthropic-version: 2023-06-01";
    let answer = app.client().raw(&closing_request("GET", "/v1/models", anthropic)).await;
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    insta::assert_json_snapshot!(serde_json::from_str::<serde_json::Value>(body).unwrap(), @r#"
    {
      "data": [
        {
          "created_at": "1970-01-01T00:00:00Z",
          "display_name": "small",
          "id": "small",
          "type": "model"
        },
        {
          "created_at": "1970-01-01T00:00:00Z",
          "display_name": "large",
          "id": "large",
          "type": "model"
        }
      ],
      "first_id": "small",
      "has_more": false,
      "last_id": "large"
    }
    "#);
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;
}

/// G3: A run without its own model list gets the upstream's list.
#[tokio::test]
async fn the_models_of_the_upstream_are_forwarded() {
    let app = TestApp::start().await;
    let list = app.client().get("/v1/models").await.json();
    assert_eq!(list["data"][0]["id"], "fake-small");
    let seen = app.upstream.seen.last_request().unwrap();
    assert_eq!((seen.method.as_str(), seen.body_bytes), ("GET", 0));
    assert_eq!(seen.header("authorization"), Some("Bearer sk-real"));
    app.stop().await;
}

/// A request that closes its connection afterwards.
fn closing_request(method: &str, target: &str, headers: &str) -> Vec<u8> {
    let body = r#"{"model":"fake","messages":[]}"#;
    format!(
        "{method} {target} HTTP/1.1\r\n{headers}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn split_pairs(line: &str) -> Vec<(&str, &str)> {
    line.split(' ').map(|pair| pair.split_once('=').unwrap()).collect()
}

fn find_value<'a>(line: &[(&str, &'a str)], key: &str) -> &'a str {
    line.iter().find(|(is, _)| *is == key).unwrap().1
}

const GENERATING: [&str; 6] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
];

const NOT_ROUTES: &[(&str, &str)] = &[
    ("POST", "/v1/%6dessages"),
    ("POST", "/v1/messages%2f"),
    ("POST", "/v1%2Fmessages"),
    ("POST", "/v1/messages%00"),
    ("POST", "/v1/keys/../messages"),
    ("POST", "/v1/./messages"),
    ("POST", "/v1/messages/.."),
    ("POST", "//v1/messages"),
    ("POST", "/v1//messages"),
    ("POST", "/v1/messages;x=1"),
    ("POST", "/v1;x=1/messages"),
    ("POST", "/v1/messages/"),
    ("POST", "/V1/messages"),
    ("POST", "/v1/Messages"),
    ("POST", "/v1\\messages"),
    ("POST", "http://localhost/v1/keys"),
    ("POST", "http://localhost//v1/messages"),
    ("POST", "https://localhost/v1/messages"),
    ("POST", "ftp://localhost/v1/messages"),
    ("POST", "http://user@localhost/v1/messages"),
    ("POST", "http://localhost@evil.example/v1/messages"),
    ("POST", "http://localhost.evil.example/v1/messages"),
    ("POST", "http://127.0.0.1.evil.example/v1/messages"),
    ("POST", "http://evil.example/v1/messages"),
    ("POST", "/v1/messages/batches"),
    ("POST", "/v1"),
    ("POST", "/"),
    ("POST", "/key/generate"),
    ("POST", "/health"),
    ("POST", "/v1/models"),
    ("GET", "/v1/messages"),
    ("PUT", "/v1/messages"),
    ("DELETE", "/v1/messages"),
    ("PATCH", "/v1/messages"),
    ("OPTIONS", "/v1/messages"),
    ("TRACE", "/v1/messages"),
    ("HEAD2", "/v1/messages"),
    ("OPTIONS", "*"),
    ("post", "/v1/messages"),
    ("CONNECT", "localhost:4000"),
];
