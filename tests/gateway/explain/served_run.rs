//! `explain` and a served run give the same outcome and the same bytes upstream.

use std::sync::Arc;

use cogni_gateway::cli::explain::explain_input::ExplainInput;
use cogni_gateway::cli::explain::explanation::{
    ExplainContext, ExplainOutcome, RequestExplanation,
};
use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::process::compile_policy;
use cogni_gateway::llm::budget::{BudgetLedger, PriorUsage, Tokens};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};

use crate::support::app::{TestApp, run_config};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";

/// G13: For any request, `explain` predicts the result of the served run.
#[tokio::test]
async fn explain_predicts_the_served_result() {
    let app = TestApp::with(configure_run).await;
    let mut config = run_config("/nowhere".as_ref(), app.upstream.addr);
    configure_run(&mut config);
    let mut runner = TestRunner::deterministic();
    let random = (0..96).map(|_| generate_request().new_tree(&mut runner).unwrap().current());
    let (mut admitted, mut refused) = (0, 0);
    for request in handpicked_requests().into_iter().chain(random) {
        match explain_and_serve(&app, &config, &request).await {
            ExplainOutcome::Admitted => admitted += 1,
            _ => refused += 1,
        }
    }
    assert!(admitted > 20 && refused > 20, "{admitted} and {refused}: a test of half the cases");
    app.stop().await;
}

async fn explain_and_serve(app: &TestApp, config: &GatewayConfig, request: &str) -> ExplainOutcome {
    let before = app.upstream.seen.request_count();
    let answer = app.client().raw(request.as_bytes()).await;
    let explained = explain_request(config, request.as_bytes());
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status: u16 = head.split(' ').nth(1).unwrap().parse().unwrap();
    if let Some(refusal) = &explained.refusal {
        assert_eq!(refusal.status, status, "{request}\n{answer}");
        let body: Value = serde_json::from_str(body).unwrap();
        // The error of a path that is not served has fewer fields.
        if body["error"].is_object() {
            assert_eq!(body["error"]["code"], refusal.code, "{request}");
            assert_eq!(body["error"]["message"], refusal.message, "{request}");
        }
        assert_eq!(app.upstream.seen.request_count(), before, "{request}");
        return ExplainOutcome::Refused;
    }
    assert_eq!(status, 200, "{request}\n{answer}");
    if explained.outcome == ExplainOutcome::Admitted {
        assert_eq!(app.upstream.seen.request_count(), before + 1, "{request}");
        let seen = app.upstream.seen.last_request().unwrap();
        let upstream = explained.upstream.unwrap();
        let (head, body) = upstream.split_once("\n\n").unwrap();
        assert_eq!(body, seen.text.unwrap_or_default(), "{request}");
        let mut sent: Vec<_> = seen
            .headers
            .iter()
            .map(|(name, value)| match name.as_str() {
                "authorization" => format!("{name}: [secret]"),
                "x-litellm-call-id" => format!("{name}: [id of the request]"),
                "traceparent" => format!("{name}: [span of the request]"),
                _ => format!("{name}: {value}"),
            })
            .collect();
        sent.push(format!("{} {} HTTP/1.1", seen.method, seen.path));
        let mut header_lines: Vec<_> = head.lines().map(str::to_owned).collect();
        sent.sort();
        header_lines.sort();
        assert_eq!(header_lines, sent, "{request}");
    }
    explained.outcome
}

fn explain_request(config: &GatewayConfig, request: &[u8]) -> RequestExplanation {
    let input = ExplainInput::parse(request.to_vec(), None).unwrap();
    let policy = compile_policy(config).unwrap();
    let ledger = Arc::new(BudgetLedger::new(config.budget.clone(), PriorUsage::default()));
    RequestExplanation::explain_request(
        &ExplainContext { config, policy: &policy, ledger: &ledger },
        input,
    )
}

/// Configures a run with every kind of policy.
fn configure_run(config: &mut GatewayConfig) {
    config.policy.max_body_bytes = 4000;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    config.identity.trace = Some(trace.parse().unwrap());
    config.policy.body.models = ["fake", "fake/output=3", "real", "opus"].map(str::to_owned).into();
    config.policy.body.aliases = [("real".to_owned(), "fake/output=2".to_owned())].into();
    config.budget.max_output_tokens = Some(Tokens(1 << 40));
    config.policy.rules = toml::from_str::<GatewayConfig>(
        "
        [[policy.rules]]
        name = 'no-opus'
        when = \"request.model == 'opus'\"
        refuse = 'no opus'
        [[policy.rules]]
        name = 'short'
        when = 'request.stream || request.max_output_tokens > 100'
        max_output_tokens = 50
        headers = { x-short = 'yes' }
        ",
    )
    .unwrap()
    .policy
    .rules;
}

fn handpicked_requests() -> Vec<String> {
    let mut requests = vec![
        "GET /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n".to_owned(),
        "GET /v1/model HTTP/1.1\r\nconnection: close\r\n\r\n".to_owned(),
        "GET /v1/messages HTTP/1.1\r\nconnection: close\r\n\r\n".to_owned(),
        http_request("/v1/messages?beta=true", "text/plain", "{}"),
        http_request("/v1/messages?beta=true", "application/json", &chat_body("fake")),
        http_request(
            "/v1/messages?beta=false",
            "application/json; charset=utf-8",
            &chat_body("real"),
        ),
        http_request("/v1//messages", "application/json", &chat_body("fake")),
        http_request("/v1/responses", "application/json", &chat_body("opus")),
        http_request("/v1/chat/completions", "application/json", ""),
        http_request("/v1/chat/completions", "application/json", &"[".repeat(100)),
        http_request("/v1/chat/completions", "application/json", &" ".repeat(4001)),
    ];
    requests.push(requests[4].replacen("\r\n", "\r\nx-litellm-tags: a\r\naccept: x\r\n", 1));
    requests.extend(
        ["/v1/models/none", "/v1/models/real", "/tool/list", "/tool/exec", "/mcp", "/connect"]
            .map(|path| format!("GET {path} HTTP/1.1\r\nconnection: close\r\n\r\n")),
    );
    requests.push(http_request("/tool/exec", "application/json", r#"{"tool":"x"}"#));
    requests.push(http_request(CHAT, "application/json", "\u{feff}{}"));
    requests
}

/// G13: A refusal has the status that the client's family obeys.
#[tokio::test]
async fn explain_knows_the_family_of_a_client() {
    let app = TestApp::with(configure_run).await;
    let mut config = run_config("/nowhere".as_ref(), app.upstream.addr);
    configure_run(&mut config);
    let agents =
        ["litellm/1", "ai-sdk/5", "OpenAI/Python 1\r\nx-stainless-raw-response: true", "curl"];
    let mut statuses = vec![];
    for (agent, path) in agents.iter().flat_map(|agent| [(agent, CHAT), (agent, RESPONSES)]) {
        let [ok, text] = ["application/json", "text/plain"];
        for request in [
            http_request(path, ok, &chat_body("other")),
            http_request(path, ok, &chat_body("opus")),
            http_request(path, ok, &" ".repeat(4001)),
            http_request(path, text, &chat_body("fake")),
        ] {
            let request = request.replacen("\r\n", &format!("\r\nuser-agent: {agent}\r\n"), 1);
            let outcome = explain_and_serve(&app, &config, &request).await;
            assert_eq!(outcome, ExplainOutcome::Refused, "{request}");
            statuses.push(explain_request(&config, request.as_bytes()).refusal.unwrap().status);
        }
    }
    for status in [400, 403, 413, 415] {
        assert!(statuses.contains(&status), "{statuses:?}");
    }
    app.stop().await;
}

/// G13: `explain` refuses the encodings that are known by their first bytes.
#[tokio::test]
async fn explain_knows_the_encodings_of_a_body() {
    let app = TestApp::with(configure_run).await;
    let mut config = run_config("/nowhere".as_ref(), app.upstream.addr);
    configure_run(&mut config);
    for start in [&b"\xef\xbb\xbf{}"[..], b"\xff\xfe{\0", b"\xfe\xff\0{", b"\x1f\x8b\x08\0"] {
        let length = " ".repeat(start.len());
        let request = http_request(CHAT, "application/json", &length).into_bytes();
        let request = [&request[..request.len() - start.len()], start].concat();
        let answer = app.client().raw(&request).await;
        assert!(answer.starts_with("HTTP/1.1 415 "), "{answer}");
        let refusal = explain_request(&config, &request).refusal.unwrap();
        assert_eq!((refusal.status, refusal.code), (415, "unsupported_media_type"));
        assert!(answer.contains(&refusal.message), "{answer}");
    }
    app.stop().await;
}

fn chat_body(model: &str) -> String {
    json!({"model": model, "messages": [], "input": "x"}).to_string()
}

fn http_request(path: &str, content_type: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// Calls of every route, with fields that pass, are changed, are limited, or are refused.
fn generate_request() -> impl Strategy<Value = String> {
    let path = prop::sample::select(vec![
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
    ]);
    let model = prop::sample::select(vec!["fake", "fake/output=3", "real", "opus", "other"]);
    (path, model, prop::collection::vec(prop::sample::select(generated_fields()), 0..4)).prop_map(
        |(path, model, fields)| {
            let mut body = json!({"model": model, "messages": [], "input": "x", "prompt": "x"});
            for (name, value) in fields {
                body[name] = value;
            }
            http_request(path, "application/json", &body.to_string())
        },
    )
}

fn generated_fields() -> Vec<(&'static str, Value)> {
    vec![
        ("stream", json!(true)),
        ("stream", json!(false)),
        ("stream_options", json!({"include_usage": false})),
        ("max_tokens", json!(5)),
        ("max_tokens", json!(100_000)),
        ("max_completion_tokens", json!(101)),
        ("max_output_tokens", json!(7)),
        ("max_tokens", json!("many")),
        ("n", json!(2)),
        ("user", json!("attacker")),
        ("metadata", json!({"user_id": "attacker"})),
        ("api_key", json!("sk-attacker")),
        ("temperature", json!(0.5)),
        ("no_such_field", json!([1, {"a": null}])),
        ("tools", json!([{"type": "web_search_20250305", "name": "web_search"}])),
        ("store", json!(true)),
    ]
}
