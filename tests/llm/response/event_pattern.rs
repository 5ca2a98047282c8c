//! Tests of event patterns: an event whose pattern is known is read at once, and gives the same result as reading byte
//! by byte without patterns.

use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::response::{CallAllowance, CutoffMode, ResponseObserver};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::{ObserverReading, hiding_observer, read_fixtures, showing_observer, sorted_offsets};

/// Events by protocol; `TEXT`, `PAD` and `NUMBER` stand for the variable parts.
const CHAT: &[&str] = &[
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"TEXT"},"finish_reason":null}],"usage":null}"#,
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"TEXT"},"finish_reason":null}]}"#,
    r#"data: {"id":"c","choices":[{"index":1,"delta":{"content":"TEXT","role":"assistant"}}]}"#,
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"","reasoning_content":"TEXT"}}]}"#,
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"TEXT"}}]}}]}"#,
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"TEXT"},"finish_reason":"stop"}]}"#,
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"TEXT"}},{"index":1,"delta":{}}]}"#,
    r#"data: {"choices":[{"delta":{"thinking_blocks":[{"thinking":"TEXT"}],"reasoning_content":"TEXT"}}]}"#,
    r#"data: {"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":NUMBER}}"#,
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"TEXT","zzz":"TEXT"}}]}"#,
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"TEXT","zzz":"word"}}]}"#,
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":[{"type":"text","text":"TEXT"}]}}]}"#,
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"reasoning_content":"TEXT","reasoning":"a","reasoning_details":[{"text":"TEXT"}]}}]}"#,
    r#"data: {"delta":"TEXT","zzz":"word","choices":[{"index":0,"message":{"content":"TEXT"}}]}"#,
    r#"data: {"choices":[{"index":0,"id":{"delta":{"content":"TEXT"}},"zzz":"word"}]}"#,
    "data: [DONE]",
];

const MESSAGES: &[&str] = &[
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":3,\"output_tokens\":1}}}",
    r#"data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#,
    r#"data: {"type":"content_block_start","index":1,"content_block":{"type":"tool_use","name":"f"}}"#,
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"TEXT\"}}",
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"TEXT\"}}",
    "event: content_block_delta\ndata:{\"type\":\"content_block_delta\",\"index\":1,\"delta\":{\"type\":\"input_json_delta\",\"partial_json\":\"TEXT\"}}",
    r#"data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"TEXT"}}"#,
    r#"data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"TEXT","partial_json":"TEXT"}}"#,
    r#"data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"TEXT","zzz":"word"}}"#,
    r#"data: {"type":"content_block_stop","index":0}"#,
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":NUMBER}}",
];

const RESPONSES: &[&str] = &[
    r#"data: {"type":"response.created","sequence_number":0,"response":{"id":"r","created_at":1,"model":"m"}}"#,
    r#"data: {"type":"response.output_item.added","sequence_number":NUMBER,"output_index":0,"item":{"id":"i","type":"message"}}"#,
    r#"data: {"type":"response.content_part.added","sequence_number":NUMBER,"output_index":0,"content_index":0,"part":{"type":"output_text"}}"#,
    "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":NUMBER,\"item_id\":\"i\",\"output_index\":0,\"content_index\":0,\"delta\":\"TEXT\",\"logprobs\":[],\"obfuscation\":\"PAD\"}",
    "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"sequence_number\":NUMBER,\"item_id\":\"i\",\"output_index\":0,\"content_index\":0,\"delta\":\"TEXT\",\"logprobs\":[],\"obfuscation\":\"PAD\"}",
    r#"data: {"delta":"TEXT","item_id":"i","type":"response.output_text.delta","sequence_number":NUMBER}"#,
    r#"data: {"type":"response.output_text.delta","output_index":0,"delta":"TEXT","x":{"sequence_number":NUMBER,"delta":"TEXT"}}"#,
    r#"data: {"type":"response.output_text.delta","output_index":0,"delta":"TEXT","zzz":"word"}"#,
    r#"data: {"type":"response.function_call_arguments.delta","sequence_number":NUMBER,"output_index":1,"delta":"TEXT"}"#,
    r#"data: {"type":"response.reasoning_summary_text.delta","sequence_number":NUMBER,"delta":"TEXT"}"#,
    r#"data: {"type":"response.output_item.done","sequence_number":NUMBER,"output_index":0,"item":{"id":"i","type":"message"}}"#,
];

/// Contents of strings, valid and invalid.
const TEXTS: &[&str] = &[
    " word",
    "a",
    "",
    "漢字",
    "é",
    "usage",
    "delta",
    "error",
    "[DONE]",
    r"\n",
    r#"\"usage\":{}"#,
    r"\u00e9",
    r"\ud83d\ude00",
    r"\ud83d",
    r"\x",
    r"\",
    "\"",
    "\t",
    "\u{7f}",
    "\",\"usage\":{\"completion_tokens\":9},\"x\":\"",
    "sixteen bytes and some more than that, to be cut by their length alone",
];

const NUMBERS: &[&str] = &[
    "0",
    "7",
    "12",
    "300",
    "007",
    "-1",
    "1.5",
    "1e3",
    "null",
    "99999999999999999999",
    "\"7\"",
    "",
];

fn any_stream() -> impl Strategy<Value = (GatewayRoute, String)> {
    let protocol = select(vec![
        (GatewayRoute::ChatCompletions, CHAT),
        (GatewayRoute::Messages, MESSAGES),
        (GatewayRoute::Responses, RESPONSES),
    ]);
    protocol.prop_flat_map(|(route, events)| {
        let usual = prop_oneof![8 => Just(0_usize..4), 1 => Just(0..TEXTS.len())];
        let text = usual.prop_flat_map(|range| range).prop_map(|at| TEXTS[at]);
        let number = prop_oneof![8 => select(&NUMBERS[..4]), 1 => select(NUMBERS)];
        let end = prop_oneof![12 => Just("\n\n"), 1 => select(vec!["\r\n\r\n", "\r\r", "\n", "\n\n\n", "\nid: 7\n\n", "\n: x\n\n"])];
        let run = (select(events), vec((text, number, end), 1..6)).prop_map(|(event, runs)| {
            runs.iter()
                .map(|(text, number, end)| {
                    let event = event.replace("TEXT", text).replace("PAD", text);
                    event.replace("NUMBER", number) + end
                })
                .collect::<String>()
        });
        (Just(route), vec(run, 1..8).prop_map(|runs| runs.concat()))
    })
}

/// Returns observers of every kind; the limited ones are granted this many tokens.
fn all_observers(route: GatewayRoute, granted: u64) -> [ResponseObserver; 4] {
    let allowance =
        CallAllowance { input: Tokens(5), output: Tokens(granted), cutoff: CutoffMode::Graceful };
    [
        showing_observer(route),
        hiding_observer(route),
        showing_observer(route).with_allowance(allowance),
        hiding_observer(route).with_allowance(allowance),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// G7, G9: An event that matches a known pattern gives the same result as the same event read byte by byte.
    #[test]
    fn a_known_event_is_read_as_byte_by_byte(
        (route, stream) in any_stream(),
        granted in 0_u64..30,
        cuts in vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let stream = stream.as_bytes();
        let slow = all_observers(route, granted).map(|observer| ObserverReading::of(observer, stream, 0..stream.len()));
        let whole = all_observers(route, granted).map(|observer| ObserverReading::of(observer, stream, []));
        prop_assert_eq!(&whole, &slow);
        let offsets = sorted_offsets(&cuts, stream.len());
        let split = all_observers(route, granted).map(|observer| ObserverReading::of(observer, stream, offsets.clone()));
        prop_assert_eq!(&split, &slow);
    }
}

/// G7, G9: Recorded streams, with each event repeated several times, are read the same wherever they are split and cut.
#[test]
fn repeated_events_are_read_alike() {
    for (name, route, stream) in read_fixtures() {
        let stream = String::from_utf8(stream).unwrap();
        let stream: String = stream.split_inclusive("\n\n").flat_map(|event| [event; 3]).collect();
        let stream = stream.as_bytes();
        for granted in [0, 1, 3, 1000] {
            let slow = all_observers(route, granted)
                .map(|observer| ObserverReading::of(observer, stream, 0..stream.len()));
            for cut in (0..=stream.len()).step_by(1 + stream.len() / 40) {
                let split = all_observers(route, granted)
                    .map(|observer| ObserverReading::of(observer, stream, [cut]));
                assert_eq!(split, slow, "{name} with {granted}, cut at {cut}");
            }
        }
    }
}
