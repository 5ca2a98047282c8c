//! B1, B4: Tests of billing retention: calls beyond their retention time are deleted, run by run and a few at a time;
//! the totals per day and account stay.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use cogni_gateway::base::db::SqliteDatabase;
use cogni_gateway::llm::budget::Nanodollars;
use cogni_gateway::service::billing::store::{DayBill, DeletedCalls, OldRuns};
use cogni_gateway::service::billing::{self, BillingStore, CallUsage};
use proptest::prelude::*;
use rusqlite::Connection;
use tempfile::{TempDir, tempdir};

use super::{charge_notice, open_store, time_at, usage_of_call};

const DAY: Duration = Duration::from_hours(24);

/// A run is deleted with its last call, and not earlier; the totals per day stay the same.
#[tokio::test]
async fn calls_of_old_runs_are_deleted_and_their_daily_totals_stay() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    let old = time_at("09:30:01") - 10 * DAY;
    let mut facts: Vec<_> =
        (0..1700).map(|number| usage_of_run("old", &number.to_string(), old)).collect();
    facts.extend((0..20).map(|number| usage_of_run("older", &number.to_string(), old - DAY)));
    // This run began long ago and continued until now.
    facts.extend([
        usage_of_run("long", "first", old),
        usage_of_run("long", "last", time_at("09:30:01")),
    ]);
    facts.push(usage_of_run("new", "only", time_at("09:30:01")));
    store.record_calls(&facts).await.unwrap();
    let charged = facts.iter().filter(|fact| !fact.call_id.ends_with("-7"));
    let mut notices: Vec<_> = charged.map(|fact| notice_of(fact, 25_000)).collect();
    notices.extend([
        notice_of(&facts[1], 26_000),
        notice_of(&facts[2], 0),
        notice_of(&facts[2], 27_000),
    ]);
    notices.extend([
        notice_of(&usage_of_run("stray", "1", old), 1),
        notice_of(&usage_of_run("stray", "1", old), 9),
    ]);
    store.ingest_notices(notices).await.unwrap();
    let before = read_days(&store).await;
    assert_eq!(before.iter().map(|day| day.calls).sum::<u64>(), 1723);

    let cutoff = time_at("09:30:01") - 5 * DAY;
    let found = store.old_runs(cutoff, None).await.unwrap();
    assert_eq!(
        found,
        OldRuns { runs: vec!["long".into(), "old".into(), "older".into()], next: None }
    );
    let mut deleted = DeletedCalls::default();
    for run in found.runs {
        deleted += store.delete_run(&run, cutoff).await.unwrap();
    }
    let expected = DeletedCalls { calls: 1720, unreceipted: 2, unpriced: 0, conflicting: 2 };
    assert_eq!(deleted, expected);
    assert_eq!(store.purge_waiting(SystemTime::now() + 3 * DAY).await.unwrap(), 1);

    let after = read_days(&store).await;
    assert_eq!(after.iter().map(|day| day.deleted_calls).sum::<u64>(), 1720);
    let as_before = |day: DayBill| DayBill { deleted_calls: 0, ..day };
    assert_eq!(after.into_iter().map(as_before).collect::<Vec<_>>(), before);
    let calls = async |run| store.run_bill(run).await.unwrap().calls;
    assert_eq!([calls("old").await, calls("older").await], [0, 0]);
    assert_eq!([calls("long").await, calls("new").await], [2, 1]);
    let left = [
        ("billing_fact", 3),
        ("billing_receipt", 3),
        ("billing_notice", 3),
        ("billing_conflict", 0),
    ];
    assert_eq!(left.map(|(table, _)| (table, count_rows(&dir, table))), left);
    let totals = store.totals(time_at("09:30:01")).await.unwrap();
    assert_eq!((totals.calls, totals.deleted_calls), (3, 1720));
    assert_eq!(store.complete_since().await.unwrap(), Some(time_at("00:00:00") - 9 * DAY));
}

/// The deletion of a run with very many calls holds the only writer for short moments, and other writes come in
/// between.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_with_many_calls_is_deleted_a_few_at_a_time() {
    let dir = tempdir().unwrap();
    let commits = Arc::new(AtomicU64::new(0));
    let commit_count = Arc::clone(&commits);
    let watch = move |_, _| {
        commit_count.fetch_add(1, Ordering::Relaxed);
    };
    let file = dir.path().join("state.db");
    let store = BillingStore::new(
        SqliteDatabase::open_with_commit_observer(&file, &[billing::SCHEMA], watch).unwrap(),
    );
    let old = time_at("09:30:01") - 10 * DAY;
    for part in 0..10 {
        let numbers = (0..2000).map(|number| (part * 2000 + number).to_string());
        let facts: Vec<_> = numbers.map(|number| usage_of_run("old", &number, old)).collect();
        store.record_calls(&facts).await.unwrap();
        store
            .ingest_notices(facts.iter().map(|fact| notice_of(fact, 25_000)).collect())
            .await
            .unwrap();
    }
    let before = commits.load(Ordering::Relaxed);
    let deleted = store.delete_run("old", time_at("00:00:00")).await.unwrap();
    assert_eq!(deleted, DeletedCalls { calls: 20_000, ..DeletedCalls::default() });
    assert!(commits.load(Ordering::Relaxed) - before >= 20_000 / 500, "it is deleted at once");
    let [day] = &read_days(&store).await[..] else { panic!("one day of one account") };
    assert_eq!((day.deleted_calls, day.amount), (20_000, Nanodollars(20_000 * 25_000)));
}

/// The store keeps at most sixteen contradictions of one call.
#[tokio::test]
async fn the_contradictions_of_one_call_are_bounded() {
    let dir = tempdir().unwrap();
    let store = open_store(dir.path());
    store.record_calls(&[usage_of_call("call-1", time_at("09:30:01"))]).await.unwrap();
    store
        .ingest_notices((0..200).map(|price| charge_notice("call-1", 100 * price)).collect())
        .await
        .unwrap();
    assert_eq!(store.run_bill("run-1").await.unwrap().conflicting, 16);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The totals per day are the same whatever is deleted when, and no run is deleted in part.
    #[test]
    fn the_daily_totals_do_not_depend_on_deletions(
        calls in prop::collection::vec((0..4_u8, 0..2_u8, 0..8_u32, any::<bool>()), 0..30),
        cutoffs in prop::collection::vec(0..10_u32, 1..4),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let place = tempdir().unwrap();
            let books = open_store(place.path());
            let facts: Vec<_> = calls.iter().zip(0..).map(|(&(run, account, ago, _), number)| CallUsage {
                account: format!("acct-{account}"),
                ..usage_of_run(&format!("run-{run}"), &format!("{number}"), time_at("12:00:00") - ago * DAY)
            }).collect();
            books.record_calls(&facts).await.unwrap();
            let charged = facts.iter().zip(&calls).filter(|(_, call)| call.3);
            books.ingest_notices(charged.map(|(fact, _)| notice_of(fact, 5)).collect()).await.unwrap();
            let before = read_days(&books).await;
            for ago in cutoffs {
                let cutoff = time_at("12:00:00") - ago * DAY;
                for run in books.old_runs(cutoff, None).await.unwrap().runs {
                    books.delete_run(&run, cutoff).await.unwrap();
                }
                let after = read_days(&books).await.into_iter();
                let after: Vec<_> = after.map(|day| DayBill { deleted_calls: 0, ..day }).collect();
                prop_assert_eq!(&after, &before);
            }
            for run in 0..4 {
                let run = format!("run-{run}");
                let all = facts.iter().filter(|fact| fact.run == run).count() as u64;
                let left = books.run_bill(&run).await.unwrap().calls;
                prop_assert!(left == 0 || left == all, "{} of {} calls", left, all);
            }
            Ok(())
        })?;
    }
}

fn usage_of_run(run: &str, name: &str, settled: SystemTime) -> CallUsage {
    CallUsage { run: run.to_owned(), ..usage_of_call(&format!("{run}-{name}"), settled) }
}

fn notice_of(fact: &CallUsage, amount: u64) -> billing::ChargeNotice {
    billing::ChargeNotice { run: Some(fact.run.clone()), ..charge_notice(&fact.call_id, amount) }
}

async fn read_days(store: &BillingStore) -> Vec<DayBill> {
    store.daily_bills(SystemTime::UNIX_EPOCH, time_at("23:59:59") + DAY, None).await.unwrap()
}

fn count_rows(dir: &TempDir, table: &str) -> u32 {
    let file = Connection::open(dir.path().join("state.db")).unwrap();
    file.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).unwrap()
}
