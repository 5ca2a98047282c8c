//! Tests of a relay process that is killed at each step of a delivery.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use cogni_gateway::fakes::github_server::{GithubOperation, InjectedFailure};
use cogni_gateway::relay::delivery::outbox::{DeliveryOutbox, DeliveryStep};

use super::run_job::{find_leaks, make_work, open_relay};
use crate::support::github_server::{NAME, RunningGithub, TOKEN, basic_auth};
use crate::support::process::{ChildProcess, NO_LISTENER, TEST_TIMEOUT, list_gits, wait_until};
use crate::support::repository::run_git;

/// L7: A process that is killed while it waits, before or after any call to GitHub, leaves a row. The next process
/// makes exactly one update of the branch and one pull request.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_relay_goes_on_in_the_next_process() {
    let github = RunningGithub::start().await;
    let operations = [
        GithubOperation::Branch,
        GithubOperation::Advertise,
        GithubOperation::Push,
        GithubOperation::ListPulls,
        GithubOperation::CreatePull,
    ];
    let ways = [InjectedFailure::HoldBefore, InjectedFailure::HoldAfter];
    let points = operations.into_iter().flat_map(|at| ways.clone().map(|way| (at, way)));
    for (number, (operation, way)) in points.enumerate() {
        let (key, description) = (format!("kill-{number}"), format!("{operation:?} {way:?}"));
        let id = add_work(&github, &key).await;
        github.hub.inject(operation, way, 1);
        let mut first = start_retry(&github, &id);
        github.hub.response_gate().wait_for_waiting(1).await;
        first.signal("KILL");
        first.wait();
        github.hub.response_gate().allow_answers(1);

        let second = finish_delivery(&github, &id).await;
        let outbox = DeliveryOutbox::open(&state_dir(&github).join("outbox.sqlite")).unwrap();
        assert_eq!(outbox.get(&id).unwrap().step, DeliveryStep::Done, "{description}: {second}");
        let count =
            run_git(&github.bare(), &["rev-list", "--count", &format!("main..sandbox/{key}")]);
        let pulls = github.hub.pulls(NAME);
        let own = pulls.iter().filter(|pull| pull.head == format!("sandbox/{key}")).count();
        assert_eq!((count.as_str(), own), ("1", 1), "{description}: {second}");
        assert!(!second.contains(TOKEN));
    }
}

/// L4, L7: The same holds for a process that is killed during the quarantine, when it makes no call.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_is_killed_in_quarantine_goes_on_in_the_next_process() {
    let github = RunningGithub::start().await;
    let id = add_work(&github, "kill").await;
    let outbox = DeliveryOutbox::open(&state_dir(&github).join("outbox.sqlite")).unwrap();
    let patches = outbox.get(&id).unwrap().request.artifacts.join("patches");
    let renamed = patches.with_extension("kept");
    fs::rename(&patches, &renamed).unwrap();
    // The relay reads this pipe when the objects are in quarantine, and waits for a writer.
    assert!(Command::new("mkfifo").arg(&patches).status().unwrap().success());
    let mut first = start_retry(&github, &id);
    let fifo = patches.clone();
    let writer = tokio::task::spawn_blocking(move || File::options().write(true).open(fifo));
    let writer = writer.await.unwrap().unwrap();
    first.signal("KILL");
    first.wait();
    drop(writer);
    fs::rename(&renamed, &patches).unwrap();
    assert_eq!(outbox.get(&id).unwrap().step, DeliveryStep::Extracted);
    let second = finish_delivery(&github, &id).await;
    assert_eq!(outbox.get(&id).unwrap().step, DeliveryStep::Done, "{second}");
    let count = run_git(&github.bare(), &["rev-list", "--count", "main..sandbox/kill"]);
    assert_eq!((count.as_str(), github.hub.pulls(NAME).len()), ("1", 1), "{second}");
}

/// L6: While git pushes, the token is in no process's arguments. Afterwards it is in no file and in no output.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_in_no_argument_and_in_no_file() {
    let github = RunningGithub::start().await;
    let id = add_work(&github, "secret").await;
    github.hub.inject(GithubOperation::Push, InjectedFailure::HoldBefore, 1);
    let mut process = start_retry(&github, &id);
    github.hub.response_gate().wait_for_waiting(1).await;
    let basic = basic_auth(TOKEN);
    let holding = |file: &str| {
        let processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
        let read = processes.filter_map(|process| fs::read(process.join(file)).ok());
        let holds = |text: &[u8], secret: &str| {
            text.windows(secret.len()).any(|part| part == secret.as_bytes())
        };
        read.filter(|text| holds(text, TOKEN) || holds(text, &basic)).count()
    };
    assert!(holding("environ") >= 2, "git has it now, or this looks at nothing");
    assert_eq!(holding("cmdline"), 0);
    github.hub.response_gate().allow_answers(1);
    let (status, output) =
        tokio::task::spawn_blocking(move || (process.wait(), process.output())).await.unwrap();
    assert!(status.success(), "{output}");
    assert!(!output.contains(TOKEN) && !output.contains(&basic), "{output}");
    assert_eq!(find_leaks(github.place.path(), &[TOKEN, &basic]), Vec::<PathBuf>::new());
}

/// R5, L6: No git outlives the process that has started it, however that process ends. So no process has the token then.
#[tokio::test(flavor = "multi_thread")]
async fn no_git_outlives_a_killed_relay() {
    let github = RunningGithub::start().await;
    for signal in ["KILL", "TERM"] {
        let id = add_work(&github, &signal.to_lowercase()).await;
        github.hub.inject(GithubOperation::Push, InjectedFailure::HoldBefore, 1);
        let mut process = start_retry(&github, &id);
        github.hub.response_gate().wait_for_waiting(1).await;
        // Git itself, and the helper that it has started to talk to the remote.
        assert!(list_gits(&state_dir(&github)).len() >= 2, "{:?}", list_gits(&state_dir(&github)));
        process.signal(signal);
        process.wait();
        let left = || format!("left after SIG{signal}: {:?}", list_gits(&state_dir(&github)));
        tokio::task::block_in_place(|| {
            wait_until(|| list_gits(&state_dir(&github)).is_empty(), left);
        });
        github.hub.response_gate().allow_answers(1);
    }
}

/// R5, L6: A signal ends a run that reads its branch, and the gits of it. The run has a result.
#[test]
fn a_run_that_is_cancelled_while_its_branch_is_read_has_a_result() {
    let directory = tempfile::tempdir().unwrap();
    // The kernel accepts git's connection, and no program answers it.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/o/site.git", silent.local_addr().unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    command
        .env("BILLING_ACCOUNT_ID", "acct-1")
        .env("LITELLM_MASTER_KEY", "sk-real")
        .env("LITELLM_HOST", NO_LISTENER.to_string())
        .env("COGNI_RUN_DIR", directory.path().join("r"))
        .env("COGNI_STATE_DIR", directory.path())
        .env_remove("GITHUB_TOKEN")
        .args(["run", "--driver", "embedded", "--repo", &url, "--branch-key", "one", "--", "true"]);
    let mut process = ChildProcess::start(&mut command, "build it");
    wait_until(|| list_gits(directory.path()).len() >= 2, || process.output());
    let status = process.terminate();
    let output = process.output();
    let result = output.lines().find(|line| line.starts_with('{')).unwrap_or_default();
    assert!(result.contains("\"error_code\":\"cancelled\""), "{output}");
    assert_eq!((status.code(), list_gits(directory.path())), (Some(1), vec![]), "{output}");
}

/// Adds a run's work to the outbox without a process that delivers it.
pub(super) async fn add_work(github: &RunningGithub, key: &str) -> String {
    let relay = open_relay(github);
    let (request, begun) = make_work(github, &relay, key, key).await;
    drop(begun);
    relay.outbox().add_job(&request).unwrap().id
}

/// Retries until the delivery is done: a git process that outlives its killed parent may hold the branch for a moment.
async fn finish_delivery(github: &RunningGithub, id: &str) -> String {
    let (mut output, begun) = (String::new(), Instant::now());
    while begun.elapsed() < TEST_TIMEOUT {
        let mut process = start_retry(github, id);
        let ended = tokio::task::spawn_blocking(move || (process.wait(), process.output())).await;
        let (status, more) = ended.unwrap();
        output += &more;
        if status.success() {
            break;
        }
    }
    output
}

/// Runs `relay retry` to its end.
pub(super) async fn run_retry(github: &RunningGithub, words: &[&str]) -> (Option<i32>, String) {
    let mut command = retry_command(github, words);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let printed = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(printed).unwrap())
}

fn start_retry(github: &RunningGithub, id: &str) -> ChildProcess {
    ChildProcess::start(&mut retry_command(github, &[id]), "build it")
}

pub(super) fn retry_command(github: &RunningGithub, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    command
        .args(["relay", "retry"])
        .args(words)
        .env("COGNI_STATE_DIR", state_dir(github))
        .env("GITHUB_API_URL", github.hub.url())
        .env("GITHUB_TOKEN", TOKEN)
        .env("AUDIT_SIGNING_KEY", "7".repeat(64));
    command
}

pub(super) fn state_dir(github: &RunningGithub) -> PathBuf {
    Path::new(github.place.path()).join("state")
}
