//! Generators of streams and bodies: well-formed ones of every shape, and noise.

use bytes::Bytes;
use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

/// A stream of events, comments and stray lines, each line with its own line end.
pub(super) fn any_stream() -> impl Strategy<Value = Bytes> {
    // The byte order mark: none, whole, twice, and two that are cut short and so belong to the first line.
    let marks: [&[u8]; 6] =
        [b"", b"", b"\xEF\xBB\xBF", b"\xEF\xBB\xBF\xEF\xBB\xBF", b"\xEF\xBB", b"\xEF"];
    let mark = select(marks.to_vec());
    let stray = select(vec!["", ":", ": ping", ":data: [DONE]"]);
    let line = (stray, line_end()).prop_map(|(line, end)| format!("{line}{end}"));
    let end = select(vec!["", "", "data: [DONE]", "data: {\"usage", ":", "\r"]);
    (mark, vec(prop_oneof![6 => any_event(), 1 => line], 0..8), end).prop_map(
        |(mark, blocks, end)| [mark, blocks.concat().as_bytes(), end.as_bytes()].concat().into(),
    )
}

/// Meaningless bytes, made of fragments that each have a meaning.
pub(super) fn any_noise() -> impl Strategy<Value = Bytes> {
    let piece = prop_oneof![
        4 => select(PIECES).prop_map(|piece| piece.as_bytes().to_vec()),
        1 => vec(any::<u8>(), 1..4),
    ];
    vec(piece, 0..40).prop_map(|pieces| pieces.concat().into())
}

/// A JSON document.
pub(super) fn any_body() -> impl Strategy<Value = Bytes> {
    let other = prop_oneof![
        any_decoy().prop_map(|inner| json!([inner, inner]).to_string()),
        any_wrong_value().prop_map(|value| value.to_string()),
    ];
    prop_oneof![6 => any_payload(), 1 => other].prop_map(Bytes::from)
}

fn any_event() -> BoxedStrategy<String> {
    let others = ["id: 7", "retry", ": comment", "data", "Data: [DONE]", " data: {}", "event", ":"];
    let other = select(others.to_vec());
    let data = prop_oneof![
        6 => any_payload(),
        1 => select(vec!["[DONE]", "{", "", "null", "[]", " [DONE]"]).prop_map(str::to_owned),
    ];
    let space = select(vec![" ", "", "  "]);
    let lines = (weighted(0.4, select(NAMES)), weighted(0.2, other), data, space);
    (lines, vec(line_end(), 1..6))
        .prop_map(|((name, other, data, space), ends)| {
            let mut lines = vec![];
            lines.extend(name.map(|name| format!("event:{space}{name}")));
            lines.extend(other.map(str::to_owned));
            lines.extend(data.lines().map(|line| format!("data:{space}{line}")));
            lines.push(String::new());
            lines
                .iter()
                .zip(ends.iter().cycle())
                .flat_map(|(line, end)| [line.as_str(), *end])
                .collect()
        })
        .boxed()
}

/// An object with significant members, in any order, among insignificant ones.
fn any_payload() -> BoxedStrategy<String> {
    let one_choice = json!([{"index": 0, "delta": {"content": "usage"}}]);
    let choices = prop_oneof![2 => Just(json!([])), 1 => Just(one_choice), 1 => any_wrong_value()];
    let error = prop_oneof![3 => Just(Value::Null), 1 => any_wrong_value(), 1 => any_decoy()];
    let members = (
        weighted(0.5, select(NAMES).prop_map(Value::from)),
        weighted(0.6, choices),
        weighted(0.7, any_usage()),
        weighted(0.2, error),
        weighted(0.4, any_inner_object()),
        weighted(0.4, any_inner_object()),
        weighted(0.3, any_decoy()),
    );
    let keys = ["type", "choices", "usage", "error", "message", "response", "content"];
    let members = members.prop_map(move |(a, b, c, d, e, f, g)| {
        let values = [a, b, c, d, e, f, g];
        keys.iter().zip(values).filter_map(|(key, value)| Some((*key, value?))).collect::<Vec<_>>()
    });
    // Spacing: compact, as Python writes it, and on several lines.
    let spaces = select(vec![("", ""), (" ", " "), ("\n  ", "\t")]);
    (members.prop_flat_map(|members| Just(members).prop_shuffle()), spaces)
        .prop_map(|(members, (before, between))| {
            let members: Vec<_> = members
                .iter()
                .map(|(key, value)| format!("{before}\"{key}\"{between}:{between}{value}"))
                .collect();
            format!("{{{}{before}}}", members.join(","))
        })
        .boxed()
}

/// The content of `message` and `response`.
fn any_inner_object() -> BoxedStrategy<Value> {
    let object = (any_usage(), any_decoy())
        .prop_map(|(usage, decoy)| json!({"id": "x", "output": [decoy], "usage": usage}));
    prop_oneof![4 => object, 1 => any_wrong_value()].boxed()
}

/// A usage object of any protocol, or something that is not one.
fn any_usage() -> BoxedStrategy<Value> {
    let details = (weighted(0.5, any_count()), weighted(0.5, any_count())).prop_map(
        |(cached, reasoning)| json!({"cached_tokens": cached, "reasoning_tokens": reasoning}),
    );
    let details = prop_oneof![4 => details, 1 => any_wrong_value()];
    let counts = vec(weighted(0.6, any_count()), COUNTS.len());
    let object =
        (counts, vec(weighted(0.3, details), DETAILS.len())).prop_map(|(counts, details)| {
            let members = COUNTS.iter().chain(DETAILS).zip(counts.into_iter().chain(details));
            Value::Object(
                members.filter_map(|(key, value)| Some(((*key).into(), value?))).collect(),
            )
        });
    prop_oneof![8 => object, 1 => any_wrong_value()].boxed()
}

fn any_count() -> BoxedStrategy<Value> {
    let edges = vec![json!(0), json!(1), json!(u64::MAX - 1), json!(u64::MAX)];
    prop_oneof![6 => (0_u64..5000).prop_map(Value::from), 1 => select(edges), 2 => any_wrong_value()].boxed()
}

/// Values of the wrong type for their place.
fn any_wrong_value() -> impl Strategy<Value = Value> {
    select(vec![
        Value::Null,
        json!(false),
        json!(-3),
        json!(2.5),
        json!(1e300),
        json!("12"),
        json!("\\\"usage\": {"),
        json!([1, 2, 3]),
        json!({}),
    ])
}

/// An object that looks like usage but is in the wrong place.
fn any_decoy() -> impl Strategy<Value = Value> {
    select(vec![
        json!({"usage": {"prompt_tokens": 1, "completion_tokens": 1, "output_tokens": 1}}),
        json!([{"input": {"usage": {"output_tokens": 0}, "error": {"message": "no"}}}, "}]{["]),
        json!("{\"usage\":{\"prompt_tokens\":1},\"error\":1}"),
        json!(["usage", "error", "\\", "\"", {"": [[[[]]]]}]),
    ])
}

fn line_end() -> impl Strategy<Value = &'static str> {
    select(vec!["\n", "\n", "\r\n", "\r"])
}

const NAMES: &[&str] = &[
    "message_start",
    "message_delta",
    "message_stop",
    "content_block_delta",
    "error",
    "message",
    "response.created",
    "response.output_text.delta",
    "response.completed",
    "response.incomplete",
    "response.failed",
];

const COUNTS: &[&str] = &[
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "input_tokens",
    "output_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
];

const DETAILS: &[&str] = &[
    "prompt_tokens_details",
    "completion_tokens_details",
    "input_tokens_details",
    "output_tokens_details",
];

const PIECES: &[&str] = &[
    "data: ",
    "data:",
    "data",
    "event: error",
    "event: message_stop",
    ":",
    "\n",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    "\u{feff}",
    "[DONE]",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "\\",
    ",",
    "null",
    "7",
    " ",
    "\"usage\"",
    "\"error\"",
    "\"choices\"",
    "\"choices\":[],",
    "\"type\":\"message_delta\"",
    "{\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\n",
    "data: {\"x\":{\"choices\":[1]},\"choices\":[],\"usage\":{\"prompt_tokens\":6}}\r\n\r\n",
];
