//! Tests of usage objects in the forms of all protocols.

use proptest::prelude::*;

use super::{MAX_REPORTED_TOKENS, UsageAccumulator};
use crate::llm::budget::price::{PriceTable, UnknownPricePolicy};
use crate::llm::protocol::LlmProtocol;

const PROTOCOLS: [LlmProtocol; 3] =
    [LlmProtocol::Chat, LlmProtocol::Responses, LlmProtocol::Messages];

fn names(protocol: LlmProtocol) -> (&'static str, &'static str) {
    match protocol {
        LlmProtocol::Chat => ("prompt", "completion"),
        LlmProtocol::Responses | LlmProtocol::Messages => ("input", "output"),
    }
}

fn report(protocol: LlmProtocol, [input, output, reasoning, total]: [u64; 4]) -> String {
    let (heard, written) = names(protocol);
    format!(
        r#"{{"{heard}_tokens":{input},"{written}_tokens":{output},"{written}_tokens_details":{{"reasoning_tokens":{reasoning}}},"total_tokens":{total}}}"#
    )
}

fn output(protocol: LlmProtocol, usage: &str) -> u64 {
    let mut tally = UsageAccumulator::default();
    assert!(tally.read_usage(protocol, usage.as_bytes()), "{usage}");
    let usage = tally.total_usage(protocol).unwrap();
    assert_eq!(usage.output, tally.total_output());
    usage.output.0
}

/// G9: reasoning that a provider reports beside the output, or only in the total, counts as output.
#[test]
fn reasoning_beside_the_output_is_output() {
    for protocol in [LlmProtocol::Chat, LlmProtocol::Responses] {
        for (counts, expected) in [
            ([10, 5, 0, 8015], 8005),
            ([10, 5, 9000, 9015], 9005),
            ([10, 5, 9000, 15], 9005),
            ([10, 5000, 4990, 5010], 5000),
            ([10, 5, 0, 15], 5),
            ([10, 5, 0, 0], 5),
        ] {
            assert_eq!(output(protocol, &report(protocol, counts)), expected, "{counts:?}");
        }
    }
    assert_eq!(output(LlmProtocol::Chat, r#"{"total_tokens":9000}"#), 9000);
    // Anthropic's cache is not part of its input, so a total would count the cache twice.
    let messages = r#"{"input_tokens":1,"output_tokens":5,"total_tokens":900}"#;
    assert_eq!(output(LlmProtocol::Messages, messages), 5);
}

/// G9: a usage that is reported only by its parts is charged by the parts. A missing report is no count.
#[test]
fn a_sum_that_is_missing_is_that_of_its_parts() {
    use LlmProtocol::{Chat, Messages, Responses};
    for (protocol, usage, expected) in [
        (
            Messages,
            r#"{"output_tokens":5,"cache_creation":{"ephemeral_1h_input_tokens":900}}"#,
            [900, 5, 0, 900, 900],
        ),
        (
            Messages,
            r#"{"input_tokens":3,"output_tokens":5,"cache_creation_input_tokens":0,"cache_creation":{"ephemeral_5m_input_tokens":50,"ephemeral_1h_input_tokens":900}}"#,
            [953, 5, 0, 950, 900],
        ),
        (
            Messages,
            r#"{"input_tokens":3,"output_tokens":5,"iterations":[{"type":"compaction","cache_creation":{"ephemeral_1h_input_tokens":900}}]}"#,
            [903, 5, 0, 900, 900],
        ),
        (
            Chat,
            r#"{"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":700}}"#,
            [700, 5, 700, 0, 0],
        ),
        (
            Chat,
            r#"{"prompt_tokens":0,"completion_tokens":5,"prompt_tokens_details":{"text_tokens":20,"image_tokens":300,"cached_tokens":7}}"#,
            [320, 5, 7, 0, 0],
        ),
        (
            Chat,
            r#"{"prompt_tokens":1000,"completion_tokens":5,"prompt_tokens_details":{"cache_creation_tokens":800,"cache_creation_token_details":{"ephemeral_1h_input_tokens":600}}}"#,
            [1000, 5, 0, 800, 600],
        ),
        (
            Chat,
            r#"{"prompt_tokens":1000,"completion_tokens":5,"prompt_tokens_details":{"cache_write_tokens":800}}"#,
            [1000, 5, 0, 800, 0],
        ),
        (
            Chat,
            r#"{"prompt_tokens":9,"completion_tokens_details":{"text_tokens":4,"audio_tokens":30,"reasoning_tokens":6}}"#,
            [9, 40, 0, 0, 0],
        ),
        (
            Responses,
            r#"{"output_tokens":5,"input_tokens_details":{"cached_tokens":700}}"#,
            [700, 5, 700, 0, 0],
        ),
        (
            Responses,
            r#"{"input_tokens":9,"output_tokens_details":{"audio_tokens":30}}"#,
            [9, 30, 0, 0, 0],
        ),
    ] {
        let mut tally = UsageAccumulator::default();
        assert!(tally.read_usage(protocol, usage.as_bytes()), "{usage}");
        let found = tally.total_usage(protocol).unwrap();
        let counts =
            [found.input, found.output, found.cache_read, found.cache_write, found.cache_write_1h];
        assert_eq!(counts.map(|tokens| tokens.0), expected, "{usage}");
    }
    let mut tally = UsageAccumulator::default();
    tally.read_usage(Chat, br#"{"prompt_tokens_details":{"cached_tokens":700}}"#);
    assert_eq!(tally.total_usage(Chat), None, "it is charged as reserved");
}

/// G9: pictures and video in a usage report cost their own rates, or the highest rate that is known of their side.
#[test]
fn pictures_and_video_are_not_charged_as_text() {
    let table = r#"
        version = "1"
        [models]
        "painter" = { input = "1", output = "10", cache_read = "0.5", image_input = "2", video_input = "3", image_output = "40", video_output = "50" }
        "listener" = { input = "1", output = "10", audio_input = "7", audio_output = "20" }
        "thinker" = { input = "1", output = "10", reasoning = "30" }
        "writer" = { input = "1", output = "10" }
    "#;
    let prices = PriceTable::parse_table(table, UnknownPricePolicy::Reject).unwrap();
    let chat = r#"{"prompt_tokens":1000000,"completion_tokens":1000000,
        "prompt_tokens_details":{"image_tokens":200000,"video_tokens":100000,"cached_tokens":null},
        "completion_tokens_details":{"image_tokens":500000,"video_tokens":100000}}"#;
    let responses = chat.replace("prompt", "input").replace("completion", "output");
    for (model, expected) in [
        // 700,000 at 1, 200,000 at 2, 100,000 at 3; 400,000 at 10, 500,000 at 40, 100,000 at 50.
        ("painter", "30.4"),
        // What is no text costs what sound costs: 700,000 at 1, 300,000 at 7; 400,000 at 10, 600,000 at 20.
        ("listener", "18.8"),
        ("thinker", "23"),
        ("writer", "11"),
    ] {
        for (protocol, usage) in [(LlmProtocol::Chat, chat), (LlmProtocol::Responses, &*responses)]
        {
            let mut tally = UsageAccumulator::default();
            assert!(tally.read_usage(protocol, usage.as_bytes()));
            let usage = tally.total_usage(protocol).unwrap();
            let price = prices.find_price(model).unwrap();
            assert_eq!(price.call_cost(&usage).to_string(), expected, "{model}");
            assert!(
                price.call_cost(&usage) <= price.max_cost(usage.input, usage.output),
                "{model}"
            );
        }
    }
    // Parts that are more than their whole, and parts that came from the cache, are not charged twice.
    let odd = r#"{"prompt_tokens":100,"completion_tokens":10,
        "prompt_tokens_details":{"image_tokens":900,"video_tokens":900,"audio_tokens":900,"cached_tokens":40},
        "completion_tokens_details":{"image_tokens":900,"video_tokens":900,"audio_tokens":900,"reasoning_tokens":4}}"#;
    let mut tally = UsageAccumulator::default();
    assert!(tally.read_usage(LlmProtocol::Chat, odd.as_bytes()));
    let usage = tally.total_usage(LlmProtocol::Chat).unwrap();
    let cost = prices.find_price("painter").unwrap().call_cost(&usage);
    // 60 at 3, 40 at 0.5; 6 at 50, 4 at 10.
    assert_eq!(cost.to_string(), "0.00054");
}

/// G9: the usage of one answer only grows; a retry inside the provider is part of that usage.
#[test]
fn a_lower_report_takes_nothing_back() {
    let mut tally = UsageAccumulator::default();
    for usage in [
        r#"{"input_tokens":5000,"cache_read_input_tokens":700,"cache_creation_input_tokens":30,"cache_creation":{"ephemeral_1h_input_tokens":20},"output_tokens":1,"iterations":[{"type":"compaction","input_tokens":9,"output_tokens":8}]}"#,
        r#"{"input_tokens":1,"cache_read_input_tokens":0,"cache_creation_input_tokens":0,"cache_creation":{"ephemeral_1h_input_tokens":0},"output_tokens":40,"iterations":[]}"#,
        r#"{"output_tokens":39}"#,
    ] {
        assert!(tally.read_usage(LlmProtocol::Messages, usage.as_bytes()));
    }
    assert!(
        tally
            .read_initial_usage(LlmProtocol::Messages, br#"{"input_tokens":1,"output_tokens":77}"#)
    );
    let usage = tally.total_usage(LlmProtocol::Messages).unwrap();
    let counts = [usage.input, usage.cache_read, usage.cache_write, usage.cache_write_1h];
    assert_eq!(counts.map(|tokens| tokens.0), [5739, 700, 30, 20]);
    assert_eq!(usage.output.0, 48);
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0_u64..10_000, 1 => u64::MAX - 9..=u64::MAX]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// G9: a report never lowers a count, in either order of the reports.
    #[test]
    fn reports_only_grow(
        protocol in prop::sample::select(&PROTOCOLS[..]),
        reports in prop::collection::vec(prop::array::uniform4(number()), 1..5),
    ) {
        let mut tally = UsageAccumulator::default();
        let mut before = (0, 0, 0);
        for counts in &reports {
            tally.read_usage(protocol, report(protocol, *counts).as_bytes());
            let usage = tally.total_usage(protocol).unwrap();
            let now = (usage.input.0, usage.output.0, usage.reasoning.0);
            prop_assert!(now.0 >= before.0.max(counts[0].min(MAX_REPORTED_TOKENS.0)));
            prop_assert!(now.1 >= before.1.max(counts[1].min(MAX_REPORTED_TOKENS.0)));
            prop_assert!(now.0.max(now.1) <= MAX_REPORTED_TOKENS.0);
            prop_assert!(now.2 >= before.2);
            before = now;
        }
    }

    /// G9: no part of a report exceeds the charge for the whole.
    #[test]
    fn the_output_is_at_least_each_part_of_it(
        protocol in prop::sample::select(&PROTOCOLS[..]),
        counts in prop::array::uniform4(number()),
    ) {
        let [input, written, reasoning, total] = counts;
        let output = output(protocol, &report(protocol, counts));
        let most = MAX_REPORTED_TOKENS.0;
        prop_assert!(output <= most && output >= written.max(reasoning).min(most));
        if protocol != LlmProtocol::Messages {
            prop_assert!(output >= total.saturating_sub(input).min(most));
        }
    }
}
