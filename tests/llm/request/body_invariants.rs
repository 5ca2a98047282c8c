//! Invariants of every admitted body, checked by the property test and by the fuzz target.

use bytes::Bytes;
use cogni_gateway::llm::budget::Tokens;
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::llm::request::field::{self, FieldRule};
use cogni_gateway::llm::request::{
    BodyPolicy, BodyReader, FieldChange, FieldChangeKind, LlmCall, UnknownFieldPolicy, admit_body,
};
use serde_json::{Map, Value, json};

/// Admits `body` in frames of `size` bytes and checks the body that goes upstream. A refused body is skipped.
pub(crate) fn check_body(route: GatewayRoute, size: usize, body: &[u8]) {
    for unknown_fields in [UnknownFieldPolicy::Drop, UnknownFieldPolicy::Pass] {
        let policy = BodyPolicy { unknown_fields, ..BodyPolicy::default() };
        let Some(mut call) = admit_in_frames(route, &policy, size, body) else { continue };
        // The ledger grants every call at least one token per answer.
        let limit = Tokens(64 * size.max(1) as u64);
        if size.is_multiple_of(2) {
            call.limit_output(limit);
        }
        let dropped =
            call.changes.iter().filter(|change| change.what == FieldChangeKind::Dropped).count();
        // If a protocol has no such field, the field is dropped and no usage chunk is hidden.
        let is_asked_for = |change: &FieldChange| {
            change.field == "stream_options" && change.what != FieldChangeKind::Dropped
        };
        let is_hidden = call.stream && call.changes.iter().any(is_asked_for);
        let sent = body_text(call);
        // A number may be too large for `serde_json`; then the bodies cannot be compared.
        let Ok(Value::Object(before)) = serde_json::from_slice(body) else { continue };
        let Ok(Value::Object(after)) = serde_json::from_slice(&sent) else {
            panic!("what goes up is no JSON: {}", sent.escape_ascii())
        };
        assert_no_forbidden_field(route, &after);
        assert_only_gateway_fields_changed(&before, &after);
        assert_eq!(before.keys().filter(|key| !after.contains_key(*key)).count(), dropped);
        if size.is_multiple_of(2) {
            assert_output_is_limited(route, limit, &after);
        }
        // A body that was admitted once is admitted again without a change.
        let again = admit_in_frames(route, &policy, 7, &sent).expect("what goes up is acceptable");
        assert!(again.changes.is_empty(), "{:?}", again.changes);
        assert_eq!(body_text(again), sent);
        if is_hidden {
            assert_eq!(after["stream_options"]["include_usage"], json!(true));
        }
    }
}

fn assert_no_forbidden_field(route: GatewayRoute, after: &Map<String, Value>) {
    for field in field::fields_of_route(route) {
        if matches!(field.rule, FieldRule::Drop(_) | FieldRule::Refuse(_)) {
            assert!(!after.contains_key(field.name), "{}", field.name);
        }
    }
    assert_ne!(after.get("store"), Some(&json!(true)));
}

fn assert_only_gateway_fields_changed(before: &Map<String, Value>, after: &Map<String, Value>) {
    for (key, value) in after {
        if !OURS.contains(&key.as_str()) {
            assert_eq!(before.get(key), Some(value), "{key}");
        }
    }
}

fn assert_output_is_limited(route: GatewayRoute, limit: Tokens, after: &Map<String, Value>) {
    let limits = LIMITS.iter().filter_map(|name| after.get(*name)?.as_u64());
    if route.counts_as_turn() {
        assert!(limits.clone().count() > 0 && limits.max() <= Some(limit.0), "{after:?}");
    }
    if let Some(budget) =
        after.get("thinking").and_then(|thinking| thinking["budget_tokens"].as_u64())
    {
        assert!(
            budget < limit.0 || !route.counts_as_turn() || client_limit_is_lower(after, budget),
            "{after:?}"
        );
    }
}

/// Returns whether the client's own limit was lower; then the client is responsible for its thinking budget.
fn client_limit_is_lower(after: &Map<String, Value>, budget: u64) -> bool {
    LIMITS.iter().filter_map(|name| after.get(*name)?.as_u64()).max() <= Some(budget)
}

fn admit_in_frames(
    route: GatewayRoute,
    policy: &BodyPolicy,
    size: usize,
    body: &[u8],
) -> Option<LlmCall> {
    let mut reader = BodyReader::new(route);
    body.chunks(size.max(1))
        .try_for_each(|frame| reader.push(Bytes::copy_from_slice(frame)))
        .ok()?;
    admit_body(policy, reader.finish_body().ok()?).ok()
}

fn body_text(call: LlmCall) -> Vec<u8> {
    let rope = call.into_body();
    let text: Vec<u8> = rope.iter().flatten().copied().collect();
    assert_eq!(rope.len(), text.len() as u64);
    text
}

const LIMITS: [&str; 3] = ["max_tokens", "max_completion_tokens", "max_output_tokens"];

/// The fields that the gateway may change.
const OURS: [&str; 6] = ["stream_options", "store", "thinking", LIMITS[0], LIMITS[1], LIMITS[2]];
