//! T9: Tests of the time of standing approvals: a clock that is set back between two processes makes none live longer.

use std::path::Path;
use std::time::{Duration, SystemTime};

use cogni_gateway::base::db::{DatabaseSchema, SqliteDatabase};
use cogni_gateway::base::wall_clock::StampClock;
use cogni_gateway::tools::approval::standing::{
    ApprovalScope, ProposalOutcome, StandingApproval, StandingFilter, StandingOutcome,
    StandingState, StandingTerms,
};
use cogni_gateway::tools::approval::store::ApprovalStore;
use cogni_gateway::tools::approval::{APPROVAL_SCHEMA, to_unix_millis};

use super::{
    DENIED_CLOCK, HOUR, completes, denied, grant, grant_by, proposal, row, start, start_run,
};
use crate::tools::approvals::open_store;

/// A clock that was set back after a restart lets no approval live longer.
#[tokio::test]
async fn a_clock_that_is_set_back_lengthens_no_approval() {
    let asking = start(DENIED_CLOCK).await;
    let id = denied(&asking.app, "{}").await.unwrap();
    grant(&asking.store, &id, 9).await;
    assert!(completes(&asking.app, "{}").await);
    // The next process knows a later time than its clock shows.
    let later = StampClock::not_before(SystemTime::now() + 2 * HOUR);
    let store = open_store(asking.directory.path()).with_clock(later);
    let next = start_run("run-2", DENIED_CLOCK, &store).await;
    assert!(denied(&next, "{}").await.is_some_and(|proposal| proposal != id));
    assert_eq!(row(&store, &id).await.state, StandingState::Expired);
}

/// The clock of the next process begins at the last step of an approval, or at the last note of the time, also if the
/// process has found no other time to trust.
#[tokio::test]
async fn the_next_process_is_not_before_the_last_step_or_note() {
    let directory = tempfile::tempdir().unwrap();
    let ahead = SystemTime::now() + 5 * HOUR;
    let first = process_at(directory.path(), ahead);
    grant_at(&first, "sta-1", ahead).await;
    let second = open_store(directory.path()).resume_clock(None).await.unwrap();
    assert!(second.now_ms() >= to_unix_millis(ahead));
    assert!(second.use_standing(("sta-1", "d"), "run-1").await.unwrap().is_some());
    // The time of the approval passes, and no person and no call asks about it.
    process_at(directory.path(), ahead + 2 * HOUR).note_time().await.unwrap();
    let third = open_store(directory.path()).resume_clock(None).await.unwrap();
    assert!(third.use_standing(("sta-1", "d"), "run-1").await.unwrap().is_none());
    assert_eq!(row(&third, "sta-1").await.state, StandingState::Expired);
}

/// An approval that some reader has found expired stays so under every clock.
#[tokio::test]
async fn an_approval_that_was_seen_expired_stays_so() {
    for reader in 0..4 {
        let directory = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        grant_at(&process_at(directory.path(), now), "sta-1", now).await;
        let late = process_at(directory.path(), now + 2 * HOUR);
        match reader {
            0 => drop(late.find_standing("sta-1").await.unwrap()),
            1 => {
                let all = StandingFilter { limit: 9, ..StandingFilter::default() };
                late.list_standing(all).await.unwrap();
            }
            2 => assert_eq!(late.find_granted("k", "run-1").await.unwrap(), []),
            _ => assert_eq!(late.use_standing(("sta-1", "d"), "run-1").await.unwrap(), None),
        }
        // The clock of this store is the wall clock, whatever the database says.
        let back = open_store(directory.path());
        let used = back.use_standing(("sta-1", "d"), "run-1").await.unwrap();
        assert_eq!(used, None, "reader {reader}");
    }
}

/// The step of a process whose clock was wrong by far closes what is open, and does not move the time for good.
#[tokio::test]
async fn a_clock_that_was_far_ahead_closes_what_is_open() {
    let directory = tempfile::tempdir().unwrap();
    let ahead = SystemTime::now() + 24 * 365 * HOUR;
    grant_at(&process_at(directory.path(), ahead), "sta-1", ahead).await;
    let store = open_store(directory.path()).resume_clock(None).await.unwrap();
    assert!(store.now_ms() < to_unix_millis(SystemTime::now() + HOUR));
    assert_eq!(row(&store, "sta-1").await.state, StandingState::Expired);
    let next = open_store(directory.path()).resume_clock(None).await.unwrap();
    assert_eq!(next.propose(proposal("sta-2")).await.unwrap(), ProposalOutcome::New);
}

/// The standing approvals of an earlier version, whose digests say less, allow nothing and cannot be granted.
#[tokio::test]
async fn a_row_of_an_earlier_version_is_closed() {
    let directory = tempfile::tempdir().unwrap();
    let old = DatabaseSchema { migrations: &APPROVAL_SCHEMA.migrations[..4], ..APPROVAL_SCHEMA };
    let path = directory.path().join("state.db");
    drop(SqliteDatabase::open_database(&path, &[old]).unwrap());
    let file = rusqlite::Connection::open(&path).unwrap();
    for state in ["proposed", "granted"] {
        file.execute_batch(&format!(
            "INSERT INTO standing_approval (id, state, scope, call_key, digest, run, account, agent, tool, rules, definition, evidence, price, created, not_after, max_uses, granted_by)
             VALUES ('sta-{state}', '{state}', 'always', 'k', 'd', 'run-1', 'a', 'a', 't', '[]', 'f', '{{}}', 0, 0, {}, 1, 'g')",
            i64::MAX
        ))
        .unwrap();
    }
    drop(file);
    let store = open_store(directory.path());
    for id in ["sta-proposed", "sta-granted"] {
        assert_eq!(row(&store, id).await.state, StandingState::Expired);
        assert_eq!(store.use_standing((id, "d"), "run-1").await.unwrap(), None);
    }
    let terms = StandingTerms { scope: ApprovalScope::Run, not_after_ms: i64::MAX, max_uses: 1 };
    let granted = grant_by(&store, "sta-proposed", "grant-2", terms).await;
    assert_eq!(granted, StandingOutcome::Closed(StandingState::Expired));
}

/// Opens the store of a process whose clock shows a time.
fn process_at(directory: &Path, time: SystemTime) -> ApprovalStore {
    open_store(directory).with_clock(StampClock::not_before(time))
}

/// Grants a proposal for nine calls within an hour after `time`.
async fn grant_at(store: &ApprovalStore, id: &str, time: SystemTime) {
    let not_after_ms = to_unix_millis(time + Duration::from_hours(1));
    let row = StandingApproval { not_after_ms, ..proposal(id) };
    assert_eq!(store.propose(row).await.unwrap(), ProposalOutcome::New);
    let terms = StandingTerms { scope: ApprovalScope::Always, not_after_ms, max_uses: 9 };
    let granted = grant_by(store, id, "grant-2", terms).await;
    assert!(matches!(granted, StandingOutcome::Changed(_)), "{granted:?}");
}
