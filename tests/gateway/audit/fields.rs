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
        (request, model) in (text(), option::of(text())),
        route in select(GatewayRoute::ALL.to_vec()),
        rules in prop::collection::vec(text().prop_map(Arc::from), 0..3),
        (stream, request_bytes, pid) in (any::<bool>(), number(), option::of(any::<u32>())),
        reserved in amount(),
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
        (request, code, call_id, cost) in (text(), option::of(text()), option::of(text()), option::of(text())),
        (outcome, status) in (select(CallOutcome::ALL.to_vec()), any::<u16>()),
        (usage, charged) in (usage(), amount()),
        (response_bytes, frames) in (number(), number()),
        reported in option::of(number().prop_map(Nanodollars)),
        (first_byte_ms, duration_ms) in (option::of(milliseconds()), milliseconds()),
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
        let record =
            CallSettledRecord { duration_ms: time, first_byte_ms: Some(time), ..settled("1") };
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
fn text() -> impl Strategy<Value = String> {
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

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), 0..100_000_u64, any::<u64>(), Just(u64::MAX)]
}

fn amount() -> impl Strategy<Value = BudgetAmount> {
    (number(), number(), number(), number()).prop_map(|(turns, input, output, cost)| BudgetAmount {
        turns,
        input: Tokens(input),
        output: Tokens(output),
        cost: Nanodollars(cost),
    })
}

fn usage() -> impl Strategy<Value = TokenUsage> {
    let tokens = prop::array::uniform12(number().prop_map(Tokens));
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

fn milliseconds() -> impl Strategy<Value = f64> {
    prop_oneof![
        0.0..600_000.0,
        any::<f64>(),
        any::<u32>().prop_map(|micros| f64::from(micros) / 1e3)
    ]
}
