//! A5: the service's file, as an earlier program has left it, and as a later one has.

use std::path::PathBuf;

use cogni_gateway::base::db::{Database, Schema};
use cogni_gateway::journal::{Journal, Row};
use cogni_gateway::{billing, grant, journal};
use serde_json::json;

use super::{Place, ask};
use crate::support::process::Process;

/// What the first program has written is served by this one.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_the_first_version_is_served() {
    let mut place = Place::new("").await;
    let file = database(&place);
    for name in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{name}", file.display()));
    }
    let rooms = [grant::SCHEMA, journal::SCHEMA, billing::SCHEMA];
    let first = rooms.map(|schema| Schema { steps: &schema.steps[..1], ..schema });
    let old = Database::open(&file, &first).unwrap();
    old.write(|change| change.execute_batch(OLD_ROWS)).await.unwrap();
    drop(old);

    place.owner = place.grant(&[]);
    let mut service = place.start();
    let journal = open_journal(&place);
    let row = journal.run("run-old").await.unwrap().unwrap();
    assert_eq!((row.account.as_str(), row.error_code.as_deref()), ("acct-7", Some("timeout")));
    let waiting = journal.run("run-waiting").await.unwrap().unwrap();
    assert_eq!(waiting.error_code.as_deref(), Some("interrupted"));
    let new = service.run(&ask("hello")).await;
    assert_eq!(service.ended(&new).await["error_code"], json!(null));
    service.process.terminate();
}

/// A file that a later program has brought to its own version is left as it is, and whoever starts this one is told. The
/// later one finds all that was there.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_a_later_version_is_refused_and_left_alone() {
    let place = Place::new("").await;
    let mut service = place.start();
    let run = service.run(&ask("hello")).await;
    service.ended(&run).await;
    service.process.terminate();
    let before = open_journal(&place).run(&run).await.unwrap().unwrap();

    let later: &[_] = [journal::SCHEMA.steps, &[LATER]].concat().leak();
    let later = Schema { steps: later, ..journal::SCHEMA };
    assert_eq!(moods(&place, later).await, [(run.clone(), "calm".to_owned())]);
    let mut refused = Process::start(&mut place.command(), "the service does not start");
    let status = tokio::task::block_in_place(|| refused.wait());
    let said = refused.said().replace(&place.state_dir().display().to_string(), "STATE");
    insta::assert_snapshot!(format!("{status}\n{said}"), @"
    exit status: 2
    error: cannot serve from `STATE/state.db`: the tables of `journal` are of a later version (2; this program knows 1); use a newer program
    ");

    assert_eq!(moods(&place, later).await, [(run.clone(), "calm".to_owned())]);
    assert_eq!(row(&place, later, &run).await, before, "a row has changed on its way up");
    assert!(place.audit_log(&run).exists());
    place.assert_nothing_is_left();
}

fn database(place: &Place) -> PathBuf {
    place.state_dir().join("state.db")
}

fn open_journal(place: &Place) -> Journal {
    Journal::new(Database::open(&database(place), &[journal::SCHEMA]).unwrap())
}

async fn row(place: &Place, schema: Schema, run: &str) -> Row {
    let journal = Journal::new(Database::open(&database(place), &[schema]).unwrap());
    journal.run(run).await.unwrap().unwrap()
}

/// What a later program has added to each run.
async fn moods(place: &Place, schema: Schema) -> Vec<(String, String)> {
    let later = Database::open(&database(place), &[schema]).unwrap();
    let moods = later.read(|view| {
        let mut statement = view.prepare("SELECT id, mood FROM run")?;
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        rows.collect()
    });
    moods.await.unwrap()
}

/// A step that nobody has thought of yet.
const LATER: &str = "ALTER TABLE run ADD COLUMN mood TEXT NOT NULL DEFAULT 'calm'";

/// Runs in the words of the first version: one that has ended, and one that its process has left.
const OLD_ROWS: &str = r#"
INSERT INTO run (id, grant_id, digest, agent, account, model, wanted, state, created, started, ended, error_code, result)
VALUES ('run-old', 'g-1', 'd', 'sandbox:agent', 'acct-7', 'fake', '{}', 'ended', 1, 2, unixepoch() * 1000, 'timeout', '{"ok":false}');
INSERT INTO run (id, grant_id, digest, agent, account, model, wanted, state, created, started)
VALUES ('run-waiting', 'g-1', 'd', 'sandbox:agent', 'acct-7', 'fake',
        '{"grant":"g-1","agent":"sandbox:agent","model":"fake","messages":[],"account":"acct-7","state_key":null,"max_runtime":null}',
        'running', 1, 2);
INSERT INTO event (run, seq, at, kind, data) VALUES ('run-waiting', 1, 2, 'run_started', '{}');
"#;
