//! Tests of rules in a served run: the client's answer, the upstream's request, and the records.

use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::client::TestResponse;

/// G13, G10: A rule's refusal has the error shape of each protocol.
#[tokio::test]
async fn a_rule_refuses_in_the_shape_of_each_protocol() {
    let app = with_rules(NO_OPUS).await;
    let mut messages = vec![];
    for path in ["/v1/chat/completions", "/v1/messages", "/v1/responses"] {
        let answer = app.client().post(path, &chat_body("claude-opus-4-5")).await;
        messages.push(format!("{}\n{}", refusal_text(&answer), answer.text()));
        assert_eq!(app.client().post(path, &chat_body("fake")).await.status, 200, "{path}");
    }
    insta::assert_snapshot!(messages.join("\n"), @r#"
    403 Forbidden x-should-retry: false
    {"error":{"code":"refused_by_rule","message":"refused by the rule `no-opus`: use claude-haiku","param":null,"type":"permission_error"}}
    403 Forbidden x-should-retry: false
    {"error":{"code":"refused_by_rule","message":"refused by the rule `no-opus`: use claude-haiku","type":"permission_error"},"type":"error"}
    400 Bad Request x-should-retry: false
    {"error":{"code":"refused_by_rule","message":"refused by the rule `no-opus`: use claude-haiku","param":null,"type":"invalid_request_error"}}
    "#);
    assert_eq!(app.upstream.seen.request_count(), 3);
    let records = app.stop().await;
    let refused: Vec<_> =
        records.iter().filter(|record| record["event"] == "request.refused").collect();
    assert_eq!(refused.len(), 3);
    assert!(refused.iter().all(|record| record["rules"] == json!(["no-opus"])));
}

/// G13: The upstream receives the changes of the rules, and the records name the rules.
#[tokio::test]
async fn a_rule_changes_what_goes_upstream() {
    let app = with_rules(CHEAPER).await;
    app.client().post("/v1/chat/completions", &chat_body("fake/output=5")).await;
    let first = app.upstream.seen.last_request().unwrap();
    assert_eq!((first.header("x-team"), first.header("x-turn")), (Some("agents"), None));
    app.client().post("/v1/chat/completions", &chat_body("fake/output=5")).await;
    let second = app.upstream.seen.last_request().unwrap();
    assert_eq!((second.header("x-team"), second.header("x-turn")), (Some("agents"), Some("later")));
    let body = second.body.as_ref().unwrap();
    assert_eq!(
        (&body["model"], &body["max_completion_tokens"]),
        (&json!("fake/output=1"), &json!(64))
    );
    let records = app.stop().await;
    let admitted = records.iter().filter(|record| record["event"] == "request.admitted");
    let admitted: Vec<_> = admitted.map(|record| (&record["rules"], &record["model"])).collect();
    let (one, two) = (json!(["team"]), json!(["team", "cheaper"]));
    assert_eq!(admitted, [(&one, &json!("fake/output=5")), (&two, &json!("fake/output=1"))]);
}

/// G13: A call that a rule limits reserves no more than that limit.
#[tokio::test]
async fn a_call_reserves_the_limit_of_a_rule() {
    let app = with_rules("[[rules]]\nname = 'r'\nwhen = 'true'\nmax_output_tokens = 7").await;
    app.client().post("/v1/messages", &chat_body("fake")).await;
    assert_eq!(app.recorded("request.admitted", 1).await[0]["reserved"]["output"], 7);
    app.stop().await;
}

/// G13: Rules apply to calls with a body, and not to a request for the model list.
#[tokio::test]
async fn rules_do_not_apply_to_requests_without_a_body() {
    let app = with_rules("[[rules]]\nname = 'r'\nwhen = 'true'\nrefuse = 'nothing at all'").await;
    for path in ["/v1/models", "/health", "/run/status"] {
        assert_eq!(app.client().get(path).await.status, 200, "{path}");
    }
    assert_eq!(app.client().post("/v1/embeddings", &chat_body("fake")).await.status, 403);
    app.stop().await;
}

async fn with_rules(text: &str) -> TestApp {
    let text = text.replace("[[rules]]", "[[policy.rules]]");
    let config: cogni_gateway::gateway::config::GatewayConfig = toml::from_str(&text).unwrap();
    TestApp::with(|app| app.policy.rules = config.policy.rules).await
}

fn chat_body(model: &str) -> Value {
    json!({"model": model, "messages": [], "input": "x"})
}

fn refusal_text(answer: &TestResponse) -> String {
    format!("{} x-should-retry: {}", answer.status, answer.header("x-should-retry").unwrap())
}

const NO_OPUS: &str = "
[[rules]]
name = 'no-opus'
when = \"request.model.startsWith('claude-opus')\"
refuse = 'use claude-haiku'
";

const CHEAPER: &str = "
[[rules]]
name = 'team'
when = 'true'
headers = { x-team = 'agents' }
[[rules]]
name = 'cheaper'
when = 'usage.output_tokens >= 5 && usage.turns == 1'
set_model = 'fake/output=1'
max_output_tokens = 64
headers = { x-turn = 'later' }
";
