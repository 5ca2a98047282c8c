//! G9, G10: Tests of a cost budget with the gateway's own price table.

use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::llm::budget::price::UnknownPricePolicy;
use cogni_gateway::llm::budget::{Nanodollars, Tokens};
use http::StatusCode;
use serde_json::{Value, json};

use crate::support::app::TestApp;
use crate::support::client::TestClient;

/// G10, G11: The audit log has the cost of a call, and the headers of the answer have the remaining money.
#[tokio::test]
async fn a_call_is_charged_by_the_price_table() {
    let app = TestApp::with(|config| set_budget(config, "1")).await;
    let answer = app.client().post("/v1/messages", &chat_body("fake/input=40;output=60")).await;
    let left = answer.headers.get("x-cogni-budget-cost-left-usd").unwrap();
    assert_eq!(left, "1");
    let status = app.client().get("/run/status").await.json();
    // 40 tokens at $10 and 60 tokens at $100 per million.
    assert_eq!(status["budget"]["spent"]["cost_usd"], "0.0064");
    assert_eq!(status["budget"]["cost_left_usd"], "0.9936");
    let records = app.stop().await;
    assert_eq!(
        records.iter().find(|record| record["event"] == "request.settled").unwrap()["charged"]["cost_usd"],
        "0.0064"
    );
}

/// G9, G10: A spent cost budget refuses calls, and the refusal stops the clients of each protocol.
#[tokio::test]
async fn spent_money_stops_the_clients_of_each_protocol() {
    let app = TestApp::with(|config| set_budget(config, "0.0062")).await;
    app.client().post("/v1/messages", &chat_body("fake/input=22;output=59")).await;
    let expected = [
        ("/v1/chat/completions", 402, "insufficient_quota"),
        ("/v1/messages", 402, "billing_error"),
        ("/v1/responses", 429, "usage_limit_reached"),
    ];
    for (path, status, kind) in expected {
        let answer = app.client().post(path, &chat_body("fake")).await;
        assert_eq!(answer.status, status, "{path}");
        let error = &answer.json()["error"];
        assert_eq!(
            (&error["code"], &error["type"]),
            (&json!("cost_budget_exhausted"), &json!(kind))
        );
    }
    let error = app.client().post("/v1/messages", &chat_body("fake")).await.json();
    insta::assert_snapshot!(error["error"]["message"], @r#""cost budget exhausted: $0.00612 of $0.0062 are spent and this call needs about $0.00026""#);
    app.stop().await;
}

/// G9: A model without a price is refused in a run with a cost budget, and allowed in other runs.
#[tokio::test]
async fn a_model_without_a_price_is_refused_where_money_counts() {
    let app = TestApp::with(|config| config.budget.max_cost_usd = Some(Nanodollars(1))).await;
    let answer = app.client().post("/v1/chat/completions", &chat_body("fake")).await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN);
    insta::assert_snapshot!(answer.json(), @r#"{"error":{"code":"price_unknown","message":"model `fake` has no price, and this run has a cost budget; an operator can add the model to the price table or set `prices.unknown`","param":"model","type":"permission_error"}}"#);
    app.stop().await;

    let app = TestApp::start().await;
    let answer = app.client().post("/v1/chat/completions", &chat_body("fake")).await;
    assert_eq!(answer.status, StatusCode::OK);
    app.stop().await;
}

/// G9: Sixty-four clients on two workers cannot spend more tokens or money than the budget.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_race_spends_no_more_than_there_is() {
    let app = TestApp::with(|config| {
        set_budget(config, "0.05");
        config.budget.max_output_tokens = Some(Tokens(450));
        config.workers = 2;
    })
    .await;
    let calls: Vec<_> = (0..64)
        .map(|_| {
            let client = app.client();
            tokio::spawn(async move {
                client
                    .post("/v1/messages", &chat_body("fake/input=10;output=100;obey=yes"))
                    .await
                    .status
            })
        })
        .collect();
    let mut served = 0;
    for call in calls {
        served += u64::from(call.await.unwrap() == StatusCode::OK);
    }
    let status = app.client().get("/run/status").await.json();
    // The remainder of the last hundred tokens is granted, too.
    let spent = status["budget"]["spent"]["output"].as_u64().unwrap();
    assert!((100..=450).contains(&spent), "{spent}");
    assert!(spent > (served - 1) * 100, "{served} calls wrote {spent} tokens");
    assert_eq!(app.upstream.seen.request_count() as u64, served);
    app.stop().await;
}

/// G9: Text of symbols has a token for each byte. Twelve clients that send it at once spend no more than the budget and
/// the error of one call's estimate, and each call that has to wait is told so.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn parallel_calls_of_symbols_spend_no_more_than_the_budget_and_one_error() {
    let text = "a~b^".repeat(750);
    let mut body = json!({"model": "fake/input=0000;output=1", "max_tokens": 1, "messages": [{"role": "user", "content": text}]});
    let bytes = body.to_string().len() as u64;
    body["model"] = json!(format!("fake/input={bytes};output=1"));
    assert_eq!(body.to_string().len() as u64, bytes);
    let (limit, error) = (2 * bytes, bytes - bytes / 3);
    let limits: [SetLimit; 3] = [
        |config, limit| config.budget.max_input_tokens = Some(Tokens(limit)),
        |config, limit| config.budget.max_total_tokens = Some(Tokens(limit)),
        // An input token costs 10,000 nanodollars.
        |config, limit| set_budget(config, &Nanodollars(limit * 10_000).to_string()),
    ];
    for set_limit in limits {
        let app = TestApp::with(|config| set_limit(config, limit)).await;
        let calls: Vec<_> = (0..12)
            .map(|_| tokio::spawn(call_until_answered(app.client(), body.clone())))
            .collect();
        let mut served = 0;
        for call in calls {
            served += u64::from(call.await.unwrap() == StatusCode::OK);
        }
        let spent = app.run.ledger.spent_amount().input.0;
        assert!((limit / 2..=limit + error).contains(&spent), "{spent} of {limit}");
        assert_eq!(spent, served * bytes);
        app.stop().await;
    }
}

/// G9: A provider adds text of its own to a request with tools, so a call of 300 bytes can have 2,100 tokens of input.
/// Thirty-five such calls at once spend no more than the budget.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn parallel_calls_with_tools_of_the_provider_spend_no_more_than_the_budget() {
    const LIMIT: u64 = 12_000;
    let tool = |kind: &str| json!({"type": kind, "name": kind});
    let tools = ["computer_20250124", "bash_20250124", "text_editor_20250728"].map(tool);
    let body = json!({"model": "fake/input=2100;output=1", "max_tokens": 1, "messages": [], "tools": tools});
    let app = TestApp::with(|config| config.budget.max_input_tokens = Some(Tokens(LIMIT))).await;
    let calls: Vec<_> =
        (0..35).map(|_| tokio::spawn(call_until_answered(app.client(), body.clone()))).collect();
    for call in calls {
        call.await.unwrap();
    }
    let spent = app.run.ledger.spent_amount().input.0;
    assert!((LIMIT / 2..=LIMIT).contains(&spent), "{spent} of {LIMIT}");
    app.stop().await;
}

/// G9: Clients that leave before the provider has reported the input cannot spend more than the budget, either.
#[tokio::test]
async fn an_input_without_a_report_is_charged_as_reserved() {
    let app = TestApp::start().await;
    let body = json!({"model": "fake/gate=1", "stream": true, "messages": [{"role": "user", "content": "a~b^".repeat(750)}]});
    let stream = app.client().open("/v1/chat/completions", &body).await;
    drop(stream);
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(settled["charged"]["input"], body.to_string().len(), "{settled}");
    app.stop().await;
}

/// Sets a limit to what a number of input tokens takes.
type SetLimit = fn(&mut GatewayConfig, u64);

/// Repeats a call for as long as the budget is only reserved, and returns the last status.
async fn call_until_answered(client: TestClient, body: Value) -> StatusCode {
    loop {
        let answer = client.post("/v1/chat/completions", &body).await;
        if answer.status != StatusCode::TOO_MANY_REQUESTS {
            return answer.status;
        }
        assert_eq!(answer.json()["error"]["code"], "budget_reserved");
        tokio::task::yield_now().await;
    }
}

/// Gives every model a price of $10 per million input tokens and $100 per million output tokens.
fn set_budget(config: &mut GatewayConfig, budget: &str) {
    let price = json!({"input": "10", "output": "100"});
    config.prices.unknown = UnknownPricePolicy::Price(serde_json::from_value(price).unwrap());
    config.budget.max_cost_usd = Nanodollars::parse(budget);
}

fn chat_body(model: &str) -> Value {
    json!({"model": model, "max_tokens": 100, "messages": []})
}
