//! Tests of a whole delivery: from the work of a sandbox to the branch, the pull request and the statement.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cogni_gateway::base::hidden_characters::is_hidden;
use cogni_gateway::fakes::github_server::{GithubOperation, InjectedFailure};
use cogni_gateway::relay::delivery::outbox::{DeliveryRequest, DeliveryStep, PullRequestText};
use cogni_gateway::relay::delivery::statement::{ProvenanceStatement, RunFacts};
use cogni_gateway::relay::delivery::{
    DeliveryError, DeliveryService, DeliveryStatus, LeasedBranch,
};
use cogni_gateway::relay::repo::extract_commands::{AnnouncedBranch, ExtractCommandSet};
use cogni_gateway::relay::repo::mirror::{CommitAuthor, FileOwner};
use cogni_gateway::relay::repo::repository::RepositoryUrl;
use cogni_gateway::relay::repo::review::RelayConfig;
use cogni_gateway::relay::repo::{ArtifactDir, BranchKey, BranchState};
use cogni_gateway::telemetry::audit::{self, AuditLog, records};
use http::StatusCode;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::repo::setup::execute_command;
pub(super) use crate::support::delivery::{delivery_config, open_relay, signing_key};
use crate::support::github_server::{NAME, RunningGithub, TOKEN, basic_auth};
use crate::support::repository::run_git;

/// L6, L7: The agent's commits reach the branch, a pull request and a statement, and the audit log records it.
#[tokio::test(flavor = "multi_thread")]
async fn a_runs_work_is_delivered() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    let audit = RunAuditLog::new(&github);
    let artifacts = request.artifacts.clone();
    let delivered = relay.deliver(request, &begun.lease, &audit.log).await.unwrap();

    let head = run_git(&github.bare(), &["rev-parse", "sandbox/task-9"]);
    assert_eq!(delivered.head.unwrap().to_string(), head);
    let pull = github.hub.pulls(NAME).remove(0);
    let url = format!("{}/{NAME}/pull/1", github.hub.url());
    assert_eq!((pull.head.as_str(), delivered.pull_request_url), ("sandbox/task-9", Some(url)));
    let note = run_git(&github.bare(), &["notes", "--ref=cogni", "show", &head]);
    let statement = ProvenanceStatement::verify(&note, signing_key().public_key()).unwrap();
    assert_eq!((statement.facts.run.as_str(), statement.verdict.as_str()), ("run-1", "push"));
    assert!(!artifacts.exists(), "what was delivered is not kept");
    insta::assert_snapshot!(delivery_events(&audit.path).join("\n"), @r#"
    relay.extracted commits=1 branch="sandbox/task-9"
    relay.judged verdict="push" mode="replayed" files=1
    relay.pushed was_there=false
    relay.pull_requested is_new=true
    "#);
    assert_eq!(
        find_leaks(github.place.path(), &[TOKEN, &basic_auth(TOKEN)]),
        Vec::<PathBuf>::new()
    );
}

/// L6: A pull request is made only on request.
#[tokio::test(flavor = "multi_thread")]
async fn no_pull_request_is_made_unasked() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    let delivered =
        deliver_work(&relay, DeliveryRequest { pull_request: None, ..request }, &begun).await;
    assert_eq!((delivered.step, delivered.pull_request_url), ("done", None));
    assert!(delivered.is_pushed && github.hub.pulls(NAME).is_empty());
}

/// L5, L6: For work that needs a review, every report says why, and a ready pull request becomes a draft before the
/// push.
#[tokio::test(flavor = "multi_thread")]
async fn every_report_of_work_for_review_says_why() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    deliver_work(&relay, request, &begun).await;
    drop(begun);
    github.hub.edit_pull(NAME, 1, |pull| pull.is_draft = false);
    let (request, begun) = make_work(&github, &relay, "task-9", "AGENTS.md").await;
    let audit = RunAuditLog::new(&github);
    let delivered = relay.deliver(request, &begun.lease, &audit.log).await.unwrap();
    let reason = "`made-by-AGENTS.md`: it is ours";
    assert_eq!((delivered.step, delivered.verdict), ("done", Some("review")));
    assert_eq!(delivered.reasons, [reason]);
    let row = relay.outbox().get(&delivered.id).unwrap();
    assert_eq!(row.reasons.iter().map(ToString::to_string).collect::<Vec<_>>(), [reason]);
    assert!(fs::read_to_string(&audit.path).unwrap().contains(&format!("\"said\":[\"{reason}\"]")));
    let pull = github.hub.pulls(NAME).remove(0);
    assert!(pull.is_draft && pull.body.unwrap().contains("- `made-by-AGENTS.md`: it is ours"));
    let calls: Vec<_> =
        github.hub.recorded_calls().into_iter().map(|call| call.operation).collect();
    let at = |wanted| calls.iter().rposition(|operation| *operation == wanted);
    assert!(at(GithubOperation::Withdraw) < at(GithubOperation::Push), "{calls:?}");
}

/// L5, L6: If the pull request cannot become a draft, nothing is pushed.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_for_review_is_pushed_to_a_pull_request_that_is_ready() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    deliver_work(&relay, request, &begun).await;
    drop(begun);
    let before = run_git(&github.bare(), &["rev-parse", "sandbox/task-9"]);
    github.hub.inject(GithubOperation::Withdraw, InjectedFailure::not_permitted(), 1);
    let (request, begun) = make_work(&github, &relay, "task-9", "AGENTS.md").await;
    let delivered = deliver_work(&relay, request, &begun).await;
    assert_eq!((delivered.step, delivered.is_pushed), ("held", false));
    insta::assert_snapshot!(delivered.why.unwrap(), @"cannot keep this work from being merged before a review: its pull request cannot be made a draft: the token may not do this: Resource not accessible by integration; it needs `contents: write` and `pull_requests: write` for this repository");
    assert!(delivered.apply.is_some() && !delivered.reasons.is_empty());
    assert_eq!(run_git(&github.bare(), &["rev-parse", "sandbox/task-9"]), before);
    drop(begun);
    let job = relay.outbox().get(&delivered.id).unwrap();
    relay.outbox().restart(&job).unwrap();
    assert_eq!(relay.resume_delivery(&delivered.id).await.unwrap().unwrap().step, "done");
}

/// L5, L6: The texts of a forge and of a git server have no hidden characters in the result, which people read.
#[tokio::test(flavor = "multi_thread")]
async fn the_texts_of_a_forge_have_no_hidden_characters() {
    let github = RunningGithub::start().await;
    let hook = github.bare().join("hooks/update");
    fs::create_dir_all(hook.parent().unwrap()).unwrap();
    let script =
        "#!/bin/sh\ncase $1 in refs/notes/*) echo 'no \u{2066}notes\u{feff} here'; exit 1; esac\n";
    fs::write(&hook, script).unwrap();
    fs::set_permissions(&hook, Permissions::from_mode(0o755)).unwrap();
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    let noted = deliver_work(&relay, request, &begun).await;
    drop(begun);
    let refused = InjectedFailure::graphql_error("FORBIDDEN", "it is \u{202e}lamron\u{200b} now");
    github.hub.inject(GithubOperation::Withdraw, refused, 1);
    let (request, begun) = make_work(&github, &relay, "task-9", "AGENTS.md").await;
    let held = deliver_work(&relay, request, &begun).await;
    let (statement, why) = (noted.statement.unwrap(), held.why.unwrap());
    assert!(!format!("{statement}{why}").chars().any(is_hidden), "{statement:?}, {why:?}");
    assert!(statement.contains(r"no \u{2066}notes\u{feff} here"), "{statement}");
    assert!(why.contains(r"it is \u{202e}lamron\u{200b} now"), "{why}");
}

/// L5, L6: A change of a protected path is not pushed. The work is kept, and one command applies it in a clone.
#[tokio::test(flavor = "multi_thread")]
async fn held_work_is_kept_and_can_be_applied() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    github.hub.protect_branch(NAME, "sandbox/task-1");
    let (request, begun) = make_work(&github, &relay, "task-1", "run-1").await;
    let before = run_git(&github.bare(), &["rev-parse", "sandbox/task-1"]);
    let delivered = deliver_work(&relay, request, &begun).await;
    assert_eq!((delivered.step, delivered.is_pushed), ("held", false));
    assert_eq!(delivered.why.as_deref(), Some("`sandbox/task-1` is a protected branch"));
    assert_eq!(run_git(&github.bare(), &["rev-parse", "sandbox/task-1"]), before);

    let clone = github.place.path().join("clone");
    run_git(github.place.path(), &["clone", "--quiet", "site.git", "clone"]);
    let line = delivered.apply.unwrap();
    let applied =
        std::process::Command::new("sh").arg("-c").arg(&line).current_dir(&clone).output();
    assert!(applied.as_ref().unwrap().status.success(), "{line}: {applied:?}");
    assert_eq!(
        run_git(&clone, &["show", &format!("held/task-1-{}:made-by-run-1", &delivered.id[24..])]),
        "by an agent"
    );
}

/// L7: If the API is down after the push, the row remains. A later process makes the pull request and does not push
/// again.
#[tokio::test(flavor = "multi_thread")]
async fn a_later_process_makes_the_missing_pull_request() {
    let github = RunningGithub::start().await;
    let first = open_relay(&github);
    let (request, begun) = make_work(&github, &first, "task-9", "run-1").await;
    github.hub.inject(
        GithubOperation::ListPulls,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        3,
    );
    let delivered = deliver_work(&first, request, &begun).await;
    assert_eq!((delivered.step, delivered.is_pushed), ("pushed", true));
    assert_eq!(delivered.why.as_deref(), Some("GitHub has a temporary failure (502 Bad Gateway)"));
    let pushes = github.hub.count_calls(GithubOperation::Push);
    drop((first, begun));

    let second = open_relay(&github);
    let due = second.resume_due_jobs(&CancellationToken::new()).await.unwrap();
    assert!(due.is_empty(), "it is not due yet");
    let again = second.resume_delivery(&delivered.id).await.unwrap().unwrap();
    assert_eq!((again.step, github.hub.pulls(NAME).len()), ("done", 1));
    // One more push, for the statement, which is the last step.
    assert_eq!(github.hub.count_calls(GithubOperation::Push), pushes + 1);
}

/// L7: If the process ends after the remote has acted but before the answer arrives, there is still one update and one
/// pull request.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_after_each_call_brings_one_update_and_one_pull_request() {
    for operation in [
        GithubOperation::Branch,
        GithubOperation::Advertise,
        GithubOperation::Push,
        GithubOperation::ListPulls,
        GithubOperation::CreatePull,
    ] {
        let github = RunningGithub::start().await;
        let first = open_relay(&github);
        let (request, begun) = make_work(&github, &first, "task-9", "run-1").await;
        github.hub.inject(operation, InjectedFailure::HoldAfter, 1);
        {
            let delivering = deliver_work(&first, request.clone(), &begun);
            tokio::select! {
                delivered = delivering => panic!("{operation:?}: not held: {delivered:?}"),
                () = github.hub.response_gate().wait_for_waiting(1) => (),
            }
        }
        github.hub.response_gate().allow_answers(1);
        drop((first, begun));
        let second = open_relay(&github);
        let id = second.outbox().list_jobs(false).unwrap().remove(0).id;
        // Threads of the first process may still hold the branch.
        let done = loop {
            match second.resume_delivery(&id).await.unwrap() {
                Some(delivered) => break delivered,
                None => tokio::task::yield_now().await,
            }
        };
        assert_eq!((done.step, done.why), ("done", None), "{operation:?}");
        assert_eq!(github.hub.pulls(NAME).len(), 1, "{operation:?}");
        let count = run_git(&github.bare(), &["rev-list", "--count", "main..sandbox/task-9"]);
        assert_eq!(count, "1", "{operation:?}");
        let again = second
            .deliver(request, &second_lease(&second, &github).await, &AuditLog::disabled())
            .await;
        assert_eq!(again.unwrap().id, id, "{operation:?}");
    }
}

/// L6, L7: If another person has moved the branch, nothing is overwritten and the work is kept.
#[tokio::test(flavor = "multi_thread")]
async fn a_branch_that_was_moved_is_not_overwritten() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-1", "run-1").await;
    let tree = run_git(&github.bare(), &["rev-parse", "main^{tree}"]);
    let other = run_git(&github.bare(), &["commit-tree", &tree, "-m", "of another writer"]);
    run_git(&github.bare(), &["update-ref", "refs/heads/sandbox/task-1", &other]);
    let delivered = deliver_work(&relay, request, &begun).await;
    assert_eq!(delivered.step, "held");
    assert!(delivered.why.unwrap().contains("is not where the run began any more"));
    assert_eq!(run_git(&github.bare(), &["rev-parse", "sandbox/task-1"]), other);
    assert!(delivered.apply.is_some());
}

/// L7: A run starts from an earlier run's work that is not delivered yet.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_builds_on_undelivered_work() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    github.hub.inject(
        GithubOperation::Branch,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        3,
    );
    let delivered = deliver_work(&relay, request, &begun).await;
    assert_eq!((delivered.step, delivered.is_pushed), ("extracted", false));
    drop(begun);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-2").await;
    assert!(begun.state.exists);
    assert_eq!(deliver_work(&relay, request, &begun).await.step, "done");
    let files = run_git(&github.bare(), &["ls-tree", "--name-only", "sandbox/task-9"]);
    assert_eq!(files, "README\nmade-by-run-1\nmade-by-run-2");
}

/// L6: The statement and the audit log describe the patches alike, also if another process makes the statement.
#[tokio::test(flavor = "multi_thread")]
async fn the_statement_and_the_audit_log_describe_patches_alike() {
    for mode in ["replayed", "bundled: other patches"] {
        let github = RunningGithub::start().await;
        let relay = open_relay(&github);
        let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
        if mode != "replayed" {
            fs::remove_file(ArtifactDir::from_path(&request.artifacts).patches_path()).unwrap();
        }
        let audit = RunAuditLog::new(&github);
        github.hub.inject(GithubOperation::CreatePull, InjectedFailure::not_permitted(), 1);
        let first = relay.deliver(request, &begun.lease, &audit.log).await.unwrap();
        assert_eq!((first.step, first.is_pushed), ("failed", true));
        drop((begun, relay));
        let again = open_relay(&github);
        let done = again.retry_delivery(&first.id, false).await.unwrap().unwrap();
        let head = done.head.unwrap().to_string();
        let note = run_git(&github.bare(), &["notes", "--ref=cogni", "show", &head]);
        assert_eq!(
            ProvenanceStatement::verify(&note, signing_key().public_key()).unwrap().mode,
            mode
        );
        let judged = format!("relay.judged verdict=\"push\" mode=\"{mode}\" files=1");
        assert!(
            delivery_events(&audit.path).contains(&judged),
            "{:?}",
            delivery_events(&audit.path)
        );
    }
}

/// L6: A repository on this machine needs no token, and has no pull requests.
#[tokio::test(flavor = "multi_thread")]
async fn a_repository_on_this_machine_needs_no_token() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let here: RepositoryUrl = format!("file://{}", github.bare().display()).parse().unwrap();
    let (request, begun) = work_at(&github, &relay, here, "task-9", "run-1").await;
    let delivered = deliver_work(&relay, request, &begun).await;
    assert_eq!((delivered.step, delivered.is_pushed), ("failed", true));
    assert!(delivered.why.unwrap().contains("a pull request needs a repository on a forge"));
    assert!(github.hub.recorded_calls().is_empty());
}

/// L7: A failed delivery is resumed on request, at the step where it failed.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_delivery_is_resumed_on_request() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    github.hub.inject(GithubOperation::CreatePull, InjectedFailure::not_permitted(), 1);
    let delivered = deliver_work(&relay, request, &begun).await;
    assert_eq!((delivered.step, delivered.is_pushed), ("failed", true));
    drop(begun);
    let job = relay.outbox().get(&delivered.id).unwrap();
    assert_eq!(relay.outbox().restart(&job).unwrap().step, DeliveryStep::Pushed);
    assert_eq!(relay.resume_delivery(&delivered.id).await.unwrap().unwrap().step, "done");
}

pub(super) async fn deliver_work(
    relay: &Arc<DeliveryService>,
    request: DeliveryRequest,
    begun: &LeasedBranch,
) -> DeliveryStatus {
    Box::pin(relay.deliver(request, &begun.lease, &AuditLog::disabled())).await.unwrap()
}

async fn second_lease(
    relay: &Arc<DeliveryService>,
    github: &RunningGithub,
) -> cogni_gateway::relay::repo::BranchLease {
    let repository: RepositoryUrl = github.clone_url().parse().unwrap();
    let key = BranchKey::parse("task-9").unwrap();
    begin_run(relay, &repository, &key, Duration::ZERO).await.unwrap().lease
}

/// Begins a run: takes the branch's lease, delivers older work, and reads the branch's state.
pub(super) async fn begin_run(
    relay: &Arc<DeliveryService>,
    repository: &RepositoryUrl,
    key: &BranchKey,
    patience: Duration,
) -> Result<LeasedBranch, DeliveryError> {
    let taken = relay.lease_branch(repository, key, patience).await?;
    Box::pin(relay.open_branch(repository, taken, None, &CancellationToken::new())).await
}

/// Makes a run whose agent commits one file, and returns the work that is collected from its sandbox.
pub(super) async fn make_work(
    github: &RunningGithub,
    relay: &Arc<DeliveryService>,
    key: &str,
    run: &str,
) -> (DeliveryRequest, LeasedBranch) {
    let repository: RepositoryUrl = github.clone_url().parse().unwrap();
    Box::pin(work_at(github, relay, repository, key, run)).await
}

async fn work_at(
    github: &RunningGithub,
    relay: &Arc<DeliveryService>,
    repository: RepositoryUrl,
    key: &str,
    run: &str,
) -> (DeliveryRequest, LeasedBranch) {
    let key = BranchKey::parse(key).unwrap();
    let begun = loop {
        match Box::pin(begin_run(relay, &repository, &key, Duration::ZERO)).await {
            Ok(begun) => break begun,
            Err(DeliveryError::Relay(cogni_gateway::relay::repo::RepoError::BranchInUse {
                ..
            })) => {
                tokio::task::yield_now().await;
            }
            Err(error) => panic!("{error}"),
        }
    };
    let workspace = github.place.path().join(run);
    let own = github.place.path().metadata().unwrap();
    let owner = FileOwner { uid: own.uid(), gid: own.gid() };
    let author = CommitAuthor { name: "An Agent".into(), email: "agent@example.com".into() };
    begun
        .mirror
        .checkout_workspace(&begun.lease, &begun.state, &workspace, (owner, &author))
        .unwrap();
    fs::write(workspace.join(format!("made-by-{run}")), "by an agent\n").unwrap();
    run_git(&workspace, &["add", "--all"]);
    run_git(&workspace, &["commit", "--quiet", "--message", "Do the work"]);
    let artifacts = relay.create_artifacts_dir().unwrap();
    let announced = extract_branch(&begun.state, &workspace, &artifacts);
    let request = DeliveryRequest {
        repository,
        state: begun.state.clone(),
        announced,
        facts: RunFacts { run: run.to_owned(), agent: "coder".to_owned(), ..RunFacts::default() },
        rules: None,
        host: None,
        artifacts: artifacts.directory().to_owned(),
        pull_request: Some(PullRequestText {
            title: "Do the work".to_owned(),
            body: "It is done.".to_owned(),
            asked: "Please do `the work` (fixes #7)".to_owned(),
            model: "gpt-4o-mini".to_owned(),
        }),
    };
    (request, begun)
}

fn extract_branch(
    state: &BranchState,
    workspace: &Path,
    artifacts: &ArtifactDir,
) -> AnnouncedBranch {
    let workspace = workspace.display().to_string();
    let commands =
        ExtractCommandSet::new(state, &workspace, "/nowhere", &RelayConfig::default().extract);
    for (command, path) in
        [(&commands.patches, artifacts.patches_path()), (&commands.bundle, artifacts.bundle_path())]
    {
        let mut spool = artifacts.create_bounded(path, command.output_bytes).unwrap();
        spool.push(&execute_command(command).0).unwrap();
        spool.finish().unwrap();
    }
    let (facts, exit_code) = execute_command(&commands.facts);
    AnnouncedBranch::parse(&facts, exit_code).unwrap().unwrap()
}

/// A run's audit log.
struct RunAuditLog {
    log: AuditLog,
    path: PathBuf,
}

impl RunAuditLog {
    fn new(github: &RunningGithub) -> Self {
        let path = github.place.path().join("audit.jsonl");
        let started = records::RunStartedRecord {
            run: "run-1".to_owned(),
            attempt: "1".to_owned(),
            account: "acct-1".to_owned(),
            version: "0".to_owned(),
            policy: "p".to_owned(),
            prices: "p".to_owned(),
            trace: None,
            upstream: "litellm",
        };
        let config =
            audit::AuditConfig { path: Some(path.clone()), ..audit::AuditConfig::default() };
        Self { log: AuditLog::open_log(&config, &started).unwrap().0, path }
    }
}

/// Returns the delivery events of a log, without values that differ between runs.
pub(super) fn delivery_events(log: &Path) -> Vec<String> {
    audit::verify::verify_file(log, None).unwrap();
    let text = fs::read_to_string(log).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let relayed = lines.filter(|line| line["event"].as_str().unwrap().starts_with("relay."));
    let summary = |line: Value| {
        let names = [
            "step",
            "verdict",
            "mode",
            "files",
            "commits",
            "branch",
            "was_there",
            "is_new",
            "code",
        ];
        let values =
            names.iter().filter_map(|&name| line.get(name).map(|value| format!(" {name}={value}")));
        values.fold(line["event"].as_str().unwrap().to_owned(), |text, more| text + &more)
    };
    relayed.map(summary).collect()
}

/// Returns the files that contain one of these secrets.
pub(super) fn find_leaks(directory: &Path, secrets: &[&str]) -> Vec<PathBuf> {
    let mut found = vec![];
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(find_leaks(&path, secrets));
            continue;
        }
        let text = fs::read(&path).unwrap();
        let holds =
            |secret: &&str| text.windows(secret.len()).any(|part| part == secret.as_bytes());
        found.extend(secrets.iter().any(holds).then_some(path));
    }
    found
}
