//! Tests of streams that exceed their grant: where the gateway cuts them, and how the client sees the end.

pub(super) mod model_output;
mod sdk_client;

use std::fmt::Write;

use bytes::Bytes;
use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::llm::protocol::{GatewayRoute, LlmProtocol};
use cogni_gateway::llm::response::{CallAllowance, CutoffMode, ResponseObserver};
use insta::assert_snapshot;
use proptest::prelude::*;

use super::{
    DELTA, ObserverReading, hiding_observer, showing_observer, sorted_offsets, unary_observer,
};
use crate::support::allocations;
use model_output::{OutputPart, OutputPiece, stream_events};
use sdk_client::{SdkClient, SdkState};

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// G9: Whatever a stream contains and wherever it is split, the client receives whole events and then the end that
    /// the protocol defines.
    #[test]
    fn a_stream_is_cut_between_events_and_ended_in_its_protocol(
        route in prop::sample::select(&ROUTES[..]),
        pieces in model_output::any_pieces(),
        granted in 0_u64..12,
        hides in any::<bool>(),
        cutoff in prop::sample::select(&[CutoffMode::Graceful, CutoffMode::Graceful, CutoffMode::Error][..]),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
    ) {
        let events = stream_events(route, &pieces);
        let stream = events.concat().into_bytes();
        let observer = || {
            let observer = if hides { hiding_observer(route) } else { showing_observer(route) };
            observer.with_allowance(CallAllowance { cutoff, ..call_allowance(granted) })
        };
        let reading = ObserverReading::of(observer(), &stream, sorted_offsets(&cuts, stream.len()));
        let bytewise = ObserverReading::of(observer(), &stream, 0..stream.len());
        prop_assert_eq!(&bytewise, &reading);

        let expected = cut_after(route, &events, granted);
        prop_assert_eq!(reading.is_cut, expected.is_some());
        let Some((passed, state)) = expected else { return Ok(()) };
        let before = events[..passed].concat();
        let told = String::from_utf8(reading.passed).unwrap();
        prop_assert!(told.starts_with(&before), "{}", told);

        let mut client = SdkClient::new(route);
        client.read(&told);
        if state == SdkState::Halfway || cutoff == CutoffMode::Error {
            prop_assert!(client.failed && !client.done, "{}", told);
        } else {
            prop_assert!(client.done && !client.failed && client.is_limited, "{}", told);
            let is_chat = route.protocol() == LlmProtocol::Chat;
            prop_assert_eq!(client.usage.is_some(), !(is_chat && hides), "{}", told);
            prop_assert!(client.usage.is_none_or(|output| output >= granted), "{}", told);
        }
        // The charged estimate is never lower than the count that decides about the cut.
        prop_assert!(reading.estimate.0 >= granted, "{:?}", reading.estimate);
    }

    /// G9: A provider that keeps the limit is never cut, whatever its tokens look like and however many are in one
    /// event.
    #[test]
    fn an_honest_stream_is_never_cut(
        route in prop::sample::select(&ROUTES[..]),
        tokens in prop::collection::vec((0..TOKENS.len(), any::<bool>()), 1..200),
    ) {
        let mut pieces: Vec<OutputPiece> = vec![];
        for (token, joins) in &tokens {
            match pieces.last_mut().filter(|_| *joins) {
                Some(piece) => piece.text.push_str(TOKENS[*token]),
                None => pieces.push(OutputPiece::text(TOKENS[*token])),
            }
        }
        let stream = stream_events(route, &pieces).concat();
        let observer = showing_observer(route).with_allowance(call_allowance(tokens.len() as u64));
        let reading = ObserverReading::of(observer, stream.as_bytes(), []);
        prop_assert!(!reading.is_cut);
        prop_assert_eq!(reading.passed, stream.as_bytes());
    }
}

/// G9: A simulated stream of LiteLLM, in pieces of five characters for a model without streaming, is not cut either.
#[test]
fn an_honest_stream_in_pieces_smaller_than_tokens_is_not_cut() {
    // Text with 4.6 characters per token in o200k.
    let text = "The record rides in the response body, and it is settled when that is dropped. ";
    let text = text.repeat(50);
    let pieces: Vec<_> = text
        .as_bytes()
        .chunks(3)
        .map(|piece| OutputPiece::text(std::str::from_utf8(piece).unwrap()))
        .collect();
    for route in ROUTES {
        let granted = text.len() as u64 * 10 / 46;
        let stream = stream_events(route, &pieces).concat();
        let reading = ObserverReading::of(
            showing_observer(route).with_allowance(call_allowance(granted)),
            stream.as_bytes(),
            [],
        );
        assert!(!reading.is_cut, "{route:?}");
    }
}

/// G9: The amount that passes before a stream is cut is bounded as documented.
#[test]
fn the_overrun_is_bounded() {
    let english = ["The", " record", " rides", " in", " the", " response", " body", ",", " and"];
    let chinese = ["记录", "在", "响应", "体", "中", "，", "并", "随", "之"];
    let mut table = String::new();
    for (name, tokens, in_one) in [
        ("English, a token an event", english, 1),
        ("English, 20 tokens an event", english, 20),
        ("Chinese, a token an event", chinese, 1),
        ("Chinese, 20 tokens an event", chinese, 20),
        ("letters, 20 tokens an event", ["a"; 9], 20),
    ] {
        let tokens: Vec<_> = tokens.into_iter().cycle().take(20_000).collect();
        let pieces: Vec<_> =
            tokens.chunks(in_one).map(|run| OutputPiece::text(&run.concat())).collect();
        let stream = stream_events(GatewayRoute::ChatCompletions, &pieces).concat();
        let observer =
            showing_observer(GatewayRoute::ChatCompletions).with_allowance(call_allowance(1000));
        let reading = ObserverReading::of(observer, stream.as_bytes(), []);
        let text = String::from_utf8(reading.passed).unwrap();
        // The first event has no text, so it is subtracted.
        let passed = (text.matches("\"content\"").count() - 1) * in_one;
        writeln!(table, "{name:28} {passed}").unwrap();
    }
    assert_snapshot!(table, @r#"
    English, a token an event    2002
    English, 20 tokens an event  3440
    Chinese, a token an event    2002
    Chinese, 20 tokens an event  4380
    letters, 20 tokens an event  16020
    "#);
}

/// G9: A running count of the upstream is exact, so it cuts at once.
#[test]
fn a_running_count_cuts_at_once() {
    let chunk = |text: &str, output: u64| {
        format!(
            "data: {{\"id\":\"c\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}],\"usage\":{{\"prompt_tokens\":9,\"completion_tokens\":{output}}}}}\n\n"
        )
    };
    let events = [chunk("One", 1), chunk(" two", 2), chunk(" three", 3), chunk(" four", 4)];
    let observer =
        showing_observer(GatewayRoute::ChatCompletions).with_allowance(call_allowance(2));
    let reading = ObserverReading::of(observer, events.concat().as_bytes(), []);
    let told = String::from_utf8(reading.passed).unwrap();
    let end = told.strip_prefix(&events[..3].concat()).unwrap();
    assert_snapshot!(end, @r#"
    data: {"choices":[{"delta":{},"finish_reason":"length","index":0,"logprobs":null}],"created":null,"id":"c","model":null,"object":"chat.completion.chunk"}

    data: {"choices":[],"created":null,"id":"c","model":null,"object":"chat.completion.chunk","usage":{"completion_tokens":3,"prompt_tokens":9,"total_tokens":12}}

    data: [DONE]
    "#);
}

/// G9: A stream whose end arrives together with a count over the limit has ended and is not cut.
#[test]
fn a_stream_that_has_ended_is_not_cut() {
    for route in ROUTES {
        let stream = stream_events(route, &[OutputPiece::text("yes")]).concat();
        let stream = stream.replace("_tokens\":7", "_tokens\":70");
        let reading = ObserverReading::of(
            showing_observer(route).with_allowance(call_allowance(8)),
            stream.as_bytes(),
            [],
        );
        assert!(!reading.is_cut, "{route:?}");
        assert_eq!(reading.usage.unwrap().output, Tokens(70), "{route:?}");
    }
}

/// G9: The snapshots show the end of a cut stream in each protocol.
#[test]
fn a_stream_ends_as_by_a_model_at_its_limit() {
    let mut ends = String::new();
    for (route, cutoff) in ROUTES
        .into_iter()
        .flat_map(|route| [(route, CutoffMode::Graceful), (route, CutoffMode::Error)])
    {
        let pieces = ["a", "b", "c", "d"].map(OutputPiece::text);
        let stream = stream_events(route, &pieces).concat();
        let observer =
            showing_observer(route).with_allowance(CallAllowance { cutoff, ..call_allowance(1) });
        let reading = ObserverReading::of(observer, stream.as_bytes(), []);
        let told = String::from_utf8(reading.passed).unwrap();
        let kept = stream.bytes().zip(told.bytes()).take_while(|(one, other)| one == other).count();
        let start = told[..kept].rfind("\n\n").unwrap() + 2;
        writeln!(ends, "--- {} {cutoff:?}\n{}", route.name(), told[start..].trim_end()).unwrap();
    }
    assert_snapshot!(ends, @r#"
    --- chat_completions Graceful
    data: {"choices":[{"delta":{},"finish_reason":"length","index":0,"logprobs":null}],"created":17,"id":"c-1","model":"m","object":"chat.completion.chunk"}

    data: {"choices":[],"created":17,"id":"c-1","model":"m","object":"chat.completion.chunk","usage":{"completion_tokens":1,"prompt_tokens":5,"total_tokens":6}}

    data: [DONE]
    --- chat_completions Error
    data: {"error":{"code":"output_limit_reached","message":"output limit reached: this call was granted 1 tokens and the model went on","param":null,"type":"insufficient_quota"}}
    --- completions Graceful
    data: {"choices":[{"finish_reason":"length","index":0,"logprobs":null,"text":""}],"created":17,"id":"c-1","model":"m","object":"text_completion"}

    data: {"choices":[],"created":17,"id":"c-1","model":"m","object":"text_completion","usage":{"completion_tokens":1,"prompt_tokens":5,"total_tokens":6}}

    data: [DONE]
    --- completions Error
    data: {"error":{"code":"output_limit_reached","message":"output limit reached: this call was granted 1 tokens and the model went on","param":null,"type":"insufficient_quota"}}
    --- messages Graceful
    event: content_block_stop
    data: {"index":0,"type":"content_block_stop"}

    event: message_delta
    data: {"delta":{"stop_reason":"max_tokens","stop_sequence":null},"type":"message_delta","usage":{"output_tokens":1}}

    event: message_stop
    data: {"type":"message_stop"}
    --- messages Error
    event: error
    data: {"error":{"code":"output_limit_reached","message":"output limit reached: this call was granted 1 tokens and the model went on","type":"billing_error"},"type":"error"}
    --- responses Graceful
    event: response.output_text.done
    data: {"content_index":0,"item_id":"item_0","logprobs":[],"output_index":0,"sequence_number":7,"text":"abcd","type":"response.output_text.done"}

    event: response.content_part.done
    data: {"content_index":0,"item_id":"item_0","output_index":0,"part":{"annotations":[],"logprobs":[],"text":"abcd","type":"output_text"},"sequence_number":8,"type":"response.content_part.done"}

    event: response.output_item.done
    data: {"item":{"content":[{"annotations":[],"logprobs":[],"text":"abcd","type":"output_text"}],"id":"item_0","status":"incomplete","type":"message"},"output_index":0,"sequence_number":9,"type":"response.output_item.done"}

    event: response.incomplete
    data: {"response":{"created_at":17,"error":null,"id":"resp_1","incomplete_details":{"reason":"max_output_tokens"},"instructions":null,"metadata":{},"model":"m","object":"response","output":[{"content":[{"annotations":[],"logprobs":[],"text":"abcd","type":"output_text"}],"id":"item_0","status":"incomplete","type":"message"}],"parallel_tool_calls":true,"status":"incomplete","temperature":null,"tool_choice":"auto","tools":[],"top_p":null,"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":0},"output_tokens":1,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":6}},"sequence_number":10,"type":"response.incomplete"}
    --- responses Error
    event: response.failed
    data: {"response":{"created_at":17,"error":{"code":"insufficient_quota","message":"output limit reached: this call was granted 1 tokens and the model went on"},"id":"resp_1","incomplete_details":null,"instructions":null,"metadata":{},"model":"m","object":"response","output":[],"parallel_tool_calls":true,"status":"failed","temperature":null,"tool_choice":"auto","tools":[],"top_p":null,"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":0},"output_tokens":1,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":6}},"sequence_number":7,"type":"response.failed"}
    "#);
}

/// G9: A unary body arrives whole and is paid for as a whole, so it is never cut.
#[test]
fn a_unary_body_is_never_cut() {
    let text = "word ".repeat(1000);
    let body = format!(r#"{{"choices":[{{"index":0,"message":{{"content":"{text}"}}}}]}}"#);
    let reading = ObserverReading::of(
        unary_observer(GatewayRoute::ChatCompletions).with_allowance(call_allowance(1)),
        body.as_bytes(),
        [],
    );
    assert!(!reading.is_cut && reading.passed == body.as_bytes());
}

/// G9: Hidden reasoning was billed. A cut stream that reasoned is charged its full grant, not only the part that was
/// displayed.
#[test]
fn hidden_reasoning_is_charged_the_full_grant() {
    for route in [GatewayRoute::ChatCompletions, GatewayRoute::Messages, GatewayRoute::Responses] {
        let thought = OutputPiece { part: OutputPart::Thinking, ..OutputPiece::text("Hm") };
        let stream = stream_events(route, &[thought, OutputPiece::text("yes")]).concat();
        let observer = || showing_observer(route).with_allowance(call_allowance(100));
        let at = stream.find("yes").unwrap();
        let reading = ObserverReading::of(observer(), &stream.as_bytes()[..at], []);
        assert_eq!(reading.estimate, Tokens(u64::MAX), "{route:?}");
        let stream = stream_events(route, &[OutputPiece::text("yes")]).concat();
        let at = stream.find("yes").unwrap() + 20;
        let reading = ObserverReading::of(observer(), &stream.as_bytes()[..at], []);
        assert!(reading.estimate < Tokens(3), "{route:?}");
    }
}

/// G9: A limited stream is parsed, and still no frame costs an allocation.
#[test]
fn a_limited_frame_costs_no_allocation() {
    for (route, frame) in [
        (GatewayRoute::ChatCompletions, DELTA.to_owned()),
        (
            GatewayRoute::Messages,
            stream_events(GatewayRoute::Messages, &[OutputPiece::text("word")])[2].clone(),
        ),
        (GatewayRoute::Messages, "event: ping\ndata: {\"type\":\"ping\"}\n\n".to_owned()),
    ] {
        let mut observer = showing_observer(route).with_allowance(call_allowance(1_000_000));
        let frame = Bytes::from(frame.into_bytes());
        // The first frame teaches the observer the common pattern.
        let mut pass =
            || assert_eq!(observer.read_frame(frame.clone()).unwrap().len(), frame.len());
        pass();
        assert_eq!(
            allocations::count_allocations(|| (0..1000).for_each(|_| pass())),
            0,
            "{frame:?}"
        );
    }
}

/// G9: The data that a cut needs to close the items of a Responses stream is bounded. Past the bound, the stream is cut
/// with an error.
#[test]
fn the_data_that_a_cut_repeats_is_bounded() {
    let long = "x".repeat(4096);
    let pieces = vec![OutputPiece::text(&long); 400];
    let stream = stream_events(GatewayRoute::Responses, &pieces);
    let mut observer =
        showing_observer(GatewayRoute::Responses).with_allowance(call_allowance(100_000));
    let frames: Vec<_> =
        stream.iter().map(|event| Bytes::copy_from_slice(event.as_bytes())).collect();
    let mut last = Bytes::new();
    let peak = allocations::peak_bytes(|| {
        for frame in &frames {
            last = observer.read_frame(frame.clone()).unwrap();
            if observer.is_truncated() {
                break;
            }
        }
    });
    assert!(observer.is_truncated() && memchr::memmem::find(&last, b"response.failed").is_some());
    assert!(peak <= 3 << 20, "{peak} bytes at once");
}

/// Limits the observer so that it cuts at the first text.
pub(super) fn limit_to_first_text(observer: ResponseObserver) -> ResponseObserver {
    observer.with_allowance(call_allowance(0))
}

/// G9: An empty finish reason is no finish reason. Text after a real one counts, and is cut with an error.
#[test]
fn a_reason_to_finish_does_not_hide_what_comes_after_it() {
    for (reason, end) in
        [("\"\"", "data: [DONE]\n\n"), ("\"stop\"", "\"type\":\"insufficient_quota\"}}\n\n")]
    {
        let stream =
            stream_events(GatewayRoute::ChatCompletions, &vec![OutputPiece::text(" word"); 100])
                .concat();
        let stream =
            stream.replace("\"finish_reason\":null", &format!("\"finish_reason\":{reason}"));
        let observer =
            showing_observer(GatewayRoute::ChatCompletions).with_allowance(call_allowance(10));
        let reading = ObserverReading::of(observer, stream.as_bytes(), []);
        let told = String::from_utf8(reading.passed).unwrap();
        assert!(reading.is_cut && told.ends_with(end), "{reason}: {told}");
    }
}

/// G9: The gateway cannot know whether a choice that it does not follow is complete, so it cuts such a stream with an
/// error.
#[test]
fn more_choices_than_are_followed_are_cut_by_an_error() {
    for (choices, last) in
        [(128, "data: [DONE]\n\n"), (129, "\"type\":\"insufficient_quota\"}}\n\n")]
    {
        let piece = |choice| OutputPiece { choice, ..OutputPiece::text("a") };
        let pieces: Vec<_> = (0..choices).map(piece).collect();
        let stream = stream_events(GatewayRoute::ChatCompletions, &pieces).concat();
        let observer =
            showing_observer(GatewayRoute::ChatCompletions).with_allowance(call_allowance(10));
        let reading = ObserverReading::of(observer, stream.as_bytes(), []);
        assert!(reading.is_cut && reading.passed.ends_with(last.as_bytes()), "{choices}");
    }
}

/// Returns an observer that parses like a limited one and never cuts.
pub(super) fn unlimited_observer(route: GatewayRoute) -> ResponseObserver {
    showing_observer(route).with_allowance(call_allowance(u64::MAX))
}

pub(super) fn call_allowance(output: u64) -> CallAllowance {
    CallAllowance { input: Tokens(5), output: Tokens(output), cutoff: CutoffMode::Graceful }
}

/// Computes with JSON trees after how many events a stream is cut, and the state of the stream at that point.
fn cut_after(route: GatewayRoute, events: &[String], granted: u64) -> Option<(usize, SdkState)> {
    let mut client = SdkClient::new(route);
    for (before, event) in events.iter().enumerate() {
        client.read(event);
        let at_least = (client.pieces / 2).max(client.bytes / 16);
        if at_least > granted && client.state() != SdkState::Ended {
            return Some((before + 1, client.state()));
        }
    }
    None
}

pub(super) const ROUTES: [GatewayRoute; 4] = [
    GatewayRoute::ChatCompletions,
    GatewayRoute::Completions,
    GatewayRoute::Messages,
    GatewayRoute::Responses,
];

/// Tokens of one byte and of several; none is longer than 16 bytes in JSON.
const TOKENS: &[&str] =
    &["a", " the", "的", "😀", "\n\n", "\"", "                ", " characteristics", " भाषा"];
