//! Tests of the chain: it detects every change of a log.

use std::time::Duration;

use cogni_gateway::telemetry::audit::AuditPublicKey;
use cogni_gateway::telemetry::audit::chain::{
    ChainBreakReason, ChainTip, MAX_UNSETTLED_CALLS, RecordHeader,
};
use cogni_gateway::telemetry::audit::read::{ChainBreakError, MAX_LINE_BYTES};
use cogni_gateway::telemetry::audit::records::{AuditRecord, CallRefusedRecord, CallSettledRecord};
use cogni_gateway::telemetry::audit::{AuditError, AuditLog, verify};
use hex::FromHex;
use proptest::prelude::*;
use ring::digest::{SHA256, digest};
use ring::signature::{ED25519, UnparsedPublicKey};
use serde::Serialize;

use super::*;

#[test]
fn a_whole_run_reads_like_this() {
    let log_dir = whole_run();
    let text = String::from_utf8(log_dir.bytes()).unwrap();
    insta::with_settings!({filters => vec![
        (r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", "[time]"),
        (r#""prev":"[0-9a-f]{64}","hash":"[0-9a-f]{64}""#, r#""prev":"[…]","hash":"[…]""#),
        (r"[0-9a-f]{128}", "[signature]"),
    ]}, {
        insta::assert_snapshot!(text, @r#"
        {"v":1,"seq":1,"time":"[time]","run":"run-1","event":"run.started","attempt":"2","account":"acct-1","version":"0.1.0","policy":"9f86d081","prices":"8d969eef","upstream":"litellm","public_key":"d04ab232742bb4ab3a1368bd4615e4e6d0224ab71a016baf8520a332c9778737","resumed":false,"prev":"[…]","hash":"[…]"}
        {"v":1,"seq":2,"time":"[time]","run":"run-1","event":"request.admitted","request":"call-1","route":"chat_completions","model":"gpt-4o","stream":true,"request_bytes":2048,"reserved":{"turns":1,"input":600,"output":4096},"prev":"[…]","hash":"[…]"}
        {"v":1,"seq":3,"time":"[time]","run":"run-1","event":"request.settled","request":"call-1","outcome":"completed","status":200,"usage":{"input":118,"output":44,"source":"provider"},"charged":{"turns":1,"input":118,"output":44},"response_bytes":9000,"frames":45,"litellm_call_id":"call-1","litellm_response_cost":"0.00074","first_byte_ms":311.001,"duration_ms":812.25,"prev":"[…]","hash":"[…]"}
        {"v":1,"seq":4,"time":"[time]","run":"run-1","event":"request.refused","request":"call-2","code":"route_not_served","status":404,"method":"POST","route":"-","model":null,"request_bytes":17,"prev":"[…]","hash":"[…]"}
        {"v":1,"seq":5,"time":"[time]","run":"run-1","event":"request.admitted","request":"call-3","route":"chat_completions","model":"gpt-4o","stream":true,"request_bytes":2048,"reserved":{"turns":1,"input":600,"output":4096},"prev":"[…]","hash":"[…]"}
        {"v":1,"seq":6,"time":"[time]","run":"run-1","event":"request.settled","request":"call-3","outcome":"client_gone","status":0,"usage":{"input":118,"output":44,"source":"provider"},"charged":{"turns":1,"input":118,"output":44},"response_bytes":9000,"frames":45,"litellm_call_id":"call-3","litellm_response_cost":"0.00074","first_byte_ms":311.001,"duration_ms":812.25,"prev":"[…]","hash":"[…]"}
        {"v":1,"seq":7,"time":"[time]","run":"run-1","event":"run.finished","spent":{"turns":2,"input":236,"output":88},"admitted":2,"refused":1,"prev":"[…]","hash":"[…]"}
        {"v":1,"seq":8,"time":"[time]","run":"run-1","event":"log.checkpoint","signature":"[signature]","public_key":"d04ab232742bb4ab3a1368bd4615e4e6d0224ab71a016baf8520a332c9778737","prev":"[…]","hash":"[…]"}
        "#);
    });
}

/// G11: A program that knows only the documented format can verify a log.
#[test]
fn a_log_can_be_checked_by_its_description() {
    let log = String::from_utf8(whole_run().bytes()).unwrap();
    let mut last = "0".repeat(64);
    for (line, seq) in log.lines().zip(1..) {
        let (content, rest) = line.split_once(",\"hash\":\"").unwrap();
        let (fields, prev) = content.split_once(",\"prev\":\"").unwrap();
        assert!(fields.starts_with(&format!("{{\"v\":1,\"seq\":{seq},")), "{fields}");
        assert_eq!(prev.strip_suffix('"').unwrap(), last);
        if seq == 8 {
            let text = |key: &str| fields.split(&format!("\"{key}\":\"")).nth(1).unwrap();
            let signature: [u8; 64] = FromHex::from_hex(&text("signature")[..128]).unwrap();
            let key: [u8; 32] = FromHex::from_hex(&text("public_key")[..64]).unwrap();
            let signed = format!("cogni-gateway audit checkpoint v1 {last}");
            UnparsedPublicKey::new(&ED25519, key).verify(signed.as_bytes(), &signature).unwrap();
        }
        let hash = digest(&SHA256, content.as_bytes());
        last = rest.strip_suffix("\"}").unwrap().to_owned();
        assert_eq!(hex::decode(&last).unwrap(), hash.as_ref());
    }
    assert!(log.ends_with(&format!("{last}\"}}\n")));
}

/// G11: Verification detects a single changed byte anywhere and names the record that holds it.
#[test]
fn every_changed_byte_is_found_and_its_record_named() {
    let mut log = whole_run().bytes();
    let starts = line_starts(&log);
    for at in 0..log.len() {
        let original = log[at];
        let seq = starts.partition_point(|start| *start <= at);
        // A neighbouring byte, the other letter case, and a line break.
        for changed in [original ^ 1, original ^ 0x20, b'\n'] {
            if changed == original {
                continue;
            }
            log[at] = changed;
            let ChainBreakError { seq: named, offset, .. } = verify_log(&log).unwrap_err();
            let name_and_offset = (named, usize::try_from(offset).unwrap());
            assert_eq!(
                name_and_offset,
                (seq as u64, starts[seq - 1]),
                "byte {at}: {original} → {changed}"
            );
        }
        log[at] = original;
    }
    assert!(verify_log(&log).is_ok());
}

proptest! {
    /// G11: No edited text passes verification, except a log that ends early after a whole record.
    #[test]
    fn an_edit_of_any_size_is_found(
        from in 0_usize..4096,
        removed in 0_usize..600,
        inserted in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let log = &*WHOLE_RUN;
        let from = from % (log.len() + 1);
        let to = (from + removed).min(log.len());
        let edited = [&log[..from], &inserted, &log[to..]].concat();
        let prefix = log.starts_with(&edited) && edited.last().is_none_or(|end| *end == b'\n');
        prop_assert_eq!(verify_log(&edited).is_ok(), prefix);
    }

    /// G11: Whatever names clients and upstreams use, the log stays readable and its lines stay short.
    #[test]
    fn any_text_and_any_number_can_be_written_and_read_back(
        text in any::<String>(),
        number in any::<u64>(),
        time in prop::num::f64::ANY,
    ) {
        let (log, lines) = in_memory(|chain, lines| {
            let amount = budget_amount(number, number, number);
            append_record(chain, lines, &CallAdmittedRecord { model: Some(&text), reserved: amount, ..admitted_record(&text) });
            append_record(chain, lines, &CallSettledRecord {
                code: Some(&text),
                charged: amount,
                litellm_call_id: Some(&text),
                first_byte_ms: Some(time),
                duration_ms: time,
                ..settled_record(&text)
            });
            append_record(chain, lines, &CallRefusedRecord { method: &text, ..refused_record(&text, "code") });
        });
        let report = verify_log(&log).unwrap();
        prop_assert_eq!((report.settled, report.open, report.unmatched), (1, 0, 0));
        prop_assert_eq!(lines, 3);
    }
}

/// G11: A hostile name takes at most this much of the disk.
#[test]
fn the_longest_text_makes_a_line_under_8_kib() {
    let text = "\u{1}".repeat(1 << 20);
    let (log, _) = in_memory(|chain, lines| {
        append_record(
            chain,
            lines,
            &CallSettledRecord {
                code: Some(&text),
                litellm_call_id: Some(&text),
                litellm_response_cost: Some(&text),
                reported_cost_usd: None,
                ..settled_record(&text)
            },
        );
    });
    assert!(log.len() < 8192, "{}", log.len());
    assert!(verify_log(&log).is_ok());
}

/// G11: Verification detects lines that were removed, repeated or moved.
#[test]
fn a_removed_repeated_or_moved_line_is_detected() {
    let log = whole_run().bytes();
    let lines: Vec<&[u8]> = log.split_inclusive(|byte| *byte == b'\n').collect();
    let found = |lines: &[&[u8]]| verify_log(&lines.concat()).unwrap_err();
    for at in 0..lines.len() {
        let seq = at as u64 + 1;
        let mut repeated = lines.clone();
        repeated.insert(at, lines[at]);
        assert_eq!(found(&repeated).seq, seq + 1);
        assert_eq!(found(&repeated).why, ChainBreakReason::WrongSequence(seq));

        if at + 1 < lines.len() {
            let mut removed = lines.clone();
            removed.remove(at);
            assert_eq!(
                (found(&removed).seq, found(&removed).why),
                (seq, ChainBreakReason::WrongSequence(seq + 1))
            );
        }
        for other in at + 1..lines.len() {
            let mut swapped = lines.clone();
            swapped.swap(at, other);
            assert_eq!(found(&swapped).seq, seq);
        }
    }
}

/// G11: If a record is changed and its hash computed again, the next record no longer fits.
#[test]
fn a_record_with_a_new_hash_does_not_fit_the_one_after_it() {
    let call = |request: &'static str| {
        let (log, _) = in_memory(|chain, lines| {
            append_record(chain, lines, &admitted_record(request));
            append_record(chain, lines, &settled_record("call-1"));
        });
        let second = line_starts(&log)[1];
        [log[..second].to_vec(), log[second..].to_vec()]
    };
    let [[changed, _], [_, after]] = [call("call-2"), call("call-1")];
    let found = verify_log(&[changed, after].concat()).unwrap_err();
    assert_eq!((found.seq, found.why), (2, ChainBreakReason::WrongPredecessor));
}

/// G11: The report says that a log has no end record, the one thing that the chain cannot detect.
#[test]
fn a_log_without_its_end_is_reported_as_unfinished() {
    let log = whole_run().bytes();
    let starts = line_starts(&log);
    assert!(verify_log(&log).unwrap().finished);
    assert!(verify_log(&log[..starts[7]]).unwrap().finished, "only the signature is missing");
    assert!(!verify_log(&log[..starts[6]]).unwrap().finished);
}

/// G11: A forged chain with new hashes is intact; only the key reveals the forgery.
#[test]
fn a_forged_chain_is_detected_with_the_key() {
    let log_dir = whole_run();
    let key = verify::verify_file(&log_dir.log(), None).unwrap().signatures.key.unwrap();
    let pinned = verify::verify_file(&log_dir.log(), Some(&key)).unwrap();
    assert_eq!(pinned.signatures.last, Some(8));

    let forged = LogDir::new();
    let other = AuditConfig { signing_key: None, ..audit_config(&forged.log()) };
    let (log, _) = AuditLog::open_log(&other, &started_record()).unwrap();
    log.finish_log(&RunFinishedRecord { spent: budget_amount(0, 0, 0), admitted: 0, refused: 0 })
        .unwrap();
    drop(log);
    assert!(verify::verify_file(&forged.log(), None).is_ok());
    let found = verify::verify_file(&forged.log(), Some(&key)).unwrap_err();
    assert!(matches!(found, AuditError::Unsigned { key: named } if named == key));
}

/// G11: Checkpoints are written on time, and a run may be resumed with another key.
#[test]
fn checkpoints_are_signed_at_intervals_by_the_current_writer() {
    let log_dir = LogDir::new();
    let signed = AuditConfig { checkpoint_every: 4, ..audit_config(&log_dir.log()) };
    let (log, _) = AuditLog::open_log(&signed, &started_record()).unwrap();
    for call in 0..10 {
        at_once(log.record_admission(&admitted_record(&format!("call-{call}")))).unwrap();
        log.record_settlement(&settled_record(&format!("call-{call}")));
    }
    drop(log);
    let first = log_dir.verify();
    assert_eq!((first.records, first.signatures.checkpoints), (26, 5));

    let (log, _) =
        AuditLog::open_log(&AuditConfig { signing_key: None, ..signed }, &started_record())
            .unwrap();
    log.finish_log(&RunFinishedRecord { spent: budget_amount(0, 0, 0), admitted: 0, refused: 0 })
        .unwrap();
    let (before, now) = (first.signatures.key.unwrap(), log_dir.verify().signatures.key.unwrap());
    assert_ne!(before, now);
    for (key, key_records, last) in [(before, 1, 25), (now, 5, 29)] {
        let signatures = verify::verify_file(&log_dir.log(), Some(&key)).unwrap().signatures;
        assert_eq!((signatures.foreign, signatures.last), (key_records, Some(last)));
    }
}

/// G11: A record waits for a signature no longer than the configured interval. The next flush signs it, and a log
/// without new records wakes no task.
#[tokio::test]
async fn a_flush_signs_records_that_waited_too_long() {
    let log_dir = LogDir::new();
    // By the next flush, any record has waited for this long.
    let soon = AuditConfig {
        checkpoint_interval: Duration::from_nanos(1),
        ..audit_config(&log_dir.log())
    };
    let (log, _) = AuditLog::open_log(&soon, &started_record()).unwrap();
    for call in 1..=3 {
        let call = call.to_string();
        log.record_admission(&admitted_record(&call)).await.unwrap();
        log.record_settlement(&settled_record(&call));
        log.wait_for_data().await;
        log.flush_buffered();
        let report = log_dir.verify();
        assert_eq!(report.signatures.last, Some(report.records), "all of it is signed");
    }
    let signed = log_dir.bytes();
    for _ in 0..10 {
        log.flush_buffered();
    }
    assert_eq!(log_dir.bytes(), signed, "a signature needs none itself");
    // The notification of the last settlement may still be pending; after it, there is nothing to wait for.
    let _ = is_ready(log.wait_for_data());
    assert!(!is_ready(log.wait_for_data()));

    // An admission alone is signed only because of its age.
    log.record_admission(&admitted_record("4")).await.unwrap();
    log.wait_for_data().await;
    log.flush_buffered();
    assert_eq!(log_dir.verify().signatures.last, Some(log_dir.verify().records));
}

/// G11: Before the interval is over, calls are not signed individually.
#[test]
fn a_flush_does_not_sign_records_before_the_interval() {
    let log_dir = LogDir::new();
    let later = AuditConfig {
        checkpoint_interval: Duration::from_hours(1),
        ..audit_config(&log_dir.log())
    };
    let never = AuditConfig { checkpoint_interval: Duration::ZERO, ..audit_config(&log_dir.log()) };
    for config in [later, never] {
        let (log, _) = AuditLog::open_log(&config, &started_record()).unwrap();
        for call in 0..100 {
            at_once(log.record_admission(&admitted_record(&call.to_string()))).unwrap();
            log.record_settlement(&settled_record(&call.to_string()));
            log.flush_buffered();
        }
    }
    assert_eq!(log_dir.verify().signatures.checkpoints, 0);
}

/// G11: Verification rejects a record with an intact link and an impossible meaning.
#[test]
fn a_chained_record_with_an_impossible_meaning_is_rejected() {
    #[derive(Serialize)]
    struct RecordSignature {
        signature: String,
        public_key: String,
    }
    impl AuditRecord for RecordSignature {
        const EVENT: &'static str = "log.checkpoint";
    }
    let log_dir = whole_run();
    let key = log_dir.verify().signatures.key.unwrap().to_string();
    let signatures = ["00".repeat(64), "00".into(), "x".into()];
    for signature in signatures {
        let (log, _) = in_memory(|chain, lines| {
            append_record(chain, lines, &admitted_record("call-1"));
            append_record(chain, lines, &RecordSignature { signature, public_key: key.clone() });
        });
        assert_eq!(verify_log(&log).unwrap_err().why, ChainBreakReason::InvalidSignature);
    }

    let (log, _) = in_memory(|chain, lines| {
        append_record(chain, lines, &admitted_record("call-1"));
        chain.append_record(
            lines,
            RecordHeader { time: b"now", run: "\"run-2\"" },
            &settled_record("call-1"),
        );
    });
    let found = verify_log(&log).unwrap_err();
    assert_eq!((found.seq, found.why), (2, ChainBreakReason::OtherRun("run-2".into())));
}

#[test]
fn an_event_of_a_later_version_is_counted_and_passed_over() {
    #[derive(Serialize)]
    struct CalledRun {
        tool: &'static str,
    }
    impl AuditRecord for CalledRun {
        const EVENT: &'static str = "tool.called";
    }
    let (log, _) =
        in_memory(|chain, lines| append_record(chain, lines, &CalledRun { tool: "time" }));
    assert_eq!(verify_log(&log).unwrap().records, 1);
}

#[test]
fn a_reader_needs_bounded_memory_whatever_the_file_holds() {
    let long = vec![b'x'; usize::try_from(MAX_LINE_BYTES).unwrap() + 1];
    assert_eq!(verify_log(&long).unwrap_err().why, ChainBreakReason::TooLong);

    let (many, _) = in_memory(|chain, lines| {
        for call in 0..=MAX_UNSETTLED_CALLS {
            append_record(chain, lines, &admitted_record(&call.to_string()));
        }
    });
    let found = verify_log(&many).unwrap_err();
    assert_eq!(
        (found.seq, found.why),
        (MAX_UNSETTLED_CALLS as u64 + 1, ChainBreakReason::TooManyUnsettled)
    );
}

/// Returns whether the future is ready at the first poll.
fn is_ready(future: impl Future) -> bool {
    pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Chains records without a file; also returns the number of lines.
fn in_memory(write: impl FnOnce(&mut ChainTip, &mut Vec<u8>)) -> (Vec<u8>, usize) {
    let mut lines = vec![];
    let mut chain = ChainTip::START;
    write(&mut chain, &mut lines);
    let count = line_starts(&lines).len();
    (lines, count)
}

fn append_record(chain: &mut ChainTip, lines: &mut Vec<u8>, record: &impl AuditRecord) {
    let head = RecordHeader { time: b"2026-11-21T23:10:33.125Z", run: "\"run-1\"" };
    chain.append_record(lines, head, record);
}

#[test]
fn a_key_is_printed_as_it_is_read() {
    let key = whole_run().verify().signatures.key.unwrap();
    assert_eq!(AuditPublicKey::parse_public_key(&key.to_string()).unwrap(), key);
}
