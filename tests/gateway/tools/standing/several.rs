//! T9: Tests of calls that several standing approvals could allow.

use cogni_gateway::tools::approval::standing::{
    ApprovalScope, ProposalOutcome, StandingApproval, StandingOutcome, StandingState,
};
use cogni_gateway::tools::approval::store::ApprovalStore;

use super::{DENIED_CLOCK, HOUR, completes, denied, grant_by, row, start_run, terms};
use crate::tools::approvals::open_store;

/// Newer approvals of the person who has started the run do not hide an older one of another person, however many they are.
#[tokio::test]
async fn an_approval_that_does_not_count_hides_none() {
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path())
        .with_owners(|run| Box::pin(async move { Some(format!("grant-of-{run}")) }));
    let first = start_run("run-1", DENIED_CLOCK, &store).await;
    let id = denied(&first, "{}").await.unwrap();
    let for_run = terms(ApprovalScope::Run, 9, HOUR);
    grant_by(&store, &id, "grant-2", for_run).await;
    let own = "grant-of-run-1";
    for number in 0..20 {
        add_granted(&store, &id, &format!("sta-{number}"), own).await;
    }
    assert!(completes(&first, "{}").await);
    assert_eq!(row(&store, &id).await.used, 1);
    // They count for the runs of others.
    let second = start_run("run-2", DENIED_CLOCK, &store).await;
    assert!(completes(&second, "{}").await);
    assert_eq!(row(&store, &id).await.used, 1);
}

/// An approval that another call has just used up leads to the next one.
#[tokio::test(flavor = "multi_thread")]
async fn racing_calls_use_all_approvals_that_fit() {
    let directory = tempfile::tempdir().unwrap();
    let store = open_store(directory.path());
    let app = start_run("run-1", DENIED_CLOCK, &store).await;
    let id = denied(&app, "{}").await.unwrap();
    grant_by(&store, &id, "grant-2", terms(ApprovalScope::Always, 1, HOUR)).await;
    for number in 1..8 {
        add_granted(&store, &id, &format!("sta-{number}"), "grant-2").await;
    }
    let calls = (0..8).map(|_| completes(&app, "{}"));
    let completed = futures_util::future::join_all(calls).await;
    assert_eq!(completed, [true; 8]);
}

/// Grants another approval of one call, for the same call as `like`.
async fn add_granted(store: &ApprovalStore, like: &str, id: &str, by: &str) {
    let like = row(store, like).await;
    let proposal = StandingApproval {
        id: id.to_owned(),
        state: StandingState::Proposed,
        scope: ApprovalScope::Always,
        run: "run-0".to_owned(),
        created_ms: store.now_ms(),
        ..like
    };
    assert_eq!(store.propose(proposal).await.unwrap(), ProposalOutcome::New);
    let granted = grant_by(store, id, by, terms(ApprovalScope::Always, 1, HOUR)).await;
    assert!(matches!(granted, StandingOutcome::Changed(_)), "{granted:?}");
}
