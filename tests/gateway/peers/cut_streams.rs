//! Tests of how the SDKs see streams that the gateway cuts at their limit.

use serde_json::{Value, json};

use super::setup::{ProxySetup, start_provider};

/// G9: The SDKs take a cut for the model's own limit, and do not retry.
#[test]
fn the_sdks_take_a_cut_for_the_models_own_limit() {
    let calls = ["chat", "completions", "messages", "responses"];
    let [chat, completions, messages, responses] = run_limited_sdk("chunks=100000", calls);
    let seen = |finish: &str, output: Value| json!({"finish": finish, "output": output, "has_text": true, "requests": 1});
    assert_eq!(chat, seen("length", json!(20)));
    assert_eq!(completions, seen("length", Value::Null));
    assert_eq!(messages, seen("max_tokens", json!(20)));
    assert_eq!(responses, seen("max_output_tokens", json!(20)));
}

/// G9: The SDKs take half a tool call for an error, and do not retry.
#[test]
fn the_sdks_take_half_a_tool_call_for_an_error() {
    let script = format!("tool=exec,chunks=100,arguments={{\"c\":\"{}\"}}", "x".repeat(98));
    let [chat, messages, responses] = run_limited_sdk(&script, ["chat", "messages", "responses"]);
    let error = json!({"error": "output_limit_reached", "requests": 1});
    assert_eq!((&chat, &messages), (&error, &error));
    let failed = "insufficient_quota";
    assert_eq!(
        responses,
        json!({"finish": failed, "output": 20, "has_text": false, "requests": 1})
    );
}

/// Returns the results of an SDK for streams that are granted 20 tokens each.
fn run_limited_sdk<const N: usize>(script: &str, calls: [&str; N]) -> [Value; N] {
    let provider = start_provider(script);
    let place = ProxySetup::start(&provider.address, &[("MAX_OUTPUT_TOKENS", "1000")]);
    let seen = place.sdk("cut_sdk.py", "m", calls);
    let records = place.ends_with_a_whole_record();
    let settled: Vec<_> =
        records.iter().filter(|record| record["event"] == "request.settled").collect();
    assert_eq!(settled.len(), N);
    for record in settled {
        assert_eq!(record["outcome"], "cut_off", "{record}");
        assert_eq!(record["charged"]["output"], 20, "{record}");
    }
    seen
}
