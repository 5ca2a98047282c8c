//! G11: Checkpoints do not prove a log whose end was truncated, forged or appended to.

use std::process::ExitCode;

use cogni_gateway::cli::audit::{AuditCommand, run};
use cogni_gateway::telemetry::audit::chain::{ChainTip, RecordHeader};
use cogni_gateway::telemetry::audit::records::AuditRecord;
use cogni_gateway::telemetry::audit::verify::CheckpointCoverage;
use cogni_gateway::telemetry::audit::{AuditPublicKey, AuditSigningKey};
use proptest::prelude::*;
use serde::Serialize;

use super::*;

/// The bytes of a finished log with a checkpoint after every third record.
static LOG: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let place = LogDir::new();
    let config = AuditConfig { checkpoint_every: 3, ..audit_config(&place.log()) };
    let (log, _) = AuditLog::open_log(&config, &started_record()).unwrap();
    for call in ["call-1", "call-2", "call-3"] {
        at_once(log.record_admission(&admitted_record(call))).unwrap();
        log.record_settlement(&settled_record(call));
    }
    log.finish_log(&RunFinishedRecord {
        spent: budget_amount(3, 354, 132),
        admitted: 3,
        refused: 0,
    })
    .unwrap();
    place.bytes()
});

#[test]
fn verify_tells_a_cut_or_forged_end_from_a_whole_log() {
    let events: Vec<_> = LOG.split(|byte| *byte == b'\n').map(record_event).collect();
    let expected = [
        "run.started",
        "request.admitted",
        "request.settled",
        "log.checkpoint",
        "request.admitted",
        "request.settled",
        "request.admitted",
        "log.checkpoint",
        "request.settled",
        "run.finished",
        "log.checkpoint",
        "",
    ];
    assert_eq!(events, expected);
    let all = 11;
    let messages: Vec<_> = [
        ("whole", forge_log(all, &[])),
        ("cut at a checkpoint", forge_log(8, &[])),
        ("cut after a checkpoint", forge_log(9, &[])),
        ("cut, and ended again", forge_log(8, &[ForgedRecord::Refusal, ForgedRecord::End])),
        ("cut, ended again, and signed by another key", {
            forge_log(8, &[ForgedRecord::Refusal, ForgedRecord::End, ForgedRecord::Checkpoint])
        }),
        ("without its last checkpoint", forge_log(10, &[])),
        ("appended to", forge_log(all, &[ForgedRecord::Refusal])),
        ("signed again by another key", forge_log(all, &[ForgedRecord::Checkpoint])),
        ("cut before the first checkpoint", forge_log(3, &[ForgedRecord::End])),
    ]
    .into_iter()
    .map(|(name, log)| {
        let (code, text) = verify_log(&log);
        let proved = if code == ExitCode::SUCCESS { "status 0" } else { "another status" };
        let verdict: Vec<_> = text.lines().take_while(|line| !line.starts_with("run ")).collect();
        assert_eq!(code == ExitCode::SUCCESS, name == "whole", "{name}: {text}");
        assert_eq!(text.starts_with("OK"), name == "whole", "{name}: {text}");
        format!("{name} ({proved})\n  {}", verdict.join("\n  "))
    })
    .collect();
    insta::assert_snapshot!(messages.join("\n"), @"
    whole (status 0)
      OK: 11 records are as they were written, and signed to the last
    cut at a checkpoint (another status)
      OPEN: the run's end is not the end of the log; records 1 to 8 are as they were written, and signed; there is none after them
    cut after a checkpoint (another status)
      OPEN: the run's end is not the end of the log; records 1 to 8 are as they were written, and signed; 1 record after them is not signed: 9
    cut, and ended again (another status)
      UNSIGNED: records 1 to 8 are as they were written, and signed; 2 records after them are not signed: 9 to 10
      nothing proves who wrote the unsigned records
    cut, ended again, and signed by another key (another status)
      UNSIGNED: records 1 to 8 are as they were written, and signed; 3 records after them are not signed: 9 to 11
      nothing proves who wrote the unsigned records
    without its last checkpoint (another status)
      UNSIGNED: records 1 to 8 are as they were written, and signed; 2 records after them are not signed: 9 to 10
      nothing proves who wrote the unsigned records
    appended to (another status)
      OPEN: the run's end is not the end of the log; records 1 to 11 are as they were written, and signed; 1 record after them is not signed: 12
    signed again by another key (another status)
      UNSIGNED: records 1 to 11 are as they were written, and signed; 1 record after them is not signed: 12
      nothing proves who wrote the unsigned records
    cut before the first checkpoint (another status)
      UNSIGNED: no checkpoint was signed by `d04ab232742bb4ab3a1368bd4615e4e6d0224ab71a016baf8520a332c9778737`, so nothing proves who wrote this log
    ");
}

proptest! {
    /// G11: Only the complete log is proved, wherever it is truncated and whatever is appended.
    #[test]
    fn only_a_whole_log_is_complete(
        left in 0_usize..=11,
        more in prop::collection::vec(
            prop_oneof![
                Just(ForgedRecord::Refusal),
                Just(ForgedRecord::End),
                Just(ForgedRecord::Checkpoint),
            ],
            0..6,
        ),
    ) {
        let report = verify::verify_log(&*forge_log(left, &more), Some(&signing_key())).unwrap();
        let signed = [0, 4, 8, 11].into_iter().rfind(|checkpoint| *checkpoint <= left).unwrap();
        let unsigned = left - signed + more.len();
        prop_assert_eq!((report.signed_records(), report.unsigned_records()), (signed as u64, unsigned as u64));
        let is_whole = left == 11 && more.is_empty();
        prop_assert_eq!(report.coverage() == CheckpointCoverage::Complete, is_whole);
    }
}

/// A record that a forger without the key appends.
#[derive(Clone, Copy, Debug)]
enum ForgedRecord {
    Refusal,
    End,
    Checkpoint,
}

/// Returns this many records of the log, followed by a forger's records with correct hashes.
fn forge_log(left: usize, more: &[ForgedRecord]) -> Vec<u8> {
    let lines = LOG.split_inclusive(|byte| *byte == b'\n').take(left);
    let mut log: Vec<u8> = lines.flatten().copied().collect();
    let mut chain = ChainTip::START;
    for line in log.split(|byte| *byte == b'\n').take(left) {
        chain.verify_next(line).unwrap();
    }
    for forgery in more {
        match forgery {
            ForgedRecord::Refusal => {
                append_record(&mut chain, &mut log, &refused_record("call-4", "rate_limited"));
            }
            ForgedRecord::End => append_record(
                &mut chain,
                &mut log,
                &RunFinishedRecord { spent: budget_amount(1, 118, 44), admitted: 1, refused: 1 },
            ),
            ForgedRecord::Checkpoint => append_signature(&mut chain, &mut log),
        }
    }
    log
}

fn append_record(chain: &mut ChainTip, log: &mut Vec<u8>, record: &impl AuditRecord) {
    let head = RecordHeader { time: b"2026-11-22T20:10:00.000Z", run: "\"run-1\"" };
    chain.append_record(log, head, record);
}

/// Appends a checkpoint that is valid under the forger's own key.
fn append_signature(chain: &mut ChainTip, log: &mut Vec<u8>) {
    #[derive(Serialize)]
    struct ForgedCheckpoint {
        signature: String,
        public_key: String,
    }
    impl AuditRecord for ForgedCheckpoint {
        const EVENT: &'static str = "log.checkpoint";
    }
    let key = AuditSigningKey::new(Some(&SecretString::new("22".repeat(32)))).unwrap();
    let text = format!("cogni-gateway audit checkpoint v1 {}", chain.last_hash());
    let signature = key.sign_message(text.as_bytes());
    let signature = signature.iter().fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"));
    append_record(
        chain,
        log,
        &ForgedCheckpoint { signature, public_key: key.public_key().to_string() },
    );
}

fn verify_log(log: &[u8]) -> (ExitCode, String) {
    let log_dir = LogDir::new();
    fs::write(log_dir.log(), log).unwrap();
    let mut out = vec![];
    let public_key = Some(signing_key().to_string());
    let code = run(&AuditCommand::Verify { file: log_dir.log(), public_key }, &mut out).unwrap();
    (code, String::from_utf8(out).unwrap())
}

/// The key that signed the log.
fn signing_key() -> AuditPublicKey {
    *AuditSigningKey::new(Some(&SecretString::new("11".repeat(32)))).unwrap().public_key()
}

fn record_event(line: &[u8]) -> String {
    let line = String::from_utf8_lossy(line);
    let event = line.split("\"event\":\"").nth(1).and_then(|rest| rest.split('"').next());
    event.unwrap_or_default().to_owned()
}
