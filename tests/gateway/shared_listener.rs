//! G1: Tests of many runs behind one listener, told apart only by their tokens.

mod command;
mod connection;
mod run_memory;
mod run_token_auth;
mod runs;

use serde_json::{Value, json};

use crate::support::client::post_request;
use crate::support::shared_app::SharedApp;

/// G1: Each run has its own budget, records and upstream name, and does not notice the other run.
#[tokio::test]
async fn two_runs_share_a_listener_and_nothing_else() {
    let app = SharedApp::with(|config, _| {
        config.budget.max_turns = Some(2);
        config.shared.as_mut().unwrap().runs[0].budget.max_turns = Some(1);
        config.metrics.address = Some(([127, 0, 0, 1], 0).into());
    })
    .await;
    let (one, two) = (app.token("run-1"), app.token("run-2"));
    let path = "/v1/chat/completions";
    for (token, status, account) in [
        (&one, 200, "acct-1"),
        (&one, 402, "acct-1"),
        (&two, 200, "acct-2"),
        (&two, 200, "acct-2"),
        (&two, 402, "acct-2"),
    ] {
        assert_eq!(app.call(token, path, &chat_body()).await.status, status);
        let seen = app.upstream.seen.last_request().unwrap();
        assert_eq!(seen.header("x-litellm-end-user-id"), Some(account));
    }
    let metrics = app.scrape().await;
    for (run, calls) in [("run-1", 1), ("run-2", 2)] {
        for (status, count) in [("2xx", calls), ("4xx", 1)] {
            let series = format!(
                "cogni_gateway_run_requests_total{{run=\"{run}\",status=\"{status}\"}} {count}\n"
            );
            assert!(metrics.contains(&series), "{series}{metrics}");
        }
    }
    let log = app.access_log();
    let directory = app.stop().await;
    for (run, calls) in [("run-1", 1), ("run-2", 2)] {
        let file = directory.path().join(format!("audit/{run}.jsonl"));
        let text = std::fs::read_to_string(file).unwrap();
        let records: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(records.iter().all(|record| record["run"] == run), "{text}");
        assert_eq!(text.matches("request.admitted").count(), calls);
        assert_eq!(text.matches("request.refused").count(), 1);
    }
    let lines = std::fs::read_to_string(log).unwrap();
    assert_eq!(
        (lines.matches("runId=run-1 ").count(), lines.matches("runId=run-2 ").count()),
        (2, 3)
    );
}

/// G1, G4: The token decides about the run, whatever the headers say.
#[tokio::test]
async fn headers_do_not_change_the_run() {
    let app = SharedApp::start().await;
    let authorization = format!("Bearer {}", app.token("run-2"));
    let request = post_request(
        "/v1/chat/completions",
        &chat_body(),
        &[
            ("authorization", &authorization),
            ("x-litellm-end-user-id", "acct-1"),
            ("x-litellm-spend-logs-metadata", "{\"run_id\":\"run-1\"}"),
            ("x-litellm-api-key", "sk-attacker"),
            ("x-litellm-tags", "free"),
            ("x-run-id", "run-1"),
        ],
    );
    assert_eq!(app.send(request).await.status, 200);
    let seen = app.upstream.seen.last_request().unwrap();
    assert_eq!(seen.header("x-litellm-end-user-id"), Some("acct-2"));
    assert_eq!(
        seen.header("x-litellm-spend-logs-metadata"),
        Some(r#"{"attempt":0,"run_id":"run-2"}"#)
    );
    assert_eq!(seen.header("authorization"), Some("Bearer sk-real"), "the token stays inside");
    assert_eq!((seen.header("x-litellm-api-key"), seen.header("x-litellm-tags")), (None, None));
    let text = std::fs::read_to_string(app.audit_log("run-1")).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    app.stop().await;
}

/// G1: Each client sends its API key where its protocol has it, and the gateway accepts the token in either place.
#[tokio::test]
async fn a_token_is_found_where_clients_put_their_key() {
    let app = SharedApp::start().await;
    let (one, two) = (app.token("run-1"), app.token("run-2"));
    let bearer = |token: &str| format!("bearer {token}");
    let call = async |headers: &[(&str, &str)]| {
        app.send(post_request("/v1/messages", &chat_body(), headers)).await.status.as_u16()
    };
    assert_eq!(call(&[("x-api-key", &one)]).await, 200);
    assert_eq!(call(&[("authorization", &bearer(&one))]).await, 200);
    assert_eq!(call(&[("authorization", &bearer(&one)), ("x-api-key", "placeholder")]).await, 200);
    assert_eq!(call(&[("authorization", "Bearer sk-x"), ("x-api-key", &one)]).await, 200);
    assert_eq!(call(&[("authorization", &bearer(&one)), ("x-api-key", &one)]).await, 200);
    assert_eq!(call(&[("authorization", &bearer(&one)), ("x-api-key", &two)]).await, 401);
    assert_eq!(call(&[("x-api-key", &one), ("x-api-key", &two)]).await, 401);
    assert_eq!(call(&[("authorization", &format!("Basic {one}"))]).await, 401);
    assert_eq!(call(&[("x-litellm-api-key", &one)]).await, 401);
    assert_eq!(app.upstream.seen.request_count(), 5);
    app.stop().await;
}

fn chat_body() -> Value {
    json!({"model": "fake", "max_tokens": 5, "messages": []})
}
