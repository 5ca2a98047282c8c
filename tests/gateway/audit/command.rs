//! Tests of `cogni-gateway audit` as an operator uses it.

use std::process::ExitCode;

use cogni_gateway::cli::audit::{AuditCommand, run};
use cogni_gateway::telemetry::audit::records::CallRefusedRecord;

use super::*;

#[test]
fn verify_reports_the_proved_records() {
    let (code, text) = verify_dir(&whole_run(), None);
    assert_eq!(code, ExitCode::SUCCESS);
    insta::with_settings!({filters => TIMES.to_vec()}, {
        insta::assert_snapshot!(text, @r"
    CHAIN ONLY: 8 records continue each other; without --public-key nothing proves who wrote them
    run         run-1, attempt 2, account acct-1, started 1×
    time        [time] to [time]
    calls       2 admitted, 2 settled (0 after a crash)
    refusals    1
    spent       2 turns, 236 in, 88 out
    checkpoints 1, the last is record 8 of 8
    key         d04ab232742bb4ab3a1368bd4615e4e6d0224ab71a016baf8520a332c9778737
                named by the file itself, so it finds damage, not a forger; pass --public-key
    end         in order
    ");
    });
}

#[test]
fn verify_with_a_key_says_who_signed() {
    let key = whole_run().verify().signatures.key.unwrap().to_string();
    let (code, text) = verify_dir(&whole_run(), Some(key));
    assert_eq!(code, ExitCode::SUCCESS);
    insta::with_settings!({filters => TIMES.to_vec()}, {
        insta::assert_snapshot!(text, @r"
    OK: 8 records are as they were written, and signed to the last
    run         run-1, attempt 2, account acct-1, started 1×
    time        [time] to [time]
    calls       2 admitted, 2 settled (0 after a crash)
    refusals    1
    spent       2 turns, 236 in, 88 out
    checkpoints 1, the last is record 8 of 8
    key         d04ab232742bb4ab3a1368bd4615e4e6d0224ab71a016baf8520a332c9778737
                the one you named
    end         in order
    ");
    });
}

/// G11: a log without an end is either being written or damaged, and the report says which.
#[test]
fn verify_names_the_process_that_writes_the_log() {
    let log_dir = LogDir::new();
    let (log, _) = log_dir.open();
    at_once(log.record_admission(&admitted_record("call-1"))).unwrap();
    let end_of = |text: &str| {
        let lines = text.lines().skip_while(|line| !line.starts_with("end"));
        lines.collect::<Vec<_>>().join("\n")
    };
    let (code, text) = verify_dir(&log_dir, None);
    assert_eq!(code, ExitCode::SUCCESS);
    assert!(text.contains("1 in flight\n"), "{text}");
    let own = (std::process::id().to_string(), "[own]");
    insta::with_settings!({filters => [(own.0.as_str(), own.1)]}, {
        insta::assert_snapshot!(end_of(&text), @r"
    end         not reached: process [own] is writing this log
                settlements and refusals of the last second may not be in it yet
    ");
    });
    // A copy is a log whose process is gone.
    let copy = LogDir::new();
    fs::write(copy.log(), log_dir.bytes()).unwrap();
    let (code, text) = verify_dir(&copy, None);
    assert_eq!(code, ExitCode::SUCCESS);
    assert!(text.contains("1 in flight, or lost if the process is gone\n"), "{text}");
    insta::assert_snapshot!(end_of(&text), @r"
    end         not recorded, and no process here is writing this log:
                the process was killed, or records at the end were cut off
    ");
}

#[test]
fn verify_reports_a_key_that_did_not_sign() {
    let (code, text) = verify_dir(&whole_run(), Some("22".repeat(32)));
    assert_eq!(code, ExitCode::FAILURE);
    insta::assert_snapshot!(text, @"UNSIGNED: no checkpoint was signed by `2222222222222222222222222222222222222222222222222222222222222222`, so nothing proves who wrote this log");
}

#[test]
fn verify_names_the_first_record_that_was_changed() {
    let log_dir = whole_run();
    let changed = String::from_utf8(log_dir.bytes()).unwrap().replace("client_gone", "completed");
    fs::write(log_dir.log(), changed).unwrap();
    let (code, text) = verify_dir(&log_dir, None);
    assert_eq!(code, ExitCode::FAILURE);
    insta::with_settings!({filters => [("byte [0-9]+", "byte [n]")]}, {
        insta::assert_snapshot!(text, @r"
        BROKEN: record 6 (line 6, byte [n]): the content does not match its hash
        records 1 to 5 are as they were written
        ");
    });
}

#[test]
fn verify_does_not_praise_an_empty_file() {
    let log_dir = LogDir::new();
    fs::write(log_dir.log(), "").unwrap();
    let (code, text) = verify_dir(&log_dir, None);
    assert_eq!(code, ExitCode::FAILURE);
    insta::assert_snapshot!(text, @"EMPTY: there is no record, so nothing is proved");
}

#[test]
fn a_key_that_is_none_is_explained() {
    let command = AuditCommand::Verify { file: whole_run().log(), public_key: Some("abc".into()) };
    let error = run(&command, &mut vec![]).unwrap_err();
    insta::assert_snapshot!(format!("{error:#}"), @"--public-key: the public key has 3 characters; it must be 32 bytes as 64 hexadecimal digits or as base64 (`openssl rand -hex 32` makes a signing key)");
}

#[test]
fn a_file_that_cannot_be_read_is_named_with_the_reason_once() {
    let command = AuditCommand::Verify { file: "/nowhere/audit.jsonl".into(), public_key: None };
    let error = run(&command, &mut vec![]).unwrap_err();
    insta::assert_snapshot!(format!("{error:#}"), @"cannot use audit log `/nowhere/audit.jsonl`: No such file or directory (os error 2)");
}

#[test]
fn show_prints_a_row_for_each_record() {
    let log_dir = whole_run();
    {
        let (log, _) = log_dir.open();
        at_once(log.record_admission(&admitted_record("0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b")))
            .unwrap();
        for call in 0..70 {
            log.record_refusal(&CallRefusedRecord {
                status: 429,
                ..refused_record(&call.to_string(), "rate_limited")
            });
        }
    }
    let bytes = log_dir.bytes();
    fs::write(log_dir.log(), [&bytes, b"{\"v\"".as_slice()].concat()).unwrap();
    drop(log_dir.open());
    let (code, text) = show_dir(&log_dir);
    assert_eq!(code, ExitCode::SUCCESS);
    let few: Vec<_> = text.lines().filter(|row| !(15..=75).contains(&row_number(row))).collect();
    insta::with_settings!({filters => TIMES.to_vec()}, {
        insta::assert_snapshot!(few.join("\n"), @r"
        [date], run run-1
             1  [time]        run.started        -                                     attempt 2, account acct-1, version 0.1.0, policy 9f86d081
             2  [time]        request.admitted   call-1                                chat_completions gpt-4o, streamed; reserves 1 turn, 600 in, 4096 out
             3  [time]        request.settled    call-1                                completed 200; charged 1 turn, 118 in, 44 out (provider); 812.2 ms
             4  [time]        request.refused    call-2                                route_not_served 404
             5  [time]        request.admitted   call-3                                chat_completions gpt-4o, streamed; reserves 1 turn, 600 in, 4096 out
             6  [time]        request.settled    call-3                                client_gone; charged 1 turn, 118 in, 44 out (provider); 812.2 ms
             7  [time]        run.finished       -                                     spent 2 turns, 236 in, 88 out
             8  [time]        log.checkpoint     -                                     by d04ab232742bb4ab3a1368bd4615e4e6d0224ab71a016baf8520a332c9778737
             9  [time]        run.started        -                                     attempt 2, resumed, account acct-1, version 0.1.0, policy 9f86d081
            10  [time]        request.admitted   0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b  chat_completions gpt-4o, streamed; reserves 1 turn, 600 in, 4096 out
            11  [time]        request.refused    0                                     rate_limited 429
            12  [time]        request.refused    1                                     rate_limited 429
            13  [time]        request.refused    2                                     rate_limited 429
            14  [time]        request.refused    3                                     rate_limited 429
            76  [time]        log.repaired       -                                     4 bytes of a torn line moved to audit.jsonl.torn-76
            77  [time]        request.settled    0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b  crashed; charged 1 turn, 600 in, 4096 out (estimated); 0.0 ms
            78  [time]        run.started        -                                     attempt 2, resumed, account acct-1, version 0.1.0, policy 9f86d081
        ");
    });
}

/// A client chooses the name of a model, and a terminal obeys control characters, so they are not printed.
#[test]
fn show_prints_no_control_characters() {
    let log_dir = LogDir::new();
    let (log, _) = log_dir.open();
    let model = "\u{1b}[2Jgpt\r\n\u{202e}\u{200b}4";
    at_once(
        log.record_admission(&CallAdmittedRecord {
            model: Some(model),
            ..admitted_record("call-1")
        }),
    )
    .unwrap();
    let (_, text) = show_dir(&log_dir);
    let row = text.lines().last().unwrap().split("chat_completions").last().unwrap();
    insta::assert_snapshot!(row, @r#" \u{1b}[2Jgpt\u{d}\u{a}\u{202e}\u{200b}4, streamed; reserves 1 turn, 600 in, 4096 out"#);
}

#[test]
fn show_ends_where_the_proof_ends() {
    let log_dir = whole_run();
    let changed = String::from_utf8(log_dir.bytes()).unwrap().replace("client_gone", "completed");
    fs::write(log_dir.log(), changed).unwrap();
    let (code, text) = show_dir(&log_dir);
    assert_eq!(code, ExitCode::FAILURE);
    assert_eq!(text.lines().count(), 1 + 5 + 2);
}

fn verify_dir(log_dir: &LogDir, public_key: Option<String>) -> (ExitCode, String) {
    command_output(&AuditCommand::Verify { file: log_dir.log(), public_key })
}

fn show_dir(log_dir: &LogDir) -> (ExitCode, String) {
    command_output(&AuditCommand::Show { file: log_dir.log() })
}

fn command_output(command: &AuditCommand) -> (ExitCode, String) {
    let mut out = vec![];
    let code = run(command, &mut out).unwrap();
    (code, String::from_utf8(out).unwrap())
}

/// Returns the number of the record that a row is about; 0 for a heading.
fn row_number(row: &str) -> u64 {
    row.split_whitespace().next().unwrap().parse().unwrap_or_default()
}

const TIMES: [(&str, &str); 3] = [
    (r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", "[time]"),
    (r"20\d\d-\d\d-\d\d", "[date]"),
    (r"\d\d:\d\d:\d\d\.\d{3}", "[time]      "),
];
