//! Tests of the JSON scanner: what it accepts, what it reports, and that the split into frames makes no difference.

use std::fmt::Write;
use std::iter;
use std::ops::Range;

use cogni_gateway::base::json::{JsonError, JsonLimits, JsonScanner, JsonType, MAX_LIVE_KEYS};
use insta::assert_snapshot;
use proptest::prelude::*;
use serde_json::Value;

use super::{generated_bodies, scan_frames, slice_range, strict_json};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// G5: The scanner refuses broken JSON, duplicate keys and text that is not UTF-8, and nothing else.
    #[test]
    fn it_accepts_exactly_what_a_strict_reader_accepts(body in generated_bodies::any_body()) {
        if let Some(accepted) = strict_json::accepts_body(&body) {
            let outcome = scan_frames([&body[..]]);
            prop_assert_eq!(outcome.is_ok(), accepted, "{:?} on {:?}", outcome, body.escape_ascii());
        }
    }

    /// G5: The outcome and its offsets do not depend on how the body is split into frames.
    #[test]
    fn the_outcome_is_the_same_however_the_body_is_split(body in generated_bodies::any_body()) {
        let whole = scan_frames([&body[..]]);
        prop_assert_eq!(&scan_frames(body.chunks(1)), &whole);
        for at in (0..=body.len()).step_by(1 + body.len() / 200) {
            let (head, tail) = body.split_at(at);
            prop_assert_eq!(&scan_frames([head, tail]), &whole, "split at {}", at);
        }
    }

    #[test]
    fn a_members_offsets_lead_to_its_key_and_its_value(body in generated_bodies::any_object()) {
        let Ok(document) = scan_frames([body.as_bytes()]) else { return Ok(()) };
        let Value::Object(expected) = serde_json::from_str(&body).unwrap() else { unreachable!() };
        prop_assert_eq!(document.members.len(), expected.len());
        for member in &document.members {
            let text = |range: Range<u64>| &body[slice_range(&range)];
            let value: Value = serde_json::from_str(text(member.value.clone())).unwrap();
            // The text between the two offsets is the key, a colon and white space.
            let before = text(member.start..member.value.start).trim_end();
            let key: String = serde_json::from_str(before.strip_suffix(':').unwrap()).unwrap();
            prop_assert_eq!(&value, &expected[&key]);
            prop_assert_eq!(member.kind, json_type(&value));
            prop_assert_eq!(member.entries as usize, count_entries(&value));
            prop_assert_eq!(member.key.as_str(), (key.len() <= 64).then_some(&*key));
            prop_assert_eq!(text(member.value.clone()).trim(), text(member.value.clone()));
        }
    }

    /// The scanner finds a significant byte at every edge of a frame, block or word.
    #[test]
    fn no_byte_hides_behind_a_block(fill in 0..300usize, odd in any::<u8>(), rest in 0..100usize) {
        let mut body = b"{\"a\":\"".to_vec();
        body.extend(iter::repeat_n(b'x', fill).chain([odd]).chain(iter::repeat_n(b'y', rest)));
        body.extend(b"\"}");
        prop_assert_eq!(scan_frames([&body[..]]).is_ok(), strict_json::accepts_body(&body).unwrap());
    }
}

/// G5: Each refusal says what is wrong, and at which offset.
#[test]
fn a_refusal_says_what_is_wrong_and_where() {
    let mut table = String::new();
    for body in REFUSED {
        let invalid = scan_frames([*body]).unwrap_err();
        let shown = body.escape_ascii().to_string().replace("\\\"", "\"").replace("\\\\", "\\");
        writeln!(table, "{shown:<28} {}: {invalid}", invalid.code()).unwrap();
    }
    assert_snapshot!(table, @r#"
                                 invalid_json: it is empty; send an object
     \n                          invalid_json: it is empty; send an object
    []                           invalid_json: it is not an object (byte 0)
    "text"                       invalid_json: it is not an object (byte 0)
    \xef\xbb\xbf{}               invalid_json: it is not an object (byte 0)
    {                            invalid_json: it ends at byte 1, before its object does
    {"a":1                       invalid_json: it ends at byte 6, before its object does
    {"a":"b                      invalid_json: it ends at byte 7, before its object does
    {} {}                        invalid_json: unexpected byte at 3
    {"a":1,}                     invalid_json: unexpected byte at 7
    {"a":[1,]}                   invalid_json: unexpected byte at 8
    {"a":[1}}                    invalid_json: unexpected byte at 7
    {\'a\':1}                    invalid_json: unexpected byte at 1
    {a:1}                        invalid_json: unexpected byte at 1
    {"a" 1}                      invalid_json: unexpected byte at 5
    {"a":}                       invalid_json: unexpected byte at 5
    {"a":nul}                    invalid_json: unexpected byte at 8
    {"a":True}                   invalid_json: unexpected byte at 5
    {"a":NaN}                    invalid_json: unexpected byte at 5
    {"a":01}                     invalid_json: unexpected byte at 6
    {"a":1.}                     invalid_json: unexpected byte at 7
    {"a":.5}                     invalid_json: unexpected byte at 5
    {"a":+1}                     invalid_json: unexpected byte at 5
    {"a":1e}                     invalid_json: unexpected byte at 7
    {"a":-}                      invalid_json: unexpected byte at 6
    {/**/}                       invalid_json: unexpected byte at 1
    {"a":"\n"}                   invalid_json: raw control character in a string at byte 6; escape it
    {"a":"\x"}                   invalid_json: unexpected byte at 7
    {"a":"\u12x4"}               invalid_json: unexpected byte at 10
    {"a":"\xff"}                 invalid_json: text that is not UTF-8 at byte 6
    {"a":"\xc3"}                 invalid_json: text that is not UTF-8 at byte 6
    {"a":"\xed\xa0\x80"}         invalid_json: text that is not UTF-8 at byte 6
    {"\xe2\x82":1}               invalid_json: text that is not UTF-8 at byte 2
    {"a":"\ud800"}               invalid_json: half of a surrogate pair at byte 6; escape both halves or send UTF-8
    {"a":"\ud83d\u0041"}         invalid_json: half of a surrogate pair at byte 6; escape both halves or send UTF-8
    {"a":"\ude00\ud83d"}         invalid_json: half of a surrogate pair at byte 6; escape both halves or send UTF-8
    {"user":1,"us\u0065r":2}     duplicate_key: duplicate key `user` at byte 10
    {"a":[{"b":1,"c":{},"b":2}]} duplicate_key: duplicate key `b` at byte 20
    {"":1,"":2}                  duplicate_key: duplicate key `` at byte 6
    {"a\nb":1,"a\nb":2}          duplicate_key: duplicate key `a\nb` at byte 10
    "#);
}

/// G5: The refusal is the same wherever a frame ends.
#[test]
fn every_split_of_a_refused_body_is_refused_alike() {
    for body in REFUSED {
        let whole = scan_frames([*body]);
        for at in 0..=body.len() {
            let (head, tail) = body.split_at(at);
            assert_eq!(scan_frames([head, tail]), whole, "{} split at {at}", body.escape_ascii());
        }
    }
}

/// G5: Nesting is bounded, below the depth that the parsers behind the gateway can handle.
#[test]
fn a_document_may_be_as_deep_as_the_limit_and_no_deeper() {
    let nested = |depth: usize| {
        let (open, close) = ("[".repeat(depth - 1), "]".repeat(depth - 1));
        scan_frames([format!("{{\"a\":{open}{close}}}").as_bytes()])
    };
    assert!(nested(64).is_ok());
    assert_eq!(nested(65), Err(JsonError::TooDeep { at: 68, limit: 64 }));
    let objects = format!("{}1{}", "{\"a\":".repeat(65), "}".repeat(65));
    assert_eq!(scan_frames([objects.as_bytes()]), Err(JsonError::TooDeep { at: 320, limit: 64 }));
}

#[test]
fn an_object_may_have_as_many_members_as_the_limit_and_no_more() {
    assert_eq!(scan_frames([object_with_members(256).as_bytes()]).unwrap().members.len(), 256);
    let refused = scan_frames([object_with_members(257).as_bytes()]).unwrap_err();
    assert_snapshot!(refused, @"more than 256 top-level members at byte 2963");
}

/// G5: A duplicate key is found among few keys and among many, close to the first key and far from it.
#[test]
fn a_duplicate_is_found_wherever_it_stands() {
    for count in [2, 15, 31, 32, 33, 34, 200, 5000] {
        for twin in [0, (count - 1) / 2, count - 2] {
            let body = nest_object(
                &object_with_members(count)
                    .replace(&format!("\"key {}\"", count - 1), &format!("\"key\\u0020{twin}\"")),
            );
            let expected = format!("key {twin}");
            let refused = scan_frames([body.as_bytes()]).unwrap_err();
            assert!(
                matches!(&refused, JsonError::DuplicateKey { key, .. } if **key == *expected),
                "{refused} among {count}"
            );
        }
        assert!(scan_frames([nest_object(&object_with_members(count)).as_bytes()]).is_ok());
    }
}

/// The keys of an object that has ended take no memory, so a conversation may have any length.
#[test]
fn keys_are_forgotten_when_their_object_ends() {
    let messages = vec![object_with_members(40); 2 * MAX_LIVE_KEYS / 40].join(",");
    assert!(scan_frames([format!("{{\"messages\":[{messages}]}}").as_bytes()]).is_ok());
}

#[test]
fn keys_that_are_live_at_one_time_are_bounded() {
    assert!(scan_frames([nest_object(&object_with_members(MAX_LIVE_KEYS - 1)).as_bytes()]).is_ok());
    let refused =
        scan_frames([nest_object(&object_with_members(MAX_LIVE_KEYS)).as_bytes()]).unwrap_err();
    assert!(matches!(refused, JsonError::TooManyKeys { .. }), "{refused}");
}

#[test]
fn nothing_is_read_after_an_error() {
    let mut scanner = JsonScanner::new(JsonLimits::default());
    scanner.feed_frame(b"{}").unwrap();
    let refused = scanner.feed_frame(b"x").unwrap_err();
    assert_eq!(scanner.feed_frame(b" "), Err(refused.clone()));
    assert_eq!(scanner.finish_document(), Err(refused));
}

/// The scanner checks only the form of a number, because other parsers (Python's, for example) refuse or change numbers
/// that a conversion would accept.
#[test]
fn numbers_are_not_converted() {
    assert!(
        scan_frames([&b"{\"a\":1e999,\"b\":123456789012345678901234567890,\"c\":-0}"[..]]).is_ok()
    );
}

/// Returns `{"key 0":0, "key 1":0, …}`.
fn object_with_members(members: usize) -> String {
    let members: Vec<_> = (0..members).map(|i| format!("\"key {i}\":0")).collect();
    format!("{{{}}}", members.join(","))
}

fn nest_object(object: &str) -> String {
    format!("{{\"a\":{object}}}")
}

fn json_type(value: &Value) -> JsonType {
    match value {
        Value::Null => JsonType::Null,
        Value::Bool(_) => JsonType::Bool,
        Value::Number(_) => JsonType::Number,
        Value::String(_) => JsonType::String,
        Value::Array(_) => JsonType::Array,
        Value::Object(_) => JsonType::Object,
    }
}

fn count_entries(value: &Value) -> usize {
    let is_entry = |value: &&Value| value.is_string() || value.is_array() || value.is_object();
    match value {
        Value::Array(items) => items.iter().filter(is_entry).count(),
        Value::Object(members) => members.values().filter(is_entry).count(),
        _ => 0,
    }
}

const REFUSED: &[&[u8]] = &[
    b"",
    b" \n",
    b"[]",
    br#""text""#,
    b"\xef\xbb\xbf{}",
    b"{",
    br#"{"a":1"#,
    br#"{"a":"b"#,
    b"{} {}",
    br#"{"a":1,}"#,
    br#"{"a":[1,]}"#,
    br#"{"a":[1}}"#,
    b"{'a':1}",
    b"{a:1}",
    br#"{"a" 1}"#,
    br#"{"a":}"#,
    br#"{"a":nul}"#,
    br#"{"a":True}"#,
    br#"{"a":NaN}"#,
    br#"{"a":01}"#,
    br#"{"a":1.}"#,
    br#"{"a":.5}"#,
    br#"{"a":+1}"#,
    br#"{"a":1e}"#,
    br#"{"a":-}"#,
    b"{/**/}",
    b"{\"a\":\"\n\"}",
    b"{\"a\":\"\\x\"}",
    br#"{"a":"\u12x4"}"#,
    b"{\"a\":\"\xff\"}",
    b"{\"a\":\"\xc3\"}",
    b"{\"a\":\"\xed\xa0\x80\"}",
    b"{\"\xe2\x82\":1}",
    br#"{"a":"\ud800"}"#,
    br#"{"a":"\ud83d\u0041"}"#,
    br#"{"a":"\ude00\ud83d"}"#,
    br#"{"user":1,"us\u0065r":2}"#,
    br#"{"a":[{"b":1,"c":{},"b":2}]}"#,
    br#"{"":1,"":2}"#,
    br#"{"a\nb":1,"a\nb":2}"#,
];
