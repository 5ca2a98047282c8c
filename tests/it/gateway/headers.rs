//! G4: what a client says about itself reaches nobody.

use serde_json::json;

use crate::support::app::TestApp;

/// G4: every header that LiteLLM would act on is dropped or overwritten.
#[tokio::test]
async fn a_client_cannot_say_who_it_is() {
    let app = TestApp::start().await;
    let lies: Vec<_> = SPOOFED.iter().map(|name| (*name, "attacker")).collect();
    let body = json!({"model": "fake", "messages": []});
    let response = app.client().post_with("/v1/chat/completions", &body, &lies).await;
    assert_eq!(response.status, 200);
    let request = app.upstream.seen.last().unwrap();
    let liars: Vec<_> =
        request.headers.iter().filter(|(_, value)| value.contains("attacker")).collect();
    assert!(liars.is_empty(), "{liars:?}");
    assert_eq!(request.header("authorization"), Some("Bearer sk-real"));
    assert_eq!(request.header("x-litellm-end-user-id"), Some("acct-1"));
    app.stop().await;
}

const SPOOFED: &[&str] = &[
    "authorization",
    "api-key",
    "x-api-key",
    "x-goog-api-key",
    "x-litellm-api-key",
    "x-litellm-end-user-id",
    "x-litellm-customer-id",
    "x-litellm-spend-logs-metadata",
    "x-litellm-tags",
    "x-litellm-call-id",
    "x-litellm-session-id",
    "x-litellm-trace-id",
    "x-litellm-timeout",
    "x-litellm-model",
    "x-forwarded-for",
    "x-original-url",
    "openai-organization",
    "session-id",
    "thread-id",
    "traceparent",
    "baggage",
    "cookie",
    "user-agent",
    "anthropic-beta",
    "openai-beta",
];
