//! L5, L7: Tests of the host's data that a row depends on: whichever process resumes the row, the result is the same,
//! or nothing is done.

use std::process::Output;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::fakes::github_server::{GithubOperation, InjectedFailure};
use cogni_gateway::relay::delivery::outbox::DeliveryStep;
use cogni_gateway::relay::delivery::{DeliveryConfig, DeliveryService, KnownSecret};
use cogni_gateway::relay::repo::RepoMirror;
use http::StatusCode;

use super::killed::{retry_command, run_retry, state_dir};
use super::run_job::{deliver_work, delivery_config, make_work, open_relay};
use crate::support::github_server::RunningGithub;
use crate::support::repository::run_git;

/// L5: Work that must not contain a credential of this host is never reviewed by a process that does not know the
/// credential, whether the work is held or under way.
#[tokio::test(flavor = "multi_thread")]
async fn a_retry_needs_the_credentials_that_the_work_must_not_contain() {
    let github = RunningGithub::start().await;
    // The agent's commits have this author address.
    let known =
        KnownSecret { name: "LITELLM_MASTER_KEY", secret: SecretString::new("agent@example.com") };
    let settings = DeliveryConfig { known_secrets: vec![known], ..delivery_config(&github) };
    let first = Arc::new(DeliveryService::open(settings).unwrap());
    let (request, begun) = make_work(&github, &first, "task-9", "run-1").await;
    github.hub.inject(
        GithubOperation::Branch,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        3,
    );
    let id = deliver_work(&first, request, &begun).await.id;
    drop(begun);
    let unknown = "cannot check this work for the secret `LITELLM_MASTER_KEY`";
    let branches = || run_git(&github.bare(), &["branch", "--list", "sandbox/task-9"]);

    let (code, output) = run_retry(&github, &[&id]).await;
    assert!(code == Some(1) && output.contains(unknown) && branches().is_empty(), "{output}");
    assert_eq!(
        first.outbox().get(&id).unwrap().step,
        DeliveryStep::Extracted,
        "it waits for who knows"
    );
    let knowing = || -> Output {
        let mut command = retry_command(&github, &[&id]);
        tokio::task::block_in_place(|| {
            command.env("LITELLM_MASTER_KEY", "agent@example.com").output()
        })
        .unwrap()
    };
    let output = String::from_utf8(knowing().stdout).unwrap();
    assert!(output.contains("it holds this host's own") && branches().is_empty(), "{output}");
    let (code, output) = run_retry(&github, &[&id]).await;
    assert!(code == Some(2) && output.contains(unknown), "{output}");
    assert_eq!(
        first.outbox().get(&id).unwrap().step,
        DeliveryStep::Held,
        "and it is held as before"
    );
    let (code, output) = run_retry(&github, &["--new-rules", &id]).await;
    assert_eq!((code, branches().as_str()), (Some(0), "  sandbox/task-9"), "{output}");

    // Work that was never reviewed may be resumed, too.
    run_git(&github.bare(), &["branch", "-D", "sandbox/task-9"]);
    let (request, begun) = make_work(&github, &first, "task-9", "run-2").await;
    drop(begun);
    let again = first.enqueue(request).unwrap();
    assert_eq!(run_retry(&github, &[&again.id]).await.0, Some(1));
    let (code, output) = run_retry(&github, &["--new-rules", &again.id]).await;
    assert_eq!(code, Some(0), "{output}");
}

/// L7: The commits of a row have the committer of the process that began the row, whatever the current committer is.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_keeps_its_committer() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    github.hub.inject(
        GithubOperation::Push,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        1,
    );
    let first = deliver_work(&relay, request, &begun).await;
    assert_eq!((first.step, first.is_pushed), ("judged", false), "{:?}", first.why);
    drop(begun);
    let wait = relay.outbox().get(&first.id).unwrap().due.duration_since(SystemTime::now());
    assert!(wait.unwrap_or_default() <= Duration::from_secs(30), "as the manual says");
    let (code, output) = run_retry(&github, &[&first.id]).await;
    assert_eq!(code, Some(0), "{output}");
    let by = run_git(&github.bare(), &["log", "-1", "--format=%H %cn <%ce>", "sandbox/task-9"]);
    assert_eq!(by, format!("{} Relay <relay@example.com>", first.head.unwrap()));
}

/// L7: A row is resumed only by the process that has the branch's lease, and only if the delivery can succeed.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_is_resumed_by_the_holder_of_the_branch() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    // While this branch exists, git cannot create `sandbox/task-9`.
    run_git(&github.bare(), &["branch", "-D", "sandbox/task-1"]);
    run_git(&github.bare(), &["branch", "sandbox", "main"]);
    let held = deliver_work(&relay, request, &begun).await;
    assert_eq!(held.step, "held", "it does not pass by itself: {:?}", held.why);
    let (code, output) = run_retry(&github, &[&held.id]).await;
    assert_eq!(
        (code, output.as_str()),
        (Some(2), "error: another process uses this branch; retry after it has finished\n")
    );
    assert_eq!(relay.outbox().get(&held.id).unwrap().step, DeliveryStep::Held);
    drop(begun);
    run_git(&github.bare(), &["branch", "-D", "sandbox"]);
    assert_eq!(run_retry(&github, &[&held.id]).await.0, Some(0));

    let (request, begun) = make_work(&github, &relay, "task-1", "run-2").await;
    let repository = request.repository.clone();
    let tree = run_git(&github.bare(), &["rev-parse", "main^{tree}"]);
    let other = run_git(&github.bare(), &["commit-tree", &tree, "-m", "of another writer"]);
    run_git(&github.bare(), &["update-ref", "refs/heads/sandbox/task-1", &other]);
    let moved = deliver_work(&relay, request, &begun).await;
    drop(begun);
    let (code, output) = run_retry(&github, &[&moved.id]).await;
    assert!(code == Some(2) && output.contains("its branch has moved on"), "{output}");
    assert_eq!(relay.outbox().get(&moved.id).unwrap().step, DeliveryStep::Held);
    let mirror = RepoMirror::open(relay.git(), &state_dir(&github), &repository).unwrap();
    assert!(
        mirror.lease_branch(relay.outbox().get(&moved.id).unwrap().request.branch().key()).is_ok()
    );
}
