//! L6, L7: Tests of many runs of one process in one repository.

use std::sync::Arc;
use std::time::Duration;

use cogni_gateway::fakes::github_server::{GithubOperation, InjectedFailure};
use cogni_gateway::relay::delivery::DeliveryError;
use cogni_gateway::relay::delivery::statement::ProvenanceStatement;
use cogni_gateway::relay::repo::{BranchKey, ObjectId, RepositoryUrl};
use futures_util::future::join_all;
use tokio::sync::Barrier;

use super::run_job::{begin_run, deliver_work, make_work, open_relay, signing_key};
use crate::support::github_server::{NAME, RunningGithub};
use crate::support::repository::run_git;

/// L7: One relay serves and delivers eight branches at once; each branch has its own commit, pull request and
/// statement.
#[tokio::test(flavor = "multi_thread")]
async fn eight_runs_at_eight_branches_deliver_at_once() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let together = Arc::new(Barrier::new(BRANCHES));
    let runs = (0..BRANCHES).map(async |at| {
        let (key, run) = (format!("many-{at}"), format!("run-{at}"));
        let (request, begun) = make_work(&github, &relay, &key, &run).await;
        // Every run has its branch now, and none has delivered.
        together.wait().await;
        deliver_work(&relay, request, &begun).await
    });
    let delivered = join_all(runs).await;
    for (at, one) in delivered.iter().enumerate() {
        assert_eq!((one.step, &one.why), ("done", &None), "{one:?}");
        let head = one.head.map(|head: ObjectId| head.to_string()).unwrap();
        assert_eq!(run_git(&github.bare(), &["rev-parse", &format!("sandbox/many-{at}")]), head);
        let files = run_git(&github.bare(), &["ls-tree", "--name-only", &head]);
        assert_eq!(files, format!("README\nmade-by-run-{at}"));
        let note = run_git(&github.bare(), &["notes", "--ref=cogni", "show", &head]);
        let statement = ProvenanceStatement::verify(&note, signing_key().public_key()).unwrap();
        assert_eq!(statement.facts.run, format!("run-{at}"));
    }
    let mut heads: Vec<_> = github.hub.pulls(NAME).into_iter().map(|pull| pull.head).collect();
    heads.sort();
    assert_eq!(heads, (0..BRANCHES).map(|at| format!("sandbox/many-{at}")).collect::<Vec<_>>());
}

/// L7: A push that hangs blocks its own branch, and no other branch of the repository.
#[tokio::test(flavor = "multi_thread")]
async fn a_push_that_hangs_blocks_its_own_branch_only() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "hangs", "run-1").await;
    github.hub.inject(GithubOperation::Push, InjectedFailure::HoldBefore, 1);
    let hanging = deliver_work(&relay, request, &begun);
    let meanwhile = async {
        github.hub.response_gate().wait_for_waiting(1).await;
        let repository: RepositoryUrl = github.clone_url().parse().unwrap();
        let own = BranchKey::parse("hangs").unwrap();
        let busy =
            Box::pin(begin_run(&relay, &repository, &own, Duration::ZERO)).await.unwrap_err();
        assert!(
            matches!(
                busy,
                DeliveryError::Relay(cogni_gateway::relay::repo::RepoError::BranchInUse { .. })
            ),
            "{busy}"
        );
        let (request, begun) = make_work(&github, &relay, "free", "run-2").await;
        assert_eq!(deliver_work(&relay, request, &begun).await.step, "done");
        github.hub.response_gate().allow_answers(1);
    };
    let (held, ()) = tokio::join!(hanging, meanwhile);
    assert_eq!(held.step, "done");
}

/// L7: A run that waits for a branch gets it when it is free, and starts from the earlier run's work.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_waits_for_a_branch_builds_on_the_earlier_work() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "shared", "run-1").await;
    let (repository, key) = (request.repository.clone(), BranchKey::parse("shared").unwrap());
    let waiting = Box::pin(begin_run(&relay, &repository, &key, Duration::from_mins(2)));
    let first = async {
        assert_eq!(deliver_work(&relay, request, &begun).await.step, "done");
        drop(begun);
    };
    let (second, ()) = tokio::join!(waiting, first);
    assert!(second.unwrap().state.exists);
}

const BRANCHES: usize = 8;
