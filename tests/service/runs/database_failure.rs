//! B1, B4, R5: what cannot be written down when a run ends. The run has not ended then; its calls are in the books before
//! it has, and nobody who stops or starts the service waits for that.

use std::time::Duration;

use cogni_gateway::service::billing::RunBill;
use rusqlite::Connection;
use serde_json::Value;

use super::{Place, ask};
use crate::support::process::{Process, patience};
use crate::support::service::Service;

/// B1, B4: the books cannot be written for as long as its last booking takes. They are when they can be, and only then it
/// has ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_has_ended_when_its_calls_are_in_the_books() {
    let place = Place::new("").await;
    let mut service = place.start();
    let run = unbooked(&place, &mut service).await;
    let row = service.get(&format!("/api/v1/runs/{run}")).await.json();
    assert_eq!((&row["state"], bill(&place, &run).await.calls), (&"running".into(), 0), "{row}");
    execute(&place, ALLOW);
    let row = service.ended(&run).await;
    assert_eq!(row["error_code"], Value::Null, "{row}");
    let bill = bill(&place, &run).await;
    assert!(bill.billable > 0, "{bill:?}");
    let told = service.events(&run).await;
    let reports = told.iter().filter(|told| told.kind == "usage_report").count();
    assert_eq!(reports as u64, bill.calls, "{told:?}");
    place.stop(service);
}

/// R5: asked twice, the service stops; the next one says why it does not start. Neither forgets the run, nor its calls.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_for_an_end_that_cannot_be_written() {
    let place = Place::new("").await;
    place.write_config("drain_timeout = \"10m\"");
    let mut service = place.start();
    let run = unbooked(&place, &mut service).await;
    service.process.signal("TERM");
    until(&mut service.process, "draining");
    service.process.signal("TERM");
    let stopped = tokio::task::block_in_place(|| service.process.wait());
    assert!(stopped.success(), "{}", service.process.said());

    let mut next = Process::start(&mut place.command(), "the service does not start");
    let status = tokio::task::block_in_place(|| next.wait());
    let said = next.said().replace(&run, "RUN");
    assert!(!status.success(), "{said}");
    let why: Vec<_> = said.lines().skip_while(|line| !line.starts_with("error")).collect();
    insta::assert_snapshot!(
        why.join("\n"),
        @"error: cannot recover the runs of an earlier process: run `RUN`: the database cannot be read or written: refused by a test"
    );

    execute(&place, ALLOW);
    let service = place.start();
    let row = service.ended(&run).await;
    assert_eq!(row["error_code"], "interrupted", "{row}");
    let bill = bill(&place, &run).await;
    assert!(bill.billable > 0, "{bill:?}");
    place.stop(service);
}

/// R5: its row is being written when nobody is to be waited for any more. It is ended like the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_comes_at_the_last_moment_is_not_waited_for() {
    let place = Place::new("gate=1").await;
    place.write_config("drain_timeout = \"10m\"");
    let mut service = place.start();
    execute(&place, SLOW);
    let owner = place.owner.clone();
    let asked = tokio::spawn(async move { owner.post("/api/v1/runs", &ask("wait")).await });
    // Where it was quicker than we, it is one of those that are under way.
    let is_under_way = || is_writing(&place) || asked.is_finished();
    let never = || "the run is not written down".to_owned();
    tokio::task::block_in_place(|| patience(is_under_way, never));
    service.process.signal("TERM");
    until(&mut service.process, "draining");
    service.process.signal("TERM");
    let stopped = tokio::task::block_in_place(|| service.process.wait());
    assert!(stopped.success(), "{}", service.process.said());
    place.assert_nothing_is_left();
}

/// A run that is over but for its row: its calls cannot be booked.
async fn unbooked(place: &Place, service: &mut Service) -> String {
    execute(place, REFUSE);
    let run = service.run(&ask("hello")).await;
    until(&mut service.process, "cannot write down how a run has ended");
    run
}

fn until(process: &mut Process, words: &str) {
    tokio::task::block_in_place(|| process.until(|said| said.contains(words)));
}

async fn bill(place: &Place, run: &str) -> RunBill {
    place.books().run_bill(run).await.unwrap()
}

/// In the service's own file, while it serves.
fn execute(place: &Place, statement: &str) {
    let connection = Connection::open(place.state_dir().join("state.db")).unwrap();
    connection.execute_batch(statement).unwrap();
}

/// Whether somebody else is in the midst of a change.
fn is_writing(place: &Place) -> bool {
    let connection = Connection::open(place.state_dir().join("state.db")).unwrap();
    connection.busy_timeout(Duration::ZERO).unwrap();
    connection.execute_batch("BEGIN IMMEDIATE; ROLLBACK").is_err()
}

/// It takes seconds to write a run down.
const SLOW: &str = "CREATE VIEW slow AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000000)
                    SELECT count(*) AS count FROM n;
                    CREATE TRIGGER slow_run BEFORE INSERT ON run WHEN (SELECT count FROM slow) < 0
                    BEGIN SELECT RAISE(ABORT, 'it is not'); END";

/// Fails as a full disk does, and at once.
const REFUSE: &str = "CREATE TRIGGER refuse BEFORE INSERT ON billing_fact
                      BEGIN SELECT RAISE(ABORT, 'refused by a test'); END";

const ALLOW: &str = "DROP TRIGGER refuse";
