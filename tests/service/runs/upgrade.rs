//! A5: Tests of the service's database, as an earlier or a later version has left it.

use std::path::{Path, PathBuf};

use cogni_gateway::base::db::{DatabaseSchema, SqliteDatabase};
use cogni_gateway::service::store::{RunRow, RunStore};
use cogni_gateway::tools::approval::APPROVAL_SCHEMA;
use cogni_gateway::{service::auth, service::billing, service::store};
use rusqlite::Connection;
use serde_json::json;

use super::{ServiceSetup, conversation_body};
use crate::support::process::ChildProcess;
use crate::support::service::ServiceProcess;

/// The service serves a database of the first version without losing anything, and claims nothing that the first
/// version did not record.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_the_first_version_is_served() {
    let mut setup = ServiceSetup::new("").await;
    let file = database_path(&setup);
    for name in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{name}", file.display()));
    }
    let _ = std::fs::remove_file(setup.state_dir().join("audit.key"));
    let old = Connection::open(&file).unwrap();
    old.pragma_update(None, "journal_mode", "WAL").unwrap();
    old.execute_batch(include_str!("first_version.sql")).unwrap();
    drop(old);
    std::fs::create_dir_all(setup.state_dir().join("audit")).unwrap();
    std::fs::write(setup.audit_log("run-old"), "").unwrap();

    setup.owner = setup.mint(&[
        "--access",
        "read,runs,admin",
        "--allow-sandbox",
        "--agent",
        "*",
        "--account",
        "acct-1",
    ]);
    let service = setup.start();
    old_run_is_as_it_was(&service).await;
    let left = service.ended("run-left").await;
    assert_eq!((&left["error_code"], &left["account"]), (&json!("interrupted"), &json!("acct-7")));
    let waiting = service.ended("run-waiting").await;
    assert_eq!(waiting["error_code"], json!(null), "{waiting}");
    let new = service.run(&conversation_body("hello")).await;
    assert_eq!(service.ended(&new).await["error_code"], json!(null));
    let proof = service.get(&format!("/api/v1/runs/{new}/audit")).await.json();
    assert_eq!(proof["verified"], true, "{proof}");
    setup.stop(service);
    assert_eq!(table_shapes(&file), shape_of_new().await, "it is another file than a new one");
}

async fn old_run_is_as_it_was(service: &ServiceProcess) {
    let row = service.get("/api/v1/runs/run-old").await.json();
    insta::assert_snapshot!(serde_json::to_string_pretty(&row).unwrap(), @r#"
    {
      "account": "acct-7",
      "agent": "sandbox:agent",
      "created_at": "1970-01-01T00:00:00.001Z",
      "ended_at": "2100-01-01T00:00:00.000Z",
      "error_code": "timeout",
      "grant": "g-1",
      "id": "run-old",
      "model": "fake",
      "queue_position": null,
      "result": {
        "error_code": "timeout",
        "ok": false,
        "status": "incomplete"
      },
      "started_at": "1970-01-01T00:00:00.002Z",
      "state": "ended"
    }
    "#);
    let output = service.get("/api/v1/runs/run-old/output").await.json();
    assert_eq!(
        output,
        json!({"complete": true, "stdout": "{\"answer\":42}\n", "stderr": "thinking\n"})
    );
    let events: Vec<_> = service
        .events("run-old")
        .await
        .into_iter()
        .map(|event| (event.seq, event.kind, event.data))
        .collect();
    let of_old = [
        (1, "run_started".to_owned(), json!({"run": "run-old"})),
        (2, "assistant_final".to_owned(), json!({"text": "42"})),
        (3, "final".to_owned(), json!({"ok": false, "error_code": "timeout"})),
    ];
    assert_eq!(events, of_old);
    let proof = service.get("/api/v1/runs/run-old/audit").await.json();
    assert_eq!(proof["verified"], false);
    insta::assert_snapshot!(proof["broken"].as_str().unwrap(), @"no seal was stored when the run ended, so the log cannot be checked against it: an earlier version made the run, or the log could not be closed");
}

/// A database with the earlier names of types and fields is read the same. The stored texts were written by the earlier
/// version.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_with_values_of_an_earlier_program_is_served() {
    let mut setup = ServiceSetup::new("").await;
    setup.write_config("retention = \"36500d\"");
    let (file, run) = (database_path(&setup), "run-01a207e4-ae05-728f-8c5c-0ac7160b3b96");
    for name in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{name}", file.display()));
    }
    let earlier = Connection::open(&file).unwrap();
    earlier.execute_batch(include_str!("../../fixtures/earlier/store.sql")).unwrap();
    drop(earlier);
    std::fs::create_dir_all(setup.state_dir().join("audit")).unwrap();
    let log = include_str!("../../fixtures/earlier/run.jsonl");
    std::fs::write(setup.audit_log(run), log).unwrap();
    let grant = ["--access", "read,runs,admin", "--allow-sandbox", "--agent", "*"];
    setup.owner = setup.mint(&[&grant[..], &["--account", "acct-7"]].concat());
    let service = setup.start();

    let row = service.get(&format!("/api/v1/runs/{run}")).await.json();
    assert_eq!((&row["state"], &row["model"]), (&json!("ended"), &json!("gpt-4o-mini")));
    assert_eq!((&row["account"], &row["error_code"]), (&json!("acct-7"), &json!(null)));
    assert_eq!(row["result"]["usage"]["cost_usd"], "0.00000465", "{row}");
    assert_eq!(row["result"]["agent"]["payloads"][0]["text"], "hello from the fake provider");
    let mut kinds: Vec<_> = service.events(run).await.into_iter().map(|event| event.kind).collect();
    kinds.dedup();
    let expected =
        ["run_started", "text_delta", "usage_report", "assistant_final", "done", "final"];
    assert_eq!(kinds, expected);
    let receipts = service.get(&format!("/api/v1/runs/{run}/receipts")).await.json();
    assert_eq!(receipts["bill"]["calls"], 1, "{receipts}");
    let audit = service.get(&format!("/api/v1/runs/{run}/audit")).await.json();
    assert_eq!(audit["records"], log.lines().count(), "{audit}");
    setup.stop(service);
}

/// Returns the tables of a database, and its vacuum mode.
fn table_shapes(file: &Path) -> Vec<String> {
    let file = Connection::open(file).unwrap();
    let vacuum: u32 = file.pragma_query_value(None, "auto_vacuum", |row| row.get(0)).unwrap();
    let mut tables = file.prepare("SELECT name FROM sqlite_schema ORDER BY name").unwrap();
    let mut shape: Vec<String> =
        tables.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap();
    let mut columns = file.prepare("SELECT t.name || '.' || c.name FROM sqlite_schema t, pragma_table_info(t.name) c ORDER BY 1").unwrap();
    let columns = columns.query_map([], |row| row.get::<_, String>(0)).unwrap();
    shape.extend(columns.map(Result::unwrap));
    shape.push(format!("auto_vacuum {vacuum}"));
    shape
}

/// Returns the shape of a new database.
async fn shape_of_new() -> Vec<String> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("state.db");
    let rooms = [auth::GRANT_SCHEMA, store::SCHEMA, billing::SCHEMA, APPROVAL_SCHEMA];
    SqliteDatabase::open_database(&file, &rooms).unwrap().release_free_pages().await.unwrap();
    table_shapes(&file)
}

/// A database of a later version is not changed, and the start reports it. The later version still finds all its data.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_a_later_version_is_refused_and_not_changed() {
    let setup = ServiceSetup::new("").await;
    let mut service = setup.start();
    let run = service.run(&conversation_body("hello")).await;
    service.ended(&run).await;
    service.process.terminate();
    let before = open_journal(&setup).find_run(&run).await.unwrap().unwrap();

    let later: &[_] = [store::SCHEMA.migrations, &[LATER]].concat().leak();
    let later = DatabaseSchema { migrations: later, ..store::SCHEMA };
    assert_eq!(list_moods(&setup, later).await, [(run.clone(), "calm".to_owned())]);
    let mut refused = ChildProcess::start(&mut setup.command(), "the service does not start");
    let status = tokio::task::block_in_place(|| refused.wait());
    let output = refused.output().replace(&setup.state_dir().display().to_string(), "STATE");
    // A machine with few descriptors prints a warning first.
    let error = output.lines().last().unwrap();
    insta::assert_snapshot!(format!("{status}\n{error}"), @"
    exit status: 2
    error: cannot serve from `STATE/state.db`: the tables of `journal` are of a later version (10; this program knows 9); use a newer program
    ");

    assert_eq!(list_moods(&setup, later).await, [(run.clone(), "calm".to_owned())]);
    assert_eq!(read_row(&setup, later, &run).await, before, "a row has changed on its way up");
    assert!(setup.audit_log(&run).exists());
    setup.assert_nothing_is_left();
}

fn database_path(setup: &ServiceSetup) -> PathBuf {
    setup.state_dir().join("state.db")
}

fn open_journal(setup: &ServiceSetup) -> RunStore {
    RunStore::new(SqliteDatabase::open_database(&database_path(setup), &[store::SCHEMA]).unwrap())
}

async fn read_row(setup: &ServiceSetup, schema: DatabaseSchema, run: &str) -> RunRow {
    let journal =
        RunStore::new(SqliteDatabase::open_database(&database_path(setup), &[schema]).unwrap());
    journal.find_run(run).await.unwrap().unwrap()
}

/// Returns the column that a later version has added to each run.
async fn list_moods(setup: &ServiceSetup, schema: DatabaseSchema) -> Vec<(String, String)> {
    let later = SqliteDatabase::open_database(&database_path(setup), &[schema]).unwrap();
    let moods = later.read_committed(|view| {
        let mut statement = view.prepare("SELECT id, mood FROM run")?;
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        rows.collect()
    });
    moods.await.unwrap()
}

/// A migration of a hypothetical later version.
const LATER: &str = "ALTER TABLE run ADD COLUMN mood TEXT NOT NULL DEFAULT 'calm'";
