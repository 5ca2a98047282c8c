//! L7: what is taken up later, by whom, and where that is written down.

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

use super::killed::{begin, state};
use super::run_job::{self, deliver, events, key, relay, work};
use crate::support::delivery::plan;
use crate::support::github_server::{NAME, Running};
use crate::support::small_disk::Disk;

/// L7: the run's log is closed when its work goes on, so what is done then is in the row's own, which is proved like it.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_done_later_is_in_the_rows_own_log() {
    let forge = Running::start().await;
    let relay = relay(&forge);
    let (order, begun) = work(&forge, &relay, "task-9", "run-1").await;
    forge.hub.inject(
        GithubOperation::Branch,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        3,
    );
    forge.hub.inject(
        GithubOperation::ListPulls,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        3,
    );
    let first = deliver(&relay, order, &begun).await;
    assert_eq!((first.step, first.audit), ("extracted", None), "{:?}", first.why);
    drop(begun);
    let second = relay.resume_delivery(&first.id).await.unwrap().unwrap();
    assert_eq!((second.step, &second.why.unwrap()[..17]), ("pushed", "GitHub is unwell "));
    let third = relay.resume_delivery(&first.id).await.unwrap().unwrap();
    let log = third.audit.unwrap();
    insta::assert_snapshot!(events(&log).join("\n"), @r#"
    relay.resumed step="extracted"
    relay.judged verdict="push" mode="replayed" files=1
    relay.pushed was_there=false
    relay.resumed step="pushed"
    relay.pushed was_there=true
    relay.pull_requested is_new=true
    "#);
    let report = verify::verify_file(&log, Some(key().public_key())).unwrap();
    assert_eq!((report.run.as_str(), report.starts, report.finished), ("run-1", 2, true));
}

/// L7: a row that goes after it was listed was taken up by who was at its branch. That is no fault, and nobody is warned.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_goes_meanwhile_is_taken_for_taken_up() {
    let forge = Running::start().await;
    let relay = relay(&forge);
    let (order, begun) = work(&forge, &relay, "task-9", "run-1").await;
    drop(begun);
    let plan = plan(&order);
    let mirrors = fs::read_dir(state(&forge).join("mirrors")).unwrap();
    let mut mirrors = mirrors.map(|entry| entry.unwrap().path());
    let lock = mirrors.find(|path| path.extension().is_some_and(|end| end == "lock")).unwrap();
    let said = NamedTempFile::new().unwrap();
    for is_asked_by_run in [true, false] {
        let desk =
            relay.outbox().register_workspace(&plan, &plan.artifacts.join("workspace")).unwrap();
        // Whoever takes it up has listed it, and waits for this.
        let mirror = File::open(&lock).unwrap();
        mirror.lock().unwrap();
        let log = said.reopen().unwrap();
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
        relay.outbox().remove_workspace(&desk).unwrap();
        drop(mirror);
        taking.await.unwrap().unwrap();
    }
    assert_eq!(fs::read_to_string(&said).unwrap(), "");
}

/// L7: a run that comes to a branch writes down what it delivers there for another.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_run_delivers_for_another_is_in_the_others_log() {
    let forge = Running::start().await;
    let relay = relay(&forge);
    let id = begin(&forge, "task-9").await;
    let (_, begun) = work(&forge, &relay, "task-9", "run-2").await;
    assert!(begun.state.exists);
    let log = job_audit_log::log_path(&state(&forge), &id);
    assert_eq!(events(&log).first().unwrap(), r#"relay.resumed step="extracted""#);
    assert_eq!(verify::verify_file(&log, Some(key().public_key())).unwrap().run, "task-9");
}

/// L7: a run does not begin beside work that is still to come to its branch: it would be in the way of that for good. That it
/// has come in vain is no attempt of the work's.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_waits_for_what_its_branch_waits_for() {
    let forge = Running::start().await;
    let relay = relay(&forge);
    let id = begin(&forge, "task-9").await;
    let order = relay.outbox().get(&id).unwrap().order;
    let away = || {
        forge.hub.inject(
            GithubOperation::Branch,
            InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
            3,
        );
    };
    let mut put_off = None;
    for _ in 0..2 {
        away();
        let begun = run_job::begin(&relay, &order.repository, order.branch().key(), Duration::ZERO);
        let error = begun.await.unwrap_err().to_string();
        insta::allow_duplicates!(
            insta::assert_snapshot!(error.replace(&id, "ID"), @"relay `ID` has to come to this branch first, and cannot be delivered yet: GitHub is unwell (502 Bad Gateway); try again later, or run `cogni-gateway relay retry ID`")
        );
        let row = relay.outbox().get(&id).unwrap();
        assert_eq!((row.step, row.attempts), (DeliveryStep::Extracted, 1));
        assert_eq!(*put_off.get_or_insert(row.due), row.due);
    }
    let (_, begun) = work(&forge, &relay, "task-9", "run-2").await;
    assert!(begun.state.exists, "it does not build on the work before it");
    assert_eq!(relay.outbox().get(&id).unwrap().step, DeliveryStep::Done);
}

/// L6, L7: what is at its branch is in nobody's way, whatever is still to be done about it.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_does_not_wait_for_a_pull_request() {
    let forge = Running::start().await;
    let relay = relay(&forge);
    let id = begin(&forge, "task-9").await;
    forge.hub.inject(
        GithubOperation::ListPulls,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        3,
    );
    let (_, begun) = work(&forge, &relay, "task-9", "run-2").await;
    assert_eq!(relay.outbox().get(&id).unwrap().step, DeliveryStep::Pushed);
    assert!(begun.state.exists);
}

/// L7: where the row's log was changed by somebody, nothing more is done to it.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_whose_log_is_broken_is_left_alone() {
    let forge = Running::start().await;
    let relay = relay(&forge);
    let id = begin(&forge, "task-9").await;
    let log = job_audit_log::log_path(&state(&forge), &id);
    fs::create_dir_all(log.parent().unwrap()).unwrap();
    fs::write(&log, "nothing of ours\n").unwrap();
    let error = relay.resume_delivery(&id).await.unwrap_err();
    assert!(error.to_string().contains("it is evidence now"), "{error}");
    assert_eq!(relay.outbox().get(&id).unwrap().step, DeliveryStep::Extracted);
    // And it holds nothing else up.
    let other = begin(&forge, "task-8").await;
    let done = relay.resume_due_jobs(&CancellationToken::new()).await.unwrap();
    assert_eq!(ids(&done), [other]);
}

/// L7: what has been tried often enough is at its end, and its log says so.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_failure_is_in_the_log() {
    let forge = Running::start().await;
    let relay = relay(&forge);
    let id = begin(&forge, "task-9").await;
    let rows = rusqlite::Connection::open(state(&forge).join("outbox.sqlite")).unwrap();
    rows.execute("UPDATE job SET attempts = 1000", []).unwrap();
    forge.hub.inject(
        GithubOperation::Branch,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        3,
    );
    assert_eq!(relay.resume_delivery(&id).await.unwrap().unwrap().step, "failed");
    insta::assert_snapshot!(events(&job_audit_log::log_path(&state(&forge), &id)).join("\n"), @r#"
    relay.resumed step="extracted"
    relay.held code="failed"
    "#);
}

/// L7: a disk that is full where work is looked at says nothing about the work: it is delivered when there is room.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_no_reason_to_hold_work() {
    let forge = Running::start().await;
    let disk = Disk::mount(1 << 20);
    fs::create_dir(disk.path("branches")).unwrap();
    fs::create_dir(state(&forge)).unwrap();
    symlink(disk.path("branches"), state(&forge).join("branches")).unwrap();
    let relay = relay(&forge);
    let (order, begun) = work(&forge, &relay, "task-9", "run-1").await;
    disk.fill();
    let first = deliver(&relay, order, &begun).await;
    assert_eq!((first.step, first.is_pushed), ("extracted", false), "{:?}", first.why);
    insta::assert_snapshot!(first.why.unwrap(), @"`git index-pack` has failed (exit status: 128): fatal: write error: No space left on device");
    disk.free();
    drop(begun);
    assert_eq!(relay.resume_delivery(&first.id).await.unwrap().unwrap().step, "done");
}

/// L7: what is due on all branches is delivered in one go, but for those that a run is at.
#[tokio::test(flavor = "multi_thread")]
async fn all_that_is_due_is_delivered_but_where_a_run_is() {
    let forge = Running::start().await;
    let mut due = vec![];
    for at in 0..3 {
        due.push(begin(&forge, &format!("due-{at}")).await);
    }
    let relay = relay(&forge);
    let order = relay.outbox().get(&due[1]).unwrap().order;
    let mirror = cogni_gateway::relay::repo::RepoMirror::open(
        relay.git(),
        &state(&forge),
        &order.repository,
    );
    let lease = mirror.unwrap().lease_branch(order.branch().key()).unwrap();

    let stopped = CancellationToken::new();
    stopped.cancel();
    assert!(relay.resume_due_jobs(&stopped).await.unwrap().is_empty(), "it has been told to stop");
    let (code, said) = super::killed::retry(&forge, &["--due"]).await;
    assert_eq!(code, Some(0), "{said}");
    let mut told: Vec<_> = said
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .map(|line| (line["id"].as_str().unwrap().to_owned(), line["step"] == "done"))
        .collect();
    told.sort();
    assert_eq!(told, [(due[0].clone(), true), (due[2].clone(), true)], "{said}");

    drop(lease);
    let left = relay.resume_due_jobs(&CancellationToken::new()).await.unwrap();
    assert_eq!((ids(&left), left[0].step), (vec![due[1].clone()], "done"));
    assert!(relay.resume_due_jobs(&CancellationToken::new()).await.unwrap().is_empty());
    assert_eq!(forge.hub.pulls(NAME).len(), 3);
}

fn ids(delivered: &[DeliveryStatus]) -> Vec<String> {
    delivered.iter().map(|one| one.id.clone()).collect()
}
