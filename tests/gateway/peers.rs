//! Tests of the gateway with third-party programs: LiteLLM as its upstream, the OpenAI and Anthropic SDKs as its
//! clients, and Prometheus.

mod aws_sdk;
mod cut_streams;
pub(crate) mod setup;
mod spoof;

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use setup::{LitellmProxy, ProxySetup, start_provider};

use crate::support::process::{free_port, wait_until};

const TEXT: &str = "hello from the fake provider";
const MOCKED: &str = "hello from litellm";

/// G2, G7: The OpenAI SDK uses chat completions, Responses, embeddings and models, unary and streamed.
#[test]
fn the_openai_sdk_speaks_through_the_socket() {
    let provider = start_provider("input=11,output=7");
    let setup = ProxySetup::start(&provider.address, &[]);
    let calls = [
        "chat",
        "chat_stream",
        "chat_stream_usage",
        "responses",
        "responses_stream",
        "embeddings",
        "models",
    ];
    let [chat, stream, counted, responses, responses_stream, embeddings, models] =
        setup.sdk("openai_sdk.py", "gpt", calls);

    assert_eq!(
        chat,
        json!({ "text": TEXT, "finish": "stop", "input": 11, "output": 7, "requests": 1 })
    );
    // The gateway asks the provider for a usage chunk without choices; a client that did not ask for the chunk does not
    // receive it.
    let text = json!({ "text": TEXT, "finish": "stop", "requests": 1 });
    assert_eq!(
        stream,
        merge_objects(&text, &json!({ "without_choices": 0, "input": null, "output": null }))
    );
    assert_eq!(
        counted,
        merge_objects(&text, &json!({ "without_choices": 1, "input": 11, "output": 7 }))
    );
    let answer =
        json!({ "text": TEXT, "finish": "completed", "input": 11, "output": 7, "requests": 1 });
    assert_eq!(responses, answer);
    assert_eq!(responses_stream, merge_objects(&answer, &json!({ "deltas": TEXT })));
    assert_eq!(embeddings, json!({ "vectors": 1, "dimensions": true, "requests": 1 }));
    assert_eq!(models["requests"], 1);
    setup.ends_with_a_whole_record();
}

/// G2, G7: The Anthropic SDK uses Messages, unary and streamed, and counts tokens.
#[test]
fn the_anthropic_sdk_speaks_through_the_socket() {
    let provider = start_provider("input=11,output=7");
    let setup = ProxySetup::start(&provider.address, &[]);
    let [messages, messages_stream, counted] =
        setup.sdk("anthropic_sdk.py", "claude", ["messages", "messages_stream", "count_tokens"]);

    let answer =
        json!({ "text": TEXT, "finish": "end_turn", "input": 11, "output": 7, "requests": 1 });
    assert_eq!(messages, answer);
    assert_eq!(messages_stream, merge_objects(&answer, &json!({ "deltas": TEXT })));
    assert!(counted["input"].as_u64().unwrap() > 0, "{counted}");
    setup.ends_with_a_whole_record();
}

/// G10: The SDKs try three times if a refusal may be temporary. The refusal of a spent budget tells them not to retry.
#[test]
fn the_sdks_do_not_retry_against_a_spent_budget() {
    let provider = start_provider("");
    let setup = ProxySetup::start(&provider.address, &[("MAX_TURNS", "1")]);
    let [first, chat, stream, responses] =
        setup.sdk("openai_sdk.py", "gpt", ["chat", "chat", "chat_stream", "responses"]);
    assert_eq!(first["text"], TEXT);
    let [messages, messages_stream] =
        setup.sdk("anthropic_sdk.py", "claude", ["messages", "messages_stream"]);
    for refused in [chat, stream, responses, messages, messages_stream] {
        assert!(
            refused["message"].as_str().unwrap().contains("turn budget exhausted"),
            "{refused}"
        );
        assert_eq!(refused["requests"], 1, "{refused}");
    }
}

/// G2, G4, G11: LiteLLM uses the gateway's call id, which is in the audit log and in the access log.
#[test]
fn litellm_serves_as_the_upstream_and_its_call_ids_are_recorded() {
    let litellm = LitellmProxy::start();
    let setup = ProxySetup::start(&litellm.address, &[]);

    let mut calls = vec![];
    for (model, stream) in [("mock", false), ("mock", true), ("gpt", false), ("gpt", true)] {
        calls.push(setup.chat(model, stream));
    }
    let [mock, mock_stream, models] =
        setup.sdk("openai_sdk.py", "mock", ["chat", "chat_stream", "models"]);
    assert_eq!((&mock["text"], &mock_stream["text"]), (&json!(MOCKED), &json!(MOCKED)));
    assert_eq!(models["models"], json!(["claude", "gpt", "mock"]));
    let [responses] = setup.sdk("openai_sdk.py", "gpt", ["responses_stream"]);
    assert_eq!(responses["deltas"], TEXT);
    let [messages, messages_stream] =
        setup.sdk("anthropic_sdk.py", "claude", ["messages", "messages_stream"]);
    assert_eq!((&messages["text"], &messages_stream["deltas"]), (&json!(TEXT), &json!(TEXT)));

    let records = setup.ends_with_a_whole_record();
    let log = fs::read_to_string(setup.access_log()).unwrap();
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

/// G12: Prometheus scrapes the gateway, and promtool finds no fault in the text.
#[test]
fn prometheus_scrapes_and_promtool_finds_no_fault() {
    let provider = start_provider("");
    let metrics = format!("127.0.0.1:{}", free_port());
    let setup = ProxySetup::start(&provider.address, &[("METRICS_ADDR", &metrics)]);
    setup.chat("gpt", false);
    setup.chat("gpt", true);

    let text = setup::get_url(&format!("http://{metrics}/metrics"));
    let complaints = setup::run_promtool(&["check", "metrics"], &text);
    assert_eq!(complaints, "", "{text}");

    let prometheus = setup::PrometheusServer::start(&metrics);
    wait_until(
        || prometheus.value(r#"up{job="cogni-gateway"}"#) == Some(1.0),
        || format!("Prometheus does not scrape: {}", prometheus.output()),
    );
    let requests = prometheus.value("sum(cogni_gateway_requests_total)");
    assert!(requests.is_some_and(|requests| requests >= 2.0), "{requests:?} of: {text}");
}

/// Merges the members of two objects.
fn merge_objects(object: &Value, more: &Value) -> Value {
    let mut both = object.as_object().unwrap().clone();
    both.extend(more.as_object().unwrap().clone());
    both.into()
}

/// Returns the output of `command`, which must succeed.
pub(crate) fn command_output(command: &mut Command) -> String {
    let output =
        command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; {}", setup::REMEDY));
    let [printed, complained] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{command:?}: {printed}{complained}");
    printed
}

fn parse_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
