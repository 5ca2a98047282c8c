//! G9, G10: Tests of a cost budget with the gateway's own price table.

use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::llm::budget::Nanodollars;
use cogni_gateway::llm::budget::price::UnknownPricePolicy;
use http::StatusCode;
use serde_json::{Value, json};

use crate::support::app::TestApp;

/// G10, G11: The audit log has the cost of a call, and the headers of the answer have the remaining money.
#[tokio::test]
async fn a_call_is_charged_by_the_price_table() {
    let app = TestApp::with(|config| dollars(config, "1")).await;
    let answer = app.client().post("/v1/messages", &call("fake/input=40;output=60")).await;
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
    let app = TestApp::with(|config| dollars(config, "0.0062")).await;
    app.client().post("/v1/messages", &call("fake/input=0;output=59")).await;
    let expected = [
        ("/v1/chat/completions", 402, "insufficient_quota"),
        ("/v1/messages", 402, "billing_error"),
        ("/v1/responses", 429, "usage_limit_reached"),
    ];
    for (path, status, kind) in expected {
        let answer = app.client().post(path, &call("fake")).await;
        assert_eq!(answer.status, status, "{path}");
        let error = &answer.json()["error"];
        assert_eq!(
            (&error["code"], &error["type"]),
            (&json!("cost_budget_exhausted"), &json!(kind))
        );
    }
    let error = app.client().post("/v1/messages", &call("fake")).await.json();
    insta::assert_snapshot!(error["error"]["message"], @r#""cost budget exhausted: $0.00612 of $0.0062 are spent and this call needs about $0.00026""#);
    app.stop().await;
}

/// G9: A model without a price is refused in a run with a cost budget, and allowed in other runs.
#[tokio::test]
async fn a_model_without_a_price_is_refused_where_money_counts() {
    let app = TestApp::with(|config| config.budget.max_cost_usd = Some(Nanodollars(1))).await;
    let answer = app.client().post("/v1/chat/completions", &call("fake")).await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN);
    insta::assert_snapshot!(answer.json(), @r#"{"error":{"code":"price_unknown","message":"model `fake` has no price, and this run has a cost budget; an operator can add the model to the price table or set `prices.unknown`","param":"model","type":"permission_error"}}"#);
    app.stop().await;

    let app = TestApp::start().await;
    let answer = app.client().post("/v1/chat/completions", &call("fake")).await;
    assert_eq!(answer.status, StatusCode::OK);
    app.stop().await;
}

/// G9: Sixty-four clients on two workers cannot spend more tokens or money than the budget.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_race_spends_no_more_than_there_is() {
    let app = TestApp::with(|config| {
        dollars(config, "0.05");
        config.budget.max_output_tokens = Some(cogni_gateway::llm::budget::Tokens(450));
        config.workers = 2;
    })
    .await;
    let calls: Vec<_> = (0..64)
        .map(|_| {
            let client = app.client();
            tokio::spawn(async move {
                client.post("/v1/messages", &call("fake/input=10;output=100;obey=yes")).await.status
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

/// Gives every model a price of $10 per million input tokens and $100 per million output tokens.
fn dollars(config: &mut GatewayConfig, budget: &str) {
    let price = json!({"input": "10", "output": "100"});
    config.prices.unknown = UnknownPricePolicy::Price(serde_json::from_value(price).unwrap());
    config.budget.max_cost_usd = Nanodollars::parse(budget);
}

fn call(model: &str) -> Value {
    json!({"model": model, "max_tokens": 100, "messages": []})
}
