//! Tests of the output estimate: how much a stream counts as having written, at each point where its client may
//! disconnect.

use std::fmt::Write;

use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::llm::protocol::GatewayRoute;
use proptest::prelude::*;

use super::output_limiter::model_output::{self, OutputPiece, stream_events};
use super::output_limiter::{ROUTES, call_allowance};
use super::{ObserverReading, hiding_observer, showing_observer, sorted_offsets};

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// G15: Wherever the client disconnects and however the stream was split, each token that the client received
    /// counts. A longer prefix never counts less, and an output limit does not change the count.
    #[test]
    fn each_token_that_the_client_received_counts(
        route in prop::sample::select(&ROUTES[..]),
        tokens in prop::collection::vec(prop::sample::select(TOKENS), 1..60),
        in_one in 1_usize..6,
        hides in any::<bool>(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
    ) {
        let pieces: Vec<_> = tokens.chunks(in_one).map(|run| OutputPiece::text(&run.concat())).collect();
        let events = stream_events(route, &pieces);
        let stream = events.concat().into_bytes();
        let observer = || if hides { hiding_observer(route) } else { showing_observer(route) };
        let mut last = Tokens::ZERO;
        let (mut end, mut seen) = (0, 0);
        for event in &events {
            end += event.len();
            if seen < pieces.len() && event_brings(event, &pieces[seen]) {
                seen += 1;
            }
            let left = ObserverReading::of(observer(), &stream[..end], sorted_offsets(&cuts, end));
            let limited = observer().with_allowance(call_allowance(u64::MAX));
            let limited = ObserverReading::of(limited, &stream[..end], []);
            prop_assert_eq!(left.estimate, limited.estimate);
            prop_assert_eq!(left.at_least, limited.at_least);
            prop_assert!(left.estimate.0 >= (seen * in_one).min(tokens.len()) as u64, "{event}");
            prop_assert!(left.estimate >= last && left.estimate >= left.at_least);
            last = left.estimate;
        }
        prop_assert_eq!(seen, pieces.len());
    }

    /// G15: A stream that is not parsed (no output limit) has the same estimate as one that is parsed.
    #[test]
    fn a_stream_without_a_limit_is_counted_like_one_with_it(
        route in prop::sample::select(&ROUTES[..]),
        pieces in model_output::any_pieces(),
        cut in any::<prop::sample::Index>(),
    ) {
        let events = stream_events(route, &pieces);
        let stream = &events[..cut.index(events.len())].concat().into_bytes();
        let free = ObserverReading::of(showing_observer(route), stream, []);
        let limited = ObserverReading::of(showing_observer(route).with_allowance(call_allowance(u64::MAX)), stream, []);
        prop_assert_eq!((free.estimate, free.at_least), (limited.estimate, limited.at_least));
    }
}

/// G15: Comments, pings, empty chunks, the role and the end of the stream count nothing.
#[test]
fn events_without_text_count_nothing() {
    for route in ROUTES {
        let silent = stream_events(route, &[]).concat();
        let fillers = ": OPENROUTER PROCESSING\n\n".repeat(100) + &silent;
        for observer in [
            showing_observer(route),
            hiding_observer(route),
            showing_observer(route).with_allowance(call_allowance(9)),
        ] {
            let reading = ObserverReading::of(observer, fillers.as_bytes(), []);
            assert_eq!(
                (reading.estimate, reading.at_least),
                (Tokens::ZERO, Tokens::ZERO),
                "{route:?}"
            );
        }
    }
    let azure = "data: {\"choices\":[],\"created\":0,\"id\":\"\",\"prompt_filter_results\":[{\"content_filter_results\":{\"hate\":{\"filtered\":false,\"severity\":\"safe\"}}}]}\n\n";
    let reading =
        ObserverReading::of(showing_observer(GatewayRoute::ChatCompletions), azure.as_bytes(), []);
    assert_eq!(reading.estimate, Tokens::ZERO);
}

/// G9: Framing does not count as text. Earlier, a stream with one token per event was estimated at 35 to 70 times its
/// size.
#[test]
fn an_estimate_is_near_the_truth() {
    let english = ["The", " record", " rides", " in", " the", " response", " body", ",", " and"];
    let tokens: Vec<_> = english.into_iter().cycle().take(900).map(OutputPiece::text).collect();
    for route in ROUTES {
        let stream = stream_events(route, &tokens).concat();
        let Tokens(estimate) =
            ObserverReading::of(showing_observer(route), stream.as_bytes(), []).estimate;
        assert!((900..1800).contains(&estimate), "{route:?}: {estimate}");
    }
}

/// G9: Text that Python's JSON encoder has escaped does not count as longer.
#[test]
fn escapes_are_not_text() {
    let text = "記録".repeat(100);
    let mut escaped = String::new();
    for unit in text.encode_utf16() {
        write!(escaped, "\\u{unit:04x}").unwrap();
    }
    let stream = stream_events(GatewayRoute::ChatCompletions, &[OutputPiece::text(&text)]).concat();
    let plain =
        ObserverReading::of(showing_observer(GatewayRoute::ChatCompletions), stream.as_bytes(), []);
    let stream = stream.replace(&text, &escaped);
    for observer in [
        showing_observer(GatewayRoute::ChatCompletions),
        super::output_limiter::unlimited_observer(GatewayRoute::ChatCompletions),
    ] {
        let reading = ObserverReading::of(observer, stream.as_bytes(), []);
        assert_eq!(reading.estimate, plain.estimate);
    }
}

/// G9: Only the texts of a unary answer count.
#[test]
fn the_texts_of_a_unary_answer_are_counted() {
    let text = "word ".repeat(320);
    for (route, body) in [
        (
            GatewayRoute::ChatCompletions,
            format!(
                r#"{{"id":"{text}","choices":[{{"message":{{"role":"assistant" , "content" : "{text}"}},"logprobs":{{"content":[{{"token":"{text}","top_logprobs":[{{"token":"{text}"}}]}}]}}}}],"usage":{{"prompt_tokens":1,"completion_tokens":0}}}}"#
            ),
        ),
        (
            GatewayRoute::Responses,
            format!(
                r#"{{"instructions":"{text}","tools":[{{"text":"{text}"}}],"output":[{{"type":"message","content":[{{"type":"output_text","text":"{text}","annotations":["{text}"]}}]}}]}}"#
            ),
        ),
        (
            GatewayRoute::Messages,
            format!(
                r#"{{"content":[{{"type":"text","text":"{text}"}},{{"type":"tool_use","input":{{"a":"{text}"}}}}]}}"#
            ),
        ),
        (GatewayRoute::Embeddings, format!(r#"{{"data":[{{"text":"{text}"}}]}}"#)),
    ] {
        let expected = if route == GatewayRoute::Embeddings { 0 } else { text.len() as u64 / 16 };
        let whole = ObserverReading::of(super::unary_observer(route), body.as_bytes(), []);
        assert_eq!(whole.at_least, Tokens(expected), "{route:?}");
        let bytewise =
            ObserverReading::of(super::unary_observer(route), body.as_bytes(), 0..body.len());
        assert_eq!(bytewise, whole, "{route:?}");
    }
}

/// G9: The passes that Anthropic does not include in its totals are billed, so they count. Audio is reported
/// separately.
#[test]
fn passes_outside_the_totals_count() {
    let usage = r#"{"input_tokens":23000,"output_tokens":1000,"iterations":[{"type":"compaction","input_tokens":180000,"output_tokens":3500,"cache_read_input_tokens":10,"cache_creation_input_tokens":40,"cache_creation":{"ephemeral_5m_input_tokens":10,"ephemeral_1h_input_tokens":30}},{"type":"message","input_tokens":23000,"output_tokens":1000}]}"#;
    let unary = ObserverReading::of(
        super::unary_observer(GatewayRoute::Messages),
        format!(r#"{{"usage":{usage}}}"#).as_bytes(),
        [],
    );
    let delta = format!(
        "event: message_start\ndata: {{\"type\":\"message_start\",\"message\":{{\"usage\":{{\"input_tokens\":23000,\"output_tokens\":1}}}}}}\n\nevent: message_delta\ndata: {{\"type\":\"message_delta\",\"usage\":{usage}}}\n\n"
    );
    let stream =
        ObserverReading::of(showing_observer(GatewayRoute::Messages), delta.as_bytes(), []);
    for usage in [unary.usage.unwrap(), stream.usage.unwrap()] {
        assert_eq!((usage.input, usage.output), (Tokens(203_050), Tokens(4500)));
        assert_eq!(usage.cache_read, Tokens(10));
        assert_eq!((usage.cache_write, usage.cache_write_1h), (Tokens(40), Tokens(30)));
    }
    let body = r#"{"usage":{"prompt_tokens":9,"completion_tokens":8,"prompt_tokens_details":{"audio_tokens":7},"completion_tokens_details":{"audio_tokens":6}}}"#;
    let usage = ObserverReading::of(
        super::unary_observer(GatewayRoute::ChatCompletions),
        body.as_bytes(),
        [],
    )
    .usage
    .unwrap();
    assert_eq!((usage.audio_input, usage.audio_output), (Tokens(7), Tokens(6)));
}

fn event_brings(event: &str, piece: &OutputPiece) -> bool {
    let text = serde_json::to_string(&piece.text).unwrap();
    event.contains("delta") && event.contains(&text) || event.contains(&format!("\"text\":{text}"))
}

/// Each token is at least as long as the estimate assumes, so the estimate holds for any number of tokens in one event.
const TOKENS: &[&str] = &[" the", "的", "😀", "abc", " characteristics", " भाषा"];
