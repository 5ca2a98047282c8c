//! G2: Tests of the access log, whose format existing nginx log readers understand.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use cogni_gateway::base::sanitize::SanitizedText;
use cogni_gateway::llm::budget::{TokenUsage, Tokens, UsageSource};
use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway::telemetry::access_log::{
    AccessLog, AccessLogDestination, AccessLogEntry, AccessLogError, AccessLogFormat,
    AccessLogIdentity, FIELD_KEYS, MAX_FILE_BYTES,
};
use proptest::prelude::*;
use serde_json::{Map, Value};

use crate::support::allocations;

/// G2: A line holds every value of a call, and `-` for a value that does not exist.
#[test]
fn a_line_reads_as_documented() {
    let usage = token_usage();
    insta::assert_snapshot!(write_lines(&[full_entry(&usage), refused_entry()]), @r"
    time=2026-11-22T23:00:00.407Z runId=run-7 attempt=0 method=POST uri=/v1/chat/completions status=200 bytes=48211 request_bytes=2048 model=openai/gpt-5-mini request_id=0199c0de-0000-7000-8000-00000000002a litellm_call_id=0199c0de-0000-7000-8000-000000000001 litellm_response_cost=5.025e-05 upstream_time=4.012 first_byte_time=0.451 request_time=4.030 usage_input=1200 usage_output=180 usage_source=provider outcome=completed trace_id=-
    time=2026-11-22T23:00:00.407Z runId=run-7 attempt=0 method=GET uri=- status=404 bytes=0 request_bytes=2048 model=- request_id=0199c0de-0000-7000-8000-00000000002a litellm_call_id=- litellm_response_cost=- upstream_time=- first_byte_time=- request_time=4.030 usage_input=- usage_output=- usage_source=- outcome=not_found trace_id=-
    ");
}

/// G2: A line of JSON holds the same values: numbers as numbers, and `null` for a value that does not exist.
#[test]
fn a_json_line_reads_as_documented() {
    let usage = token_usage();
    insta::assert_snapshot!(written_in_json(&IDENTITY, &[full_entry(&usage), refused_entry()]), @r#"
    {"time":"2026-11-22T23:00:00.407Z","runId":"run-7","attempt":0,"method":"POST","uri":"/v1/chat/completions","status":200,"bytes":48211,"request_bytes":2048,"model":"openai/gpt-5-mini","request_id":"0199c0de-0000-7000-8000-00000000002a","litellm_call_id":"0199c0de-0000-7000-8000-000000000001","litellm_response_cost":5.025e-05,"upstream_time":4.012,"first_byte_time":0.451,"request_time":4.030,"usage_input":1200,"usage_output":180,"usage_source":"provider","outcome":"completed","trace_id":null}
    {"time":"2026-11-22T23:00:00.407Z","runId":"run-7","attempt":0,"method":"GET","uri":null,"status":404,"bytes":0,"request_bytes":2048,"model":null,"request_id":"0199c0de-0000-7000-8000-00000000002a","litellm_call_id":null,"litellm_response_cost":null,"upstream_time":null,"first_byte_time":null,"request_time":4.030,"usage_input":null,"usage_output":null,"usage_source":null,"outcome":"not_found","trace_id":null}
    "#);
}

/// G2, G15: The count of a flood is a number in JSON, too.
#[test]
fn a_flood_is_counted_in_json() {
    let late = AccessLogEntry { time: bare_entry().time + Duration::from_secs(1), ..bare_entry() };
    let text = written_in_json(&IDENTITY, &[vec![bare_entry(); 100], vec![late]].concat());
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let repeated: Vec<_> = lines.iter().filter(|line| line["outcome"] == "repeated").collect();
    assert_eq!(repeated.len(), 1, "{text}");
    assert_eq!(repeated[0]["repeats"], 68);
}

/// G2: Every line has every key once, in the documented order, whatever a client or an upstream sends.
#[test]
fn every_line_has_every_key_in_order() {
    let text = write_lines(&[bare_entry()]);
    let keys: Vec<_> =
        text.trim_end().split(' ').map(|pair| pair.split_once('=').unwrap().0).collect();
    assert_eq!(keys, FIELD_KEYS);
}

proptest! {
    /// G2: Text from outside cannot add a key, end a line early or hide one.
    #[test]
    fn no_text_from_outside_can_forge_a_field(hostile in prop::collection::vec("(?s).{0,200}|[ =\"\\n\\r\\x00\\x1b]{1,9}", 6)) {
        let [method, model, request_id, call_id, cost, run] = [0, 1, 2, 3, 4, 5].map(|i: usize| hostile[i].as_str());
        let line = AccessLogEntry {
            method,
            model: Some(model),
            request_id,
            litellm_call_id: Some(call_id),
            litellm_response_cost: Some(cost),
            ..bare_entry()
        };
        let text = written_as(&AccessLogIdentity { run, attempt: run }, &[line]);
        let lines: Vec<_> = text.split_terminator('\n').collect();
        prop_assert_eq!(lines.len(), 1);
        let pairs: Vec<_> = lines[0].split(' ').map(|pair| pair.split_once('=').unwrap()).collect();
        prop_assert_eq!(pairs.iter().map(|(key, _)| *key).collect::<Vec<_>>(), FIELD_KEYS);
        for (key, value) in pairs {
            prop_assert!((1..=SanitizedText::MAX_BYTES).contains(&value.len()), "{key}={value}");
            prop_assert!(value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._:/@+,-%".contains(&byte)));
        }
    }

    /// G2: In JSON, text from outside is escaped: each line is one object of printable ASCII with exactly the documented
    /// keys, and each value is the beginning of what was sent.
    #[test]
    fn no_text_from_outside_can_forge_a_json_member(hostile in prop::collection::vec("(?s).{0,200}|[ =\"\\\\\n\r\x00\x1b]{1,9}", 6)) {
        let [method, model, request_id, call_id, cost, run] = [0, 1, 2, 3, 4, 5].map(|i: usize| hostile[i].as_str());
        let line = AccessLogEntry {
            method,
            model: Some(model),
            request_id,
            litellm_call_id: Some(call_id),
            litellm_response_cost: Some(cost),
            ..bare_entry()
        };
        let text = written_in_json(&AccessLogIdentity { run, attempt: run }, &[line]);
        prop_assert!(text.trim_end_matches('\n').bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{text:?}");
        prop_assert_eq!(text.lines().count(), 1);
        let members: Map<String, Value> = serde_json::from_str(&text).unwrap();
        let keys: std::collections::BTreeSet<_> = members.keys().map(String::as_str).collect();
        prop_assert_eq!(keys, FIELD_KEYS.into_iter().collect());
        let sent = [("method", method), ("model", model), ("request_id", request_id), ("litellm_call_id", call_id), ("runId", run)];
        for (key, sent) in sent {
            match &members[key] {
                Value::Null => prop_assert!(matches!(sent, "" | "-")),
                kept => {
                    let kept = kept.as_str().unwrap();
                    prop_assert!(sent.starts_with(kept) && kept.len() + 4 > sent.len().min(SanitizedText::MAX_BYTES));
                }
            }
        }
    }

    /// A text that fits its limit can be decoded to the same bytes.
    #[test]
    fn an_encoded_text_can_be_decoded(text in "(?s).{1,40}") {
        prop_assume!(text.len() * 3 <= SanitizedText::MAX_BYTES);
        let shown = SanitizedText(&text).to_text();
        let mut bytes = shown.bytes();
        let mut decoded = vec![];
        while let Some(byte) = bytes.next() {
            decoded.push(if byte == b'%' {
                let digits = [bytes.next().unwrap(), bytes.next().unwrap()];
                u8::from_str_radix(std::str::from_utf8(&digits).unwrap(), 16).unwrap()
            } else {
                byte
            });
        }
        prop_assert_eq!(decoded, text.as_bytes());
    }

    /// The two functions that encode a text agree.
    #[test]
    fn appending_and_showing_agree(text in "(?s).{0,200}") {
        let mut appended = vec![];
        SanitizedText(&text).append_to(&mut appended);
        let shown = SanitizedText(&text).to_text();
        prop_assert_eq!(appended, shown.as_bytes());
    }
}

/// An existing log file is appended to, and a new one is readable only by its owner and group.
#[test]
fn a_file_is_created_for_owner_and_group_and_appended_to() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    for _ in 0..2 {
        open_log(&path).write_entry(&bare_entry());
    }
    assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o137, 0);
}

/// Lines are buffered until a flush or the end of the process.
#[test]
fn lines_are_written_at_a_flush_and_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let log = open_log(&path);
    log.write_entry(&call_entry());
    log.flush_log();
    assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 1);
    for _ in 0..1000 {
        log.write_entry(&call_entry());
    }
    drop(log);
    assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 1001);
}

/// Many threads write to one file: every line is whole and none is missing.
#[test]
fn lines_of_many_threads_do_not_mix() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let log = open_log(&path);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let log =
                log.for_run(&AccessLogIdentity { run: &format!("run-{thread}"), attempt: "0" });
            scope.spawn(move || (0..500).for_each(|_| log.write_entry(&call_entry())));
        }
    });
    drop(log);
    let text = fs::read_to_string(&path).unwrap();
    let mut by_run = BTreeMap::new();
    for line in text.lines() {
        assert_eq!(line.split(' ').count(), FIELD_KEYS.len(), "{line}");
        *by_run.entry(line.split(' ').nth(1).unwrap()).or_insert(0) += 1;
    }
    let all = ["runId=run-0", "runId=run-1", "runId=run-2", "runId=run-3"].map(|run| (run, 500));
    assert_eq!(by_run, BTreeMap::from(all));
}

/// Rotation: earlier lines are in the moved file and later lines in the new one.
#[test]
fn a_log_is_reopened_after_it_was_moved() {
    let dir = tempfile::tempdir().unwrap();
    let (path, moved) = (dir.path().join("access.log"), dir.path().join("access.log.1"));
    let log = open_log(&path);
    log.write_entry(&AccessLogEntry { status: 201, ..bare_entry() });
    fs::rename(&path, &moved).unwrap();
    log.reopen_file().unwrap();
    log.write_entry(&AccessLogEntry { status: 202, ..bare_entry() });
    drop(log);
    assert!(fs::read_to_string(&moved).unwrap().contains(" status=201 "));
    assert!(fs::read_to_string(&path).unwrap().contains(" status=202 "));
}

/// A log that cannot be reopened continues in the old file.
#[test]
fn a_failed_reopening_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (path, moved) = (dir.path().join("access.log"), dir.path().join("access.log.1"));
    let log = open_log(&path);
    fs::rename(&path, &moved).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(log.reopen_file().is_err());
    log.write_entry(&bare_entry());
    drop(log);
    assert_eq!(fs::read_to_string(&moved).unwrap().lines().count(), 1);
}

/// A full disk loses lines; the loss is counted and has no other effect.
#[test]
fn a_full_disk_loses_lines_and_counts_them() {
    let log = open_log(Path::new("/dev/full"));
    log.write_entry(&bare_entry());
    log.write_entry(&bare_entry());
    log.flush_log();
    assert_eq!(log.lost_lines(), 2);
    log.write_entry(&bare_entry());
    log.flush_log();
    assert_eq!(log.lost_lines(), 3);
}

/// A pipe without a reader delays no request: lines that do not fit are lost and counted.
#[test]
fn a_stuck_reader_delays_no_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    // The pipe is opened for reading and writing, so that neither side waits for the other.
    let mut reader = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let log = open_log(&path);
    // 16 MB is more than a pipe, a batch and the backlog hold.
    for _ in 0..50_000 {
        log.write_entry(&call_entry());
    }
    let lost = log.lost_lines();
    assert!(lost > 0);
    let mut first = [0; 5];
    reader.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"time=");
}

/// G2: A pipe that no process reads is refused at once, at the start and when the file is opened again.
#[test]
fn a_pipe_without_a_reader_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let shown =
        |error: AccessLogError| error.to_string().replace(dir.path().to_str().unwrap(), "/var/log");
    let destination = AccessLogDestination::File(path.clone());
    let error = AccessLog::open_log(&destination, &IDENTITY).unwrap_err();
    insta::assert_snapshot!(shown(error), @"the access log `/var/log/pipe` is a named pipe that no process reads; start its reader first");
    let mut reader = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let log = open_log(&path);
    log.write_entry(&bare_entry());
    log.reopen_file().unwrap();
    let mut first = [0; 5];
    reader.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"time=");
    drop(reader);
    let error = log.reopen_file().unwrap_err();
    assert!(shown(error).contains("start its reader first"));
}

#[test]
fn a_log_that_cannot_be_opened_says_what_to_do() {
    let destination = AccessLogDestination::from("/nowhere/access.log");
    let error = AccessLog::open_log(&destination, &IDENTITY).unwrap_err();
    insta::assert_snapshot!(error, @"cannot open the access log `/nowhere/access.log`; name a file in a directory that this user may write, `-` for stdout, or `off`");
}

/// G2: `/dev/stdout` is written without opening it by name, which a container's user may not do; `off` writes nothing.
#[test]
fn destinations_are_told_apart() {
    let parsed = ["-", "/dev/stdout", "/dev/stderr", "off", "/var/log/access.log"]
        .map(|name| AccessLogDestination::from(name).to_string());
    assert_eq!(parsed, ["/dev/stdout", "/dev/stdout", "/dev/stderr", "off", "/var/log/access.log"]);
    let log = AccessLog::open_log(&AccessLogDestination::Off, &IDENTITY).unwrap();
    log.write_entry(&bare_entry());
    log.flush_log();
    log.reopen_file().unwrap();
    assert_eq!(log.lost_lines(), 0);
}

/// A clock that is wrong by centuries causes no failure.
#[test]
fn any_time_can_be_written() {
    let century = Duration::from_hours(100 * 365 * 24);
    for time in [UNIX_EPOCH - century, UNIX_EPOCH + 100 * century] {
        assert!(write_lines(&[AccessLogEntry { time, ..bare_entry() }]).starts_with("time="));
    }
}

/// After the buffers exist, a line costs no allocation.
#[test]
fn a_line_costs_no_allocation() {
    let usage = token_usage();
    let line = AccessLogEntry { model: Some("gpt-5 mini"), ..full_entry(&usage) };
    for format in [AccessLogFormat::Text, AccessLogFormat::Json] {
        let log = open_as(Path::new("/dev/null"), &IDENTITY, format);
        let counted = allocations::count_allocations(|| {
            for _ in 0..30 {
                log.write_entry(&line);
            }
        });
        assert_eq!(counted, 0, "{format:?}");
    }
}

/// G15: A flood of free requests cannot fill the disk. Each call still has its own line.
#[test]
fn a_flood_of_refusals_is_counted() {
    let late = AccessLogEntry { time: bare_entry().time + Duration::from_secs(1), ..bare_entry() };
    let lines = [vec![bare_entry(); 100], vec![call_entry(); 100], vec![late]].concat();
    let text = write_lines(&lines);
    assert_eq!(text.lines().count(), 32 + 100 + 2);
    let repeated: Vec<_> = text.lines().filter(|line| line.contains("outcome=repeated")).collect();
    insta::assert_snapshot!(repeated.join("\n"), @"time=2026-11-22T23:00:01.407Z runId=run-7 attempt=0 method=- uri=- status=0 bytes=0 request_bytes=0 model=- request_id=- litellm_call_id=- litellm_response_cost=- upstream_time=- first_byte_time=- request_time=0.000 usage_input=- usage_output=- usage_source=- outcome=repeated trace_id=- repeats=68");
}

/// G15: A log file has a maximum size; a full file is moved away and kept once.
#[test]
fn a_full_file_is_moved_away() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let destination = AccessLogDestination::File(path.clone());
    let log = AccessLog::open_with_format(&destination, &IDENTITY, AccessLogFormat::Text, 10_000)
        .unwrap();
    for _ in 0..200 {
        log.write_entry(&call_entry());
        log.flush_log();
    }
    drop(log);
    let sizes =
        [path, dir.path().join("access.log.1")].map(|path| fs::metadata(path).unwrap().len());
    assert!(sizes.iter().all(|size| *size < 11_000), "{sizes:?}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

/// Returns the entry of a request that made a call.
fn call_entry() -> AccessLogEntry<'static> {
    AccessLogEntry { upstream_time: Some(Duration::ZERO), ..bare_entry() }
}

/// Returns the entry of a call that has every value.
fn full_entry(usage: &TokenUsage) -> AccessLogEntry<'_> {
    AccessLogEntry {
        bytes: 48_211,
        model: Some("openai/gpt-5-mini"),
        litellm_call_id: Some("0199c0de-0000-7000-8000-000000000001"),
        litellm_response_cost: Some("5.025e-05"),
        upstream_time: Some(Duration::from_millis(4012)),
        first_byte_time: Some(Duration::from_micros(451_900)),
        usage: Some(usage),
        ..bare_entry()
    }
}

fn refused_entry() -> AccessLogEntry<'static> {
    AccessLogEntry { uri: None, status: 404, method: "GET", outcome: "not_found", ..bare_entry() }
}

fn token_usage() -> TokenUsage {
    TokenUsage {
        input: Tokens(1200),
        output: Tokens(180),
        source: UsageSource::Provider,
        ..TokenUsage::default()
    }
}

fn bare_entry() -> AccessLogEntry<'static> {
    AccessLogEntry {
        time: UNIX_EPOCH + Duration::from_millis(1_795_388_400_407),
        method: "POST",
        uri: Some(GatewayRoute::ChatCompletions.path()),
        status: 200,
        bytes: 0,
        request_bytes: 2048,
        model: None,
        request_id: "0199c0de-0000-7000-8000-00000000002a",
        litellm_call_id: None,
        litellm_response_cost: None,
        upstream_time: None,
        first_byte_time: None,
        request_time: Duration::from_millis(4030),
        usage: None,
        outcome: "completed",
    }
}

const IDENTITY: AccessLogIdentity<'_> = AccessLogIdentity { run: "run-7", attempt: "0" };

fn open_log(path: &Path) -> AccessLog {
    open_as(path, &IDENTITY, AccessLogFormat::Text)
}

fn open_as(path: &Path, identity: &AccessLogIdentity<'_>, format: AccessLogFormat) -> AccessLog {
    let destination = AccessLogDestination::File(path.to_owned());
    AccessLog::open_with_format(&destination, identity, format, MAX_FILE_BYTES).unwrap()
}

fn write_lines(lines: &[AccessLogEntry<'_>]) -> String {
    written_as(&IDENTITY, lines)
}

fn written_as(identity: &AccessLogIdentity<'_>, lines: &[AccessLogEntry<'_>]) -> String {
    written_in(AccessLogFormat::Text, identity, lines)
}

fn written_in_json(identity: &AccessLogIdentity<'_>, lines: &[AccessLogEntry<'_>]) -> String {
    written_in(AccessLogFormat::Json, identity, lines)
}

fn written_in(
    format: AccessLogFormat,
    identity: &AccessLogIdentity<'_>,
    lines: &[AccessLogEntry<'_>],
) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let log = open_as(&path, identity, format);
    for line in lines {
        log.write_entry(line);
    }
    drop(log);
    fs::read_to_string(path).unwrap()
}
