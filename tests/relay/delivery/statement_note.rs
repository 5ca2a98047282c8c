//! L6: Tests of the git note that carries the statement beside a commit.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use cogni_gateway::fakes::github_server::{GithubOperation, InjectedFailure};
use cogni_gateway::relay::delivery::{DeliveryConfig, DeliveryService};
use http::StatusCode;

use super::run_job::{deliver_work, delivery_config, make_work, open_relay, signing_key};
use crate::support::github_server::RunningGithub;
use crate::support::repository::run_git;

/// L6: A person with a clone and the relay's public key can verify a statement with one command.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_is_proved_in_a_clone() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    let done = deliver_work(&relay, request, &begun).await;
    assert_eq!(done.statement.as_deref(), Some("beside the commit"));
    run_git(github.place.path(), &["clone", "--quiet", "site.git", "clone"]);
    let clone = github.place.path().join("clone");
    run_git(&clone, &["fetch", "--quiet", "origin", "refs/notes/cogni:refs/notes/cogni"]);
    let (public, head) = (signing_key().public_key().to_string(), done.head.unwrap().to_string());
    let (code, output) = verify_note(&clone, &["origin/sandbox/task-9", "--public-key", &public]);
    assert!(
        code == 0 && output.contains(&head) && output.contains("\"run\":\"run-1\""),
        "{output}"
    );
    let (code, output) = verify_note(&clone, &["origin/main", "--public-key", &public]);
    assert_eq!(
        (code, output.as_str()),
        (
            1,
            "UNPROVED: the commit has no statement here; fetch it with `git fetch origin refs/notes/cogni:refs/notes/cogni`\n"
        )
    );
    let stranger = "1".repeat(64);
    let (code, output) = verify_note(&clone, &[&head, "--public-key", &stranger]);
    assert!(code == 1 && output.contains("the statement was not signed by"), "{output}");
    // A commit that cannot be read is neither proved nor disproved.
    assert_eq!(verify_note(&clone, &["nothing", "--public-key", &public]).0, 2);
    // A statement is valid only for its own commit, whatever commit it was copied to.
    run_git(&clone, &["notes", "--ref=cogni", "copy", &head, "origin/main"]);
    let (code, output) = verify_note(&clone, &["origin/main", "--public-key", &public]);
    assert!(code == 1 && output.contains("is about another commit"), "{output}");
}

/// L6: A remote that refuses notes still gets the work, and the row says that there is no statement.
#[tokio::test(flavor = "multi_thread")]
async fn a_remote_that_refuses_notes_is_reported() {
    let github = RunningGithub::start().await;
    let hook = github.bare().join("hooks/update");
    fs::create_dir_all(hook.parent().unwrap()).unwrap();
    fs::write(&hook, "#!/bin/sh\ncase $1 in refs/notes/*) echo no notes here; exit 1; esac\n")
        .unwrap();
    fs::set_permissions(&hook, Permissions::from_mode(0o755)).unwrap();
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    let done = deliver_work(&relay, request, &begun).await;
    assert_eq!((done.step, done.is_pushed), ("done", true), "{:?}", done.why);
    let statement = done.statement.unwrap();
    assert!(
        statement.starts_with("none: the remote does not take it")
            && statement.contains("no notes here"),
        "{statement}"
    );
}

/// L6, L7: If the remote cannot take the statement because of a temporary fault, it is retried after everything else is
/// done.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_cannot_be_pushed_now_is_pushed_later() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    github.hub.inject(
        GithubOperation::ListPulls,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        3,
    );
    let first = deliver_work(&relay, request, &begun).await;
    assert_eq!((first.step, first.statement), ("pushed", None));
    drop(begun);
    // The only push from here on is the statement's.
    github.hub.inject(
        GithubOperation::Push,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        1,
    );
    let second = relay.resume_delivery(&first.id).await.unwrap().unwrap();
    assert_eq!((second.step, second.statement), ("pull_requested", None), "{:?}", second.why);
    let third = relay.resume_delivery(&first.id).await.unwrap().unwrap();
    assert_eq!((third.step, third.statement.as_deref()), ("done", Some("beside the commit")));
}

/// L6: A key that is lost with its process would prove nothing, so nothing is signed with it.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_signed_with_a_key_that_is_lost() {
    let github = RunningGithub::start().await;
    let relay =
        DeliveryService::open(DeliveryConfig { signing_key: None, ..delivery_config(&github) });
    let relay = Arc::new(relay.unwrap());
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    let done = deliver_work(&relay, request, &begun).await;
    assert_eq!(
        done.statement.as_deref(),
        Some("none: there is no `AUDIT_SIGNING_KEY` to sign it with")
    );
    assert_eq!(run_git(&github.bare(), &["for-each-ref", "refs/notes"]), "");
}

fn verify_note(clone: &Path, words: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    let output = command.args(["relay", "verify"]).args(words).current_dir(clone).output();
    let output = output.unwrap();
    let printed = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(printed).unwrap())
}
