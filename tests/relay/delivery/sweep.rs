//! Tests of the sweep: what is removed after some time, and what is kept.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use cogni_gateway::relay::delivery::outbox::StepOutcome;
use cogni_gateway::relay::delivery::sweep::{RelaySweepReport, sweep_relay_state};
use cogni_gateway::relay::repo::BranchLease;

use super::killed::{add_work, state_dir};
use super::run_job::{deliver_work, make_work, open_relay};
use crate::support::github_server::RunningGithub;
use crate::support::repository::run_git;

/// L4, L5: Delivered work and unused mirrors are removed. Undelivered work is kept with everything that it needs.
#[tokio::test(flavor = "multi_thread")]
async fn data_without_a_use_is_removed() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    let (request, begun) = make_work(&github, &relay, "done", "run-1").await;
    let artifacts = request.artifacts.clone();
    assert_eq!(deliver_work(&relay, request, &begun).await.step, "done");
    drop(begun);
    assert!(!artifacts.exists());
    // The state after a process was killed between writing the row and removing the directory.
    fs::create_dir(&artifacts).and_then(|()| fs::write(artifacts.join("bundle"), "")).unwrap();
    let (state, outbox, age) = (state_dir(&github), relay.outbox(), Duration::from_hours(2));
    let works = RelaySweepReport { works: 1, ..RelaySweepReport::default() };
    let removed = sweep_relay_state(&state, outbox, age, SystemTime::now()).unwrap();
    assert_eq!((removed, artifacts.exists()), (works, false));
    let held = add_work(&github, "held").await;
    let row = outbox.get(&held).unwrap();
    let row = outbox
        .advance_job(&row, StepOutcome::Held { code: "policy", why: "it is ours".to_owned() })
        .unwrap();
    let workspace = state.join("work/kept/workspace");
    fs::create_dir_all(&workspace).unwrap();
    let branches = fs::read_dir(state.join("branches")).unwrap().next().unwrap().unwrap().path();
    let names = |path: &Path| {
        let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
        entries.collect::<Vec<_>>()
    };
    assert_eq!(names(&branches.join("done")), ["lease"], "nothing stays in quarantine");
    let left = branches.join("done/objects");
    fs::create_dir(&left).unwrap();

    let removed = sweep_relay_state(&state, outbox, age, SystemTime::now()).unwrap();
    assert_eq!(removed, RelaySweepReport::default(), "all is young");
    assert!(!left.exists(), "what a killed run left in quarantine goes at once");
    let mirror = fs::read_dir(state.join("mirrors")).unwrap().map(|entry| entry.unwrap().path());
    let mirror = mirror.into_iter().find(|path| path.is_dir()).unwrap();
    for path in [&state.join("work/kept"), &row.request.artifacts, &mirror.join("relay-made")] {
        grow_old(path);
    }
    let removed = sweep_relay_state(&state, outbox, age, SystemTime::now()).unwrap();
    assert_eq!(removed, works, "the held work needs its mirror");
    assert!(
        row.request.artifacts.join("bundle").exists() && !workspace.exists() && mirror.exists()
    );

    outbox.restart(&row).unwrap();
    assert_eq!(relay.resume_delivery(&held).await.unwrap().unwrap().step, "done");
    // A run that holds a branch has used the mirror, so the mirror is not old.
    let lease =
        BranchLease::try_acquire(&branches, &"busy".to_owned().try_into().unwrap()).unwrap();
    assert_eq!(
        sweep_relay_state(&state, outbox, age, SystemTime::now()).unwrap(),
        RelaySweepReport::default()
    );
    drop(lease);
    grow_old(&mirror.join("relay-made"));
    let removed = sweep_relay_state(&state, outbox, age, SystemTime::now()).unwrap();
    assert_eq!(removed, RelaySweepReport { mirrors: 1, ..RelaySweepReport::default() });
    let (_, begun) = make_work(&github, &relay, "done", "run-2").await;
    assert!(begun.state.exists, "the mirror is made anew");
    assert_eq!(outbox.list_jobs(false).unwrap().len(), 2);
    let tomorrow = SystemTime::now() + Duration::from_hours(24);
    assert_eq!(
        (outbox.remove_delivered(tomorrow).unwrap(), outbox.list_jobs(false).unwrap().len()),
        (2, 0)
    );
}

/// L4: If a power cut or a person has removed a lease's file, the sweep continues and removes what is old.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_lease_file_ends_no_sweep() {
    let github = RunningGithub::start().await;
    let relay = open_relay(&github);
    for key in ["old", "young", "other"] {
        drop(make_work(&github, &relay, key, key).await);
    }
    let state = state_dir(&github);
    let branches = fs::read_dir(state.join("branches")).unwrap().next().unwrap().unwrap().path();
    let mirror = state.join("mirrors").join(branches.file_name().unwrap()).with_extension("git");
    for key in ["old", "young"] {
        fs::remove_file(branches.join(key).join("lease")).unwrap();
    }
    fs::create_dir(branches.join("young/objects")).unwrap();
    grow_old(&branches.join("old"));
    sweep_relay_state(&state, relay.outbox(), Duration::from_hours(2), SystemTime::now()).unwrap();
    let refs = run_git(&mirror, &["for-each-ref", "--format=%(refname)"]);
    let is_there = |key: &str| refs.contains(&format!("/{key}/"));
    assert_eq!(["old", "young", "other"].map(is_there), [false, true, true], "{refs}");
    assert!(!branches.join("young/objects").exists(), "what was left there stays");
}

fn grow_old(path: &Path) {
    let then = SystemTime::now() - Duration::from_hours(3);
    File::open(path).unwrap().set_modified(then).unwrap();
}
