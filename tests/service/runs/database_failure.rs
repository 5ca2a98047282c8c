//! B1, B4, R5: Tests of a database that cannot be written when a run ends. The run has not ended until its calls are in
//! the billing store, and neither a shutdown nor a start waits for that.

use std::time::Duration;

use cogni_gateway::service::billing::RunBill;
use futures_util::future::join;
use rusqlite::Connection;
use serde_json::{Value, json};

use super::{ServiceSetup, conversation_body};
use crate::support::process::{ChildProcess, wait_until};
use crate::support::service::ServiceProcess;

/// B1, B4: The billing store cannot be written while the run's last calls are recorded. The run ends only after that
/// has succeeded.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_ends_only_after_its_calls_are_recorded() {
    let setup = ServiceSetup::new("").await;
    let mut service = setup.start();
    let run = start_unbooked_run(&setup, &mut service).await;
    let row = service.get(&format!("/api/v1/runs/{run}")).await.json();
    assert_eq!(
        (&row["state"], read_bill(&setup, &run).await.calls),
        (&"running".into(), 0),
        "{row}"
    );
    execute_statement(&setup, ALLOW);
    let row = service.ended(&run).await;
    assert_eq!(row["error_code"], Value::Null, "{row}");
    let bill = read_bill(&setup, &run).await;
    assert!(bill.billable > 0, "{bill:?}");
    let events = service.events(&run).await;
    let reports = events.iter().filter(|event| event.kind == "usage_report").count();
    assert_eq!(reports as u64, bill.calls, "{events:?}");
    setup.stop(service);
}

/// R5: A second signal stops the service, and the next process says why it does not start. Neither loses the run or its
/// calls.
#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_does_not_wait_for_an_end_that_cannot_be_written() {
    let setup = ServiceSetup::new("").await;
    setup.write_config("drain_timeout = \"10m\"");
    let mut service = setup.start();
    let run = start_unbooked_run(&setup, &mut service).await;
    service.process.signal("TERM");
    wait_for_words(&mut service.process, "draining");
    service.process.signal("TERM");
    let stopped = tokio::task::block_in_place(|| service.process.wait());
    assert!(stopped.success(), "{}", service.process.output());

    let mut next = ChildProcess::start(&mut setup.command(), "the service does not start");
    let status = tokio::task::block_in_place(|| next.wait());
    let output = next.output().replace(&run, "RUN");
    assert!(!status.success(), "{output}");
    let why: Vec<_> = output.lines().skip_while(|line| !line.starts_with("error")).collect();
    insta::assert_snapshot!(
        why.join("\n"),
        @"error: cannot recover the runs of an earlier process: run `RUN`: the database cannot be read or written: refused by a test"
    );

    execute_statement(&setup, ALLOW);
    let service = setup.start();
    let row = service.ended(&run).await;
    assert_eq!(row["error_code"], "interrupted", "{row}");
    let bill = read_bill(&setup, &run).await;
    assert!(bill.billable > 0, "{bill:?}");
    setup.stop(service);
}

/// R5: A run's row is being written when the service no longer waits. The run ends like the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_comes_at_the_last_moment_is_not_waited_for() {
    let setup = ServiceSetup::new("gate=1").await;
    setup.write_config("drain_timeout = \"10m\"");
    let mut service = setup.start();
    execute_statement(&setup, SLOW);
    let owner = setup.owner.clone();
    let request =
        tokio::spawn(async move { owner.post("/api/v1/runs", &conversation_body("wait")).await });
    // If the write was quicker than the test, the run is under way.
    let is_under_way = || is_writing(&setup) || request.is_finished();
    let never = || "the run is not written down".to_owned();
    tokio::task::block_in_place(|| wait_until(is_under_way, never));
    service.process.signal("TERM");
    wait_for_words(&mut service.process, "draining");
    service.process.signal("TERM");
    let stopped = tokio::task::block_in_place(|| service.process.wait());
    assert!(stopped.success(), "{}", service.process.output());
    setup.assert_nothing_is_left();
}

/// A2: A cancelled run has left the queue, and its end is not written yet. The API never shows it as running.
#[tokio::test(flavor = "multi_thread")]
async fn a_queued_run_that_is_cancelled_is_never_running() {
    let setup = ServiceSetup::new("gate=head").await;
    setup.set_max_runs(1);
    let service = setup.start();
    let begun = service.run(&conversation_body("begun")).await;
    setup.provider.gate.wait_for_waiting(1).await;
    let waiting = service.run(&conversation_body("waiting")).await;
    let writer = Connection::open(setup.state_dir().join("state.db")).unwrap();
    writer.execute_batch("BEGIN IMMEDIATE").unwrap();
    // The answer waits until the request is written.
    let path = format!("/api/v1/runs/{waiting}/cancel");
    let watch = async {
        let row = loop {
            let row = service.get(&format!("/api/v1/runs/{waiting}")).await.json();
            if row["queue_position"].is_null() {
                break row;
            }
        };
        assert_eq!((&row["state"], &row["started_at"]), (&json!("queued"), &Value::Null), "{row}");
        let listed = service.get("/api/v1/runs?state=queued").await.json();
        assert_eq!(listed["runs"][0]["id"], json!(waiting), "{listed}");
        writer.execute_batch("ROLLBACK").unwrap();
    };
    let (cancelled, ()) = join(service.post(&path, &json!({})), watch).await;
    assert_eq!(cancelled.status, 202, "{}", cancelled.text());
    assert_eq!(service.ended(&waiting).await["error_code"], "cancelled");
    setup.provider.gate.allow_answers(1);
    assert_eq!(service.ended(&begun).await["error_code"], Value::Null);
    setup.stop(service);
}

/// Starts a run whose end waits only for its row, because its calls cannot be recorded.
async fn start_unbooked_run(setup: &ServiceSetup, service: &mut ServiceProcess) -> String {
    execute_statement(setup, REFUSE);
    let run = service.run(&conversation_body("hello")).await;
    wait_for_words(&mut service.process, "cannot store the end of the run; trying again");
    run
}

fn wait_for_words(process: &mut ChildProcess, words: &str) {
    tokio::task::block_in_place(|| process.until(|output| output.contains(words)));
}

async fn read_bill(setup: &ServiceSetup, run: &str) -> RunBill {
    setup.books().run_bill(run).await.unwrap()
}

/// Executes a statement in the service's database while the service runs.
fn execute_statement(setup: &ServiceSetup, statement: &str) {
    let connection = Connection::open(setup.state_dir().join("state.db")).unwrap();
    connection.execute_batch(statement).unwrap();
}

/// Returns whether another connection is writing.
fn is_writing(setup: &ServiceSetup) -> bool {
    let connection = Connection::open(setup.state_dir().join("state.db")).unwrap();
    connection.busy_timeout(Duration::ZERO).unwrap();
    connection.execute_batch("BEGIN IMMEDIATE; ROLLBACK").is_err()
}

/// Makes the insertion of a run take seconds.
const SLOW: &str = "CREATE VIEW slow AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000000)
                    SELECT count(*) AS count FROM n;
                    CREATE TRIGGER slow_run BEFORE INSERT ON run WHEN (SELECT count FROM slow) < 0
                    BEGIN SELECT RAISE(ABORT, 'it is not'); END";

/// Makes the insertion fail at once, as a full disk does.
const REFUSE: &str = "CREATE TRIGGER refuse BEFORE INSERT ON billing_fact
                      BEGIN SELECT RAISE(ABORT, 'refused by a test'); END";

const ALLOW: &str = "DROP TRIGGER refuse";
