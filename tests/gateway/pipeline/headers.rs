//! G4: Tests of headers: a client's claims about itself do not reach the upstream, and the upstream's data about itself
//! does not reach the client.

use cogni_gateway::gateway::upstream::UpstreamKind;
use cogni_gateway::llm::request::ProviderCapability;
use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::{client, raw_upstream};

/// G4: Every header that LiteLLM would obey is dropped or overwritten, also if it is repeated.
#[tokio::test]
async fn identity_headers_of_a_client_are_dropped() {
    let app = TestApp::start().await;
    let lies: Vec<_> = SPOOFED.iter().map(|name| (*name, "attacker")).collect();
    for path in ["/v1/chat/completions", "/v1/responses", "/v1/messages"] {
        for lies in [lies.clone(), [lies.as_slice(), lies.as_slice()].concat()] {
            let response = app.client().post_with(path, &chat_body(), &lies).await;
            assert_eq!(response.status, 200);
            let request = app.upstream.seen.last_request().unwrap();
            let liars: Vec<_> =
                request.headers.iter().filter(|(_, value)| value.contains("attacker")).collect();
            assert!(liars.is_empty(), "{path}: {liars:?}");
            assert_eq!(header_names(&request.headers), OURS, "{path}");
            assert_eq!(request.header("authorization"), Some("Bearer sk-real"));
            assert_eq!(request.header("x-litellm-end-user-id"), Some("acct-1"));
        }
    }
    app.stop().await;
}

/// G4: The few headers that change an answer pass; of beta features, only the listed ones.
#[tokio::test]
async fn allowed_headers_of_a_client_pass() {
    let app = TestApp::start().await;
    let messages = [
        ("accept", "text/event-stream"),
        ("anthropic-version", "2026-10-21"),
        ("anthropic-beta", "claude-code-20250219, files-api-2025-04-14"),
        ("anthropic-beta", "interleaved-thinking-2025-05-14"),
        ("openai-beta", "responses=experimental, assistants=v2"),
    ];
    app.client().post_with("/v1/messages", &chat_body(), &messages).await;
    let request = app.upstream.seen.last_request().unwrap();
    assert_eq!(request.header("accept"), Some("text/event-stream"));
    assert_eq!(request.header("anthropic-version"), Some("2026-10-21"));
    let betas = "claude-code-20250219,interleaved-thinking-2025-05-14";
    assert_eq!(request.header("anthropic-beta"), Some(betas));
    assert_eq!(request.header("openai-beta"), Some("responses=experimental"));
    app.stop().await;
}

/// G4, G5: A beta header and its field pass or are dropped together, because Anthropic refuses one without the other.
#[tokio::test]
async fn a_field_passes_only_with_its_beta_header() {
    let mut body = chat_body();
    for field in ["context_management", "compaction", "output_format"] {
        body[field] = json!({});
    }
    let betas = "context-management-2025-06-27,compact-2026-09-04,structured-outputs-2025-11-13,\
                 computer-use-2025-11-24,effort-2025-11-24,tool-search-tool-2025-10-19";
    let betas_sent =
        [betas, ",files-api-2025-04-14,mcp-client-2025-11-20,fast-mode-2026-02-01"].concat();
    let betas_sent = [("anthropic-beta", betas_sent.as_str())];

    let app = TestApp::start().await;
    let response = app.client().post_with("/v1/messages", &body, &betas_sent).await;
    let request = app.upstream.seen.last_request().unwrap();
    assert_eq!(request.header("anthropic-beta"), Some(betas));
    let sent: Value = serde_json::from_str(request.text.as_deref().unwrap()).unwrap();
    assert_eq!(sent, body);
    assert_eq!(response.header("x-cogni-dropped-fields"), None);
    app.stop().await;

    let app = TestApp::with(|config| {
        config.policy.headers.anthropic_beta = vec!["compact-2026-01-12".to_owned()].into();
        config.policy.body.capabilities = [ProviderCapability::RemoteMcp].into();
    })
    .await;
    let response = app.client().post_with("/v1/messages", &body, &betas_sent).await;
    let request = app.upstream.seen.last_request().unwrap();
    assert_eq!(request.header("anthropic-beta"), Some("mcp-client-2025-11-20"));
    body.as_object_mut().unwrap().remove("output_format");
    let sent: Value = serde_json::from_str(request.text.as_deref().unwrap()).unwrap();
    assert_eq!(sent, body);
    assert_eq!(response.header("x-cogni-dropped-fields"), Some("output_format"));
    app.stop().await;
}

/// G4: A list header without any allowed value is dropped, not sent empty.
#[tokio::test]
async fn a_list_header_without_allowed_values_is_dropped() {
    let app = TestApp::with(|config| config.policy.headers.openai_beta.clear()).await;
    let headers = [("openai-beta", "responses=experimental"), ("anthropic-beta", ",,")];
    app.client().post_with("/v1/responses", &chat_body(), &headers).await;
    assert_eq!(header_names(&app.upstream.seen.last_request().unwrap().headers), OURS);
    app.stop().await;
}

/// G4: LiteLLM receives the run, the attempt and the tracing fields, with any content that a header can hold.
#[tokio::test]
async fn the_spend_logs_get_the_run() {
    let app = TestApp::with(|config| {
        config.identity.attempt = "3".to_owned();
        config.identity.deployment = Some("d-1".to_owned());
        config.identity.metadata = json!({
            "graph_id": "g-1",
            "existing_trace_id": "t-1",
            "session_id": "s-1",
            "trace_user_id": "Zoë \u{1f980}\u{7f}\n",
            "run_id": "forged",
            "cogni_deployment_id": "forged",
        })
        .as_object()
        .unwrap()
        .clone();
        config.policy.headers.tags = vec!["team:a".to_owned(), "prod".to_owned()];
    })
    .await;
    app.client().post("/v1/chat/completions", &chat_body()).await;
    let request = app.upstream.seen.last_request().unwrap();
    assert_eq!(request.header("x-litellm-tags"), Some("team:a,prod"));
    let metadata = request.header("x-litellm-spend-logs-metadata").unwrap();
    insta::assert_snapshot!(metadata, @r#"{"attempt":3,"cogni_deployment_id":"d-1","existing_trace_id":"t-1","graph_id":"g-1","run_id":"run-1","session_id":"s-1","trace_user_id":"Zo\u00eb \ud83e\udd80\u007f\n"}"#);
    let read: Value = serde_json::from_str(metadata).unwrap();
    assert_eq!(read["trace_user_id"], "Zoë \u{1f980}\u{7f}\n");
    app.stop().await;
}

/// G4: The client's answer, the upstream's logs and the gateway's records have the same call id.
#[tokio::test]
async fn the_request_id_is_the_call_id() {
    let app = TestApp::start().await;
    let response = app.client().post("/v1/chat/completions", &chat_body()).await;
    let request = app.upstream.seen.last_request().unwrap();
    let call = request.header("x-litellm-call-id").unwrap();
    assert_eq!(response.header("x-litellm-call-id"), Some(call));
    let records = app.stop().await;
    for event in ["request.admitted", "request.settled"] {
        let record = records.iter().find(|record| record["event"] == event).unwrap();
        assert_eq!(record["request"], call);
    }
}

/// G4: Each kind of upstream gets its own credential header, and only LiteLLM gets LiteLLM's headers.
#[tokio::test]
async fn each_kind_of_upstream_gets_its_own_headers() {
    let expected: [(_, &[_]); 2] = [
        (
            UpstreamKind::Openai,
            &[
                "accept-encoding",
                "authorization",
                "content-length",
                "content-type",
                "host",
                "user-agent",
            ],
        ),
        (
            UpstreamKind::Anthropic,
            &[
                "accept-encoding",
                "anthropic-version",
                "content-length",
                "content-type",
                "host",
                "user-agent",
                "x-api-key",
            ],
        ),
    ];
    for (kind, headers) in expected {
        let app = TestApp::with(|config| {
            config.upstream.kind = kind;
            config.policy.headers.tags = vec!["team:a".to_owned()];
        })
        .await;
        app.client().post_with("/v1/messages", &chat_body(), &[("authorization", "x")]).await;
        let request = app.upstream.seen.last_request().unwrap();
        assert_eq!(header_names(&request.headers), headers);
        let key = request.header("x-api-key").or(request.header("authorization"));
        assert!(key.unwrap().ends_with("sk-real"));
        app.stop().await;
    }
}

/// G4: Addresses, keys, cookies and costs do not reach the client; the cost is in the records.
#[tokio::test]
async fn headers_about_the_upstream_do_not_reach_the_client() {
    let app = TestApp::start().await;
    let unary = app.client().post("/v1/chat/completions", &chat_body()).await;
    let passed = ["content-length", "content-type", "date", "x-litellm-call-id"];
    assert_eq!(sort_names(unary.headers.keys()), passed);
    let stream = json!({"model": "fake", "stream": true, "messages": []});
    let streamed = app.client().post("/v1/chat/completions", &stream).await;
    let passed =
        ["cache-control", "content-type", "date", "transfer-encoding", "x-litellm-call-id"];
    assert_eq!(sort_names(streamed.headers.keys()), passed);
    let records = app.stop().await;
    let settled = records.iter().find(|record| record["event"] == "request.settled").unwrap();
    assert_eq!(settled["litellm_response_cost"], "2.1e-05");
}

/// G4: A setting lets the cost header pass to the client.
#[tokio::test]
async fn the_cost_header_passes_if_the_operator_allows_it() {
    let app = TestApp::with(|config| config.policy.headers.expose_response_cost = true).await;
    let response = app.client().post("/v1/chat/completions", &chat_body()).await;
    assert_eq!(response.header("x-litellm-response-cost"), Some("2.1e-05"));
    assert_eq!(response.header("x-litellm-response-cost-original"), None);
    app.stop().await;
}

/// G4: Headers that tell a client when and whether to retry pass.
#[tokio::test]
async fn advice_about_retries_passes() {
    let app = TestApp::start().await;
    let body = json!({"model": "fake/status=429;retry_after=7;should_retry=no", "messages": []});
    let response = app.client().post("/v1/chat/completions", &body).await;
    assert_eq!(response.status, 429);
    assert_eq!(response.header("retry-after"), Some("7"));
    assert_eq!(response.header("x-should-retry"), Some("false"));
    app.stop().await;
}

/// G4, G15: An answer with an encoding that was not requested cannot be read, so it is charged its reservation.
#[tokio::test]
async fn an_encoding_that_was_not_requested_is_malformed() {
    let (upstream, address) = raw_upstream::listen_locally().await;
    let app =
        TestApp::with(|config| config.upstream.url = address.to_string().parse().unwrap()).await;
    let client = app.client();
    let request =
        client::post_request("/v1/chat/completions", &chat_body(), &[("accept-encoding", "gzip")]);
    let (answer, ()) = tokio::join!(client.send(request), async {
        let (mut connection, _) = upstream.accept().await.unwrap();
        let request = raw_upstream::read_request(&mut connection).await;
        assert!(request.contains("accept-encoding: identity\r\n"), "{request}");
        let answer = raw_upstream::ANSWER.replace("\r\n\r\n", "\r\ncontent-encoding: gzip\r\n\r\n");
        raw_upstream::send_text(&mut connection, &answer).await;
    });
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["code"]),
        (502, &json!("upstream_malformed"))
    );
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(settled["charged"]["output"], 16_384, "{settled}");
    app.stop().await;
}

fn chat_body() -> Value {
    json!({"model": "fake", "messages": []})
}

fn header_names(headers: &[(String, String)]) -> Vec<&str> {
    sort_names(headers.iter().map(|(name, _)| name))
}

fn sort_names<'a>(names: impl Iterator<Item = &'a (impl AsRef<str> + 'a)>) -> Vec<&'a str> {
    let mut names: Vec<_> = names.map(AsRef::as_ref).collect();
    names.sort_unstable();
    names
}

/// The headers that LiteLLM receives if the client adds no header that passes.
const OURS: &[&str] = &[
    "accept-encoding",
    "authorization",
    "content-length",
    "content-type",
    "host",
    "user-agent",
    "x-litellm-call-id",
    "x-litellm-end-user-id",
    "x-litellm-spend-logs-metadata",
];

const SPOOFED: &[&str] = &[
    "authorization",
    "proxy-authorization",
    "api-key",
    "x-api-key",
    "x-goog-api-key",
    "ocp-apim-subscription-key",
    "x-litellm-api-key",
    "x_litellm_api_key",
    "x-litellm-end-user-id",
    "x-litellm-customer-id",
    "x-litellm-spend-logs-metadata",
    "x-litellm-tags",
    "x-litellm-call-id",
    "x-litellm-session-id",
    "x-litellm-trace-id",
    "x-litellm-timeout",
    "x-litellm-stream-timeout",
    "x-litellm-num-retries",
    "x-litellm-model",
    "x-litellm-enable-message-redaction",
    "litellm-disable-message-redaction",
    "x-forwarded-for",
    "x-forwarded-host",
    "forwarded",
    "x-real-ip",
    "x-original-url",
    "x-rewrite-url",
    "x-http-method-override",
    "openai-organization",
    "openai-project",
    "session-id",
    "thread-id",
    "x-request-id",
    "traceparent",
    "tracestate",
    "baggage",
    "cookie",
    "referer",
    "user-agent",
    "te",
    "trailer",
    "range",
    "if-none-match",
    "anthropic-beta",
    "anthropic-dangerous-direct-browser-access",
    "openai-beta",
];
