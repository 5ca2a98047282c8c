//! B2: Tests of ingest: bodies of LiteLLM's callback as a real one has sent them, and malformed ones.

use cogni_gateway::service::billing::ChargeNotice;
use cogni_gateway::service::billing::ingest::{self, MalformedBodyError, SkippedItems};
use insta::assert_snapshot;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::read_recording;
use crate::support::allocations;

/// The items of one body.
#[derive(Debug, Default, PartialEq)]
struct ParsedItems {
    notices: Vec<ChargeNotice>,
    rest: SkippedItems,
}

fn parse_body(body: &[u8]) -> Result<ParsedItems, MalformedBodyError> {
    let mut notices = vec![];
    let rest = ingest::parse_body(body, |some| notices.extend(some))?;
    Ok(ParsedItems { notices, rest })
}

/// B2: The batch has a unary call, a streamed call, a Messages stream, and a model that LiteLLM does not have.
#[test]
fn a_real_batch_is_understood() {
    assert_snapshot!(format_table(&parse_body(&read_recording("callback.json")).unwrap()), @r#"
    01a20298-15f8-7428-a20a-7213618e37a2 run-7 acct-42 mock came through, 10 in, 20 out, $0.00005, 2026-11-22T09:30:51.847Z
    01a20298-1c99-763c-9bd8-e4dcb2c7fdcb run-7 acct-42 gpt came through, 11 in, 7 out, $0.000025, 2026-11-22T09:30:53.549Z
    01a20298-2568-7128-9aae-ccbbfe4a339f run-7 acct-42 claude came through, 11 in, 7 out, $0.000138, 2026-11-22T09:30:55.371Z
    01a20298-264d-7228-9477-9313fdbfa41f run-7 acct-42 nope failed, 0 in, 0 out, $0, 2026-11-22T09:30:55.474Z
    "#);
}

/// B2: LiteLLM's three formats, `json_array`, `ndjson` and `single`, give the same notices.
#[test]
fn an_array_lines_and_single_objects_say_the_same() {
    let whole = parse_body(&read_recording("callback.json")).unwrap();
    let items: Vec<Value> = serde_json::from_slice(&read_recording("callback.json")).unwrap();
    let lines: Vec<_> = items.iter().map(Value::to_string).collect();
    assert_eq!(parse_body(lines.join("\n").as_bytes()).unwrap(), whole);
    let singly: Vec<_> =
        lines.iter().flat_map(|line| parse_body(line.as_bytes()).unwrap().notices).collect();
    assert_eq!(singly, whole.notices);
}

#[test]
fn an_item_that_cannot_be_used_takes_nothing_from_the_others() {
    let items = json!([
        changed_item(&json!({})),
        changed_item(&json!({ "litellm_call_id": null })),
        changed_item(&json!({ "litellm_call_id": "x".repeat(257) })),
        changed_item(&json!({ "status": "perhaps" })),
        changed_item(&json!({ "response_cost": -1 })),
        changed_item(&json!({ "response_cost": 1_000_001 })),
        changed_item(&json!({ "completion_tokens": "seven" })),
        changed_item(&json!({ "prompt_tokens": 2_000_000_000_u64 })),
        changed_item(&json!({ "endTime": 1e300 })),
        "what",
        changed_item(&json!({ "metadata": { "spend_logs_metadata": null } })),
        changed_item(&json!({ "metadata": { "spend_logs_metadata": { "run_id": 7 } } })),
        changed_item(
            &json!({ "metadata": { "spend_logs_metadata": { "run_id": "x".repeat(257) } } })
        ),
        changed_item(
            &json!({ "response_cost": null, "prompt_tokens": null, "wibble": { "a": [] } })
        ),
    ]);
    let parsed = parse_body(items.to_string().as_bytes()).unwrap();
    let ParsedItems { notices, rest } = parsed;
    assert_eq!((notices.len(), rest.foreign, rest.invalid), (2, 2, 10));
    let complaints: Vec<_> =
        rest.complaints.iter().map(|one| format!("{}: {}", one.item, one.message)).collect();
    assert_snapshot!(complaints.join("\n"), @r#"
    1: `litellm_call_id` is missing, so the call is unknown
    2: the call's id is longer than 256 bytes
    3: `status` is neither "success" nor "failure"
    4: `-1` is not an amount of dollars, such as "2.50"
    5: $1000001 is not the price of one call
    6: invalid type: string "seven", expected u64
    7: so many tokens are not those of one call
    8: `endTime` is not a time in seconds
    9: the item is no JSON object
    12: `run_id` is longer than 256 bytes
    "#);
}

#[test]
fn a_body_that_is_not_json_is_refused() {
    assert_snapshot!(parse_body(b"[{\"id\":").unwrap_err(), @"the body is neither a JSON object, nor an array of objects, nor one object on each line: EOF while parsing a value at line 1 column 7");
    assert_eq!(parse_body(b"").unwrap(), ParsedItems::default());
}

/// A body of the maximum size takes little additional memory, whether it has many items or one large item.
#[test]
fn a_large_body_is_read_in_little_memory() {
    let zeros = |beginning: &str, end: &str| {
        let mut body = beginning.to_owned();
        body.extend(std::iter::repeat_n("0,", (LARGEST - beginning.len() - end.len() - 1) / 2));
        body + "0" + end
    };
    let within = |field: &str| zeros(&format!("[{{{field}:["), "]}]");
    let deep = format!("[{}0{}]", "[".repeat(LARGEST / 2 - 2), "]".repeat(LARGEST / 2 - 2));
    let line = r#""status":"success","endTime":1,"litellm_call_id":"c","metadata""#;
    let item = format!(r#"{{{line}:{{"spend_logs_metadata":{{"run_id":"r"}}}}}},"#);
    let notices = format!("[{}0]", item.repeat(150_000));
    let bodies = [
        zeros("[", "]"),
        within(r#""messages""#),
        within(r#""response_cost""#),
        zeros(&format!(r#"[{{{line}:{{"spend_logs_metadata":{{"run_id":["#), "]}}}]"),
        deep,
        notices,
    ];
    for body in bodies {
        assert!(body.len() <= LARGEST && body.len() > LARGEST / 2, "{}", body.len());
        let peak = allocations::peak_bytes(|| {
            ingest::parse_body(body.as_bytes(), drop).unwrap();
        });
        assert!(peak < 2 * LARGEST as u64, "{peak} bytes for {}…", &body[..60]);
    }
}

/// The maximum size of the service.
const LARGEST: usize = 16 << 20;

proptest! {
    /// Each item of an array counts once, whatever the items are.
    #[test]
    fn every_item_is_counted_once(changes in prop::collection::vec(("[a-zA-Z_]{1,16}|status|response_cost|endTime|metadata", any_value()), 0..6)) {
        let changed: Vec<_> = changes.into_iter().map(|(key, value)| changed_item(&json!({ key: value }))).collect();
        let parsed = parse_body(Value::from(changed.clone()).to_string().as_bytes()).unwrap();
        let ParsedItems { notices, rest } = parsed;
        prop_assert_eq!(notices.len() as u64 + rest.foreign + rest.invalid, changed.len() as u64);
    }

    #[test]
    fn no_body_is_too_strange(body in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_body(&body);
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::hash_map("[a-z_]{1,20}|spend_logs_metadata|run_id", inner, 0..3)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// A real item with some members changed.
fn changed_item(changes: &Value) -> Value {
    let items: Vec<Value> = serde_json::from_slice(&read_recording("callback.json")).unwrap();
    let mut item = items[0].as_object().unwrap().clone();
    item.extend(changes.as_object().unwrap().clone());
    item.into()
}

fn format_table(parsed: &ParsedItems) -> String {
    let row = |notice: &ChargeNotice| {
        let run = notice.run.as_deref().unwrap_or("-");
        let account = notice.account.as_deref().unwrap_or("-");
        let model = notice.model.as_deref().unwrap_or("-");
        let end = if notice.is_provisional { "failed" } else { "came through" };
        let ended = cogni_gateway::base::timestamp::format_rfc3339_millis(notice.ended);
        let (call, amount, input, output) =
            (&notice.call_id, notice.amount, notice.input.0, notice.output.0);
        format!(
            "{call} {run} {account} {model} {end}, {input} in, {output} out, ${amount}, {ended}"
        )
    };
    parsed.notices.iter().map(row).collect::<Vec<_>>().join("\n")
}
