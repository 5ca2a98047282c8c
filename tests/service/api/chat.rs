//! A2: Tests of chats: the agent's text is streamed as it arrives.

use http::Method;
use serde_json::{Value, json};

use super::chat_body;
use crate::support::service::{MintedGrant, ServiceSetup, parse_events};

/// A2: The events come in order, the answer before the end, and can be read again from any number.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_streams_its_answer_and_can_be_read_again() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let grant = setup.grant(&[]);
    let response = grant.post("/api/v1/ai/chat", &chat_body("fake/text=ready")).await;
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("text/event-stream"));
    let run = response.header("x-run-id").unwrap().to_owned();
    let events = parse_events(response.text());
    let count = events.len() as u64;
    assert_eq!(event_ids(response.text()), (1..=count).collect::<Vec<_>>());
    let deltas = events.iter().filter(|event| event.kind == "text_delta");
    let text: String = deltas.filter_map(|event| event.data["text"].as_str()).collect();
    assert_eq!(text, "ready");
    let kinds: Vec<_> = events.iter().map(|event| &*event.kind).collect();
    assert_eq!((kinds[0], *kinds.last().unwrap()), ("run_started", "final"), "{kinds:?}");
    assert!(kinds.contains(&"assistant_final") && kinds.contains(&"done"), "{kinds:?}");
    assert_eq!(events.last().unwrap().data["ok"], true);

    let path = format!("/api/v1/runs/{run}/events");
    assert_eq!(event_ids(grant.get(&path).await.text()), event_ids(response.text()));
    let after = count - 2;
    let rest = grant.get(&format!("{path}?after={after}")).await;
    assert_eq!(event_ids(rest.text()), [after + 1, after + 2]);
    let last = [("last-event-id", &*after.to_string())];
    let rest = grant.ask(Method::GET, &path, "", &last).await;
    assert_eq!(event_ids(rest.text()), [after + 1, after + 2], "the header says the same");
    setup.stop(service);
}

/// A2: A client that disconnects ends its chat's run.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_whose_client_goes_away_is_ended() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let grant = setup.grant(&[]);
    let run = leave_chat(&grant, &chat_body(WAITS)).await;
    let row = grant.ended(&run).await;
    assert_eq!(
        (&row["state"], &row["error_code"]),
        (&json!("ended"), &json!("cancelled")),
        "{row}"
    );
    setup.stop(service);
}

/// A2: If the request says so, the run continues without its client.
#[tokio::test(flavor = "multi_thread")]
async fn a_detached_chat_continues_without_its_client() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let grant = setup.grant(&[]);
    let mut body = chat_body(WAITS);
    body["onDisconnect"] = "continue".into();
    let run = leave_chat(&grant, &body).await;
    setup.provider.gate.wait_for_waiting(1).await;
    setup.provider.gate.allow_answers(1);
    let row = grant.ended(&run).await;
    assert_eq!((&row["state"], &row["error_code"]), (&json!("ended"), &Value::Null), "{row}");
    setup.stop(service);
}

/// Reads a chat until the agent's first text, which comes before the end, and disconnects.
async fn leave_chat(grant: &MintedGrant, body: &Value) -> String {
    let mut stream = grant.open("/api/v1/ai/chat", body).await;
    assert_eq!(stream.status, 200);
    let run = stream.headers["x-run-id"].to_str().unwrap().to_owned();
    let mut text = String::new();
    while !text.contains("text_delta") {
        let frame = stream.frame().await.unwrap().expect("it is not over");
        text.push_str(std::str::from_utf8(&frame).unwrap());
    }
    let running = grant.get(&format!("/api/v1/runs/{run}")).await.json();
    assert_eq!(running["state"], "running", "{running}");
    run
}

/// A3: The budget of a run never exceeds the grant's, whatever the request asks for.
#[tokio::test(flavor = "multi_thread")]
async fn a_budget_is_the_lower_of_the_request_and_the_grant() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let (free, bound) = (setup.grant(&[]), setup.grant(&["--max-turns", "0"]));
    for (grant, turns) in [(&free, 0), (&bound, 50)] {
        let mut body = chat_body("fake");
        body["budget"] = json!({ "max_turns": turns });
        let response = grant.post("/api/v1/ai/chat", &body).await;
        let events = parse_events(response.text());
        let last = &events.last().unwrap().data;
        assert_eq!(last["error_code"], "budget_exhausted", "{last}");
    }
    setup.stop(service);
}

fn event_ids(text: &str) -> Vec<u64> {
    parse_events(text).iter().map(|event| event.seq).collect()
}

/// A model that writes one word, and the next one when the gate opens.
const WAITS: &str = "fake/text=one two;gate=1";
