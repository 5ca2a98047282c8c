//! A3, A5: Tests of a start that finds changes since the last process: a revoked grant, a database older than the runs,
//! and signals that come early.

use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use cogni_gateway::base::db::SqliteDatabase;
use cogni_gateway::runner::ChatMessage;
use cogni_gateway::service::runs::RunSubmission;
use cogni_gateway::service::store::{self, AddRunOutcome, NewRunRow, RunStore, SpendingCaps};
use cogni_gateway::telemetry::audit::verify;
use serde_json::{Value, json};

use super::{ServiceSetup, conversation_body};
use crate::support::process::{ChildProcess, wait_until};
use crate::support::service::{MintedGrant, ServiceProcess};

/// A3: A revoked grant's token is invalid, and its queued runs do not begin.
#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_grants_queued_run_does_not_begin() {
    let setup = ServiceSetup::new("").await;
    let (revoked, good) = (setup.grant(&[]), setup.grant(&[]));
    queue_run(&setup, &revoked, "run-0").await;
    queue_run(&setup, &good, "run-1").await;
    setup.cogni(&["grant", "revoke", &revoked.id]);
    let service = setup.start();
    let row = service.ended("run-0").await;
    assert_eq!((&row["error_code"], &row["started_at"]), (&json!("grant_revoked"), &Value::Null));
    assert_eq!(
        row["result"]["error"],
        "the run's grant is no longer valid: this grant has been revoked"
    );
    assert_eq!(service.ended("run-1").await["error_code"], Value::Null);
    assert_eq!(setup.books().run_bill("run-0").await.unwrap().calls, 0);
    setup.stop(service);
}

/// R5: A start after a crash does not wait for a container engine that hangs.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_does_not_wait_for_an_engine_that_hangs() {
    let setup = ServiceSetup::new("").await;
    let socket = setup.path().join("engine.sock");
    let _silent = UnixListener::bind(&socket).unwrap();
    setup.write_config(&format!("docker_socket = \"{}\"", socket.display()));
    queue_run(&setup, &setup.grant(&[]), "run-0").await;
    let begun = Instant::now();
    let service = setup.start();
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert_eq!(service.ended("run-0").await["error_code"], Value::Null);
    setup.stop(service);
}

/// A5: The next process knows of a cancel that its client was told, even if the process was killed right after the answer.
/// The run does not begin, or does not count as interrupted.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_outlives_a_killed_process() {
    let setup = ServiceSetup::new("gate=head").await;
    setup.set_max_runs(1);
    let mut service = setup.start();
    let begun = service.run(&conversation_body("begun")).await;
    setup.provider.gate.wait_for_waiting(1).await;
    let waiting = service.run(&conversation_body("waiting")).await;
    for run in [&waiting, &begun] {
        let cancelled = service.post(&format!("/api/v1/runs/{run}/cancel"), &json!({})).await;
        assert_eq!(cancelled.status, 202, "{}", cancelled.text());
    }
    service.process.signal("KILL");
    tokio::task::block_in_place(|| service.process.wait());
    // The killed process may have written the ends. These are the rows of a process that had no time for it.
    let connection = rusqlite::Connection::open(setup.state_dir().join("state.db")).unwrap();
    let states = [(&waiting, "queued"), (&begun, "running")];
    for (run, state) in states {
        let undo = "UPDATE run SET state = ?2, ended = NULL, error_code = NULL WHERE id = ?1";
        connection.execute(undo, [run, state]).unwrap();
        connection.execute("DELETE FROM outcome WHERE run = ?1", [run]).unwrap();
    }
    drop(connection);

    let service = setup.start();
    for run in [&waiting, &begun] {
        let row = service.ended(run).await;
        assert_eq!(row["error_code"], "cancelled", "{row}");
    }
    assert_eq!(count_requests(&setup), 1);
    setup.stop(service);
}

/// A5, B4: The run was queued when the backup was made, and has ended since. It is not executed and billed again.
#[tokio::test(flavor = "multi_thread")]
async fn a_restored_backup_begins_no_run_again() {
    let setup = ServiceSetup::new("").await;
    let grant = setup.grant(&[]);
    queue_run(&setup, &grant, "run-0").await;
    let (file, backup) = (setup.state_dir().join("state.db"), setup.path().join("backup.db"));
    let connection = rusqlite::Connection::open(&file).unwrap();
    connection.execute("VACUUM INTO ?1", [backup.to_str().unwrap()]).unwrap();
    drop(connection);
    let service = setup.start();
    assert_eq!(service.ended("run-0").await["error_code"], Value::Null);
    let later = service.run(&conversation_body("hello")).await;
    service.ended(&later).await;
    let before = (read_bill(&service).await, count_requests(&setup));
    assert_ne!(before.0["billable"], 0, "{before:?}");
    setup.stop(service);
    for name in ["-wal", "-shm"] {
        let _ = fs::remove_file(format!("{}{name}", file.display()));
    }
    fs::copy(&backup, &file).unwrap();

    let service = setup.start();
    let row = service.ended("run-0").await;
    assert_eq!(row["error_code"], "interrupted", "{row}");
    let proof = service.get("/api/v1/runs/run-0/audit").await.json();
    assert_eq!(proof["verified"], true, "{proof}");
    let output = service.process.output();
    assert!(output.contains("newer than every run in the database"), "{output}");
    let after = (read_bill(&service).await, count_requests(&setup));
    assert_eq!(
        (&after.0["calls"], &after.0["billable"]),
        (&before.0["calls"], &before.0["billable"])
    );
    assert_eq!(after.1, before.1, "it has called again");
    setup.stop(service);
}

/// A5: Of two runs in one millisecond, the later may have the lower id, which is no sign of a restored backup.
#[tokio::test(flavor = "multi_thread")]
async fn runs_in_one_millisecond_cause_no_backup_warning() {
    let setup = ServiceSetup::new("").await;
    let grant = setup.grant(&[]);
    queue_run(&setup, &grant, "run-2").await;
    queue_run(&setup, &grant, "run-1").await;
    let service = setup.start();
    service.ended("run-2").await;
    service.ended("run-1").await;
    setup.stop(service);
    let service = setup.start();
    let output = service.process.output();
    assert!(!output.contains("newer than every run"), "{output}");
    setup.stop(service);
}

/// A5, R5: The process was killed after the log file was made and before its first record, so the run has not begun.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_without_a_record_keeps_no_run_from_beginning() {
    let setup = ServiceSetup::new("").await;
    let grant = setup.grant(&[]);
    queue_run(&setup, &grant, "run-0").await;
    let log = setup.audit_log("run-0");
    fs::create_dir_all(log.parent().unwrap()).unwrap();
    File::create_new(&log).unwrap();
    let service = setup.start();
    let row = service.ended("run-0").await;
    assert_eq!(row["error_code"], Value::Null, "{row}");
    let report = verify::verify_file(&log, None).unwrap();
    assert!(report.finished && report.admitted > 0, "{report:?}");
    setup.stop(service);
}

/// R5: A signal that arrives while another process still holds the state directory is remembered and obeyed later.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_at_the_start_is_obeyed_when_the_service_is_ready() {
    let setup = ServiceSetup::new("").await;
    setup.stop(setup.start());
    let held = File::open(setup.state_dir()).unwrap();
    for signals in [&["HUP", "USR1"][..], &["TERM"]] {
        held.lock().unwrap();
        let mut service = ChildProcess::start(&mut setup.command(), "the service does not start");
        let is_registered = || has_handler(service.id(), SIGHUP);
        tokio::task::block_in_place(|| {
            wait_until(is_registered, || "SIGHUP has no handler".to_owned());
        });
        for signal in signals {
            service.signal(signal);
        }
        held.unlock().unwrap();
        let status = tokio::task::block_in_place(|| {
            if signals == ["TERM"] {
                return service.wait();
            }
            service.until(|output| output.contains("are read again"));
            service.terminate()
        });
        assert!(status.success(), "{signals:?}: {}", service.output());
    }
}

fn has_handler(pid: u32, signal: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    caught.is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}

/// Queues a run that a process has accepted and not begun.
async fn queue_run(setup: &ServiceSetup, grant: &MintedGrant, run: &str) {
    let wanted = RunSubmission {
        grant: grant.id.clone(),
        agent: "sandbox:agent".to_owned(),
        model: Some("fake".to_owned()),
        messages: vec![ChatMessage::user("hello")],
        account: "acct-1".to_owned(),
        ..RunSubmission::default()
    };
    let new = NewRunRow {
        id: run.to_owned(),
        grant: grant.id.clone(),
        idempotency_key: None,
        caps: SpendingCaps::default(),
        max_cost_usd: None,
        digest: String::new(),
        agent: wanted.agent.clone(),
        account: wanted.account.clone(),
        model: "fake".to_owned(),
        submission: serde_json::to_string(&wanted).unwrap(),
    };
    let added = open_store(&setup.state_dir().join("state.db")).add_run(new).await.unwrap();
    assert!(matches!(added, AddRunOutcome::New(..)), "{added:?}");
}

fn open_store(file: &Path) -> RunStore {
    RunStore::new(SqliteDatabase::open_database(file, &[store::SCHEMA]).unwrap())
}

async fn read_bill(service: &ServiceProcess) -> Value {
    service.get("/api/v1/runs/run-0/receipts").await.json()["bill"].clone()
}

fn count_requests(setup: &ServiceSetup) -> usize {
    // The reconciliation task also asks the provider for spend logs.
    setup.provider.seen.requests().iter().filter(|request| request.method == "POST").count()
}

const SIGHUP: u32 = 1;
