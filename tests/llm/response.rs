//! Tests of the response observer: what it reads, what it passes on, and what it costs.

mod client_disconnect;
mod event_pattern;
mod generated_streams;
mod output_limiter;
mod reference_reader;
mod unknown_text;

use std::fmt::Write;
use std::fs;

use bytes::Bytes;
use cogni_gateway::llm::budget::{Nanodollars, TokenUsage, Tokens};
use cogni_gateway::llm::protocol::{GatewayRoute, LlmProtocol};
use cogni_gateway::llm::response::{
    EventTooLargeError, MAX_EVENT_BYTES, ResponseFormat, ResponseObserver, StreamEnd,
    UsageChunkMode,
};
use insta::assert_snapshot;
use proptest::prelude::*;

use crate::support::allocations;

/// Everything that an observer reports about a response, and everything that it passes on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ObserverReading {
    usage: Option<TokenUsage>,
    so_far: Option<TokenUsage>,
    cost: Option<Nanodollars>,
    finish: StreamEnd,
    estimate: Tokens,
    at_least: Tokens,
    is_cut: bool,
    passed: Vec<u8>,
}

impl ObserverReading {
    /// Observes the response, split before each offset.
    fn of(
        mut observer: ResponseObserver,
        response: &[u8],
        cuts: impl IntoIterator<Item = usize>,
    ) -> Self {
        let response = Bytes::copy_from_slice(response);
        let mut passed = vec![];
        let mut from = 0;
        for to in cuts.into_iter().chain([response.len()]) {
            passed.extend(observer.read_frame(response.slice(from..to)).unwrap());
            from = to;
        }
        passed.extend(observer.end_of_body().unwrap_or_default());
        Self {
            usage: observer.reported_usage(),
            so_far: observer.partial_usage(),
            cost: observer.reported_cost(),
            finish: observer.stream_end(),
            estimate: observer.output_estimate(),
            at_least: observer.output_lower_bound(),
            is_cut: observer.is_truncated(),
            passed,
        }
    }
}

/// G7: The observer reads usage, cost and the kind of end from the streams of all three protocols.
#[test]
fn each_recorded_stream_reports_its_usage_and_its_end() {
    let mut table = String::new();
    for (name, route, stream) in read_fixtures() {
        let reading = ObserverReading::of(showing_observer(route), &stream, []);
        assert_eq!(reading.passed, stream, "{name}");
        writeln!(table, "{name:20} {}", format_reading(&reading)).unwrap();
    }
    assert_snapshot!(table, @r"
    chat_cut             Unfinished: unknown
    chat_error           Errored: unknown
    chat_litellm_claude  Terminated: 19 in, 7 out, 5 read, 3 written, $0.00005025
    chat_no_usage        Terminated: unknown
    chat_running_usage   Terminated: 9 in, 3 out
    chat_tool_calls      Terminated: 301 in, 22 out
    chat_usage_chunk     Terminated: 2048 in, 130 out, 1024 read, 128 reasoning
    chat_usage_on_finish Terminated: 12 in, 1 out
    chat_wild_lines      Terminated: 6 in, 2 out
    chat_wrong_counts    Terminated: 40 in, 4 out, 40 read, 2 reasoning
    completions          Terminated: 3 in, 2 out
    messages_bridged     Terminated: 14 in, 2 out
    messages_cache       Terminated: 19 in, 31 out, 5 read, 3 written
    messages_error       Errored: unknown
    responses_completed  Terminated: 310 in, 72 out, 256 read, 64 reasoning
    responses_error      Errored: unknown
    responses_failed     Terminated: unknown
    responses_unnamed    Terminated: 15 in, 16 out, $0.000021
    ");
}

/// G7: Wherever a stream is split, and whatever its line ends are, the observer reports the same and changes no byte.
#[test]
fn a_stream_split_at_any_byte_is_read_alike() {
    for (name, route, stream) in read_fixtures().into_iter().flat_map(with_line_ends) {
        for observer in [showing_observer, hiding_observer] {
            let whole = ObserverReading::of(observer(route), &stream, []);
            for cut in 0..=stream.len() {
                let split = ObserverReading::of(observer(route), &stream, [cut]);
                assert_eq!(split, whole, "{name} cut at {cut}");
            }
            let bytewise = ObserverReading::of(observer(route), &stream, 0..stream.len());
            assert_eq!(bytewise, whole, "{name}, byte by byte");
        }
    }
}

#[test]
fn the_line_end_does_not_matter() {
    for (name, route, stream) in read_fixtures() {
        // These fixtures have mixed line ends already, or their last line has none.
        if ["chat_wild_lines", "chat_cut"].contains(&&*name) {
            continue;
        }
        let told_with = |(_, route, stream): (String, GatewayRoute, Vec<u8>)| {
            format_reading(&ObserverReading::of(showing_observer(route), &stream, []))
        };
        let expected = told_with((name.clone(), route, stream.clone()));
        for variant in with_line_ends((name.clone(), route, stream)) {
            assert_eq!(told_with(variant.clone()), expected, "{}", variant.0);
        }
    }
}

/// G7: The usage chunk that the client did not ask for is hidden; every other byte passes unchanged.
#[test]
fn only_the_usage_chunk_is_hidden() {
    for (name, route, stream) in read_fixtures() {
        // In all other streams the chunks end in the same way.
        if name == "chat_wild_lines" {
            continue;
        }
        let text = String::from_utf8(stream).unwrap();
        let is_shown = |event: &&str| {
            route.protocol() != LlmProtocol::Chat
                || !USAGE_CHUNK.iter().any(|chunk| event.contains(chunk))
        };
        let expected: String = text.split_inclusive("\n\n").filter(is_shown).collect();
        let reading = ObserverReading::of(hiding_observer(route), text.as_bytes(), []);
        assert_eq!(String::from_utf8(reading.passed.clone()).unwrap(), expected, "{name}");
        assert_eq!(
            format_reading(&reading),
            format_reading(&ObserverReading::of(showing_observer(route), text.as_bytes(), [])),
            "{name}"
        );
    }
}

/// G7: The usage chunk is hidden completely if it has many lines with different line ends.
#[test]
fn the_usage_chunk_is_hidden_with_all_its_lines() {
    let (_, route, stream) = read_fixture("chat_wild_lines");
    let text = String::from_utf8(stream).unwrap();
    let (before, chunk) = text.split_at(text.find("id: 2").unwrap());
    let (chunk, after) = chunk.split_at(chunk.find(":\rdata: [DONE]").unwrap());
    assert_eq!(chunk.lines().count(), 7);
    let reading = ObserverReading::of(hiding_observer(route), text.as_bytes(), []);
    assert_eq!(String::from_utf8(reading.passed).unwrap(), format!("{before}{after}"));
}

/// G7: A frame from which nothing is removed is passed on without a copy, also after the usage filter.
#[test]
fn a_frame_from_which_nothing_is_taken_is_not_copied() {
    for observer in [showing_observer, hiding_observer] {
        let mut observer = observer(GatewayRoute::ChatCompletions);
        for frame in [DELTA, &DELTA.repeat(3), ": ping\n\n", "\n", "data: {\"choices\":[{\"del"] {
            let frame = Bytes::copy_from_slice(frame.as_bytes());
            let passed = observer.read_frame(frame.clone()).unwrap();
            assert_eq!((passed.as_ptr(), passed.len()), (frame.as_ptr(), frame.len()));
        }
    }
}

/// G7: Bytes are held back only while they may be the beginning of the usage chunk.
#[test]
fn bytes_are_held_back_only_while_they_may_be_the_usage_chunk() {
    let mut observer = hiding_observer(GatewayRoute::ChatCompletions);
    let mut frame = |text: &str| {
        let passed = observer.read_frame(Bytes::copy_from_slice(text.as_bytes())).unwrap();
        String::from_utf8(passed.into()).unwrap()
    };
    assert_eq!(frame(": pi"), ": pi", "a comment, even without its end");
    assert_eq!(frame("ng\ndata: {\"id\":1,\"choi"), "ng\n", "this may be the chunk");
    assert_eq!(frame("ces\":[ "), "", "it still may");
    assert_eq!(frame("{\"index\""), "data: {\"id\":1,\"choices\":[ {\"index\"", "it is not");
    assert_eq!(frame(":0}]}\n\ndata: {}\n\nd"), ":0}]}\n\ndata: {}\n\n");
    assert_eq!(frame("ata: {\"choices\":[],\"usage\":{}}\n"), "");
    assert_eq!(frame("\r"), "", "the chunk has ended");
    assert_eq!(frame("\ndata: [DONE]\n\n"), "data: [DONE]\n\n", "its line feed went with it");
    let long = format!("data: {{\"id\":\"{}", "x".repeat(20_000));
    assert_eq!(frame(&long), long, "no usage chunk is as long");
}

#[test]
fn an_event_that_lacks_only_its_empty_line_is_read_at_the_end() {
    for (stream, passed) in [
        ("data: [DONE]", "data: [DONE]"),
        ("data: [DONE]\n", "data: [DONE]\n"),
        ("data: [DONE]\r", "data: [DONE]\r"),
    ] {
        for observer in [showing_observer, hiding_observer] {
            let reading =
                ObserverReading::of(observer(GatewayRoute::ChatCompletions), stream.as_bytes(), []);
            assert_eq!(reading.finish, StreamEnd::Terminated);
            assert_eq!(reading.passed, passed.as_bytes());
        }
    }
    let usage = b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":1}}";
    let reading = ObserverReading::of(hiding_observer(GatewayRoute::ChatCompletions), usage, []);
    assert_eq!(
        (format_reading(&reading).as_str(), reading.passed),
        ("Unfinished: 5 in, 1 out", vec![])
    );
}

/// G7: A Messages stream that was cut has reported its input tokens, but not its output tokens.
#[test]
fn a_cut_messages_stream_still_reports_its_exact_input() {
    let (_, route, stream) = read_fixture("messages_cache");
    let cut = memchr::memmem::find(&stream, b"event: message_delta").unwrap();
    let reading = ObserverReading::of(showing_observer(route), &stream[..cut], []);
    assert_eq!(reading.usage, None);
    let input = reading.so_far.unwrap();
    assert_eq!(
        (input.input.0, input.cache_read.0, input.cache_write.0, input.output.0),
        (19, 5, 3, 0)
    );
}

/// G7, G9: The observer reads usage from unary bodies of all routes, wherever it is in the body. A `usage` inside a
/// tool's arguments is ignored.
#[test]
fn usage_is_read_from_unary_bodies() {
    let mut table = String::new();
    for (name, route, body) in BODIES {
        let whole = ObserverReading::of(unary_observer(*route), body.as_bytes(), []);
        for cut in 0..=body.len() {
            assert_eq!(
                ObserverReading::of(unary_observer(*route), body.as_bytes(), [cut]),
                whole,
                "{name} cut at {cut}"
            );
        }
        assert_eq!(
            ObserverReading::of(unary_observer(*route), body.as_bytes(), 0..body.len()),
            whole,
            "{name}"
        );
        assert_eq!(whole.passed, body.as_bytes(), "{name}");
        writeln!(table, "{name:20} {}", format_reading(&whole)).unwrap();
    }
    assert_snapshot!(table, @r"
    chat                 Terminated: 11 in, 7 out, 4 read, 6 reasoning, $0.0000315
    chat, usage first    Terminated: 1 in, 2 out
    chat, no usage       Terminated: unknown
    chat, zero usage     Terminated: unknown
    chat, half a usage   Terminated: unknown
    chat, cut            Unfinished: unknown
    completions          Terminated: 3 in, 1 out
    embeddings           Terminated: 8 in, 0 out
    embeddings, total    Terminated: 8 in, 0 out
    embeddings, no input Terminated: 8 in, 0 out
    messages             Terminated: 19 in, 7 out, 5 read, 3 written
    messages, error      Errored: unknown
    count_tokens         Terminated: unknown
    responses            Terminated: 15 in, 6 out, 8 read, 5 reasoning
    models               Terminated: unknown
    a value not ended    Terminated: 5 in, 2 out
    not JSON             Terminated: unknown
    ");
}

/// G7: An event of 64 MiB without an end is refused when it reaches the bound.
#[test]
fn an_endless_event_is_cut_at_the_bound() {
    for mut observer in
        [showing_observer(GatewayRoute::Responses), hiding_observer(GatewayRoute::ChatCompletions)]
    {
        let mut frames = 0;
        let peak = allocations::peak_bytes(|| {
            let frame = Bytes::from(vec![b'x'; 64 * 1024]);
            while observer.read_frame(frame.clone()).is_ok() {
                frames += 1;
                assert!(frames < 1024, "64 MiB have passed");
            }
        });
        assert_eq!(frames, MAX_EVENT_BYTES / (64 * 1024));
        // The last growth step of the buffer holds the half and the whole at the same time.
        assert!(peak <= MAX_EVENT_BYTES as u64 * 3 / 2 + 128 * 1024, "{peak} bytes at once");
    }
}

/// G7: The bound applies to the event, however its bytes arrive.
#[test]
fn an_event_of_the_largest_size_passes_and_one_byte_more_does_not() {
    let mut stream = vec![b'x'; MAX_EVENT_BYTES - 2];
    stream.extend(b"\n\n");
    let long: Bytes = [b"x", stream.as_slice()].concat().into();
    let comment: Bytes = [b": comment", stream.as_slice()].concat().into();
    let stream = Bytes::from(stream);
    let read = |stream: &Bytes, cut| {
        let mut observer = showing_observer(GatewayRoute::ChatCompletions);
        observer.read_frame(stream.slice(..cut))?;
        observer.read_frame(stream.slice(cut..)).map(drop)
    };
    for cut in [0, 1, MAX_EVENT_BYTES - 2, MAX_EVENT_BYTES - 1] {
        assert_eq!(read(&stream, cut), Ok(()), "cut at {cut}");
        assert_eq!(read(&long, cut), Err(EventTooLargeError), "cut at {cut}");
        assert_eq!(read(&comment, cut), Ok(()), "a comment cut at {cut}");
    }
}

/// G7: Comments and unary bodies are not stored, so they need no bound.
#[test]
fn comments_and_unary_bodies_are_not_stored() {
    for (mut observer, head) in [
        (showing_observer(GatewayRoute::ChatCompletions), ": "),
        (hiding_observer(GatewayRoute::ChatCompletions), ": "),
        (unary_observer(GatewayRoute::Embeddings), "{\"data\":[\""),
    ] {
        let frame = Bytes::from_static(SEVENS);
        let peak = allocations::peak_bytes(|| {
            observer.read_frame(Bytes::from_static(head.as_bytes())).unwrap();
            for _ in 0..160 {
                observer.read_frame(frame.clone()).unwrap();
            }
        });
        // A unary body in pieces has one scanner, whatever its length.
        assert!(peak <= SCANNER_BYTES, "{peak} bytes after {head:?}");
    }
}

/// G7: The observer allocates nothing for a frame.
#[test]
fn a_frame_costs_no_allocation() {
    let streams = [
        (showing_observer(GatewayRoute::ChatCompletions), DELTA, 1),
        (hiding_observer(GatewayRoute::ChatCompletions), DELTA, 1),
        (
            showing_observer(GatewayRoute::Messages),
            "event: content_block_delta\ndata: {\"type\":\"content_block_delta\"}\n\n",
            1,
        ),
        (
            showing_observer(GatewayRoute::Responses),
            "event: response.output_text.delta\r\ndata: {\"delta\":\"x\"}\r\n\r\n",
            1,
        ),
        (
            showing_observer(GatewayRoute::Responses),
            "data: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n",
            1,
        ),
        // The frame is split in the middle: the carried-over part reuses the first buffer.
        (showing_observer(GatewayRoute::ChatCompletions), DELTA, 2),
    ];
    for (mut observer, event, pieces) in streams {
        let event = Bytes::from(event.to_owned().into_bytes());
        let cut = event.len() / pieces;
        let frames = [event.slice(..cut), event.slice(cut..)];
        let mut pass = || {
            for frame in &frames {
                assert_eq!(observer.read_frame(frame.clone()).unwrap().len(), frame.len());
            }
        };
        pass();
        assert_eq!(
            allocations::count_allocations(|| (0..1000).for_each(|_| pass())),
            0,
            "{event:?}"
        );
    }
}

#[test]
fn an_observer_is_small() {
    assert!(size_of::<ResponseObserver>() <= 232, "{} bytes", size_of::<ResponseObserver>());
}

/// G7: The beginning of an event decides the same way however the event is split, even if a form that clients would
/// ignore is kept. The property test below found this case.
#[test]
fn an_event_that_begins_with_other_choices_goes_on() {
    let stream =
        b"\xef\xbb\xbf\xef\xbb\xbfdata: {\"choices\":[{}]}\ndata:{\"choices\":[],\"usage\":{}}\n\n";
    for cut in 0..stream.len() {
        let reading =
            ObserverReading::of(hiding_observer(GatewayRoute::ChatCompletions), stream, [cut]);
        assert_eq!(reading.passed, stream, "cut at {cut}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    /// G7: The observer agrees with a parser that follows the WHATWG text and uses a JSON tree.
    #[test]
    fn streams_are_read_as_the_reference_reads_them(
        route in prop::sample::select(&[GatewayRoute::ChatCompletions, GatewayRoute::Responses, GatewayRoute::Messages][..]),
        stream in generated_streams::any_stream(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        hides in any::<bool>(),
    ) {
        let observer = if hides { hiding_observer(route) } else { showing_observer(route) };
        let reading = ObserverReading::of(observer, &stream, sorted_offsets(&cuts, stream.len()));
        let expected = reference_reader::read_stream(route, hides, &stream);
        prop_assert_eq!(reading.finish, expected.finish);
        prop_assert_eq!(reading.so_far, expected.so_far);
        prop_assert_eq!(String::from_utf8_lossy(&reading.passed), String::from_utf8_lossy(&expected.passed));
    }

    /// G7: Random bytes are read alike however they are split.
    #[test]
    fn noise_is_read_alike_however_it_is_split(
        route in prop::sample::select(&GatewayRoute::ALL[..]),
        stream in generated_streams::any_noise(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let limited = |route| output_limiter::limit_to_first_text(showing_observer(route));
        let limited_hidden = |route| output_limiter::limit_to_first_text(hiding_observer(route));
        let observers: [&dyn Fn(GatewayRoute) -> ResponseObserver; 5] =
            [&showing_observer, &hiding_observer, &unary_observer, &limited, &limited_hidden];
        for observer in observers {
            let whole = ObserverReading::of(observer(route), &stream, []);
            let split = ObserverReading::of(observer(route), &stream, sorted_offsets(&cuts, stream.len()));
            prop_assert_eq!(&split, &whole);
        }
        prop_assert_eq!(ObserverReading::of(showing_observer(route), &stream, []).passed, stream.to_vec());
    }

    /// G7: The observer reads only the top level of a unary body.
    #[test]
    fn bodies_are_read_as_the_reference_reads_them(
        route in prop::sample::select(&GatewayRoute::ALL[..]),
        body in generated_streams::any_body(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let reading = ObserverReading::of(unary_observer(route), &body, sorted_offsets(&cuts, body.len()));
        let expected = reference_reader::read_body(route, &body);
        prop_assert_eq!((reading.finish, reading.so_far), (expected.finish, expected.so_far));
    }
}

fn showing_observer(route: GatewayRoute) -> ResponseObserver {
    ResponseObserver::new(route, ResponseFormat::Sse, UsageChunkMode::Show)
}

fn hiding_observer(route: GatewayRoute) -> ResponseObserver {
    ResponseObserver::new(route, ResponseFormat::Sse, UsageChunkMode::Hide)
}

fn unary_observer(route: GatewayRoute) -> ResponseObserver {
    ResponseObserver::new(route, ResponseFormat::Json, UsageChunkMode::Show)
}

fn read_fixture(name: &str) -> (String, GatewayRoute, Vec<u8>) {
    read_fixtures().into_iter().find(|fixture| fixture.0 == name).unwrap()
}

/// Returns name, route and bytes of each file in `tests/fixtures`, sorted by name.
fn read_fixtures() -> Vec<(String, GatewayRoute, Vec<u8>)> {
    let mut found: Vec<_> = fs::read_dir("tests/fixtures")
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "sse"))
        .map(|path| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let route = match name.split('_').next().unwrap() {
                "completions" => GatewayRoute::Completions,
                "responses" => GatewayRoute::Responses,
                "messages" => GatewayRoute::Messages,
                _ => GatewayRoute::ChatCompletions,
            };
            (name, route, fs::read(path).unwrap())
        })
        .collect();
    found.sort_by(|one, other| one.0.cmp(&other.0));
    assert!(found.len() >= 18, "the recorded streams are in tests/fixtures");
    found
}

/// Returns the stream unchanged, with each kind of line end, and with a byte order mark.
fn with_line_ends(
    (name, route, stream): (String, GatewayRoute, Vec<u8>),
) -> Vec<(String, GatewayRoute, Vec<u8>)> {
    let text = String::from_utf8(stream).unwrap();
    [
        ("", text.clone()),
        (" CR LF", text.replace('\n', "\r\n")),
        (" CR", text.replace('\n', "\r")),
        (" BOM", format!("\u{feff}{text}")),
    ]
    .map(|(variant, text)| (format!("{name}{variant}"), route, text.into_bytes()))
    .into()
}

/// Formats a reading for a failure message.
fn format_reading(reading: &ObserverReading) -> String {
    let usage = reading.usage.map_or_else(
        || "unknown".to_owned(),
        |usage| {
            let more = [
                ("read", usage.cache_read),
                ("written", usage.cache_write),
                ("reasoning", usage.reasoning),
            ];
            let more = more.iter().filter(|(_, tokens)| !tokens.is_zero());
            more.fold(
                format!("{} in, {} out", usage.input.0, usage.output.0),
                |told, (name, tokens)| format!("{told}, {} {name}", tokens.0),
            )
        },
    );
    let cost = reading.cost.map_or_else(String::new, |cost| format!(", ${cost}"));
    format!("{:?}: {usage}{cost}", reading.finish)
}

/// Converts indexes to sorted offsets.
fn sorted_offsets(cuts: &[prop::sample::Index], length: usize) -> Vec<usize> {
    let mut offsets: Vec<_> = cuts.iter().map(|cut| cut.index(length + 1)).collect();
    offsets.sort_unstable();
    offsets
}

/// The usage chunks of the fixtures contain these texts, and no other chunk does.
const USAGE_CHUNK: &[&str] = &[r#""choices":[],"usage":{"#, r#""choices": [ ], "usage": {"#];

/// The bytes are static, so that sharing them allocates nothing.
static SEVENS: &[u8] = &[b'7'; 64 * 1024];

const DELTA: &str = "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}],\"usage\":null}\n\n";

/// Unary bodies: chat, tool calls, LiteLLM's cost, an error, and bodies of the other routes.
const BODIES: &[(&str, GatewayRoute, &str)] = &[
    (
        "chat",
        GatewayRoute::ChatCompletions,
        r#"{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"{\"usage\":{}}\\"},"finish_reason":"stop"}],"usage":{"prompt_tokens":11,"completion_tokens":7,"total_tokens":18,"prompt_tokens_details":{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":6},"cost":3.15e-05},"service_tier":"default"}"#,
    ),
    (
        "chat, usage first",
        GatewayRoute::ChatCompletions,
        "{ \"usage\" : { \"completion_tokens\" : 2 , \"prompt_tokens\" : 1 }\n, \"choices\" : [ ] }\n",
    ),
    ("chat, no usage", GatewayRoute::ChatCompletions, r#"{"id":"c","choices":[],"usage":null}"#),
    (
        "chat, zero usage",
        GatewayRoute::ChatCompletions,
        r#"{"id":"c","choices":[],"usage":{"prompt_tokens":0,"completion_tokens":0}}"#,
    ),
    (
        "chat, half a usage",
        GatewayRoute::ChatCompletions,
        r#"{"id":"c","choices":[],"usage":{"prompt_tokens":9}}"#,
    ),
    (
        "chat, cut",
        GatewayRoute::ChatCompletions,
        r#"{"id":"c","choices":[{"index":0,"message":{"role":"assist"#,
    ),
    (
        "completions",
        GatewayRoute::Completions,
        r#"{"choices":[{"text":"x","logprobs":{"tokens":["usage"]}}],"usage":{"prompt_tokens":3,"completion_tokens":1}}"#,
    ),
    (
        "embeddings",
        GatewayRoute::Embeddings,
        r#"{"object":"list","data":[{"object":"embedding","index":0,"embedding":[-0.017358398,0.0042610168,1e-9,0.25,-0.125]}],"model":"e","usage":{"prompt_tokens":8,"total_tokens":8}}"#,
    ),
    (
        "embeddings, total",
        GatewayRoute::Embeddings,
        r#"{"data":[{"embedding":[0.25]}],"usage":{"total_tokens":8}}"#,
    ),
    (
        "embeddings, no input",
        GatewayRoute::Embeddings,
        r#"{"data":[{"embedding":[0.25]}],"usage":{"prompt_tokens":0,"total_tokens":8}}"#,
    ),
    (
        "messages",
        GatewayRoute::Messages,
        r#"{"type":"message","usage":{"input_tokens":11,"cache_creation_input_tokens":3,"cache_creation":{"ephemeral_5m_input_tokens":1,"ephemeral_1h_input_tokens":2},"cache_read_input_tokens":5,"output_tokens":7},"content":[{"type":"tool_use","input":{"usage":{"input_tokens":0,"output_tokens":0},"error":{}}}]}"#,
    ),
    (
        "messages, error",
        GatewayRoute::Messages,
        r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#,
    ),
    ("count_tokens", GatewayRoute::CountTokens, r#"{"input_tokens":10}"#),
    (
        "responses",
        GatewayRoute::Responses,
        r#"{"error":null,"tools":[{"parameters":{"usage":{"input_tokens":0}}}],"usage":{"input_tokens":15,"input_tokens_details":{"cached_tokens":8},"output_tokens":6,"output_tokens_details":{"reasoning_tokens":5}}}"#,
    ),
    ("models", GatewayRoute::Models, r#"{"data":[{"id":"m","object":"model"}],"object":"list"}"#),
    (
        "a value not ended",
        GatewayRoute::Completions,
        r#"{"usage":7]{"usage":{"prompt_tokens":5,"completion_tokens":2}}"#,
    ),
    ("not JSON", GatewayRoute::ChatCompletions, r#"]}{"usage" "usage": , {"a":1}}} {"error"#),
];

/// The most bytes that the observer of a response allocates beside its own. Our choice: one small value.
const SCANNER_BYTES: u64 = 128;
