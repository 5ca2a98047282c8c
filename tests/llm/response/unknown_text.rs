//! Tests of text in places that no protocol defines: it counts towards the cut and towards the estimate.

use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::response::{CallAllowance, CutoffMode, ResponseObserver};

use super::{ObserverReading, showing_observer};

/// Ten words, 50 bytes.
const WORDS: &str = "word word word word word word word word word word ";

/// Chunks with text in an unusual or unknown member.
const UNKNOWN: &[&str] = &[
    r#"data: {"choices":[{"index":0,"delta":{"zzz":"WORDS"}}]}"#,
    r#"data: {"choices":[{"index":0,"delta":{"content":"","zzz":{"deep":["WORDS"]}}}]}"#,
    r#"data: {"choices":[{"index":0,"delta":{"content":[{"type":"text","text":"WORDS"}]}}]}"#,
    r#"data: {"choices":[{"index":0,"delta":{"reasoning_details":[{"type":"reasoning.text","text":"WORDS"}]}}]}"#,
    r#"data: {"choices":[{"index":0,"message":{"content":"WORDS"}}]}"#,
    r#"data: {"choices":[{"index":"0","delta":{"content":"WORDS"}}]}"#,
    r#"data: {"data":{"choices":[{"index":0,"delta":{"content":"WORDS"}}]}}"#,
    r#"data: [{"choices":[{"index":0,"delta":{"content":"WORDS"}}]}]"#,
    r#"data: {"choices":[{"index":0,"delta":{"content":"WORDS"}}]"#,
    r#"data: {"choices":[{"index":0,"delta":{"content":"WORDS","content":""}}]}"#,
    r#"data: {"choices":[{"index":0,"delta":{"content":"","provider_specific_fields":{"zzz":"WORDS"}}}]}"#,
    "data: WORDS",
];

/// Chunks whose strings are not text of the answer.
const QUIET: &[&str] = &[
    ": WORDS",
    "id: WORDS\ndata: {}",
    "event: WORDS\ndata: {}",
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant"},"logprobs":{"content":[{"token":"WORDS"}]}}]}"#,
    r#"data: {"choices":[{"index":0,"delta":{"audio":{"id":"a","data":"WORDS"}}}]}"#,
    r#"data: {"choices":[{"index":0,"delta":{"images":[{"image_url":{"url":"WORDS"}}]}}]}"#,
    r#"data: {"choices":[{"index":0,"delta":{"annotations":[{"title":"WORDS"}]}}],"obfuscation":"WORDS"}"#,
    r#"data: {"choices":[],"x_groq":{"id":"WORDS"},"provider":"WORDS"}"#,
];

fn limited_observer(route: GatewayRoute) -> ResponseObserver {
    let allowance =
        CallAllowance { input: Tokens(5), output: Tokens(100), cutoff: CutoffMode::Graceful };
    showing_observer(route).with_allowance(allowance)
}

fn stream_with_event(event: &str) -> String {
    format!("{}\n\n", event.replace("WORDS", WORDS)).repeat(400)
}

/// G9, G15: A stream is cut at its grant, whichever member holds the text.
#[test]
fn text_of_unknown_form_is_cut_and_counted() {
    for event in UNKNOWN {
        let stream = stream_with_event(event);
        let seen = ObserverReading::of(
            showing_observer(GatewayRoute::ChatCompletions),
            stream.as_bytes(),
            [],
        );
        assert!(seen.at_least >= Tokens(400 * 50 / 16), "{event}: {:?}", seen.at_least);
        assert!(seen.estimate >= Tokens(400 * 50 / 3), "{event}: {:?}", seen.estimate);
        let cut = ObserverReading::of(
            limited_observer(GatewayRoute::ChatCompletions),
            stream.as_bytes(),
            [],
        );
        assert!(cut.is_cut, "{event}");
        let words = String::from_utf8(cut.passed).unwrap().matches("word").count();
        assert!(words <= 100 * 16 / 5 + 10, "{event}: {words} words have passed");
    }
}

/// G9: Framing, names and descriptions of the text do not count as text, so they cut no valid stream.
#[test]
fn framing_and_names_are_no_text() {
    for event in QUIET {
        let stream = stream_with_event(event);
        let reading = ObserverReading::of(
            limited_observer(GatewayRoute::ChatCompletions),
            stream.as_bytes(),
            [],
        );
        assert!(!reading.is_cut, "{event}");
        assert_eq!(reading.at_least, Tokens::ZERO, "{event}");
    }
}

/// G15: Images and audio are charged if no usage is reported, and do not cut a stream.
#[test]
fn media_are_charged_and_cut_nothing() {
    for (event, tokens) in [
        (
            r#"data: {"choices":[{"index":0,"delta":{"images":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}}]}"#,
            1290,
        ),
        (
            r#"data: {"choices":[{"index":0,"delta":{"content":"a","images":[{"image_url":{"url":"https://x"}},{"b64_json":"AAAA"}]}}]}"#,
            2580,
        ),
        (r#"data: {"choices":[{"index":0,"delta":{"images":["AAAA","AAAA"]}}]}"#, 2580),
        (r#"data: {"choices":[{"index":0,"delta":{"zzz":{"data":"iVBORw0KGgoAAAA"}}}]}"#, 1290),
        (
            r#"data: {"choices":[{"index":0,"delta":{"audio":{"id":"a","data":"WORDSWORDSWORDS"}}}]}"#,
            2,
        ),
        (r#"data: {"choices":[{"index":0,"delta":{"zzz":{"data":"WORDSWORDSWORDS"}}}]}"#, 2),
    ] {
        let stream = stream_with_event(event);
        // Text still cuts the stream.
        let cut = ObserverReading::of(
            limited_observer(GatewayRoute::ChatCompletions),
            stream.as_bytes(),
            [],
        );
        assert_eq!(cut.is_cut, event.contains(r#""content":"a""#), "{event}");
        let reading = ObserverReading::of(
            showing_observer(GatewayRoute::ChatCompletions),
            stream.as_bytes(),
            [],
        );
        assert!(reading.estimate >= Tokens(400 * tokens), "{event}: {:?}", reading.estimate);
        assert!(reading.estimate <= Tokens(400 * (tokens + 1)), "{event}: {:?}", reading.estimate);
    }
}

/// G9: Reasoning that an upstream sends under several names counts once.
#[test]
fn repeated_reasoning_counts_once() {
    let event = r#"data: {"choices":[{"index":0,"delta":{"content":"","reasoning":"WORDS","reasoning_content":"WORDS","reasoning_details":[{"type":"reasoning.text","text":"WORDS"}],"thinking_blocks":[{"thinking":"WORDS"}],"provider_specific_fields":{"reasoning_content":"WORDS","thought_signatures":["WORDS"]}}}]}"#;
    let stream = stream_with_event(event);
    let reading =
        ObserverReading::of(showing_observer(GatewayRoute::ChatCompletions), stream.as_bytes(), []);
    assert_eq!(reading.at_least, Tokens(400 * 50 / 16));
}

/// G9: A Responses stream may have its text only in its last event. Text that was streamed counts once.
#[test]
fn text_in_the_last_event_of_a_response_counts_once() {
    let words = WORDS.repeat(400);
    let delta = format!(r#"data: {{"type":"response.output_text.delta","delta":"{words}"}}"#);
    let last = format!(
        r#"data: {{"type":"response.completed","response":{{"instructions":"{words}{words}","output":[{{"type":"reasoning","id":"{words}","encrypted_content":"{words}","summary":[{{"text":"{words}"}}]}},{{"type":"message","content":[{{"type":"output_text","text":"{words}","annotations":[{{"title":"{words}"}}]}}]}},{{"type":"file_search_call","results":[{{"text":"{words}"}}]}}]}}}}"#
    );
    for stream in [format!("{last}\n\n"), format!("{delta}\n\n{last}\n\n")] {
        let reading =
            ObserverReading::of(showing_observer(GatewayRoute::Responses), stream.as_bytes(), []);
        assert_eq!(reading.at_least, Tokens(400 * 50 / 16));
    }
}

/// G9: The events of a Responses stream that repeat its text count if no delta has brought the text, and not twice.
#[test]
fn text_that_only_repeating_events_bring_counts_once() {
    let words = WORDS.repeat(400);
    let delta = format!(r#"data: {{"type":"response.output_text.delta","delta":"{words}"}}"#);
    let done = format!(
        r#"data: {{"type":"response.output_text.done","item_id":"i","text":"{words}"}}

data: {{"type":"response.content_part.done","part":{{"type":"output_text","text":"{words}","annotations":[]}}}}

data: {{"type":"response.output_item.done","item":{{"id":"i","type":"message","content":[{{"type":"output_text","text":"{words}"}}]}}}}"#
    );
    let item = done.rsplit("\n\n").next().unwrap().to_owned();
    let read = |stream: &str| {
        ObserverReading::of(showing_observer(GatewayRoute::Responses), stream.as_bytes(), [])
            .at_least
    };
    for stream in [format!("{item}\n\n"), format!("{done}\n\n"), format!("{delta}\n\n{done}\n\n")] {
        assert_eq!(read(&stream), Tokens(400 * 50 / 16));
    }
    // Each item brings its own text.
    assert_eq!(read(&format!("{item}\n\n{item}\n\n")), Tokens(2 * 400 * 50 / 16));
    // A summary is not the billed reasoning, and a call's result is not the model's.
    let summary = item.replace("\"content\"", "\"summary\"");
    let named =
        format!(r#"data: {{"type":"response.reasoning_summary_text.done","text":"{words}"}}"#);
    assert_eq!(read(&format!("{summary}\n\n{named}\n\n")), Tokens::ZERO);
}

/// G9: A long error is text. A short one, which says what went wrong, costs nothing.
#[test]
fn text_in_an_error_counts() {
    for (repeats, expected) in [(20, Tokens::ZERO), (400, Tokens(400 * 50 / 16))] {
        let words = WORDS.repeat(repeats);
        for (route, event) in [
            (GatewayRoute::Messages, r#"{"type":"error","error":{"message":"WORDS"}}"#),
            (GatewayRoute::Messages, r#"{"type":"message_stop","more":"WORDS"}"#),
            (GatewayRoute::Messages, r#"{"type":"ping","more":"WORDS"}"#),
            (GatewayRoute::Responses, r#"{"type":"error","message":"WORDS"}"#),
            (GatewayRoute::ChatCompletions, r#"{"error":{"message":"WORDS"}}"#),
        ] {
            let stream = format!("data: {}\n\n", event.replace("WORDS", &words));
            let reading = ObserverReading::of(showing_observer(route), stream.as_bytes(), []);
            let tokens = reading.at_least;
            // The error's type counts, too.
            let is_right = tokens >= expected && tokens.0 <= expected.0 + 1;
            assert!(is_right, "{route:?} {event}: {tokens:?}");
        }
    }
}

/// G9: An unknown delta in Messages and Responses counts as text. Tool results, citations and signatures do not.
#[test]
fn named_events_of_unknown_form_count() {
    for (route, event, counts) in [
        (
            GatewayRoute::Messages,
            r#"data: {"type":"content_block_delta","delta":{"type":"new_delta","zzz":"WORDS"}}"#,
            true,
        ),
        (GatewayRoute::Messages, r#"data: {"type":"new_event","zzz":"WORDS"}"#, true),
        (
            GatewayRoute::Messages,
            r#"data: {"type":"content_block_delta","delta":{"type":"signature_delta","signature":"WORDS"}}"#,
            false,
        ),
        (
            GatewayRoute::Messages,
            r#"data: {"type":"content_block_delta","delta":{"type":"citations_delta","citation":{"cited_text":"WORDS"}}}"#,
            false,
        ),
        (
            GatewayRoute::Messages,
            r#"data: {"type":"content_block_start","content_block":{"type":"web_search_tool_result","content":[{"title":"WORDS"}]}}"#,
            false,
        ),
        (
            GatewayRoute::Responses,
            r#"data: {"type":"response.new.delta","delta":{"zzz":"WORDS"}}"#,
            true,
        ),
        (GatewayRoute::Responses, r#"data: {"type":"new_event","zzz":"WORDS"}"#, true),
        (
            GatewayRoute::Responses,
            r#"data: {"type":"response.created","response":{"instructions":"WORDS"}}"#,
            false,
        ),
        (
            GatewayRoute::Responses,
            r#"data: {"type":"response.output_text.done","text":"WORDS"}"#,
            true,
        ),
    ] {
        let reading =
            ObserverReading::of(limited_observer(route), stream_with_event(event).as_bytes(), []);
        assert_eq!(!reading.at_least.is_zero(), counts, "{event}");
    }
}
