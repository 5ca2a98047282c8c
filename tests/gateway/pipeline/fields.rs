//! G5, G6: Tests of the request fields that reach the provider.

use cogni_gateway::gateway::upstream::UpstreamKind;
use cogni_gateway::llm::request::ProviderCapability;
use serde_json::{Value, json};

use crate::metrics::scrape_listener;
use crate::support::app::TestApp;
use crate::support::client;

/// G5: No statement of the client about itself, the upstream or the price reaches the provider, in any protocol.
/// Harmless statements are dropped without a refusal.
#[tokio::test]
async fn unlisted_fields_do_not_reach_the_provider() {
    let [openai, anthropic] = strict_apps().await;
    for (path, own) in PATHS {
        let app = if path.starts_with("/v1/messages") { &anthropic } else { &openai };
        for lie in DROPPED {
            let body = format!(r#"{{{lie},"model":"m","max_tokens":9,{own}}}"#);
            let response = post_text(app, path, body).await;
            assert_eq!(response.status, 200, "{path} {lie}: {}", response.text());
            let sent = app.upstream.seen.last_request().unwrap().text.unwrap();
            assert!(!sent.contains("attacker"), "{path} {lie}: {sent}");
        }
    }
    openai.stop().await;
    anthropic.stop().await;
}

/// G5: A field that only an attack or a mistake would contain is refused in the protocol's error shape, and recorded.
#[tokio::test]
async fn a_forbidden_field_is_refused_and_recorded() {
    let app = TestApp::start().await;
    for (path, own) in PATHS {
        for lie in REFUSED {
            let response = post_text(&app, path, format!(r#"{{"model":"m",{own},{lie}}}"#)).await;
            assert_eq!(response.status, 400, "{path} {lie}");
            assert_eq!(response.header("x-should-retry"), Some("false"));
            let error = &response.json()["error"];
            assert_eq!(error["code"], "field_not_allowed", "{path} {lie}");
            let field = lie.split('"').nth(1).unwrap().replace("\\u0069", "i");
            assert!(error["message"].as_str().unwrap().contains(&field), "{error}");
            assert!(error["param"].is_null() || error["param"] == field, "{error}");
        }
    }
    assert_eq!(app.upstream.seen.request_count(), 0);
    let records = app.stop().await;
    let refused = records.iter().filter(|record| record["event"] == "request.refused");
    assert!(refused.clone().count() >= REFUSED.len());
    assert!(refused.clone().all(|record| record["code"] == "field_not_allowed"));
}

/// G6, G10: A request that needs a capability is refused until the capability is granted; then it is sent unchanged.
#[tokio::test]
async fn a_capability_is_refused_until_it_is_granted() {
    let body = json!({
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "web_search_20991231", "name": "web_search"}],
    });
    let app = TestApp::start().await;
    let response = app.client().post("/v1/messages", &body).await;
    assert_eq!(response.status, 403);
    insta::assert_snapshot!(response.text(), @r#"{"error":{"code":"capability_not_granted","message":"`tools` needs `web_search` (`web_search_20991231`), which this run has not been granted; its operator can grant it, in `policy.body.capabilities` or `CAPABILITIES`","type":"permission_error"},"type":"error"}"#);
    assert_eq!(app.upstream.seen.request_count(), 0);
    let response = app.client().post("/v1/chat/completions", &body).await;
    insta::assert_snapshot!(response.text(), @r#"{"error":{"code":"capability_not_granted","message":"`tools` needs `web_search` (`web_search_20991231`), which this run has not been granted; its operator can grant it, in `policy.body.capabilities` or `CAPABILITIES`","param":"tools","type":"permission_error"}}"#);
    app.stop().await;

    let app = TestApp::with(|config| {
        config.policy.body.capabilities = [ProviderCapability::WebSearch].into();
    })
    .await;
    let response = app.client().post("/v1/messages", &body).await;
    assert_eq!(response.status, 200);
    assert_eq!(app.upstream.seen.last_request().unwrap().body.as_ref(), Some(&body));
    app.stop().await;
}

/// G5, G12: Dropped fields are counted by reason, never by the client's text.
#[tokio::test]
async fn dropped_fields_are_counted() {
    let app = TestApp::with(|config| {
        config.metrics.address = Some(([127, 0, 0, 1], 0).into());
    })
    .await;
    let body = json!({"model": "m", "user": "u", "metadata": {}, "wibble": 1, "temperature": 1});
    for _ in 0..2 {
        assert_eq!(app.client().post("/v1/chat/completions", &body).await.status, 200);
    }
    let text =
        scrape_listener(app.metrics.unwrap(), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await;
    let counted: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("cogni_gateway_dropped_fields_total{"))
        .collect();
    insta::assert_snapshot!(counted.join("\n"), @r#"
    cogni_gateway_dropped_fields_total{reason="attribution",route="chat_completions"} 4
    cogni_gateway_dropped_fields_total{reason="unknown",route="chat_completions"} 2
    "#);
    app.stop().await;
}

/// G5, G6: Requests of current clients pass unchanged, except for the gateway's own fields. Each fixture file has a
/// client's request and the fields that are left out of it. The provider is strict, unless it serves open models.
#[tokio::test]
async fn requests_of_real_clients_pass_unchanged() {
    let [openai, anthropic] = strict_apps().await;
    let open_models = TestApp::start().await;
    for (name, text) in CLIENTS {
        let client: Value = serde_json::from_str(text).unwrap();
        let (path, body) = (client["path"].as_str().unwrap(), &client["body"]);
        let app = match (client["server"].as_str(), path) {
            (Some(_), _) => &open_models,
            (None, "/v1/messages") => &anthropic,
            (None, _) => &openai,
        };
        let beta = client["beta"].as_str().map(|beta| ("anthropic-beta", beta));
        let response = app.client().post_with(path, body, beta.as_slice()).await;
        assert_eq!(response.status, 200, "{name}: {}", response.text());
        let mut expected = body.clone();
        let changes = client["changes"].as_object().unwrap();
        for (field, value) in changes {
            match value {
                Value::Null => drop(expected.as_object_mut().unwrap().remove(field)),
                value => expected[field] = value.clone(),
            }
        }
        assert_eq!(app.upstream.seen.last_request().unwrap().body, Some(expected), "{name}");
    }
    open_models.stop().await;
    openai.stop().await;
    anthropic.stop().await;
}

/// G5: A response header names the dropped fields.
#[tokio::test]
async fn the_answer_names_the_dropped_fields() {
    let app = TestApp::start().await;
    let own = r#""messages":[],"tools":[{"type":"web_search","external_web_access":false}],"timeout":9,"wibble":1,"user":"u""#;
    let answer = post_text(&app, "/v1/chat/completions", format!(r#"{{"model":"m",{own}}}"#)).await;
    assert_eq!(
        answer.header("x-cogni-dropped-fields"),
        Some("timeout, wibble, user, tools.web_search")
    );
    let answer =
        post_text(&app, "/v1/chat/completions", r#"{"model":"m","messages":[]}"#.to_owned()).await;
    assert_eq!(answer.header("x-cogni-dropped-fields"), None);
    app.stop().await;
}

/// Starts gateways in front of providers that refuse what OpenAI and Anthropic refuse.
async fn strict_apps() -> [TestApp; 2] {
    [
        TestApp::strict(UpstreamKind::Openai, |_| ()).await,
        TestApp::strict(UpstreamKind::Anthropic, |_| ()).await,
    ]
}

async fn post_text(app: &TestApp, path: &str, body: String) -> client::TestResponse {
    let request = http::Request::post(path)
        .header("host", "localhost")
        .header("content-type", "application/json")
        .body(http_body_util::Full::from(body))
        .unwrap();
    app.client().send(request).await
}

/// The paths that accept a body, and the fields that each requires.
const PATHS: &[(&str, &str)] = &[
    ("/v1/chat/completions", r#""messages":[{"role":"user","content":"hello"}]"#),
    ("/v1/completions", r#""prompt":"hello""#),
    ("/v1/responses", r#""input":"hello""#),
    ("/v1/messages", r#""messages":[{"role":"user","content":"hello"}]"#),
    ("/v1/messages/count_tokens", r#""messages":[{"role":"user","content":"hello"}]"#),
    ("/v1/embeddings", r#""input":"hello""#),
];

const DROPPED: &[&str] = &[
    r#""user":"attacker""#,
    r#""us\u0065r":"attacker""#,
    r#""USER":"attacker""#,
    r#""metadata":{"user_id":"attacker","tags":["attacker"]}"#,
    r#""metadata":"{\"user_id\":\"attacker\"}""#,
    r#""safety_identifier":"attacker""#,
    r#""litellm_metadata":{"user":"attacker","spend_logs_metadata":{"run":"attacker"}}"#,
    r#""litellm_session_id":"attacker","litellm_trace_id":"attacker""#,
    r#""tags":["attacker"]"#,
    r#""client_metadata":{"who":"attacker"}"#,
    r#""service_tier":"attacker""#,
    r#""speed":"attacker""#,
    r#""provider":{"order":["attacker"]},"models":["attacker"]"#,
    r#""betas":["attacker"],"anthropic_beta":["attacker"]"#,
    r#""num_retries":9,"timeout":"attacker","cache":{"no-cache":"attacker"},"drop_params":"attacker""#,
    r#""wibble":"attacker""#,
    r#""attacker":1"#,
];

const REFUSED: &[&str] = &[
    r#""api_key":"sk-attacker""#,
    r#""ap\u0069_key":"sk-attacker""#,
    r#""extra_headers":{"authorization":"Bearer sk-attacker"}"#,
    r#""headers":{"x-api-key":"sk-attacker"}"#,
    r#""api_base":"http://attacker""#,
    r#""base_url":"http://attacker""#,
    r#""organization":"attacker""#,
    r#""user_config":{}"#,
    r#""model_list":[]"#,
    r#""aws_role_name":"attacker""#,
    r#""vertex_credentials":"attacker""#,
    r#""azure_ad_token":"attacker""#,
    r#""input_cost_per_token":0"#,
    r#""cache_read_input_token_cost":0"#,
    r#""mock_response":"attacker""#,
    r#""no-log":true"#,
    r#""fallbacks":["attacker"]"#,
    r#""context_window_fallbacks":[]"#,
    r#""router_settings_override":{}"#,
    r#""guardrails":[]"#,
    r#""allowed_openai_params":["attacker"]"#,
    r#""success_callback":["attacker"]"#,
    r#""langfuse_host":"http://attacker""#,
    r#""litellm_call_id":"attacker""#,
];

const CLIENTS: &[(&str, &str)] = &[
    ("openai_chat", include_str!("../../fixtures/clients/openai_chat.json")),
    ("openai_responses", include_str!("../../fixtures/clients/openai_responses.json")),
    ("anthropic_messages", include_str!("../../fixtures/clients/anthropic_messages.json")),
    ("claude_code", include_str!("../../fixtures/clients/claude_code.json")),
    ("codex", include_str!("../../fixtures/clients/codex.json")),
    ("pi", include_str!("../../fixtures/clients/pi.json")),
];
