//! G11: The records of a call are written by hand-written code, and these tests compare them with serde's output.

use std::sync::Arc;

use cogni_gateway::llm::budget::{BudgetAmount, Nanodollars, TokenUsage, Tokens, UsageSource};
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::telemetry::audit::records::{
    AuditRecord, CallAdmittedRecord, CallOutcome, CallSettledRecord, MAX_TEXT_BYTES,
};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

proptest! {
    /// G11: An admission has the same bytes as serde writes.
    #[test]
    fn an_admission_is_written_as_serde_writes_it(
        (request, model) in (any_text(), option::of(any_text())),
        route in select(GatewayRoute::ALL.to_vec()),
        rules in prop::collection::vec(any_text().prop_map(Arc::from), 0..3),
        (stream, request_bytes, pid) in (any::<bool>(), any_number(), option::of(any::<u32>())),
        reserved in any_amount(),
    ) {
        let rules: Vec<Arc<str>> = rules;
        let record = CallAdmittedRecord {
            request: &request,
            route: route.name(),
            model: model.as_deref(),
            rules: &rules,
            stream,
            request_bytes,
            pid,
            reserved,
        };
        prop_assert_eq!(by_hand(&record), by_serde(&record));
    }

    /// G11: A settlement has the same bytes as serde writes.
    #[test]
    fn a_settlement_is_written_as_serde_writes_it(
        (request, code, call_id, cost) in (any_text(), option::of(any_text()), option::of(any_text()), option::of(any_text())),
        (outcome, status) in (select(CallOutcome::ALL.to_vec()), any::<u16>()),
        (usage, charged) in (any_usage(), any_amount()),
        (response_bytes, frames) in (any_number(), any_number()),
        reported in option::of(any_number().prop_map(Nanodollars)),
        (first_byte_ms, duration_ms) in (option::of(any_milliseconds()), any_milliseconds()),
    ) {
        let record = CallSettledRecord {
            request: &request,
            outcome,
            status,
            code: code.as_deref(),
            usage,
            charged,
            response_bytes,
            frames,
            litellm_call_id: call_id.as_deref(),
            litellm_response_cost: cost.as_deref(),
            reported_cost_usd: reported,
            first_byte_ms,
            duration_ms,
        };
        prop_assert_eq!(by_hand(&record), by_serde(&record));
    }
}

/// A time in microseconds is written as serde writes a float, also at both ends of the range of the hand-written code.
#[test]
fn every_time_is_written_as_serde_writes_it() {
    let edges = [999_999_999_999.999, 1e12, 1e15, f64::MAX, f64::MIN_POSITIVE, f64::INFINITY];
    let small = (0..3000_u32).map(|micros| f64::from(micros) / 1000.0);
    for time in small.chain(edges).flat_map(|time| [time, -time]).chain([f64::NAN]) {
        let record = CallSettledRecord {
            duration_ms: time,
            first_byte_ms: Some(time),
            ..settled_record("1")
        };
        assert_eq!(by_hand(&record), by_serde(&record), "{time}");
    }
}

fn by_hand(record: &impl AuditRecord) -> String {
    // The buffer is not empty at the start: its content must stay.
    let mut line = b"before".to_vec();
    record.append_json(&mut line);
    String::from_utf8(line).unwrap()
}

fn by_serde(record: &impl AuditRecord) -> String {
    format!("before{}", serde_json::to_string(record).unwrap())
}

/// Generated ids, text that a client may send, text that must be escaped, and text that must be truncated.
fn any_text() -> impl Strategy<Value = String> {
    let anything = prop::collection::vec(any::<char>(), 0..40);
    let long = prop::collection::vec(any::<char>(), MAX_TEXT_BYTES / 4..MAX_TEXT_BYTES + 9);
    prop_oneof![
        "[0-9a-f]{8}-[0-9a-f]{4}",
        "[ -~]{0,40}",
        "[\\x00-\\x20\"\\\\/\\x7f]{0,9}",
        anything.prop_map(String::from_iter),
        long.prop_map(String::from_iter),
    ]
}

fn any_number() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), 0..100_000_u64, any::<u64>(), Just(u64::MAX)]
}

fn any_amount() -> impl Strategy<Value = BudgetAmount> {
    (any_number(), any_number(), any_number(), any_number()).prop_map(
        |(turns, input, output, cost)| BudgetAmount {
            turns,
            input: Tokens(input),
            output: Tokens(output),
            cost: Nanodollars(cost),
        },
    )
}

fn any_usage() -> impl Strategy<Value = TokenUsage> {
    let tokens = prop::array::uniform12(any_number().prop_map(Tokens));
    (tokens, select(UsageSource::ALL.to_vec())).prop_map(|(tokens, source)| {
        let [input, output, cache_read, cache_write, cache_write_1h, reasoning, ..] = tokens;
        let [.., audio_input, audio_output, image_input, video_input, image_output, video_output] =
            tokens;
        TokenUsage {
            input,
            output,
            cache_read,
            cache_write,
            cache_write_1h,
            reasoning,
            audio_input,
            audio_output,
            image_input,
            video_input,
            image_output,
            video_output,
            source,
        }
    })
}

fn any_milliseconds() -> impl Strategy<Value = f64> {
    prop_oneof![
        0.0..600_000.0,
        any::<f64>(),
        any::<u32>().prop_map(|micros| f64::from(micros) / 1e3)
    ]
}
