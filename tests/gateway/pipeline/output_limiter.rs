//! G9: Tests of streams that exceed their grant. The fake provider ignores output limits unless its script says to obey
//! them.

use cogni_gateway::fakes::model_provider::AnswerEnd;
use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::llm::response::CutoffMode;
use serde_json::{Value, json};

use crate::support::app::TestApp;

/// G9: The client sees the end that a model makes at its limit, the upstream sees a disconnect, and the ledger is
/// charged no more than the grant.
#[tokio::test]
async fn a_stream_that_outruns_its_grant_ends_as_at_a_limit() {
    for (path, end) in [
        ("/v1/chat/completions", "\"finish_reason\":\"length\""),
        ("/v1/completions", "\"finish_reason\":\"length\""),
        ("/v1/messages", "\"stop_reason\":\"max_tokens\""),
        ("/v1/responses", "\"reason\":\"max_output_tokens\""),
    ] {
        let app = TestApp::with(|config| config.budget.max_output_tokens = Some(Tokens(20))).await;
        let stream = app.client().open(path, &streamed_body("fake/chunks=100000;coalesce=7")).await;
        let (events, in_order) = stream.rest().await;
        assert!(in_order && events.contains(end), "{path}: {events}");
        let terminator = [
            "data: [DONE]\n\n",
            "\"type\":\"message_stop\"}\n\n",
            "\"type\":\"response.incomplete\"}\n\n",
        ];
        assert!(terminator.iter().any(|end| events.ends_with(end)), "{path}: {events}");
        let settled = app.recorded("request.settled", 1).await.remove(0);
        assert_eq!(
            (&settled["outcome"], &settled["code"], &settled["status"]),
            (&json!("cut_off"), &json!("output_limit_reached"), &json!(200)),
            "{path}"
        );
        assert_eq!(settled["charged"]["output"], 20, "{path}");
        assert_eq!(settled["usage"]["source"], "estimated", "{path}");
        app.upstream
            .seen
            .wait_until(|seen| seen.last_request().unwrap().ended == Some(AnswerEnd::ClientLeft))
            .await;
        let refused = app.client().post(path, &streamed_body("fake")).await;
        assert_eq!(refused.json()["error"]["code"], "token_budget_exhausted", "{path}");
        app.stop().await;
    }
}

/// G9: No client receives a tool call with incomplete arguments as a complete one.
#[tokio::test]
async fn a_half_written_tool_call_is_cut_by_an_error() {
    let model = format!("fake/tool=exec;chunks=100;arguments=\"{}\"", "x".repeat(98));
    for (path, error) in [
        ("/v1/chat/completions", "data: {\"error\":{\"code\":\"output_limit_reached\""),
        ("/v1/messages", "event: error\ndata: {\"error\":{\"code\":\"output_limit_reached\""),
        ("/v1/responses", "event: response.failed\n"),
    ] {
        let app = TestApp::with(|config| config.budget.max_output_tokens = Some(Tokens(20))).await;
        let (events, in_order) = app.client().open(path, &streamed_body(&model)).await.rest().await;
        let last = events.trim_end().rsplit("\n\n").next().unwrap();
        assert!(in_order && last.starts_with(error), "{path}: {last}");
        assert_eq!(app.recorded("request.settled", 1).await[0]["outcome"], "cut_off");
        app.stop().await;
    }
}

/// G9: An operator may choose an error instead of an end that looks like the model's own.
#[tokio::test]
async fn a_policy_may_have_every_cut_be_an_error() {
    let app = TestApp::with(|config| {
        config.budget.max_total_tokens = Some(Tokens(200));
        config.policy.cutoff = CutoffMode::Error;
    })
    .await;
    let stream = app.client().open("/v1/messages", &streamed_body("fake/chunks=100000")).await;
    let (events, in_order) = stream.rest().await;
    assert!(in_order && events.contains("event: error\n"), "{events}");
    app.stop().await;
}

/// G9: A stream within its limit is never cut, and neither is a stream without a limit.
#[tokio::test]
async fn an_honest_stream_and_an_unlimited_one_are_left_alone() {
    let app = TestApp::with(|config| config.budget.max_output_tokens = Some(Tokens(100))).await;
    let body = streamed_body("fake/obey=yes;chunks=100000");
    let (events, _) = app.client().open("/v1/messages", &body).await.rest().await;
    assert_eq!(events.matches("\"text_delta\"").count(), 50, "{events}");
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(
        (&settled["outcome"], &settled["usage"]["output"]),
        (&json!("completed"), &json!(50))
    );
    app.stop().await;

    let app = TestApp::start().await;
    let (events, _) =
        app.client().open("/v1/messages", &streamed_body("fake/chunks=9999")).await.rest().await;
    assert_eq!(events.matches("\"text_delta\"").count(), 9999);
    app.stop().await;
}

/// G9: A unary answer arrives whole, and is charged as reported.
#[tokio::test]
async fn a_unary_answer_is_never_cut() {
    let app = TestApp::with(|config| config.budget.max_output_tokens = Some(Tokens(20))).await;
    let mut body = streamed_body("fake/chunks=500");
    body["stream"] = json!(false);
    let answer = app.client().post("/v1/chat/completions", &body).await;
    assert!(answer.json()["choices"][0]["finish_reason"] == "stop");
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(
        (&settled["outcome"], &settled["charged"]["output"]),
        (&json!("completed"), &json!(500))
    );
    app.stop().await;
}

/// G9: Sixteen concurrent streams that all exceed their grants do not overspend the budget.
#[tokio::test]
async fn streams_that_outrun_their_grants_together_do_not_overspend() {
    let app = TestApp::with(|config| config.budget.max_output_tokens = Some(Tokens(100))).await;
    let calls: Vec<_> = (0..16)
        .map(|_| {
            let client = app.client();
            let mut body = streamed_body("fake/chunks=100000");
            body["max_tokens"] = json!(10);
            tokio::spawn(async move { client.post("/v1/messages", &body).await.status })
        })
        .collect();
    for call in calls {
        let status = call.await.unwrap();
        assert!([200, 402, 429].contains(&status.as_u16()), "{status}");
    }
    let records = app.stop().await;
    let finished = records.iter().find(|record| record["event"] == "run.finished").unwrap();
    let spent = &finished["spent"]["output"];
    assert!((10..=100).contains(&spent.as_u64().unwrap()), "{spent}");
}

/// G9: If the client disconnects from a Messages stream, the input is known, and the output is estimated from its text
/// without the framing.
#[tokio::test]
async fn an_abandoned_stream_is_charged_for_its_text() {
    let app = TestApp::with(|config| config.budget.max_output_tokens = Some(Tokens(5000))).await;
    let asked = streamed_body("fake/gate=20;chunks=100;input=7");
    let stream = app.client().open("/v1/chat/completions", &asked).await;
    app.upstream.gate.wait_for_waiting(1).await;
    drop(stream);
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(settled["outcome"], "client_gone");
    // "hello from the fake provider" four times: 112 bytes in 20 events with 2 KB of framing. The time since the last
    // event counts, too.
    let output = settled["usage"]["output"].as_u64().unwrap();
    assert!((20..500).contains(&output), "{settled}");
    assert_eq!(settled["usage"]["source"], "estimated");
    app.stop().await;
}

fn streamed_body(model: &str) -> Value {
    json!({
        "model": model,
        "stream": true,
        "max_tokens": 50,
        "max_output_tokens": 50,
        "input": "x",
        "messages": [],
    })
}
