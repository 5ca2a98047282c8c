//! Recovery never panics, whatever bytes a log file has, and every log that it accepts proves itself.
#![cfg_attr(fuzzing, no_main)]

use std::collections::BTreeMap;

use cogni_gateway::telemetry::audit::chain::{ChainTip, RecordHeader};
use cogni_gateway::telemetry::audit::records::AuditRecord;
use cogni_gateway::telemetry::audit::{recover, verify};
use cogni_gateway_fuzz::fuzz_target;
use serde::Serialize;
use serde_json::value::RawValue;

fuzz_target!(|data: &[u8]| {
    check_recovery(data);
    check_recovery(&chain_records(data));
});

fn check_recovery(log: &[u8]) {
    let Ok(scan) = recover::scan_log(log) else { return };
    let whole = usize::try_from(scan.whole_bytes).expect("it is a part of a slice");
    let report = verify::verify_log(&log[..whole], None).expect("what recovery accepts verifies");
    assert_eq!(report.records + 1, scan.chain.next_seq());
    assert_eq!((report.spent, report.open), (scan.spent, scan.open.len() as u64));
}

/// Chains each line, which has a digit for the event and an object with the fields. No fuzzer finds a SHA-256, so the
/// fuzzer would otherwise never get past the first hash.
fn chain_records(data: &[u8]) -> Vec<u8> {
    let (mut chain, mut lines) = (ChainTip::START, vec![]);
    for line in data.split(|byte| *byte == b'\n') {
        let Some((event, fields)) = line.split_first() else { continue };
        let Ok(fields) = serde_json::from_slice(fields) else { continue };
        let add = match event {
            b'0' => add_record::<0>,
            b'1' => add_record::<1>,
            b'2' => add_record::<2>,
            b'3' => add_record::<3>,
            _ => add_record::<4>,
        };
        add(&mut chain, &mut lines, fields);
    }
    lines
}

fn add_record<const E: usize>(chain: &mut ChainTip, lines: &mut Vec<u8>, fields: RecordFields<'_>) {
    let head = RecordHeader { time: b"2026-11-21T23:10:33.125Z", run: "\"run-1\"" };
    if !fields.is_empty() {
        chain.append_record(lines, head, &FuzzEvent::<E>(fields));
    }
}

type RecordFields<'a> = BTreeMap<&'a str, &'a RawValue>;

#[derive(Serialize)]
#[serde(transparent)]
struct FuzzEvent<'a, const E: usize>(RecordFields<'a>);

impl<const E: usize> AuditRecord for FuzzEvent<'_, E> {
    const EVENT: &'static str = EVENTS[E];
}

const EVENTS: [&str; 5] =
    ["request.admitted", "request.settled", "request.refused", "log.checkpoint", "tool.called"];
