//! G9, G10: Tests of budgets: what a run may spend, and how its client learns that the budget is spent.

use std::time::Duration;

use cogni_gateway::llm::budget::Tokens;
use http::StatusCode;
use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::client::TestResponse;

/// G10: The status and the text of the refusal make the clients of each protocol stop. The values were measured with
/// real clients.
#[tokio::test]
async fn a_spent_turn_budget_stops_the_clients_of_each_protocol() {
    let app = TestApp::with(|config| config.budget.max_turns = Some(1)).await;
    app.client().post("/v1/chat/completions", &unary_body("fake")).await;
    insta::assert_snapshot!(call_refused(&app, "/v1/chat/completions").await, @r#"
    402 Payment Required
    x-should-retry: false
    {"error":{"code":"turn_budget_exhausted","message":"turn budget exhausted: 1 of 1 turns are spent","param":null,"type":"insufficient_quota"}}
    "#);
    insta::assert_snapshot!(call_refused(&app, "/v1/messages").await, @r#"
    402 Payment Required
    x-should-retry: false
    {"error":{"code":"turn_budget_exhausted","message":"turn budget exhausted: 1 of 1 turns are spent","type":"billing_error"},"type":"error"}
    "#);
    insta::assert_snapshot!(call_refused(&app, "/v1/responses").await, @r#"
    429 Too Many Requests
    x-should-retry: false
    {"error":{"code":"turn_budget_exhausted","message":"turn budget exhausted: 1 of 1 turns are spent","param":null,"type":"usage_limit_reached"}}
    "#);
    assert_eq!(app.upstream.seen.request_count(), 1);
    app.stop().await;
}

/// G9: A call that makes no model generate takes no turn.
#[tokio::test]
async fn only_generating_takes_a_turn() {
    let app = TestApp::with(|config| config.budget.max_turns = Some(1)).await;
    for path in ["/v1/embeddings", "/v1/messages/count_tokens"] {
        let body = json!({"model": "fake", "messages": [], "input": "x"});
        assert_eq!(app.client().post(path, &body).await.status, 200);
    }
    assert_eq!(app.client().get("/v1/models").await.status, 200);
    let answer = app.client().post("/v1/chat/completions", &unary_body("fake")).await;
    assert_eq!(answer.status, 200);
    app.stop().await;
}

/// G9: Tokens are charged as the provider reports them, and a spent token budget refuses further calls.
#[tokio::test]
async fn a_spent_token_budget_stops_the_clients_of_each_protocol() {
    let app = TestApp::with(|config| config.budget.max_output_tokens = Some(Tokens(77))).await;
    app.client().post("/v1/chat/completions", &unary_body("fake/output=77")).await;
    insta::assert_snapshot!(call_refused(&app, "/v1/chat/completions").await, @r#"
    402 Payment Required
    x-should-retry: false
    {"error":{"code":"token_budget_exhausted","message":"output token budget exhausted: 77 of 77 tokens are spent and this call needs about 1","param":null,"type":"insufficient_quota"}}
    "#);
    insta::assert_snapshot!(call_refused(&app, "/v1/messages").await, @r#"
    402 Payment Required
    x-should-retry: false
    {"error":{"code":"token_budget_exhausted","message":"output token budget exhausted: 77 of 77 tokens are spent and this call needs about 1","type":"billing_error"},"type":"error"}
    "#);
    insta::assert_snapshot!(call_refused(&app, "/v1/responses").await, @r#"
    429 Too Many Requests
    x-should-retry: false
    {"error":{"code":"token_budget_exhausted","message":"output token budget exhausted: 77 of 77 tokens are spent and this call needs about 1","param":null,"type":"usage_limit_reached"}}
    "#);
    app.stop().await;
}

/// G9, G10: If a run has too many concurrent calls, the refusal is temporary, and the client may retry.
#[tokio::test]
async fn a_refusal_for_concurrent_calls_is_temporary() {
    let app = TestApp::with(|config| config.budget.max_concurrent = Some(1)).await;
    let open = app.client().open("/v1/messages", &streamed_body("fake/gate=1")).await;
    insta::assert_snapshot!(call_refused(&app, "/v1/chat/completions").await, @r#"
    429 Too Many Requests
    retry-after: 1
    {"error":{"code":"too_many_concurrent_requests","message":"the limit of 1 open calls is reached; retry when a call has ended","param":null,"type":"rate_limit_error"}}
    "#);
    insta::assert_snapshot!(call_refused(&app, "/v1/messages").await, @r#"
    429 Too Many Requests
    retry-after: 1
    {"error":{"code":"too_many_concurrent_requests","message":"the limit of 1 open calls is reached; retry when a call has ended","type":"rate_limit_error"},"type":"error"}
    "#);
    insta::assert_snapshot!(call_refused(&app, "/v1/responses").await, @r#"
    429 Too Many Requests
    retry-after: 1
    {"error":{"code":"too_many_concurrent_requests","message":"the limit of 1 open calls is reached; retry when a call has ended","param":null,"type":"rate_limit_error"}}
    "#);
    app.upstream.gate.allow_answers(1);
    open.finish().await.unwrap();
    let answer = app.client().post("/v1/messages", &unary_body("fake")).await;
    assert_eq!(answer.status, 200);
    app.stop().await;
}

/// G9, G10: If the missing budget is only reserved by open calls, the refusal is temporary.
#[tokio::test]
async fn a_refusal_for_reserved_budget_is_temporary() {
    let app = TestApp::with(|config| config.budget.max_output_tokens = Some(Tokens(100))).await;
    let open = app.client().open("/v1/chat/completions", &streamed_body("fake/gate=1")).await;
    insta::assert_snapshot!(call_refused(&app, "/v1/chat/completions").await, @r#"
    429 Too Many Requests
    retry-after: 1
    {"error":{"code":"budget_reserved","message":"open calls hold the rest of the output budget; retry when a call has ended","param":null,"type":"rate_limit_error"}}
    "#);
    app.upstream.gate.allow_answers(1);
    open.finish().await.unwrap();
    app.stop().await;
}

/// G9, G10: The refusal of a request rate states how long to wait.
#[tokio::test]
async fn a_rate_says_how_long_to_wait() {
    let app = TestApp::with(|config| config.budget.requests_per_minute = Some(1)).await;
    app.client().post("/v1/chat/completions", &unary_body("fake")).await;
    let refusal = call_refused(&app, "/v1/chat/completions").await;
    insta::with_settings!({filters => [("retry-after: [0-9]+", "retry-after: [seconds]")]}, {
        insta::assert_snapshot!(refusal, @r#"
        429 Too Many Requests
        retry-after: [seconds]
        {"error":{"code":"rate_limited","message":"the limit of 1 requests per minute is reached","param":null,"type":"rate_limit_error"}}
        "#);
    });
    app.stop().await;
}

/// G9, G10: The refusal of a token rate states how long to wait.
#[tokio::test]
async fn a_rate_of_tokens_says_how_long_to_wait() {
    let app = TestApp::with(|config| config.budget.tokens_per_minute = Some(10)).await;
    app.client().post("/v1/chat/completions", &unary_body("fake")).await;
    let refusal = call_refused(&app, "/v1/responses").await;
    insta::with_settings!({filters => [("retry-after: [0-9]+", "retry-after: [seconds]")]}, {
        insta::assert_snapshot!(refusal, @r#"
        429 Too Many Requests
        retry-after: [seconds]
        {"error":{"code":"rate_limited","message":"the limit of 10 tokens per minute is reached","param":null,"type":"rate_limit_error"}}
        "#);
    });
    app.stop().await;
}

/// G9, G10: No call begins after the run's deadline.
#[tokio::test]
async fn a_run_whose_time_is_over_begins_nothing() {
    let app = TestApp::with(|config| config.budget.deadline = Some(Duration::from_nanos(1))).await;
    insta::assert_snapshot!(call_refused(&app, "/v1/chat/completions").await, @r#"
    402 Payment Required
    x-should-retry: false
    {"error":{"code":"deadline_exceeded","message":"the run's deadline of 1ns has passed","param":null,"type":"insufficient_quota"}}
    "#);
    insta::assert_snapshot!(call_refused(&app, "/v1/messages").await, @r#"
    402 Payment Required
    x-should-retry: false
    {"error":{"code":"deadline_exceeded","message":"the run's deadline of 1ns has passed","type":"billing_error"},"type":"error"}
    "#);
    insta::assert_snapshot!(call_refused(&app, "/v1/responses").await, @r#"
    429 Too Many Requests
    x-should-retry: false
    {"error":{"code":"deadline_exceeded","message":"the run's deadline of 1ns has passed","param":null,"type":"usage_limit_reached"}}
    "#);
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;
}

/// G9: Sixty-four clients on two workers get one turn exactly once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_turn_is_spent_once_however_many_ask() {
    let app = TestApp::with(|config| {
        config.budget.max_turns = Some(1);
        config.workers = 2;
    })
    .await;
    let calls: Vec<_> = (0..64)
        .map(|_| {
            let client = app.client();
            tokio::spawn(
                async move { client.post("/v1/messages", &unary_body("fake")).await.status },
            )
        })
        .collect();
    let mut statuses = vec![];
    for call in calls {
        statuses.push(call.await.unwrap());
    }
    let with = |status| statuses.iter().filter(|is| **is == status).count();
    assert_eq!((with(StatusCode::OK), with(StatusCode::PAYMENT_REQUIRED)), (1, 63));
    assert_eq!(app.upstream.seen.request_count(), 1);
    app.stop().await;
}

/// G9, G11: The audit log holds what was spent, and a restarted process continues from it.
#[tokio::test]
async fn a_budget_survives_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let start = || {
        TestApp::with(|config| {
            config.audit.path = Some(dir.path().join("audit.jsonl"));
            config.budget.max_turns = Some(2);
        })
    };
    for _ in 0..2 {
        let app = start().await;
        let answer = app.client().post("/v1/messages", &unary_body("fake")).await;
        assert_eq!(answer.status, 200);
        app.stop().await;
    }
    let app = start().await;
    let answer = app.client().post("/v1/messages", &unary_body("fake")).await;
    assert_eq!(answer.status, 402);
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;
}

/// G9: The gateway limits the output upstream, also if the client set no limit.
#[tokio::test]
async fn the_upstream_gets_the_remaining_budget_as_output_limit() {
    let app = TestApp::with(|config| config.budget.max_output_tokens = Some(Tokens(250))).await;
    let calls = [
        ("/v1/chat/completions", json!({"model": "fake/output=99", "messages": []})),
        (
            "/v1/responses",
            json!({"model": "fake/output=99", "input": "x", "max_output_tokens": 900}),
        ),
        ("/v1/messages", json!({"model": "fake/output=99", "max_tokens": 99, "messages": []})),
    ];
    let mut answers = vec![];
    for (path, call) in calls {
        let answer = app.client().post(path, &call).await;
        let left = answer.headers["x-cogni-budget-output-tokens-left"].to_str().unwrap();
        answers.push(format!(
            "{left} {}",
            app.upstream.seen.last_request().unwrap().text.as_deref().unwrap()
        ));
    }
    insta::assert_snapshot!(answers.join("\n"), @r#"
    250 {"messages":[],"model":"fake/output=99","max_completion_tokens":250}
    151 {"input":"x","max_output_tokens":151,"model":"fake/output=99","store":false}
    52 {"max_tokens":52,"messages":[],"model":"fake/output=99"}
    "#);
    app.stop().await;
}

/// G9: A provider bills the parts of a prediction that the answer does not contain as output, beside the output limit. So a
/// prediction needs as much budget as it has bytes.
#[tokio::test]
async fn a_prediction_is_reserved_as_output() {
    let app = TestApp::with(|config| config.budget.max_output_tokens = Some(Tokens(1000))).await;
    let call = |bytes| json!({"model": "fake", "messages": [], "max_tokens": 900, "prediction": "x".repeat(bytes)});
    let answer = app.client().post("/v1/chat/completions", &call(40_000)).await;
    assert_eq!(answer.status, 402);
    assert_eq!(app.upstream.seen.request_count(), 0);
    // The quotes of the text count, too.
    let answer = app.client().post("/v1/chat/completions", &call(198)).await;
    assert_eq!(answer.status, 200);
    let sent = app.upstream.seen.last_request().unwrap().text.unwrap();
    assert!(sent.starts_with(r#"{"max_tokens":800,"#), "{sent}");
    app.stop().await;
}

/// G9: Several answers of one call share the remaining budget.
#[tokio::test]
async fn several_answers_share_the_remaining_budget() {
    let app = TestApp::with(|config| config.budget.max_output_tokens = Some(Tokens(250))).await;
    let call = json!({"model": "fake", "messages": [], "n": 4, "max_tokens": 100});
    assert_eq!(app.client().post("/v1/chat/completions", &call).await.status, 200);
    insta::assert_snapshot!(app.upstream.seen.last_request().unwrap().text.as_deref().unwrap(), @r#"{"max_tokens":62,"messages":[],"model":"fake","n":4}"#);
    app.stop().await;
}

/// G10: An agent can read its remaining budget.
#[tokio::test]
async fn the_status_has_the_remaining_budget() {
    let app = TestApp::with(|config| {
        config.budget.max_turns = Some(5);
        config.budget.max_output_tokens = Some(Tokens(1000));
        config.budget.deadline = Some(Duration::from_hours(1));
    })
    .await;
    app.client().post("/v1/chat/completions", &unary_body("fake/input=11;output=77")).await;
    let mut status = app.client().get("/run/status").await.json();
    status["budget"]["time_left"] = json!("[time]");
    insta::assert_json_snapshot!(status, @r#"
    {
      "attempt": "0",
      "budget": {
        "cost_left_usd": null,
        "input_tokens_left": null,
        "limits": {
          "deadline": "1h",
          "max_concurrent": null,
          "max_cost_usd": null,
          "max_input_tokens": null,
          "max_output_tokens": 1000,
          "max_total_tokens": null,
          "max_turns": 5,
          "requests_per_minute": null,
          "tokens_per_minute": null
        },
        "open_calls": 0,
        "output_tokens_left": 923,
        "reserved": {
          "input": 0,
          "output": 0,
          "turns": 0
        },
        "spent": {
          "input": 11,
          "output": 77,
          "turns": 1
        },
        "time_left": "[time]",
        "total_tokens_left": null,
        "turns_left": 4
      },
      "runId": "run-1"
    }
    "#);
    app.stop().await;
}

/// Returns a refusal as the client sees it.
async fn call_refused(app: &TestApp, path: &str) -> String {
    let TestResponse { status, headers, body } = app.client().post(path, &unary_body("fake")).await;
    let header = |name: &str| {
        headers.get(name).map(|value| format!("{name}: {}\n", value.to_str().unwrap()))
    };
    let advice = [header("retry-after"), header("x-should-retry")].into_iter().flatten();
    let text = String::from_utf8(body.to_vec()).unwrap();
    format!("{status}\n{}{text}", advice.collect::<String>())
}

fn unary_body(model: &str) -> Value {
    json!({"model": model, "max_tokens": 100, "messages": []})
}

fn streamed_body(model: &str) -> Value {
    json!({"model": model, "max_tokens": 100, "stream": true, "messages": []})
}
