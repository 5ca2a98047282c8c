//! A5: Tests of retention with a wrong wall clock.

use std::time::{Duration, SystemTime};

use cogni_gateway::base::db::SqliteDatabase;
use cogni_gateway::service::store::{self, RunStore};

use super::{ServiceSetup, conversation_body};

/// A process whose clock is a hundred days ahead of the process before removes no runs.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_removed_while_the_clock_cannot_be_trusted() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let run = service.run(&conversation_body("hello")).await;
    service.ended(&run).await;
    let journal = || {
        let file = setup.state_dir().join("state.db");
        RunStore::new(SqliteDatabase::open_database(&file, &[store::SCHEMA]).unwrap())
    };
    assert!(journal().noted_time().await.unwrap().is_some(), "there was nothing to compare with");
    setup.stop(service);
    let long_ago = SystemTime::now() - Duration::from_hours(24 * 100);
    journal().note_time(long_ago).await.unwrap();
    let file = rusqlite::Connection::open(setup.state_dir().join("state.db")).unwrap();
    let millis = long_ago.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis();
    let millis = i64::try_from(millis).unwrap();
    file.execute("UPDATE run SET created = ?1, ended = ?1", [millis]).unwrap();

    assert_not_forgotten(&setup, &run).await;

    // The same age, after a clock that advanced gradually.
    journal().note_time(SystemTime::now()).await.unwrap();
    let service = setup.start();
    let path = format!("/api/v1/runs/{run}");
    let begun = std::time::Instant::now();
    while service.get(&path).await.status != 404 {
        assert!(begun.elapsed() < crate::support::process::TEST_TIMEOUT, "it is not forgotten");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    setup.stop(service);
}

/// A process that did not trust the clock at its end lets the next process wait, although the clock is right again.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_does_not_end_the_wait_after_a_jump() {
    let setup = ServiceSetup::new("").await;
    let service = setup.start();
    let run = service.run(&conversation_body("hello")).await;
    service.ended(&run).await;
    setup.stop(service);
    let file = setup.state_dir().join("state.db");
    let journal = RunStore::new(SqliteDatabase::open_database(&file, &[store::SCHEMA]).unwrap());
    journal.note_time(SystemTime::now()).await.unwrap();
    assert!(journal.was_clock_trusted().await.unwrap());
    journal.note_distrust().await.unwrap();
    drop(journal);
    rusqlite::Connection::open(&file).unwrap().execute("UPDATE run SET ended = 0", []).unwrap();

    for _ in 0..2 {
        assert_not_forgotten(&setup, &run).await;
    }
}

/// Asserts that a service that does not trust the clock keeps an old run.
async fn assert_not_forgotten(setup: &ServiceSetup, run: &str) {
    let mut service = setup.start();
    let is_told = |output: &str| output.contains("the clock is not trusted yet");
    tokio::task::block_in_place(|| service.process.until(is_told));
    // The first pass of the retention task is over when the next run has ended.
    let next = service.run(&conversation_body("hello")).await;
    service.ended(&next).await;
    assert_eq!(service.get(&format!("/api/v1/runs/{run}")).await.status, 200);
    setup.stop(service);
}
