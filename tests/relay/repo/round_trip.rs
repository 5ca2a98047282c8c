//! L2 to L6: Tests of the whole round trip: from the remote to the agent and back.

use cogni_gateway::relay::repo::quarantine::PatchComparison;
use cogni_gateway::relay::repo::{BranchKey, RepoError, ReviewVerdict};

use super::setup::RelaySetup;

/// L2, L3, L4, L6: In the usual case the relay is the committer, the agent stays the author, and each commit names its
/// run.
#[test]
fn the_agents_commits_reach_their_branch() {
    let setup = RelaySetup::new();
    let run = setup.begin("ISSUE-7", "one");
    assert_eq!(run.workspace.git(["branch", "--show-current"]), "sandbox/ISSUE-7");
    run.workspace.write("docs/guide.md", "one\n2\nthree\n");
    run.workspace.commit("Number two\n\nAs [asked] for.");
    run.workspace.write("docs/more.md", "four\n");
    run.workspace.commit("[WIP] Number four");
    let pushed = setup.deliver(&run).unwrap();
    assert_eq!(
        (pushed.mode.clone(), pushed.verdict.clone()),
        (PatchComparison::Replayed, ReviewVerdict::Push)
    );
    assert_eq!(setup.tip("sandbox/ISSUE-7"), pushed.tip.to_string());
    assert_eq!(setup.tip("main"), run.state.start.to_string());
    insta::assert_snapshot!(
        setup.remote.git(["log", "--date=iso", "--format=%an <%ae> %ad | %cn <%ce> %cd%n%B", "main..sandbox/ISSUE-7"]),
        @"
    An Agent <agent@example.com> 2026-01-02 03:04:05 +0000 | Relay <relay@example.com> 2026-01-02 03:04:05 +0000
    [WIP] Number four

    Sandbox-Run: run-1
    Sandbox-Agent: sandbox:agent

    An Agent <agent@example.com> 2026-01-02 03:04:05 +0000 | Relay <relay@example.com> 2026-01-02 03:04:05 +0000
    Number two

    As [asked] for.

    Sandbox-Run: run-1
    Sandbox-Agent: sandbox:agent
    "
    );
}

/// L6: A replay after a lost answer finds its own commit at the remote.
#[test]
fn the_same_work_comes_to_the_same_commit() {
    let setup = RelaySetup::new();
    let run = setup.begin("twice", "one");
    run.workspace.write("more.txt", "more\n");
    run.workspace.commit("More");
    let first = setup.deliver(&run).unwrap();
    let second = setup.deliver(&run).unwrap();
    assert_eq!(first.tip, second.tip);
    assert!(!first.was_there && second.was_there);
}

/// L1: Several runs append to one branch.
#[test]
fn runs_append_to_their_branch() {
    let setup = RelaySetup::new();
    let mut tips = vec![];
    for name in ["one", "two", "three"] {
        let run = setup.begin("many", name);
        assert_eq!(run.state.exists, name != "one");
        run.workspace.write(&format!("{name}.txt"), name);
        run.workspace.commit(name);
        tips.push(setup.deliver(&run).unwrap().tip.to_string());
    }
    tips.reverse();
    let history = setup.remote.git(["rev-list", "main..sandbox/many"]);
    assert_eq!(history.lines().collect::<Vec<_>>(), tips);
}

/// L7: A second run on a branch gets an error.
#[test]
fn two_runs_are_never_at_one_branch() {
    let setup = RelaySetup::new();
    let key = BranchKey::parse("busy").unwrap();
    let first = setup.mirror.lease_branch(&key).unwrap();
    assert!(matches!(setup.mirror.lease_branch(&key), Err(RepoError::BranchInUse { .. })));
    setup.mirror.lease_branch(&BranchKey::parse("other").unwrap()).unwrap();
    let fence = first.fence();
    drop(first);
    assert!(setup.mirror.lease_branch(&key).unwrap().fence() > fence);
}

/// L7: A second run may instead wait for the first one, and their work does not interleave.
#[tokio::test]
async fn a_second_run_may_wait_for_the_first() {
    let setup = RelaySetup::new();
    let key = BranchKey::parse("busy").unwrap();
    let first = setup.mirror.lease_branch(&key).unwrap();
    let patience = std::time::Duration::from_millis(1);
    let outcome = setup.mirror.lease_with_timeout(&key, patience).await;
    assert!(matches!(outcome, Err(RepoError::BranchInUse { .. })));
    let mut waiting =
        Box::pin(setup.mirror.lease_with_timeout(&key, std::time::Duration::from_mins(1)));
    assert!(futures_util::poll!(&mut waiting).is_pending());
    let fence = first.fence();
    drop(first);
    assert!(waiting.await.unwrap().fence() > fence);
}
