//! The gateway among programs that others wrote: LiteLLM above it, the OpenAI and Anthropic SDKs below, Prometheus beside it.

mod place;

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use place::{Litellm, Place, provider};

use crate::support::process::{free_port, patience};

const TEXT: &str = "hello from the fake provider";

/// G2, G7: chat completions, Responses, embeddings and models, unary and streamed.
#[test]
fn the_openai_sdk_speaks_through_the_socket() {
    let provider = provider("input=11,output=7");
    let place = Place::start(&provider.address, &[]);
    let sdk = |call| place.sdk("openai_sdk.py", call, "gpt");

    assert_eq!(
        sdk("chat"),
        json!({ "text": TEXT, "finish": "stop", "input": 11, "output": 7, "requests": 1 })
    );
    // The chunk of usage that the gateway asks for is not the client's to see.
    let stream = json!({ "text": TEXT, "finish": "stop", "without_choices": 0, "input": null, "output": null, "requests": 1 });
    assert_eq!(sdk("chat_stream"), stream);
    let counted = json!({ "text": TEXT, "finish": "stop", "without_choices": 1, "input": 11, "output": 7, "requests": 1 });
    assert_eq!(sdk("chat_stream_usage"), counted);
    let answer =
        json!({ "text": TEXT, "finish": "completed", "input": 11, "output": 7, "requests": 1 });
    assert_eq!(sdk("responses"), answer);
    let mut streamed = answer;
    streamed["deltas"] = json!(TEXT);
    assert_eq!(sdk("responses_stream"), streamed);
    assert_eq!(sdk("embeddings"), json!({ "vectors": 1, "dimensions": true, "requests": 1 }));
    assert_eq!(sdk("models")["requests"], 1);
    place.ends_with_a_whole_record();
}

/// G2, G7: Messages, unary and streamed, and its counting of tokens.
#[test]
fn the_anthropic_sdk_speaks_through_the_socket() {
    let provider = provider("input=11,output=7");
    let place = Place::start(&provider.address, &[]);
    let sdk = |call| place.sdk("anthropic_sdk.py", call, "claude");

    let answer =
        json!({ "text": TEXT, "finish": "end_turn", "input": 11, "output": 7, "requests": 1 });
    assert_eq!(sdk("messages"), answer);
    let mut streamed = answer;
    streamed["deltas"] = json!(TEXT);
    assert_eq!(sdk("messages_stream"), streamed);
    assert!(sdk("count_tokens")["input"].as_u64().unwrap() > 0);
    place.ends_with_a_whole_record();
}

/// G10: the SDKs retry what may pass, three times over; a spent budget will not.
#[test]
fn the_sdks_do_not_retry_against_a_spent_budget() {
    let provider = provider("");
    let place = Place::start(&provider.address, &[("MAX_TURNS", "1")]);
    assert_eq!(place.sdk("openai_sdk.py", "chat", "gpt")["text"], TEXT);
    for (script, call) in [
        ("openai_sdk.py", "chat"),
        ("openai_sdk.py", "chat_stream"),
        ("openai_sdk.py", "responses"),
        ("anthropic_sdk.py", "messages"),
        ("anthropic_sdk.py", "messages_stream"),
    ] {
        let refused = place.sdk(script, call, "gpt");
        assert!(matches!(refused["status"].as_u64(), Some(400..=403)), "{call}: {refused}");
        assert_eq!(refused["requests"], 1, "{call}: {refused}");
    }
}

/// G2, G4, G11: LiteLLM's call id is ours, and stands in the audit and in the access log.
#[test]
fn litellm_serves_as_the_upstream_and_its_call_ids_are_recorded() {
    let litellm = Litellm::start();
    let place = Place::start(&litellm.address, &[]);

    let mut calls = vec![];
    for (model, stream) in [("mock", false), ("mock", true), ("gpt", false), ("gpt", true)] {
        calls.push(place.chat(model, stream));
    }
    let said = "hello from litellm";
    assert_eq!(place.sdk("openai_sdk.py", "chat", "mock")["text"], said);
    assert_eq!(place.sdk("openai_sdk.py", "chat_stream", "mock")["text"], said);
    assert_eq!(place.sdk("openai_sdk.py", "responses_stream", "gpt")["deltas"], TEXT);
    assert_eq!(place.sdk("anthropic_sdk.py", "messages", "claude")["text"], TEXT);
    assert_eq!(place.sdk("anthropic_sdk.py", "messages_stream", "claude")["deltas"], TEXT);
    assert_eq!(
        place.sdk("openai_sdk.py", "models", "")["models"],
        json!(["claude", "gpt", "mock"])
    );

    let records = place.ends_with_a_whole_record();
    let log = fs::read_to_string(place.access_log()).unwrap();
    for call in &calls {
        let of = |event: &str| {
            records
                .iter()
                .find(|record| record["event"] == event && record["request"] == call.as_str())
        };
        assert!(of("request.admitted").is_some(), "{call}: {records:#?}");
        let settled = of("request.settled").unwrap();
        assert_eq!(settled["litellm_call_id"], call.as_str());
        assert_eq!(settled["usage"]["source"], "provider", "{settled}");
        assert_eq!(
            log.lines().filter(|line| line.contains(&format!("litellm_call_id={call} "))).count(),
            1
        );
    }
}

/// G12: Prometheus reads it, and promtool has nothing to say about it.
#[test]
fn prometheus_scrapes_what_promtool_finds_no_fault_with() {
    let provider = provider("");
    let metrics = format!("127.0.0.1:{}", free_port());
    let place = Place::start(&provider.address, &[("METRICS_ADDR", &metrics)]);
    place.chat("gpt", false);
    place.chat("gpt", true);

    let text = place::get(&format!("http://{metrics}/metrics"));
    let complaints = place::promtool(&["check", "metrics"], &text);
    assert_eq!(complaints, "", "{text}");

    let prometheus = place::Prometheus::start(&metrics);
    patience(
        || prometheus.value(r#"up{job="cogni-gateway"}"#) == Some(1.0),
        || format!("Prometheus does not scrape: {}", prometheus.said()),
    );
    let requests = prometheus.value("sum(cogni_gateway_requests_total)");
    assert!(requests.is_some_and(|requests| requests >= 2.0), "{requests:?} of: {text}");
}

/// What `command` prints, if it succeeds.
fn output(command: &mut Command) -> String {
    let output =
        command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; {}", place::REMEDY));
    let [said, complained] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{command:?}: {said}{complained}");
    said
}

fn parse_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
