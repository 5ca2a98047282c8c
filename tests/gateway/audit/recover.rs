//! Tests of recovery: what a crash leaves behind, and how the next process continues.

use std::collections::HashSet;
use std::env;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use cogni_gateway::llm::budget::RecentUsage;
use cogni_gateway::telemetry::audit::chain::ChainBreakReason;
use cogni_gateway::telemetry::audit::read::AuditEvent;
use cogni_gateway::telemetry::audit::{AuditError, recover, verify};
use proptest::prelude::*;

use super::*;

/// G11: A last record that was torn at any byte is repaired, and no byte is lost.
#[test]
fn a_last_line_cut_at_any_byte_is_moved_aside_and_settled() {
    let log_dir = LogDir::new();
    let (log, _) = log_dir.open();
    at_once(log.record_admission(&admitted_record("call-1"))).unwrap();
    log.record_settlement(&settled_record("call-1"));
    at_once(log.record_admission(&admitted_record("call-2"))).unwrap();
    log.record_settlement(&settled_record("call-2"));
    drop(log);
    let whole = log_dir.bytes();
    let last = *line_starts(&whole).last().unwrap();

    for cut in last..whole.len() {
        // Every repair is synced, and there are hundreds; a sync to memory is cheap.
        let log_dir = LogDir { folder: tempfile::tempdir_in("/dev/shm").unwrap() };
        fs::write(log_dir.log(), &whole[..cut]).unwrap();
        let (log, recovered) = log_dir.open();
        drop(log);
        let torn = &whole[last..cut];
        assert_eq!(recovered.torn_bytes, torn.len() as u64);
        assert_eq!((recovered.crashed, recovered.resumed), (1, true));
        assert_eq!(recovered.spent, budget_amount(1, 118, 44) + budget_amount(1, 600, 4096));

        let torn_end = fs::read(log_dir.log().with_extension("jsonl.torn-5")).unwrap_or_default();
        assert_eq!(torn_end, torn);
        assert!(log_dir.bytes().starts_with(&whole[..last]), "what was whole stays as it was");
        let report = log_dir.verify();
        assert_eq!((report.crashed, report.open, report.starts), (1, 0, 2));
        let names: Vec<_> = log_dir.entries()[4..].iter().map(|entry| entry.name.clone()).collect();
        let repaired = ["log.repaired", "request.settled", "run.started"];
        assert_eq!(names, repaired[usize::from(torn.is_empty())..]);
    }
}

/// G11: A torn admission was never acknowledged, so nothing is charged for it.
#[test]
fn a_torn_admission_costs_nothing() {
    let log_dir = LogDir::new();
    let (log, _) = log_dir.open();
    at_once(log.record_admission(&admitted_record("call-1"))).unwrap();
    drop(log);
    let whole = log_dir.bytes();
    fs::write(log_dir.log(), &whole[..whole.len() - 1]).unwrap();
    let (_log, recovered) = log_dir.open();
    assert_eq!((recovered.crashed, recovered.spent), (0, BudgetAmount::default()));
}

/// G9, G11: The log knows the age of its run across all processes.
#[test]
fn the_age_of_a_run_is_in_its_log() {
    let (log_dir, begun) = (LogDir::new(), Instant::now());
    let (log, fresh) = log_dir.open();
    assert_eq!(fresh.age, Duration::ZERO);
    drop(log);
    loop {
        let (_log, recovered) = log_dir.open();
        if recovered.age > Duration::ZERO {
            // The log's clock has a resolution of one millisecond.
            assert!(recovered.age <= begun.elapsed() + Duration::from_secs(1), "{recovered:?}");
            return;
        }
    }
}

/// G9, G11: A restart does not give the calls of the last minute back to the run's rates.
#[test]
fn the_calls_of_the_last_minute_are_in_the_log() {
    let place = LogDir::new();
    let (log, fresh) = place.open();
    assert_eq!(fresh.recent, RecentUsage::default());
    for request in ["one", "two", "open"] {
        at_once(log.record_admission(&admitted_record(request))).unwrap();
    }
    log.record_settlement(&settled_record("one"));
    log.record_settlement(&settled_record("two"));
    drop(log);
    let scan = recover::scan_log(&*place.bytes()).unwrap();
    let now = SystemTime::now();
    let charged = scan.spent.total_tokens();
    assert_eq!(scan.recent.until(now), RecentUsage { requests: 3, tokens: charged });
    let later = now + Duration::from_mins(2);
    assert_eq!(scan.recent.until(later), RecentUsage::default());
    let (_log, recovered) = place.open();
    let lost = admitted_record("open").reserved.total_tokens();
    assert_eq!(recovered.recent, RecentUsage { requests: 3, tokens: charged + lost });
}

/// G9, G11: A clock that is set back gives a run no time back.
#[test]
fn a_clock_that_is_set_back_makes_no_run_younger() {
    let place = whole_run();
    let scan = recover::scan_log(&*place.bytes()).unwrap();
    let report = verify::verify_log(&*place.bytes(), None).unwrap();
    let [began, ended] =
        [report.first, report.last].map(|time| humantime::parse_rfc3339(&time).unwrap());
    let hour = Duration::from_hours(1);
    assert_eq!(scan.age(ended + hour), ended.duration_since(began).unwrap() + hour);
    assert_eq!(scan.age(began - hour), ended.duration_since(began).unwrap());
}

/// G11: A repair that is itself interrupted loses nothing.
#[test]
fn torn_bytes_are_added_to_those_already_kept() {
    let log_dir = whole_run();
    let kept_in = log_dir.log().with_extension("jsonl.torn-9");
    fs::write(&kept_in, "before ").unwrap();
    append_bytes(&log_dir.log(), b"{\"v\":1,\"seq\":9");
    let (log, recovered) = log_dir.open();
    drop(log);
    assert_eq!(recovered.torn_bytes, 14);
    assert_eq!(fs::read_to_string(&kept_in).unwrap(), "before {\"v\":1,\"seq\":9");
}

/// G11: `kill -9` at any moment leaves a log with every acknowledged admission.
#[test]
fn a_log_whose_writer_is_killed_reopens_and_proves_itself() {
    if let Some(path) = env::var_os(VICTIM) {
        return write_until_killed(Path::new(&path));
    }
    let log_dir = LogDir::new();
    let mut acknowledged = HashSet::new();
    // Each round continues the log of the round before.
    for (round, calls) in [1, 7, 60, 300, 1000].into_iter().enumerate() {
        let mut victim = spawn_victim(&log_dir.log());
        let mut lines = BufReader::new(victim.stderr.take().unwrap()).lines().map(Result::unwrap);
        acknowledged.extend(lines.by_ref().take(calls).map(|call| format!("{round} {call}")));
        victim.kill().unwrap();
        victim.wait().unwrap();
        // The lines that the process printed before it died and that are not read yet; the last line may be incomplete.
        let rest: Vec<_> = lines.collect();
        let whole = rest.len().saturating_sub(1);
        acknowledged.extend(rest[..whole].iter().map(|call| format!("{round} {call}")));

        let report = check_prefix(&log_dir);
        assert_eq!(report.starts, round as u64 * 2 + 1);
        let (log, recovered) = log_dir.open();
        drop(log);
        assert_eq!((recovered.crashed, recovered.resumed), (report.open, true));
        assert_eq!(log_dir.verify().open, 0);
    }

    let mut starts = 0;
    let mut found = HashSet::new();
    for entry in log_dir.entries() {
        match entry.event {
            AuditEvent::Started(_) => starts += 1,
            AuditEvent::Admitted(call) => {
                found.insert(format!("{} {}", (starts - 1) / 2, call.request));
            }
            _ => (),
        }
    }
    assert!(acknowledged.len() >= 1368, "{}", acknowledged.len());
    let lost: Vec<_> = acknowledged.difference(&found).collect();
    assert!(lost.is_empty(), "acknowledged and not recorded: {lost:?}");
}

/// G11: Charges add up across restarts, whichever process crashed.
#[test]
fn charges_add_up_across_restarts() {
    let log_dir = LogDir::new();
    for round in 0..3 {
        let (log, recovered) = log_dir.open();
        let charged = 118 * round + 600 * round;
        assert_eq!(recovered.spent.input, Tokens(charged));
        assert_eq!(recovered.crashed, u64::from(round > 0));
        at_once(log.record_admission(&admitted_record("settled"))).unwrap();
        at_once(log.record_admission(&admitted_record("lost"))).unwrap();
        log.record_settlement(&settled_record("settled"));
    }
    let (log, _) = log_dir.open();
    drop(log);
    let report = log_dir.verify();
    assert_eq!(
        (report.starts, report.crashed, report.spent),
        (4, 3, budget_amount(6, 2154, 12420))
    );
}

#[test]
fn a_finished_run_can_be_taken_up_again() {
    let log_dir = whole_run();
    let (log, recovered) = log_dir.open();
    assert_eq!((recovered.crashed, recovered.torn_bytes, recovered.resumed), (0, 0, true));
    drop(log);
    let report = log_dir.verify();
    assert_eq!((report.starts, report.finished), (2, false));
}

/// G11: Recovery adds nothing to a log that has been altered.
#[test]
fn a_log_broken_in_the_middle_is_left_alone() {
    let log_dir = whole_run();
    let mut bytes = log_dir.bytes();
    let third = line_starts(&bytes)[2];
    bytes[third + 50] ^= 1;
    fs::write(log_dir.log(), &bytes).unwrap();
    let error = AuditLog::open_log(&audit_config(&log_dir.log()), &started_record()).err().unwrap();
    insta::with_settings!({filters => [(r"`/.*/audit.jsonl`", "`[log]`")]}, {
        insta::assert_snapshot!(error, @"audit log `[log]` fails verification at record 3 (line 3, byte 828): the content does not match its hash; keep the file for an investigation, move it away, and start with a new one");
    });
    assert_eq!(log_dir.bytes(), bytes);
}

#[test]
fn a_log_of_another_run_is_left_alone() {
    let log_dir = whole_run();
    let bytes = log_dir.bytes();
    let other = RunStartedRecord { run: "run-2".into(), ..started_record() };
    let error = AuditLog::open_log(&audit_config(&log_dir.log()), &other).err().unwrap();
    insta::with_settings!({filters => [(r"`/.*/audit.jsonl`", "`[log]`")]}, {
        insta::assert_snapshot!(error, @"audit log `[log]` belongs to run `run-1`, this is run `run-2`; give each run its own file");
    });
    assert_eq!(log_dir.bytes(), bytes);
}

/// A wrong `AUDIT_LOG_PATH` must not destroy another file.
#[test]
fn a_file_that_is_no_log_is_left_alone() {
    for content in ["password = hunter2", "a line\n", "{}\n{}\n", "{\"v\":2,\"seq\":1"] {
        let log_dir = LogDir::new();
        fs::write(log_dir.log(), content).unwrap();
        let error =
            AuditLog::open_log(&audit_config(&log_dir.log()), &started_record()).err().unwrap();
        assert!(matches!(error, AuditError::ChainBroken { .. }), "{content}: {error}");
        assert_eq!(log_dir.bytes(), content.as_bytes());
    }
    let log_dir = LogDir::new();
    fs::create_dir(log_dir.log()).unwrap();
    assert!(matches!(
        AuditLog::open_log(&audit_config(&log_dir.log()), &started_record()),
        Err(AuditError::NotAFile { .. })
    ));
}

/// G11: A symbolic link beside the logs does not redirect writes, whether its target exists or not.
#[test]
fn a_log_is_never_written_through_a_link() {
    for is_there in [true, false] {
        let log_dir = LogDir::new();
        let other = log_dir.log().with_extension("other");
        if is_there {
            fs::write(&other, "").unwrap();
        }
        std::os::unix::fs::symlink(&other, log_dir.log()).unwrap();
        let opened = AuditLog::open_log(&audit_config(&log_dir.log()), &started_record());
        assert!(matches!(opened, Err(AuditError::NotAFile { .. })), "{:?}", opened.err());
        assert_eq!(fs::read(&other).ok(), is_there.then(Vec::new));
    }
}

/// G11: Two writers would break the chain, so the second one is refused.
#[test]
fn a_log_in_use_cannot_be_opened_again() {
    let log_dir = LogDir::new();
    let (log, _) = log_dir.open();
    let error = AuditLog::open_log(&audit_config(&log_dir.log()), &started_record()).err().unwrap();
    insta::with_settings!({filters => [(r"`/.*/audit.jsonl`", "`[log]`")]}, {
        insta::assert_snapshot!(error, @"audit log `[log]` is being written by another process; stop that one, or use another file");
    });
    drop(log);
    log_dir.open();
}

#[test]
fn only_the_owner_can_read_a_log() {
    let log_dir = whole_run();
    append_bytes(&log_dir.log(), b"torn");
    drop(log_dir.open());
    assert_eq!(file_mode(&log_dir.log()), 0o600);
    assert_eq!(file_mode(&log_dir.log().with_extension("jsonl.torn-9")), 0o600);
}

proptest! {
    /// G11: Recovery never panics, and every log that it accepts verifies.
    #[test]
    fn whatever_recovery_accepts_verifies(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        at in 0_usize..4096,
    ) {
        let log = &*WHOLE_RUN;
        let at = at % (log.len() + 1);
        for log in [bytes.clone(), [&log[..at], &bytes].concat()] {
            if let Ok(scan) = recover::scan_log(&*log) {
                let whole = usize::try_from(scan.whole_bytes).unwrap();
                let report = verify_log(&log[..whole]).unwrap();
                prop_assert_eq!(report.records + 1, scan.chain.next_seq());
                prop_assert_eq!(report.open, scan.open.len() as u64);
                prop_assert_eq!(report.spent, scan.spent);
            }
        }
    }
}

fn spawn_victim(log: &Path) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "audit::recover::a_log_whose_writer_is_killed_reopens_and_proves_itself"])
        .arg("--nocapture")
        .env(VICTIM, log)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Starts four threads that print each call's name after its admission is acknowledged.
fn write_until_killed(path: &Path) {
    let log = &AuditLog::open_log(&audit_config(path), &started_record()).unwrap().0;
    thread::scope(|scope| {
        for writer in 0..4 {
            scope.spawn(move || {
                for call in 0.. {
                    let name = format!("{writer}/{call}");
                    at_once(log.record_admission(&admitted_record(&name))).unwrap();
                    // One write call, so that the parent never sees two names mixed.
                    std::io::stderr().write_all(format!("{name}\n").as_bytes()).unwrap();
                    if call % 3 > 0 {
                        log.record_settlement(&settled_record(&name));
                    }
                    log.flush_buffered();
                }
            });
        }
    });
}

/// Returns the report of everything before a torn tail.
fn check_prefix(log_dir: &LogDir) -> AuditVerifyReport {
    let bytes = log_dir.bytes();
    verify_log(&bytes).unwrap_or_else(|broken| {
        assert_eq!(broken.why, ChainBreakReason::Torn);
        verify_log(&bytes[..usize::try_from(broken.offset).unwrap()]).unwrap()
    })
}

fn append_bytes(path: &Path, bytes: &[u8]) {
    OpenOptions::new().append(true).open(path).unwrap().write_all(bytes).unwrap();
}

fn file_mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

const VICTIM: &str = "AUDIT_LOG_OF_THE_VICTIM";
