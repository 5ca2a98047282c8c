//! L7: Tests of deliveries that are resumed later: which process resumes them, and where the events are recorded.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::sync::Mutex;
use std::time::Duration;

use cogni_gateway::fakes::github_server::{GithubOperation, InjectedFailure};
use cogni_gateway::relay::delivery::outbox::DeliveryStep;
use cogni_gateway::relay::delivery::{DeliveryStatus, job_audit_log};
use cogni_gateway::runner::branch_delivery::{recover_all, recover_for_run};
use cogni_gateway::telemetry::audit::verify;
use http::StatusCode;
use tempfile::NamedTempFile;
use tokio_util::sync::CancellationToken;
use tracing::instrument::WithSubscriber;

use super::killed::{add_work, state_dir};
use super::run_job::{self, deliver_work, delivery_events, make_work, open_relay, signing_key};
use crate::support::delivery::delivery_plan;
use crate::support::github_server::{NAME, RunningGithub};
use crate::support::small_disk::SmallDisk;

/// L7: The run's log is closed when its delivery is resumed, so later events are in the row's own log, which is proved
/// in the same way.
#[tokio::test(flavor = "multi_thread")]
async fn later_events_are_in_the_rows_own_log() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    github.hub.inject(
        GithubOperation::Branch,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        3,
    );
    github.hub.inject(
        GithubOperation::ListPulls,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        3,
    );
    let first = deliver_work(&relay, request, &begun).await;
    assert_eq!((first.step, first.audit), ("extracted", None), "{:?}", first.why);
    drop(begun);
    let second = relay.resume_delivery(&first.id).await.unwrap().unwrap();
    assert_eq!(
        (second.step, &second.why.unwrap()[..30]),
        ("pushed", "GitHub has a temporary failure")
    );
    let third = relay.resume_delivery(&first.id).await.unwrap().unwrap();
    let log = third.audit.unwrap();
    insta::assert_snapshot!(delivery_events(&log).join("\n"), @r#"
    relay.resumed step="extracted"
    relay.judged verdict="push" mode="replayed" files=1
    relay.pushed was_there=false
    relay.resumed step="pushed"
    relay.pushed was_there=true
    relay.pull_requested is_new=true
    "#);
    let report = verify::verify_file(&log, Some(signing_key().public_key())).unwrap();
    assert_eq!((report.run.as_str(), report.starts, report.finished), ("run-1", 2, true));
}

/// L7: If a row disappears after it was listed, the holder of its branch has resumed it. That is no error, and no
/// warning is logged.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_another_process_resumes_is_no_error() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    drop(begun);
    let plan = delivery_plan(&request);
    let mirrors = fs::read_dir(state_dir(&github).join("mirrors")).unwrap();
    let mut mirrors = mirrors.map(|entry| entry.unwrap().path());
    let lock = mirrors.find(|path| path.extension().is_some_and(|end| end == "lock")).unwrap();
    let log_file = NamedTempFile::new().unwrap();
    for is_asked_by_run in [true, false] {
        let row =
            relay.outbox().register_workspace(&plan, &plan.artifacts.join("workspace")).unwrap();
        // The retry has listed the row, and waits for this lock.
        let mirror = File::open(&lock).unwrap();
        mirror.lock().unwrap();
        let log = log_file.reopen().unwrap();
        let log = tracing_subscriber::fmt().with_writer(Mutex::new(log)).finish();
        let owner = relay.clone();
        let taking = async move {
            if is_asked_by_run {
                recover_for_run(&owner, "run-1").await
            } else {
                recover_all(&owner).await
            }
        };
        let taking = tokio::spawn(taking.with_subscriber(log));
        tokio::time::sleep(Duration::from_millis(300)).await;
        relay.outbox().remove_workspace(&row).unwrap();
        drop(mirror);
        taking.await.unwrap().unwrap();
    }
    assert_eq!(fs::read_to_string(&log_file).unwrap(), "");
}

/// L7: A run that delivers an earlier run's work records that delivery in the earlier run's log.
#[tokio::test(flavor = "multi_thread")]
async fn delivering_another_runs_work_is_recorded_in_its_log() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let id = add_work(&github, "task-9").await;
    let (_, begun) = make_work(&github, &relay, "task-9", "run-2").await;
    assert!(begun.state.exists);
    let log = job_audit_log::log_path(&state_dir(&github), &id);
    assert_eq!(delivery_events(&log).first().unwrap(), r#"relay.resumed step="extracted""#);
    assert_eq!(verify::verify_file(&log, Some(signing_key().public_key())).unwrap().run, "task-9");
}

/// L7: A run does not begin while older work of its branch must be delivered first, because the run would block that
/// work for good. The refused run does not count as a delivery attempt.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_does_not_begin_before_older_work_is_delivered() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let id = add_work(&github, "task-9").await;
    let request = relay.outbox().get(&id).unwrap().request;
    let away = || {
        github.hub.inject(
            GithubOperation::Branch,
            InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
            3,
        );
    };
    let mut put_off = None;
    for _ in 0..2 {
        away();
        let begun =
            run_job::begin_run(&relay, &request.repository, request.branch().key(), Duration::ZERO);
        let error = begun.await.unwrap_err().to_string();
        insta::allow_duplicates!(
            insta::assert_snapshot!(error.replace(&id, "ID"), @"delivery `ID` of an earlier run must reach this branch first, and cannot be delivered now: GitHub has a temporary failure (502 Bad Gateway); try again later, or run `cogni-gateway relay retry ID`")
        );
        let row = relay.outbox().get(&id).unwrap();
        assert_eq!((row.step, row.attempts), (DeliveryStep::Extracted, 1));
        assert_eq!(*put_off.get_or_insert(row.due), row.due);
    }
    let (_, begun) = make_work(&github, &relay, "task-9", "run-2").await;
    assert!(begun.state.exists, "it does not build on the work before it");
    assert_eq!(relay.outbox().get(&id).unwrap().step, DeliveryStep::Done);
}

/// L6, L7: Work that has reached its branch blocks no run, although its pull request is still missing.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_does_not_wait_for_a_pull_request() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let id = add_work(&github, "task-9").await;
    github.hub.inject(
        GithubOperation::ListPulls,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        3,
    );
    let (_, begun) = make_work(&github, &relay, "task-9", "run-2").await;
    assert_eq!(relay.outbox().get(&id).unwrap().step, DeliveryStep::Pushed);
    assert!(begun.state.exists);
}

/// L7: Nothing further is done to a row whose log was changed from outside.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_whose_log_is_broken_is_not_touched() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let id = add_work(&github, "task-9").await;
    let log = job_audit_log::log_path(&state_dir(&github), &id);
    fs::create_dir_all(log.parent().unwrap()).unwrap();
    fs::write(&log, "nothing of ours\n").unwrap();
    let error = relay.resume_delivery(&id).await.unwrap_err();
    assert!(error.to_string().contains("keep the file for an investigation"), "{error}");
    assert_eq!(relay.outbox().get(&id).unwrap().step, DeliveryStep::Extracted);
    // The broken row does not block other rows.
    let other = add_work(&github, "task-8").await;
    let done = relay.resume_due_jobs(&CancellationToken::new()).await.unwrap();
    assert_eq!(delivery_ids(&done), [other]);
}

/// L7: A delivery that has failed too often ends, and its log says so.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_failure_is_in_the_log() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let id = add_work(&github, "task-9").await;
    let rows = rusqlite::Connection::open(state_dir(&github).join("outbox.sqlite")).unwrap();
    rows.execute("UPDATE job SET attempts = 1000", []).unwrap();
    github.hub.inject(
        GithubOperation::Branch,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        3,
    );
    assert_eq!(relay.resume_delivery(&id).await.unwrap().unwrap().step, "failed");
    insta::assert_snapshot!(delivery_events(&job_audit_log::log_path(&state_dir(&github), &id)).join("\n"), @r#"
    relay.resumed step="extracted"
    relay.held code="failed"
    "#);
}

/// L7: A full disk during the review says nothing about the work; the work is delivered when there is room.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_no_reason_to_hold_work() {
    let github = RunningGithub::start().await;
    let disk = SmallDisk::mount(1 << 20);
    fs::create_dir(disk.path("branches")).unwrap();
    fs::create_dir(state_dir(&github)).unwrap();
    symlink(disk.path("branches"), state_dir(&github).join("branches")).unwrap();
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "task-9", "run-1").await;
    disk.fill();
    let first = deliver_work(&relay, request, &begun).await;
    assert_eq!((first.step, first.is_pushed), ("extracted", false), "{:?}", first.why);
    insta::assert_snapshot!(first.why.unwrap(), @"`git index-pack` has failed (exit status: 128): fatal: write error: No space left on device");
    disk.free();
    drop(begun);
    assert_eq!(relay.resume_delivery(&first.id).await.unwrap().unwrap().step, "done");
}

/// L7: Everything that is due is delivered in one pass, except branches that a run holds.
#[tokio::test(flavor = "multi_thread")]
async fn everything_due_is_delivered_except_on_branches_of_runs() {
    let github = RunningGithub::start().await;
    let mut due = vec![];
    for at in 0..3 {
        due.push(add_work(&github, &format!("due-{at}")).await);
    }
    let relay = open_relay(&github);
    let request = relay.outbox().get(&due[1]).unwrap().request;
    let mirror = cogni_gateway::relay::repo::RepoMirror::open(
        relay.git(),
        &state_dir(&github),
        &request.repository,
    );
    let lease = mirror.unwrap().lease_branch(request.branch().key()).unwrap();

    let stopped = CancellationToken::new();
    stopped.cancel();
    assert!(relay.resume_due_jobs(&stopped).await.unwrap().is_empty(), "it has been told to stop");
    let (code, output) = super::killed::run_retry(&github, &["--due"]).await;
    assert_eq!(code, Some(0), "{output}");
    let mut lines: Vec<_> = output
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .map(|line| (line["id"].as_str().unwrap().to_owned(), line["step"] == "done"))
        .collect();
    lines.sort();
    assert_eq!(lines, [(due[0].clone(), true), (due[2].clone(), true)], "{output}");

    drop(lease);
    let left = relay.resume_due_jobs(&CancellationToken::new()).await.unwrap();
    assert_eq!((delivery_ids(&left), left[0].step), (vec![due[1].clone()], "done"));
    assert!(relay.resume_due_jobs(&CancellationToken::new()).await.unwrap().is_empty());
    assert_eq!(github.hub.pulls(NAME).len(), 3);
}

fn delivery_ids(delivered: &[DeliveryStatus]) -> Vec<String> {
    delivered.iter().map(|one| one.id.clone()).collect()
}
