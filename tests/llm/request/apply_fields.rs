//! Tests of the field tables: what happens to each field, and that dropping some fields leaves the others unchanged.

use std::fmt::Write;

use bytes::Bytes;
use cogni_gateway::base::json::{JsonLimits, JsonScanner};
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::request::field::{self, FieldRule, RequestField};
use cogni_gateway::llm::request::{
    BodyPolicy, BodyPolicyError, ProviderCapability, UnknownFieldPolicy, admit_body,
};
use insta::assert_snapshot;
use proptest::prelude::*;
use proptest::sample::{Index, select, subsequence};
use serde_json::Value;

use super::{
    POSTS, admit_in, body_invariants, concat_rope, generated_bodies, read_frames, send_body,
    split_frames,
};

/// G5: The snapshot shows what happens to every known field.
#[test]
fn every_known_field_has_one_rule() {
    let mut table = String::new();
    for route in POSTS {
        writeln!(table, "# {}", route.name()).unwrap();
        for field in own_fields(route) {
            writeln!(table, "{} {}", field.name, field_fate(field.rule)).unwrap();
        }
    }
    table.push_str("# everywhere\n");
    for field in field::fields_of_route(GatewayRoute::Models) {
        writeln!(table, "{} {}", field.name, field_fate(field.rule)).unwrap();
    }
    for (names, why) in field::forbidden_name_parts() {
        writeln!(table, "{names} refused: it {}", why.description()).unwrap();
    }
    assert_snapshot!(table);
}

/// The lookup of a name is a binary search, so each table must be sorted and have each name once.
#[test]
fn the_tables_are_in_order() {
    for route in POSTS.into_iter().chain([GatewayRoute::Models]) {
        let names: Vec<_> = own_fields(route).map(|field| field.name).collect();
        assert!(names.is_sorted_by(|a, b| a < b), "{route:?}: {names:?}");
        assert!(names.iter().all(|name| !name.bytes().any(|byte| byte.is_ascii_uppercase())));
    }
}

/// G5: A field with the rule "refuse" is refused, a field with the rule "drop" is removed, and a field with the rule
/// "pass" goes upstream, however its name is escaped.
#[test]
fn every_known_field_is_handled_by_its_rule() {
    for route in POSTS {
        for field in field::fields_of_route(route) {
            for name in [field.name.to_owned(), escape_name(field.name)] {
                let model = if field.rule == FieldRule::Model { "" } else { r#","model":"m""# };
                let value = if field.rule == FieldRule::Model { "\"m\"" } else { "null" };
                let body = format!(r#"{{"{name}":{value}{model}}}"#);
                let outcome = send_body(route, &BodyPolicy::default(), &body);
                match field.rule {
                    FieldRule::Refuse(_) => {
                        let refusal = outcome.unwrap_err();
                        assert_eq!(refusal.code(), "field_not_allowed", "{route:?} {body}");
                        assert_eq!(refusal.field_at_fault(), field.name);
                    }
                    rule => {
                        let sent = parse_json(&outcome.unwrap());
                        let passes = !matches!(rule, FieldRule::Drop(_));
                        assert_eq!(sent.get(field.name).is_some(), passes, "{route:?} {body}");
                    }
                }
            }
        }
    }
}

/// G5: The fields that servers of open models understand pass on the routes where those servers accept them.
#[test]
fn the_fields_of_open_models_pass() {
    for (family, names) in field::open_models() {
        assert!(names.is_sorted_by(|a, b| a < b), "{family}: {names:?}");
        for name in names {
            let body = format!(r#"{{"model":"m","{name}":1}}"#);
            for route in [GatewayRoute::ChatCompletions, GatewayRoute::Completions] {
                assert_eq!(
                    send_body(route, &BodyPolicy::default(), &body).unwrap(),
                    body,
                    "{family}"
                );
            }
            assert_eq!(
                send_body(GatewayRoute::Messages, &BodyPolicy::default(), &body).unwrap(),
                r#"{"model":"m"}"#
            );
        }
    }
}

/// G5, G9: Ollama's `options` pass, except options that would override the limits beside them.
#[test]
fn options_cannot_override_limits() {
    let mut table = String::new();
    for options in [
        "null",
        r#"{"num_ctx":4096,"temperature":0}"#,
        r#"{"num_predict":-1}"#,
        r#"{"num\u005fpredict":-1}"#,
        r#"{"NUM_PREDICT":1}"#,
        "[]",
        "\"x\"",
    ] {
        let body = format!(r#"{{"model":"m","options":{options}}}"#);
        let outcome = send_body(GatewayRoute::ChatCompletions, &BodyPolicy::default(), &body);
        writeln!(table, "{options} {}", outcome.unwrap_or_else(|refusal| refusal.to_string()))
            .unwrap();
    }
    assert_snapshot!(table, @r#"
    null {"model":"m","options":null}
    {"num_ctx":4096,"temperature":0} {"model":"m","options":{"num_ctx":4096,"temperature":0}}
    {"num_predict":-1} `options` must be an object of at most 4 KiB, without `num_predict`; set `max_tokens` at the top level instead
    {"num\u005fpredict":-1} `options` must be an object of at most 4 KiB, without `num_predict`; set `max_tokens` at the top level instead
    {"NUM_PREDICT":1} `options` must be an object of at most 4 KiB, without `num_predict`; set `max_tokens` at the top level instead
    [] `options` must be an object of at most 4 KiB, without `num_predict`; set `max_tokens` at the top level instead
    "x" `options` must be an object of at most 4 KiB, without `num_predict`; set `max_tokens` at the top level instead
    "#);
}

const EXTRA_BODIES: [&str; 24] = [
    "null",
    "{}",
    r#"{"google":{"thinking_config":{"thinking_budget":0,"include_thoughts":true}}}"#,
    r#"{"google":{"cached_content":"cachedContents/1"}}"#,
    r#"{"google":{"api_key":"k"}}"#,
    r#"{"google":{"wibble":1,"safety_settings":[]},"user":"u","top_k":5}"#,
    r#"{"google":{"google":{"thinking_config":1}}}"#,
    r#"{"user":"u","metadata":{}}"#,
    r#"{"wibble":1}"#,
    r#"{"API_KEY":1}"#,
    r#"{"api_base":"http://x"}"#,
    r#"{"extra_headers":{}}"#,
    r#"{"extra_body":{}}"#,
    r#"{"model":"other"}"#,
    r#"{"max_tokens":5}"#,
    r#"{"n":5}"#,
    r#"{"stream":true}"#,
    r#"{"store":true}"#,
    r#"{"messages":[]}"#,
    r#"{"tools":[{"type":"web_search"}]}"#,
    r#"{"prediction":{}}"#,
    r#"{"web_search_options":{}}"#,
    r#"{"t\u006fp_k":5}"#,
    "[]",
];

/// G5: A field in `extra_body` follows the same rule as the field at the top level, and does not override a top-level
/// field.
#[test]
fn fields_in_an_extra_body_follow_the_same_rules() {
    let mut table = String::new();
    for extra in EXTRA_BODIES {
        let body = format!(r#"{{"extra_body":{extra},"model":"m"}}"#);
        let policy = BodyPolicy::default();
        let outcome = match admit_in(
            GatewayRoute::ChatCompletions,
            &policy,
            split_frames(body.as_bytes(), 5),
        ) {
            Ok(call) => {
                let said =
                    call.changes.iter().map(|change| change.field.clone()).collect::<Vec<_>>();
                let sent = String::from_utf8(concat_rope(&call.into_body())).unwrap();
                format!("{} {sent}", said.join(", "))
            }
            Err(refusal) => format!("{}: {refusal}", refusal.code()),
        };
        writeln!(table, "{extra}\n  {}", outcome.trim()).unwrap();
    }
    assert_snapshot!(table, @r#"
    null
      {"extra_body":null,"model":"m"}
    {}
      {"extra_body":{},"model":"m"}
    {"google":{"thinking_config":{"thinking_budget":0,"include_thoughts":true}}}
      {"extra_body":{"google":{"thinking_config":{"thinking_budget":0,"include_thoughts":true}}},"model":"m"}
    {"google":{"cached_content":"cachedContents/1"}}
      capability_not_granted: `cached_content` needs `stored_state`, which this run has not been granted; its operator can grant it, in `policy.body.capabilities` or `CAPABILITIES`
    {"google":{"api_key":"k"}}
      field_not_allowed: `extra_body.api_key` is not allowed, as it would choose the upstream or its credentials; leave it out
    {"google":{"wibble":1,"safety_settings":[]},"user":"u","top_k":5}
      extra_body.wibble, extra_body.user {"extra_body":{"google":{"safety_settings":[]},"top_k":5},"model":"m"}
    {"google":{"google":{"thinking_config":1}}}
      extra_body.google {"extra_body":{"google":{}},"model":"m"}
    {"user":"u","metadata":{}}
      extra_body.user, extra_body.metadata {"extra_body":{},"model":"m"}
    {"wibble":1}
      extra_body.wibble {"extra_body":{},"model":"m"}
    {"API_KEY":1}
      field_not_allowed: `extra_body.API_KEY` is not allowed, as it would choose the upstream or its credentials; leave it out
    {"api_base":"http://x"}
      field_not_allowed: `extra_body.api_base` is not allowed, as it would choose the upstream or its credentials; leave it out
    {"extra_headers":{}}
      field_not_allowed: `extra_body.extra_headers` is not allowed, as it would choose the upstream or its credentials; leave it out
    {"extra_body":{}}
      field_not_allowed: `extra_body` is not allowed in `extra_body`, where the field would replace a top-level field; move `extra_body` to the top level
    {"model":"other"}
      field_not_allowed: `model` is not allowed in `extra_body`, where the field would replace a top-level field; move `model` to the top level
    {"max_tokens":5}
      field_not_allowed: `max_tokens` is not allowed in `extra_body`, where the field would replace a top-level field; move `max_tokens` to the top level
    {"n":5}
      field_not_allowed: `n` is not allowed in `extra_body`, where the field would replace a top-level field; move `n` to the top level
    {"stream":true}
      field_not_allowed: `stream` is not allowed in `extra_body`, where the field would replace a top-level field; move `stream` to the top level
    {"store":true}
      field_not_allowed: `store` is not allowed in `extra_body`, where the field would replace a top-level field; move `store` to the top level
    {"messages":[]}
      field_not_allowed: `messages` is not allowed in `extra_body`, where the field would replace a top-level field; move `messages` to the top level
    {"tools":[{"type":"web_search"}]}
      field_not_allowed: `tools` is not allowed in `extra_body`, where the field would replace a top-level field; move `tools` to the top level
    {"prediction":{}}
      field_not_allowed: `prediction` is not allowed in `extra_body`, where the field would replace a top-level field; move `prediction` to the top level
    {"web_search_options":{}}
      capability_not_granted: `web_search_options` needs `web_search`, which this run has not been granted; its operator can grant it, in `policy.body.capabilities` or `CAPABILITIES`
    {"t\u006fp_k":5}
      invalid_field: `extra_body` must be an object of at most 4 KiB
    []
      invalid_field: `extra_body` must be an object of at most 4 KiB
    "#);
}

/// G5: An unknown field is dropped, refused or passed as the policy says. A known field with different letter case
/// counts as unknown.
#[test]
fn unknown_fields_are_dropped_rejected_or_passed() {
    let mut table = String::new();
    for body in [
        r#"{"model":"m","wibble":1}"#,
        r#"{"model":"m","w\u0069bble":1}"#,
        r#"{"model":"m","User":"u","mAx_tokens":5,"top_p":1}"#,
        r#"{"model":"m","API_KEY":"sk"}"#,
        r#"{"model":"m","stop_sequences":[]}"#,
        r#"{"model":"m","uſer":"u"}"#,
        r#"{"model":"m","":1,"a b":1,"a\nb":1}"#,
        r#"{"model":"m","a-name-that-is-far-longer-than-the-sixty-four-bytes-that-are-kept-of-it":1}"#,
        r#"{"model":"m","my_aws_key":1,"aws_anything":1}"#,
    ] {
        writeln!(table, "{body}").unwrap();
        for unknown_fields in
            [UnknownFieldPolicy::Drop, UnknownFieldPolicy::Pass, UnknownFieldPolicy::Reject]
        {
            let policy = BodyPolicy { unknown_fields, ..BodyPolicy::default() };
            let outcome = match send_body(GatewayRoute::ChatCompletions, &policy, body) {
                Ok(sent) => sent,
                Err(refusal) => format!("{}: {refusal}", refusal.code()),
            };
            writeln!(table, "  {unknown_fields:?}: {outcome}").unwrap();
        }
    }
    assert_snapshot!(table, @r#"
    {"model":"m","wibble":1}
      Drop: {"model":"m"}
      Pass: {"model":"m","wibble":1}
      Reject: unknown_field: field `wibble` is unknown; leave the field out
    {"model":"m","w\u0069bble":1}
      Drop: {"model":"m"}
      Pass: {"model":"m","wibble":1}
      Reject: unknown_field: field `wibble` is unknown; leave the field out
    {"model":"m","User":"u","mAx_tokens":5,"top_p":1}
      Drop: {"model":"m","top_p":1}
      Pass: {"model":"m","top_p":1}
      Reject: unknown_field: field `User` is unknown; leave the field out
    {"model":"m","API_KEY":"sk"}
      Drop: field_not_allowed: `API_KEY` is not allowed, as it would choose the upstream or its credentials; leave it out
      Pass: field_not_allowed: `API_KEY` is not allowed, as it would choose the upstream or its credentials; leave it out
      Reject: field_not_allowed: `API_KEY` is not allowed, as it would choose the upstream or its credentials; leave it out
    {"model":"m","stop_sequences":[]}
      Drop: {"model":"m"}
      Pass: {"model":"m"}
      Reject: unknown_field: field `stop_sequences` is unknown; leave the field out
    {"model":"m","uſer":"u"}
      Drop: {"model":"m"}
      Pass: {"model":"m"}
      Reject: unknown_field: field `u%C5%BFer` is unknown; leave the field out
    {"model":"m","":1,"a b":1,"a\nb":1}
      Drop: {"model":"m"}
      Pass: {"model":"m"}
      Reject: unknown_field: field `-` is unknown; leave the field out
    {"model":"m","a-name-that-is-far-longer-than-the-sixty-four-bytes-that-are-kept-of-it":1}
      Drop: {"model":"m"}
      Pass: {"model":"m"}
      Reject: unknown_field: field `a name over 64 bytes` is unknown; leave the field out
    {"model":"m","my_aws_key":1,"aws_anything":1}
      Drop: field_not_allowed: `aws_anything` is not allowed, as it would choose the upstream or its credentials; leave it out
      Pass: field_not_allowed: `aws_anything` is not allowed, as it would choose the upstream or its credentials; leave it out
      Reject: unknown_field: field `my_aws_key` is unknown; leave the field out
    "#);
}

/// G5: Admission reports each change that it made, for `explain` and for the metrics.
#[test]
fn changes_are_reported() {
    let policy = BodyPolicy { aliases: [("m".into(), "x".into())].into(), ..BodyPolicy::default() };
    let body = r#"{"us\u0065r":"u","model":"m","stream":true,"wibble\n":1,"store":true,"top_\u0070":1,"service_tier":"priority"}"#;
    let call =
        admit_in(GatewayRoute::ChatCompletions, &policy, split_frames(body.as_bytes(), 9)).unwrap();
    let changes: Vec<_> = call
        .changes
        .iter()
        .map(|change| {
            format!("{} {}: {}", change.field, change.what.as_str(), change.why.description())
        })
        .collect();
    assert_snapshot!(changes.join("\n"), @r"
    user dropped: the gateway itself states who calls
    wibble%0A dropped: the gateway does not know the field
    top_p overwritten: the field's name was written with escapes
    service_tier dropped: the field would change the price
    model renamed: the upstream has its own name for the model
    store overwritten: the provider may keep nothing, as `stored_state` is not granted
    stream_options forced: a stream must report its usage
    ");
    assert_snapshot!(String::from_utf8(concat_rope(&call.into_body())).unwrap(), @r#"{"model":"x","stream":true,"store":false,"top_p":1,"stream_options":{"include_usage":true}}"#);
}

/// G6: The provider stores no answer unless the capability is granted, whether it stores by default or on request.
#[test]
fn answers_are_not_stored_unless_that_is_granted() {
    let mut table = String::new();
    let granted = BodyPolicy {
        capabilities: [ProviderCapability::StoredState].into(),
        ..BodyPolicy::default()
    };
    for route in [GatewayRoute::Responses, GatewayRoute::ChatCompletions] {
        for store in ["", r#","store":true"#, r#","store":null"#, r#","store":false"#] {
            let body = format!(r#"{{"model":"m"{store}}}"#);
            let not = send_body(route, &BodyPolicy::default(), &body).unwrap();
            let with = send_body(route, &granted, &body).unwrap();
            writeln!(table, "{:<16} {body:<28} {not:<28} {with}", route.name()).unwrap();
        }
    }
    assert_snapshot!(table, @r#"
    responses        {"model":"m"}                {"model":"m","store":false}  {"model":"m"}
    responses        {"model":"m","store":true}   {"model":"m","store":false}  {"model":"m","store":true}
    responses        {"model":"m","store":null}   {"model":"m","store":false}  {"model":"m","store":null}
    responses        {"model":"m","store":false}  {"model":"m","store":false}  {"model":"m","store":false}
    chat_completions {"model":"m"}                {"model":"m"}                {"model":"m"}
    chat_completions {"model":"m","store":true}   {"model":"m","store":false}  {"model":"m","store":true}
    chat_completions {"model":"m","store":null}   {"model":"m","store":null}   {"model":"m","store":null}
    chat_completions {"model":"m","store":false}  {"model":"m","store":false}  {"model":"m","store":false}
    "#);
}

/// G5: A field of the wrong JSON type is refused if the upstream might interpret it differently.
#[test]
fn fields_have_the_kind_that_they_must_have() {
    let mut table = String::new();
    for (route, body) in [
        (GatewayRoute::ChatCompletions, r#"{"model":"m","messages":"hello"}"#),
        (GatewayRoute::ChatCompletions, r#"{"model":"m","tools":{"type":"web_search"}}"#),
        (GatewayRoute::Responses, r#"{"model":"m","input":{}}"#),
        (GatewayRoute::Responses, r#"{"model":"m","store":"no"}"#),
        (GatewayRoute::Messages, r#"{"model":"m","thinking":true}"#),
    ] {
        writeln!(table, "{body}: {}", send_body(route, &BodyPolicy::default(), body).unwrap_err())
            .unwrap();
    }
    assert_snapshot!(table, @r#"
    {"model":"m","messages":"hello"}: `messages` must be a list
    {"model":"m","tools":{"type":"web_search"}}: `tools` must be a list
    {"model":"m","input":{}}: `input` must be a text or a list
    {"model":"m","store":"no"}: `store` must be true or false
    {"model":"m","thinking":true}: `thinking` must be an object
    "#);
}

proptest! {
    /// G5: Whichever fields are dropped, the body that is sent is valid JSON and equals the client's body without those
    /// fields.
    #[test]
    fn dropping_fields_leaves_the_others_unchanged(
        names in subsequence(NAMES, 0..=NAMES.len()).prop_shuffle(),
        values in prop::collection::vec(generated_bodies::any_value(), NAMES.len()),
        place in any::<Index>(),
        space in select(&["", " ", "\n\t"][..]),
        size in 1..60usize,
    ) {
        let mut members: Vec<_> =
            names.iter().zip(&values).map(|(name, value)| format!("\"{name}\"{space}:{value}")).collect();
        members.insert(place.index(members.len() + 1), r#""model": "m""#.to_owned());
        let body = format!("{{{space}{}{space}}}", members.join(&format!("{space},{space}")));
        prop_assume!(JsonScanner::new(JsonLimits::default()).feed_frame(body.as_bytes()).is_ok());

        let call = admit_in(GatewayRoute::Messages, &BodyPolicy::default(), split_frames(body.as_bytes(), size)).unwrap();
        let mut expected = parse_json(&body);
        expected.as_object_mut().unwrap().retain(|name, _| PASSING.contains(&name.as_str()));
        let dropped = names.len() + 1 - expected.as_object().unwrap().len();
        let told = call.changes.iter().filter(|change| change.what.as_str() == "dropped").count();
        prop_assert_eq!(told, dropped);
        let sent = concat_rope(&call.into_body());
        prop_assert_eq!(serde_json::from_slice::<Value>(&sent).unwrap(), expected);
        let plain = JsonScanner::new(JsonLimits::default()).feed_frame(&sent);
        prop_assert!(plain.is_ok());
    }

    /// G5, G6, G9: Whatever the client sends, the body that goes upstream is valid JSON, holds nothing that is
    /// forbidden, and differs from the client's body only in the gateway's own fields.
    #[test]
    fn an_admitted_body_keeps_the_invariants(
        route in select(&POSTS[..]),
        size in 0..100usize,
        names in subsequence(ANY, 0..=ANY.len()).prop_shuffle(),
        values in prop::collection::vec(sound_value(), ANY.len()),
    ) {
        let members = names.iter().zip(&values).map(|(name, value)| format!("\"{name}\":{value}"));
        let body = format!("{{{}}}", members.collect::<Vec<_>>().join(","));
        body_invariants::check_body(route, size, body.as_bytes());
    }

    /// G5, G6: The outcome for a body does not depend on how its bytes were split into frames.
    #[test]
    fn the_outcome_is_the_same_however_the_body_arrives(
        route in select(&POSTS[..]),
        names in subsequence(JUDGED, 0..=3),
        values in prop::collection::vec(generated_bodies::any_value(), 3),
    ) {
        let members = names.iter().zip(&values).map(|(name, value)| format!(",\"{name}\":{value}"));
        let body = format!(r#"{{"model":"m"{}}}"#, members.collect::<String>());
        let outcome = |frames: Vec<Bytes>| -> Result<Vec<u8>, Option<BodyPolicyError>> {
            let body = read_frames(route, frames).map_err(|_| None)?;
            Ok(concat_rope(&admit_body(&BodyPolicy::default(), body).map_err(Some)?.into_body()))
        };
        let bytes = Bytes::from(body);
        let whole = outcome(vec![bytes.clone()]);
        for at in 0..bytes.len() {
            prop_assert_eq!(&outcome(vec![bytes.slice(..at), bytes.slice(at..)]), &whole, "{}", at);
        }
    }
}

/// Values that fields usually have, so that some generated bodies are admitted.
fn sound_value() -> impl Strategy<Value = String> {
    prop_oneof![
        1 => generated_bodies::any_value(),
        2 => select(&["null", "true", "false", "\"m\"", "[]", "{}", "5", "5000", "\"\""][..])
            .prop_map(str::to_owned),
        1 => Just(r#"{"type":"enabled","budget_tokens":4000}"#.to_owned()),
    ]
}

/// Returns the fields of the route's own protocol.
fn own_fields(route: GatewayRoute) -> impl Iterator<Item = RequestField> {
    let everywhere = field::fields_of_route(GatewayRoute::Models).count();
    let all = field::fields_of_route(route).count();
    field::fields_of_route(route).take(if route == GatewayRoute::Models {
        all
    } else {
        all - everywhere
    })
}

fn field_fate(rule: FieldRule) -> String {
    match rule {
        FieldRule::Pass(shape) => format!("passes: {shape:?}"),
        FieldRule::Needs(capability) => format!("needs {}", capability.name()),
        FieldRule::Drop(why) => format!("dropped: {}", why.description()),
        FieldRule::Refuse(why) => format!("refused: it {}", why.description()),
        FieldRule::Store => "made false unless stored_state is granted".to_owned(),
        rule => format!("read: {rule:?}"),
    }
}

fn escape_name(name: &str) -> String {
    let (first, rest) = name.split_at(1);
    format!("\\u{:04x}{rest}", first.as_bytes()[0])
}

fn parse_json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

const NAMES: &[&str] = &[
    "user",
    "met\\u0061data",
    "wibble",
    "",
    "service_tier",
    "temperature",
    "\\u0074op_p",
    "cache_control",
    "output_config",
    "a name that is longer than the sixty-four bytes that are kept of it, and then some",
    "Temperature",
];

const PASSING: &[&str] = &["model", "temperature", "top_p", "cache_control", "output_config"];

const ANY: &[&str] = &[
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "thinking",
    "store",
    "user",
    "wibb\\u006ce",
    "input",
    "tools",
    "temperatur\\u0065",
];

const JUDGED: &[&str] = &["messages", "tools", "input", "system", "prompt", "store", "to\\u006fls"];
