//! G11, B1, A5: Tests of a full disk: costs are recorded when there is room again, and callers are told to retry.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use cogni_gateway::runner::agents;
use rusqlite::Connection;
use serde_json::{Value, json};

use super::{ServiceSetup, conversation_body};
use crate::support::process::TEST_TIMEOUT;
use crate::support::service::ServiceProcess;
use crate::support::small_disk::SmallDisk;

/// G11, B1: The log of a run whose calls end while the disk is full is closed when there is room, and is billed with
/// the calls' real usage instead of their reservations.
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_end_on_a_full_disk_are_recorded_and_billed_later() {
    let (setup, disk) = with_audit_disk().await;
    let mut service = setup.start();
    let run = full_at_its_end(&setup, &service, &disk).await;
    wait_for_words(&mut service, "cannot store the end of the run; trying again");
    let row = service.get(&format!("/api/v1/runs/{run}")).await.json();
    assert_eq!(row["state"], "running", "it has ended without its calls: {row}");

    disk.free();
    let row = service.ended(&run).await;
    assert_eq!(row["state"], "ended", "{row}");
    let proof = read_proof(&service, &run).await;
    let verdict = json!([proof["verified"], proof["finished"], proof["open"], proof["crashed"]]);
    assert_eq!(verdict, json!([true, true, 0, 0]), "{proof}");
    assert_eq!(setup.books().run_bill(&run).await.unwrap().calls, CALLS, "{row}");
    setup.stop(service);
}

/// G11, B1: A process that ends before there is room leaves the log to the next process, which starts without waiting
/// for room.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_ends_on_a_full_disk_is_ended_by_the_next_process() {
    let (setup, disk) = with_audit_disk().await;
    let mut service = setup.start();
    let run = full_at_its_end(&setup, &service, &disk).await;
    wait_for_words(&mut service, "cannot store the end of the run; trying again");
    service.process.signal("KILL");
    service.process.wait();

    let mut service = setup.start();
    wait_for_words(&mut service, "the audit log cannot be closed yet");
    let row = service.get(&format!("/api/v1/runs/{run}")).await.json();
    assert_eq!(row["state"], "running", "{row}");
    disk.free();
    let row = service.ended(&run).await;
    assert_eq!(row["error_code"], "interrupted", "{row}");
    let proof = read_proof(&service, &run).await;
    assert_eq!(json!([proof["verified"], proof["open"]]), json!([true, 0]), "{proof}");
    assert_eq!(setup.books().run_bill(&run).await.unwrap().calls, CALLS);
    setup.stop(service);
}

/// G11, B1: The open log of an ended run, left by an earlier version, is closed, billed and sealed by the next start.
#[tokio::test(flavor = "multi_thread")]
async fn the_open_log_of_an_ended_run_is_closed_and_billed() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let run = service.run(&conversation_body("hello")).await;
    service.ended(&run).await;
    let calls = setup.books().run_bill(&run).await.unwrap().calls;
    setup.stop(service);
    let log = fs::read_to_string(setup.audit_log(&run)).unwrap();
    let admitted = log.find("request.admitted").unwrap();
    let end = admitted + log[admitted..].find('\n').unwrap() + 1;
    fs::write(setup.audit_log(&run), &log[..end]).unwrap();
    let database = Connection::open(setup.state_dir().join("state.db")).unwrap();
    let forget = "UPDATE run SET log_records = NULL, log_head = NULL, log_key = NULL;
                  DELETE FROM billing_receipt; DELETE FROM billing_fact;";
    database.execute_batch(forget).unwrap();
    drop(database);

    let service = setup.start();
    let begun = Instant::now();
    while read_proof(&service, &run).await["verified"] != true {
        assert!(begun.elapsed() < TEST_TIMEOUT, "{}", read_proof(&service, &run).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let proof = read_proof(&service, &run).await;
    assert_eq!(json!([proof["finished"], proof["open"], proof["crashed"]]), json!([true, 0, 1]));
    assert_eq!((calls, setup.books().run_bill(&run).await.unwrap().calls), (1, 1));
    setup.stop(service);
}

/// A5: No run is accepted whose log would have no room, and the check that names the full disk tells why.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_without_room_for_its_log_is_refused() {
    let (setup, disk) = with_audit_disk().await;
    write_agent(&setup, "", |entry| entry);
    let mut service = setup.start();
    disk.fill();
    let refused = service.post("/api/v1/runs", &conversation_body("hello")).await;
    assert_eq!(refused.json()["error"]["code"], "storage_full", "{}", refused.text());
    let checks = service.get("/readyz").await.json()["checks"].clone();
    assert!(checks["audit"].as_str().unwrap().contains("No space left"), "{checks}");
    assert_eq!(checks["storage"], "ok", "{checks}");
    disk.free();
    let run = service.run(&conversation_body("hello")).await;
    assert_eq!(service.ended(&run).await["error_code"], Value::Null);
    service.process.terminate();
    setup.assert_nothing_is_left();
}

/// G11, A5: A run that was accepted, and whose log cannot be opened when it begins, ends with a code and the reason. The
/// next run gets its place.
#[tokio::test(flavor = "multi_thread")]
async fn an_accepted_run_that_cannot_open_its_log_frees_its_place() {
    let setup = ServiceSetup::new("gate=head").await;
    setup.set_max_runs(1);
    let mut service = setup.start();
    let before = service.run(&conversation_body("before")).await;
    setup.provider.gate.wait_for_waiting(1).await;
    let run = service.run(&conversation_body("hello")).await;
    let after = service.run(&conversation_body("after")).await;
    // Nothing can be written under the name of the log.
    fs::create_dir(setup.audit_log(&run)).unwrap();
    setup.provider.gate.allow_answers(1000);
    assert_eq!(service.ended(&before).await["error_code"], Value::Null);
    let row = service.ended(&run).await;
    assert_eq!((&row["state"], &row["error_code"]), (&json!("ended"), &json!("internal")), "{row}");
    let message = row["result"]["error"].as_str().unwrap();
    insta::assert_snapshot!(message, @"audit log `[host path]` is not a regular file; name a file on a disk");
    assert_eq!(service.ended(&after).await["error_code"], Value::Null);
    fs::remove_dir(setup.audit_log(&run)).unwrap();
    service.process.terminate();
    setup.assert_nothing_is_left();
}

/// A5: A full disk is a temporary error of the service, and both the response and `/readyz` say so.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_on_a_full_disk_is_told_to_retry() {
    let (setup, disk) = (ServiceSetup::new("").await, SmallDisk::mount(16 << 20));
    move_to(&setup.state_dir(), &disk.path("state"));
    let service = setup.start();
    assert_eq!(service.get("/readyz").await.status, 200);
    disk.fill();
    let ready = service.get("/readyz").await;
    assert_eq!(ready.status, 503, "{}", ready.text());
    let message = ready.json()["checks"]["storage"].as_str().unwrap().to_owned();
    assert!(message.contains("No space left on device"), "{message}");
    // The database has a little free room in its own files.
    let begun = Instant::now();
    let refused = loop {
        let answer = service.post("/api/v1/runs", &conversation_body("hello")).await;
        if !answer.status.is_success() {
            break answer;
        }
        assert!(begun.elapsed() < TEST_TIMEOUT, "the disk is never full");
    };
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (503, Some("10")));
    assert_eq!(refused.json()["error"]["code"], "storage_full", "{}", refused.text());

    disk.free();
    let is_ready = async || service.get("/readyz").await.status == 200;
    while !is_ready().await {
        assert!(begun.elapsed() < TEST_TIMEOUT, "it does not get ready again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let run = service.run(&conversation_body("hello")).await;
    assert_eq!(service.ended(&run).await["error_code"], Value::Null);
    setup.stop(service);
}

/// Makes a run whose calls are answered when the disk has no room for their settlements.
async fn full_at_its_end(
    setup: &ServiceSetup,
    service: &ServiceProcess,
    disk: &SmallDisk,
) -> String {
    let run = service.run(&conversation_body("hello")).await;
    setup.provider.gate.wait_for_waiting(usize::try_from(CALLS).unwrap()).await;
    disk.fill();
    setup.provider.gate.allow_answers(usize::try_from(CALLS).unwrap());
    run
}

/// Starts a service whose audit logs are on their own disk, and whose agent makes more calls at the provider's gate
/// than a log's last page can settle.
async fn with_audit_disk() -> (ServiceSetup, SmallDisk) {
    let (setup, disk) = (ServiceSetup::new("").await, SmallDisk::mount(1 << 20));
    fs::create_dir(disk.path("audit")).unwrap();
    symlink(disk.path("audit"), setup.state_dir().join("audit")).unwrap();
    let ask = "curl --silent -o /dev/null -H 'content-type: application/json' \
        -d '{\\\"model\\\":\\\"fake/gate=1\\\",\\\"messages\\\":[]}' $OPENAI_BASE_URL/chat/completions &";
    let script =
        format!("for call in 1 2 3 4 5 6 7 8 9 10 11 12; do {ask} done; wait; echo '{{}}'");
    let argv = format!("argv = [\"/bin/sh\", \"-c\", \"{script}\"]");
    let agent_argv = r#"argv = ["/cogni-agent", "--timeout", "${TIMEOUT}"]"#;
    write_agent(&setup, "", |entry| entry.replace(agent_argv, &argv));
    (setup, disk)
}

const CALLS: u64 = 12;

fn write_agent(setup: &ServiceSetup, more: &str, change: impl Fn(String) -> String) {
    let agents = setup.path().join("agents");
    fs::create_dir_all(&agents).unwrap();
    let entry = agents::builtin_file("sandbox:agent").unwrap();
    let entry = entry.replace("setup = \"messages\"\n", &format!("setup = \"messages\"\n{more}"));
    fs::write(agents.join("sandbox-agent.toml"), change(entry)).unwrap();
    setup.write_config(&format!("agents_dir = \"{}\"", agents.display()));
}

/// Moves a directory and puts a link in its place.
fn move_to(directory: &Path, elsewhere: &Path) {
    let mut copy = Command::new("cp");
    assert!(copy.arg("-aT").arg(directory).arg(elsewhere).status().unwrap().success());
    fs::remove_dir_all(directory).unwrap();
    symlink(elsewhere, directory).unwrap();
}

async fn read_proof(service: &ServiceProcess, run: &str) -> Value {
    service.get(&format!("/api/v1/runs/{run}/audit")).await.json()
}

fn wait_for_words(service: &mut ServiceProcess, words: &str) {
    tokio::task::block_in_place(|| service.process.until(|output| output.contains(words)));
}
