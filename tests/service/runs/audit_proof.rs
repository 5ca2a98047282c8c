//! A4, G11: Tests of the proof of a run's audit log. A log is proved only if it is the log that was closed when the run
//! ended. Old logs are removed if the operator configures it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use cogni_gateway::base::db::SqliteDatabase;
use cogni_gateway::base::secret::SecretString;
use cogni_gateway::llm::budget::BudgetAmount;
use cogni_gateway::relay::delivery::OUTBOX_FILE;
use cogni_gateway::relay::delivery::outbox::{DeliveryOutbox, StepOutcome};
use cogni_gateway::service::billing;
use cogni_gateway::service::store;
use cogni_gateway::telemetry::audit::delivery_records::WorkAppliedRecord;
use cogni_gateway::telemetry::audit::records::{RunFinishedRecord, RunStartedRecord};
use cogni_gateway::telemetry::audit::seal::AuditLogSeal;
use cogni_gateway::telemetry::audit::{AuditConfig, AuditLog, AuditSigningKey, KEY_FILE_NAME};
use serde_json::{Value, json};

use super::{ServiceSetup, conversation_body};
use crate::support::delivery::{delivery_plan, delivery_request};
use crate::support::process::{TEST_TIMEOUT, wait_until};
use crate::support::service::ServiceProcess;

/// A user who can write to the log directory can exchange a log, but the exchanged log is not proved.
#[tokio::test(flavor = "multi_thread")]
async fn a_forged_exchanged_or_truncated_log_is_not_proved() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let (other, run) = (
        service.run(&conversation_body("one")).await,
        service.run(&conversation_body("two")).await,
    );
    service.ended(&other).await;
    service.ended(&run).await;
    let (file, key) = (setup.audit_log(&run), public_key(&setup));
    let log = fs::read(&file).unwrap();
    let lines: Vec<_> = log.split_inclusive(|byte| *byte == b'\n').collect();
    let sealed = read_proof(&service, &run).await;
    assert_eq!(
        (&sealed["verified"], &sealed["finished"]),
        (&json!(true), &json!(true)),
        "{sealed}"
    );
    assert_eq!(sealed["records"], json!(lines.len()));

    let mut reasons = vec![];
    let mut forge = async |name: &str, forged: &dyn Fn(&Path)| {
        forged(&file);
        let proof = read_proof(&service, &run).await;
        assert_eq!(proof["verified"], false, "{name}: {proof}");
        assert_eq!(proof["records"], 0, "what it says is told, as if it were true: {proof}");
        let reason = proof["broken"].as_str().unwrap();
        let reason = reason.replace(&other, "OTHER").replace(&other_key().1, "KEY");
        let all = lines.len();
        let counts = [(all + 3, "ALL + 3"), (all, "ALL"), (all - 1, "ALL - 1")];
        let reason = counts.iter().fold(reason, |reason, (count, name)| {
            let count = |words: &str| (format!("{words} {count} "), format!("{words} {name} "));
            let named = [count("has"), count("its"), count("had")];
            named.iter().fold(reason, |reason, (count, name)| reason.replace(count, name))
        });
        reasons.push(format!("{name}: {reason}"));
        fs::write(&file, &log).unwrap();
    };
    forge("swapped", &|file| {
        fs::copy(setup.audit_log(&other), file).unwrap();
    })
    .await;
    forge("its first record", &|file| fs::write(file, lines[0]).unwrap()).await;
    forge("without its signature", &|file| {
        fs::write(file, lines[..lines.len() - 1].concat()).unwrap();
    })
    .await;
    forge("empty", &|file| fs::write(file, "").unwrap()).await;
    forge("gone", &|file| fs::remove_file(file).unwrap()).await;
    forge("a byte", &|file| {
        fs::write(file, String::from_utf8_lossy(&log).replacen("acct-1", "acct-2", 1)).unwrap();
    })
    .await;
    forge("by another key", &|file| write_log(file, &run, &other_key().0, lines.len())).await;
    forge("by our own key", &|file| write_log(file, &run, &key, lines.len())).await;
    forge("gone on with", &|file| append_records(file, &run, &key)).await;
    insta::assert_snapshot!(reasons.join("\n"), @"
    swapped: the file is the log of run `OTHER`
    its first record: the log has 1 of its ALL records: some are missing at the end
    without its signature: the log has ALL - 1 of its ALL records: some are missing at the end
    empty: the log has 0 of its ALL records: some are missing at the end
    gone: the log is gone: it had ALL records when the run ended
    a byte: record 1 (line 1, byte 0): the content does not match its hash
    by another key: the log is another one than when the run ended, signed with another key: `KEY`
    by our own key: the log is another one than when the run ended: records were changed, and all were signed again
    gone on with: the log has ALL + 3 records, and had ALL when the run ended: some records were added
    ");
    assert_eq!(read_proof(&service, &run).await, sealed, "the log itself is as good as ever");
    setup.stop(service);
}

/// An unchanged log is read once, however often its proof is requested; a changed log is read again.
#[tokio::test(flavor = "multi_thread")]
async fn the_proof_of_an_unchanged_log_is_reused() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let run = service.run(&conversation_body("hello")).await;
    service.ended(&run).await;
    setup.stop(service);
    let (file, key) = (setup.audit_log(&run), public_key(&setup));
    write_log(&file, &run, &key, 2000);
    let public = *AuditSigningKey::new(Some(&SecretString::new(key.trim()))).unwrap().public_key();
    store_seal(&setup, &run, AuditLogSeal::seal_log(&file, &run, &public).unwrap()).await;

    let service = setup.start();
    let id = service.process.id();
    let first = read_proof(&service, &run).await;
    assert_eq!(first["verified"], true, "{first}");
    let length = fs::metadata(&file).unwrap().len();
    let is_read = async || {
        let before = bytes_read(id);
        assert_eq!(read_proof(&service, &run).await, first);
        bytes_read(id) - before >= length
    };
    let begun = Instant::now();
    while is_read().await {
        assert!(begun.elapsed() < TEST_TIMEOUT, "it is read again each time");
    }
    let log = fs::read_to_string(&file).unwrap();
    fs::write(&file, log.replacen("acct-1", "acct-2", 1)).unwrap();
    assert_eq!(read_proof(&service, &run).await["verified"], false);
    setup.stop(service);
}

/// One key signs for all processes with the same state directory, and only its owner can read it.
#[tokio::test(flavor = "multi_thread")]
async fn the_key_of_a_state_directory_outlives_its_processes() {
    let setup = ServiceSetup::new("").await;
    let mut keys = vec![];
    for _ in 0..2 {
        let service = setup.start();
        let run = service.run(&conversation_body("hello")).await;
        service.ended(&run).await;
        let proof = read_proof(&service, &run).await;
        assert_eq!(proof["verified"], true, "{proof}");
        keys.push(proof["public_key"].clone());
        setup.stop(service);
    }
    assert_eq!(keys[0], keys[1]);
    let mode = fs::metadata(setup.state_dir().join(KEY_FILE_NAME)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    // An operator's own key replaces it; earlier signatures stay valid.
    let mut setup = setup;
    let (seed, public) = other_key();
    setup.set("AUDIT_SIGNING_KEY", &seed);
    let service = setup.start();
    let run = service.run(&conversation_body("hello")).await;
    service.ended(&run).await;
    assert_eq!(read_proof(&service, &run).await["public_key"], json!(public));
    let listed = service.get("/api/v1/runs").await.json();
    for row in listed["runs"].as_array().unwrap() {
        assert_eq!(
            read_proof(&service, row["id"].as_str().unwrap()).await["verified"],
            true,
            "{row}"
        );
    }
    setup.stop(service);
}

/// A run of a process that has ended is closed by the next process, which seals its log.
#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_an_interrupted_run_is_closed_and_sealed() {
    let setup = ServiceSetup::new("gate=1").await;
    let mut service = setup.start();
    let run = service.run(&conversation_body("hello")).await;
    let log = setup.audit_log(&run);
    let is_admitted = || fs::read_to_string(&log).is_ok_and(|log| log.contains("request.admitted"));
    tokio::task::block_in_place(|| wait_until(is_admitted, || "no call is admitted".to_owned()));
    // Records without a checkpoint are not reported as proved.
    let open = read_proof(&service, &run).await;
    let facts = json!([open["verified"], open["broken"], open["finished"], open["signed"]]);
    assert_eq!(facts, json!([false, null, false, 0]), "{open}");
    assert_eq!(open["unsigned"], open["records"], "{open}");
    service.process.signal("KILL");
    service.process.wait();
    // The state after a crash in the middle of a write.
    let torn = [fs::read(&log).unwrap(), b"{\"v\":1,\"seq\":".to_vec()].concat();
    fs::write(&log, torn).unwrap();

    let service = setup.start();
    let row = service.ended(&run).await;
    assert_eq!(row["error_code"], "interrupted");
    let closed = read_proof(&service, &run).await;
    let facts = json!([closed["verified"], closed["finished"], closed["open"], closed["crashed"]]);
    assert_eq!(facts, json!([true, true, 0, 1]), "{closed}");
    assert_eq!((&closed["signed"], &closed["unsigned"]), (&closed["records"], &json!(0)));
    let text = fs::read_to_string(&log).unwrap();
    fs::write(&log, text.split_inclusive('\n').take(3).collect::<String>()).unwrap();
    assert_eq!(read_proof(&service, &run).await["verified"], false);
    setup.stop(service);
}

/// The service sweeps the relay's directory, too, so an operator need not run `relay sweep`.
#[tokio::test(flavor = "multi_thread")]
async fn the_relays_leftovers_are_removed_after_the_retention_time() {
    let setup = ServiceSetup::new("").await;
    let work = setup.state_dir().join("work");
    let (old, young) = (work.join("old"), work.join("young"));
    for directory in [&old, &young] {
        fs::create_dir_all(directory).unwrap();
        fs::write(directory.join("bundle"), "x").unwrap();
    }
    let long_ago = SystemTime::now() - Duration::from_hours(31 * 24);
    fs::File::open(&old).unwrap().set_modified(long_ago).unwrap();
    let service = setup.start();
    tokio::task::block_in_place(|| wait_until(|| !old.exists(), || "it is still there".to_owned()));
    assert!(young.exists(), "it is young");
    setup.stop(service);
}

/// A log is removed when it is old, its run is removed, and none of its work is kept; not earlier.
#[tokio::test(flavor = "multi_thread")]
async fn logs_go_when_they_are_older_than_they_are_kept() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let mut runs = vec![];
    for text in ["forgotten", "remembered", "young", "held", "left"] {
        let run = service.run(&conversation_body(text)).await;
        service.ended(&run).await;
        runs.push(run);
    }
    setup.stop(service);
    let [forgotten, remembered, young, held, left] = &runs[..] else { unreachable!() };
    let beside = setup.audit_log(forgotten).with_extension("jsonl.torn-3");
    fs::write(&beside, "{").unwrap();
    let row = keep_work(&setup, held, left);
    fs::write(setup.audit_log(&row), "").unwrap();
    let kept_runs = [remembered, held, left, &row];
    let logs = kept_runs.into_iter().chain([forgotten]).map(|name| setup.audit_log(name));
    for log in logs.chain([beside.clone()]) {
        let long_ago = SystemTime::now() - Duration::from_hours(3);
        fs::File::options().append(true).open(log).unwrap().set_modified(long_ago).unwrap();
    }
    for run in [forgotten, young, held, left] {
        end_long_ago(&setup, run).await;
    }

    // No retention time is configured.
    let service = setup.start();
    let is_forgotten = format!("/api/v1/runs/{forgotten}");
    let begun = Instant::now();
    while service.get(&is_forgotten).await.status != 404 {
        assert!(begun.elapsed() < TEST_TIMEOUT, "it is not forgotten");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    setup.stop(service);
    assert!(runs.iter().all(|run| setup.audit_log(run).exists()), "kept for ever");

    setup.write_config("audit_retention = \"2h\"");
    let service = setup.start();
    let is_gone = || !setup.audit_log(forgotten).exists() && !beside.exists();
    tokio::task::block_in_place(|| wait_until(is_gone, || "the old log is still there".to_owned()));
    for name in kept_runs {
        assert!(setup.audit_log(name).exists(), "{name} of {kept_runs:?}");
    }
    assert!(setup.audit_log(young).exists(), "it is young");
    assert_eq!(read_proof(&service, remembered).await["verified"], true);
    setup.stop(service);
}

/// Calls are removed when they are old and their run is removed; the log reports how many of them were flagged.
#[tokio::test(flavor = "multi_thread")]
async fn calls_go_when_they_are_older_than_they_are_kept() {
    let setup = ServiceSetup::new("").await;
    setup.write_config("billing_retention = \"4d\"");
    let service = setup.start();
    let mut runs = vec![];
    for text in ["forgotten", "remembered", "young"] {
        let run = service.run(&conversation_body(text)).await;
        service.ended(&run).await;
        runs.push(run);
    }
    setup.stop(service);
    let [forgotten, remembered, young] = &runs[..] else { unreachable!() };
    for run in [forgotten, remembered] {
        age_calls(&setup, run).await;
    }
    for run in [forgotten, young] {
        end_long_ago(&setup, run).await;
    }
    let calls = async |run: &str| setup.books().run_bill(run).await.unwrap().calls;

    let mut service = setup.start();
    tokio::task::block_in_place(|| service.process.until(|output| output.contains("were flagged")));
    let printed = service.process.output();
    assert!(printed.contains("unreceipted=1"), "{printed}");
    assert_eq!(calls(forgotten).await, 0);
    assert_eq!([calls(remembered).await, calls(young).await], [1, 1]);
    assert_eq!(setup.books().totals(SystemTime::now()).await.unwrap().deleted_calls, 1);
    let bill = service.get(&format!("/api/v1/runs/{remembered}/receipts")).await.json();
    assert_eq!(bill["bill"]["calls"], 1, "{bill}");
    setup.stop(service);
}

async fn read_proof(service: &ServiceProcess, run: &str) -> Value {
    service.get(&format!("/api/v1/runs/{run}/audit")).await.json()
}

fn public_key(setup: &ServiceSetup) -> String {
    fs::read_to_string(setup.state_dir().join(KEY_FILE_NAME)).unwrap()
}

/// Another key pair, as a forger has one.
fn other_key() -> (String, String) {
    let key = AuditSigningKey::new(Some(&SecretString::new("22".repeat(32)))).unwrap();
    ("22".repeat(32), key.public_key().to_string())
}

/// Writes a log with this many records that is valid except for its writer.
fn write_log(file: &Path, run: &str, key: &str, records: usize) {
    fs::remove_file(file).unwrap();
    let log = open_log(file, run, key);
    for _ in 0..records - 3 {
        log.record_delivery(&WorkAppliedRecord { relay: "-", head: "-" });
    }
    finish_log(&log);
}

/// Appends three records: a start, an end and its signature.
fn append_records(file: &Path, run: &str, key: &str) {
    finish_log(&open_log(file, run, key));
}

fn open_log(file: &Path, run: &str, key: &str) -> AuditLog {
    let key = Some(SecretString::new(key.trim()));
    let config =
        AuditConfig { path: Some(file.to_owned()), signing_key: key, ..AuditConfig::default() };
    let started = RunStartedRecord {
        run: run.to_owned(),
        attempt: "1".to_owned(),
        account: "acct-1".to_owned(),
        version: "0".to_owned(),
        policy: "-".to_owned(),
        prices: "-".to_owned(),
        trace: None,
        upstream: "openai",
    };
    AuditLog::open_log(&config, &started).unwrap().0
}

fn finish_log(log: &AuditLog) {
    log.finish_log(&RunFinishedRecord { spent: BudgetAmount::default(), admitted: 0, refused: 0 })
        .unwrap();
}

/// Adds held work of one run, and a workspace of another run with uncollected work. Returns the id of the first.
fn keep_work(setup: &ServiceSetup, held: &str, left: &str) -> String {
    let outbox = DeliveryOutbox::open(&setup.state_dir().join(OUTBOX_FILE)).unwrap();
    let job = outbox.add_job(&delivery_request(held)).unwrap();
    let why = "an operator has to look at it".to_owned();
    outbox.advance_job(&job, StepOutcome::Held { code: "held", why }).unwrap();
    let workspace = setup.path().join("workspace");
    let row =
        outbox.register_workspace(&delivery_plan(&delivery_request(left)), &workspace).unwrap();
    outbox.retain_workspace(&row, &workspace, "files").unwrap();
    job.id
}

/// Stores a seal for a run, as if this log had been closed at the run's end.
async fn store_seal(setup: &ServiceSetup, run: &str, seal: AuditLogSeal) {
    let file = setup.state_dir().join("state.db");
    let (database, run) =
        (SqliteDatabase::open_database(&file, &[store::SCHEMA]).unwrap(), run.to_owned());
    let change = "UPDATE run SET log_records = ?2, log_head = ?3 WHERE id = ?1";
    let records = seal.records.cast_signed();
    let changed = database
        .write_in_transaction(move |write| write.execute(change, (run, records, seal.head)));
    assert_eq!(changed.await.unwrap(), 1);
}

/// Returns all bytes that a process has read, from files and others.
fn bytes_read(process: u32) -> u64 {
    let io = fs::read_to_string(format!("/proc/{process}/io")).unwrap();
    let read = io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap();
    read.parse().unwrap()
}

/// Makes a run's calls five days old.
async fn age_calls(setup: &ServiceSetup, run: &str) {
    let file = setup.state_dir().join("state.db");
    let (database, run) =
        (SqliteDatabase::open_database(&file, &[billing::SCHEMA]).unwrap(), run.to_owned());
    let age =
        "UPDATE billing_fact SET started = started - ?2, settled = settled - ?2 WHERE run = ?1";
    let days: i64 = 5 * 24 * 60 * 60 * 1000;
    let aged = database
        .write_in_transaction(move |change| change.execute(age, (run, days)))
        .await
        .unwrap();
    assert_eq!(aged, 1);
}

/// Makes a run so old that the next start removes it.
async fn end_long_ago(setup: &ServiceSetup, run: &str) {
    let file = setup.state_dir().join("state.db");
    let (database, run) =
        (SqliteDatabase::open_database(&file, &[store::SCHEMA]).unwrap(), run.to_owned());
    let end = "UPDATE run SET ended = 1 WHERE id = ?1";
    database.write_in_transaction(move |change| change.execute(end, [run])).await.unwrap();
}
