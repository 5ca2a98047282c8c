//! Tests of the outbox, whose rows record how far a run's delivery has come.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime};

use cogni_gateway::relay::delivery::outbox::{
    DeliveryJob, DeliveryOutbox, DeliveryPlan, DeliveryRequest, DeliveryStep, OutboxError,
    PullRequestRef, RetainedTotals, StepOutcome, UndeliveredTotals, VerdictKind,
};
use cogni_gateway::relay::repo::review::{self, ReviewAction, ReviewReason};
use cogni_gateway::relay::repo::{BranchKey, BranchLease, ObjectId};
use cogni_gateway::runner::long_running::workspace_store::{
    PruneOutcome, StoredBranchRef, WorkspaceStore, has_pending_delivery,
};
use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use crate::support::delivery::{delivery_plan, delivery_request, parse_sha};

/// L7: A row is there for the next process, readable by its owner only.
#[test]
fn a_row_outlives_its_process() {
    let place = tempfile::tempdir().unwrap();
    let written = {
        let outbox = open_outbox(&place);
        let job =
            outbox.claim_job(&outbox.add_job(&delivery_request("run-1")).unwrap(), 3).unwrap();
        let job = outbox.advance_job(&job, quarantined_step()).unwrap();
        outbox
            .advance_job(&job, reviewed_step(review::ReviewVerdict::Review(review_reasons())))
            .unwrap()
    };
    let read = open_outbox(&place).get(&written.id).unwrap();
    assert_eq!(read, written);
    assert_eq!(
        (read.step, read.verdict, read.fence),
        (DeliveryStep::Judged, Some(VerdictKind::Review), 3)
    );
    assert_eq!((read.head, &read.request), (Some(parse_sha("tip")), &delivery_request("run-1")));
    assert_eq!((read.reasons, read.mode.as_deref()), (review_reasons(), Some("bundled: merge")));
    for file in fs::read_dir(place.path().join("state")).unwrap() {
        assert_eq!(file.unwrap().metadata().unwrap().mode() & 0o77, 0);
    }
}

/// L7: The same work of the same run is one row, however often it is added. Other work of that run is another row, even
/// if its tree is the same.
#[test]
fn the_same_work_is_the_same_row() {
    let place = tempfile::tempdir().unwrap();
    let outbox = open_outbox(&place);
    let first = outbox.add_job(&delivery_request("run-1")).unwrap();
    let moved = outbox.advance_job(&first, quarantined_step()).unwrap();
    assert_eq!(outbox.add_job(&delivery_request("run-1")).unwrap(), moved);
    assert_ne!(outbox.add_job(&delivery_request("run-2")).unwrap().id, first.id);
    let other =
        DeliveryRequest { artifacts: "/somewhere/else".into(), ..delivery_request("run-1") };
    let second = outbox.add_job(&other).unwrap();
    assert_ne!(second.id, first.id);
    assert_eq!(second.step, DeliveryStep::Extracted);
}

/// L7: No step can be skipped, and none is undone.
#[test]
fn steps_come_in_their_order() {
    let place = tempfile::tempdir().unwrap();
    let outbox = open_outbox(&place);
    let ways = |from: DeliveryStep| {
        let to = DeliveryStep::ALL
            .into_iter()
            .filter(|to| from.can_transition_to(*to))
            .map(DeliveryStep::as_str);
        let to = to.collect::<Vec<_>>().join(", ");
        format!("{from} → {}", if to.is_empty() { "nothing" } else { &to })
    };
    insta::assert_snapshot!(DeliveryStep::ALL.map(ways).join("\n"), @r"
    extracted → quarantined, held, failed
    quarantined → judged, held, failed
    judged → judged, pushed, held, failed
    pushed → pull_requested, done, held, failed
    pull_requested → done, held, failed
    done → nothing
    held → nothing
    failed → nothing
    ");
    let job = outbox.add_job(&delivery_request("run-1")).unwrap();
    for progress in
        [StepOutcome::Pushed, reviewed_step(review::ReviewVerdict::Push), StepOutcome::Done]
    {
        let error = outbox.advance_job(&job, progress).unwrap_err();
        assert!(matches!(error, OutboxError::InvalidTransition { .. }), "{error}");
    }
}

/// L7: A process with an outdated view of the row, or without the branch's lease, changes nothing.
#[test]
fn a_late_writer_moves_nothing() {
    let place = tempfile::tempdir().unwrap();
    let outbox = open_outbox(&place);
    let old = outbox.claim_job(&outbox.add_job(&delivery_request("run-1")).unwrap(), 1).unwrap();
    outbox.advance_job(&old, quarantined_step()).unwrap();
    assert!(matches!(
        outbox.advance_job(&old, quarantined_step()),
        Err(OutboxError::ChangedConcurrently { .. })
    ));
    let now = outbox.get(&old.id).unwrap();
    outbox.claim_job(&now, 2).unwrap();
    assert!(matches!(
        outbox.advance_job(&now, reviewed_step(review::ReviewVerdict::Push)),
        Err(OutboxError::Fenced { .. })
    ));
    assert!(matches!(outbox.claim_job(&now, 1), Err(OutboxError::Fenced { .. })));
}

/// L7: If many processes attempt the same step, one of them succeeds.
#[test]
fn one_of_many_processes_takes_a_step() {
    let place = tempfile::tempdir().unwrap();
    let job = open_outbox(&place).add_job(&delivery_request("run-1")).unwrap();
    let taken = thread::scope(|scope| {
        let all: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| open_outbox(&place).advance_job(&job, quarantined_step()).is_ok())
            })
            .collect();
        all.into_iter().map(|one| one.join().unwrap()).filter(|is| *is).count()
    });
    assert_eq!(taken, 1);
}

/// L7: A rescheduled row is due at its time, and a finished row is never due.
#[test]
fn a_rescheduled_row_is_due_at_its_time() {
    let place = tempfile::tempdir().unwrap();
    let outbox = open_outbox(&place);
    let job = outbox.add_job(&delivery_request("run-1")).unwrap();
    let why = format!("GitHub has a temporary failure\n{}", "x".repeat(900));
    let later = outbox.reschedule_after_failure(&job, Duration::from_mins(10), &why).unwrap();
    let error = later.error.unwrap();
    assert!(error.len() == 500 && !error.contains('\n'));
    let due =
        |after| outbox.due_jobs(SystemTime::now() + Duration::from_mins(after)).unwrap().len();
    assert_eq!([due(0), due(11)], [0, 1]);
    assert_eq!(pending_jobs(&outbox).unwrap().len(), 1);
    // The clock was a hundred days ahead when this row was written.
    let days = Duration::from_hours(24 * 100);
    assert_eq!(outbox.due_jobs(SystemTime::now() - days).unwrap().len(), 1);
    let waiting = outbox.get(&job.id).unwrap();
    let ahead = DeliveryJob { due: SystemTime::now() + days, ..waiting.clone() };
    assert!(ahead.is_due());
    let put_off = outbox.reschedule(&ahead, Duration::ZERO, "the clock is right again").unwrap();
    assert!(put_off.due <= SystemTime::now() && put_off.is_due());
    outbox.reschedule(&waiting, Duration::ZERO, &why).unwrap();

    let job = outbox.get(&job.id).unwrap();
    let put_off = outbox.reschedule(&job, Duration::ZERO, "a run has come").unwrap();
    assert_eq!((put_off.attempts, put_off.due), (1, job.due));
    let claimed = outbox.claim_job(&put_off, 1).unwrap();
    let job = outbox.reschedule_after_failure(&claimed, Duration::from_mins(10), "again").unwrap();
    assert_eq!(job.attempts, 2);
    let held = outbox
        .advance_job(&job, StepOutcome::Held { code: "policy", why: "a workflow".to_owned() })
        .unwrap();
    assert_eq!([due(11), outbox.list_jobs(true).unwrap().len()], [0, 0]);
    assert_eq!(outbox.list_jobs(false).unwrap().first(), Some(&held));
    let again = outbox.restart(&held).unwrap();
    assert_eq!((again.step, again.error, due(0)), (DeliveryStep::Extracted, None, 1));
    assert_eq!(again.attempts, 0, "an operator has asked for a new attempt");
}

/// R6: While work of a branch is under way, the workspace of its long-running sandbox is kept; afterwards it may be
/// removed.
#[test]
fn work_under_way_keeps_a_workspace() {
    let place = tempfile::tempdir().unwrap();
    let home = place.path().join("workspaces/0123456789abcdef0123456789abcdef");
    fs::create_dir_all(home.join("workspace")).unwrap();
    let order = delivery_request("run-1");
    let branch_key = order.branch().key().as_str().to_owned();
    let line = StoredBranchRef { repository: order.repository.canonical_key(), branch_key };
    let label = json!({"agent": "coder", "branch": "task 1", "line": line});
    fs::write(home.join("label.json"), label.to_string()).unwrap();

    let (outbox, shelf) = (open_outbox(&place), WorkspaceStore::in_state_dir(place.path()));
    let kept = shelf.list().unwrap().remove(0);
    let is_awaited = |line: &StoredBranchRef| has_pending_delivery(&outbox, line);
    let job = outbox.add_job(&order).unwrap();
    assert_eq!(
        shelf.prune_decision(&kept, Duration::ZERO, is_awaited),
        PruneOutcome::DeliveryPending
    );
    assert_eq!(shelf.prune(&kept, Duration::ZERO, is_awaited), PruneOutcome::DeliveryPending);
    assert!(home.exists());
    outbox.advance_job(&job, StepOutcome::Failed { why: "it is refused".to_owned() }).unwrap();
    assert_eq!(shelf.prune(&kept, Duration::ZERO, is_awaited), PruneOutcome::Removed);
    assert!(!home.exists());
}

/// L7: Rows of an earlier version are read one by one, and the same run may add more.
#[test]
fn rows_of_an_earlier_version_are_read() {
    let place = tempfile::tempdir().unwrap();
    fs::create_dir(place.path().join("state")).unwrap();
    let path = place.path().join("state/relay.sqlite");
    let connection = rusqlite::Connection::open(&path).unwrap();
    connection.execute_batch(include_str!("outbox/first.sql")).unwrap();
    let text = serde_json::to_value(delivery_request("run-1")).unwrap();
    let mut old = text.as_object().unwrap().clone();
    old.remove("host");
    old.remove("rules");
    let given = (serde_json::to_string(&old).unwrap(), "/somewhere/run-1");
    let insert = "INSERT INTO job (id, repository, branch_key, run, tree, \"order\", artifacts, step, verdict, due, created, updated) \
                  VALUES ('one', 'github.com/acme/site', 'task-1', 'run-1', 't', ?1, ?2, 'held', 'hold', 1, 1, 1)";
    connection.execute(insert, given).unwrap();
    drop(connection);
    let outbox = open_outbox(&place);
    let job = outbox.get("one").unwrap();
    assert_eq!(
        (job.step, job.verdict, &job.request),
        (DeliveryStep::Held, Some(VerdictKind::Hold), &delivery_request("run-1"))
    );
    let other =
        DeliveryRequest { artifacts: "/somewhere/else".into(), ..delivery_request("run-1") };
    assert_ne!(outbox.add_job(&other).unwrap().id, "one");
    assert_eq!(outbox.list_jobs(false).unwrap().len(), 2);
}

/// L7: A row that was written before types and fields got their present names is read and written as before.
#[test]
fn a_row_of_an_earlier_program_is_read_and_written_as_it_was() {
    let place = tempfile::tempdir().unwrap();
    fs::create_dir(place.path().join("state")).unwrap();
    let connection = rusqlite::Connection::open(place.path().join("state/relay.sqlite")).unwrap();
    connection.execute_batch(include_str!("../../fixtures/earlier/outbox.sql")).unwrap();
    let stored: String =
        connection.query_row("SELECT \"order\" FROM job", [], |row| row.get(0)).unwrap();
    drop(connection);
    let job = open_outbox(&place).get("01a207e45e88712d8b4cbc71c048a699").unwrap();
    assert_eq!((job.step, job.verdict), (DeliveryStep::Held, Some(VerdictKind::Hold)));
    assert_eq!(job.request.repository.canonical_key(), "file:///srv/earlier/bare.git");
    let mut stored: serde_json::Value = serde_json::from_str(&stored).unwrap();
    // The state directory of the fixture has moved here.
    let work = place.path().join("state/work/01a207e45e62737786ca9226a89011f9");
    stored["artifacts"] = work.to_str().unwrap().into();
    assert_eq!(serde_json::to_value(&job.request).unwrap(), stored);
}

/// L5: The rows of a copied state directory name the copied work. So a copy that discards work leaves the original as it
/// is, and another name of the same directory changes no row.
#[test]
fn a_copied_outbox_names_its_own_work() {
    let place = tempfile::tempdir().unwrap();
    let (original, copy) = (place.path().join("original"), place.path().join("copy"));
    let outbox = DeliveryOutbox::open(&original.join("outbox.sqlite")).unwrap();
    let request = |run: &str| DeliveryRequest {
        artifacts: original.join("work").join(run),
        ..delivery_request(run)
    };
    let job = outbox.add_job(&request("run-1")).unwrap();
    let order = request("run-2");
    let workspace = order.artifacts.join("workspace");
    let desk = outbox.register_workspace(&delivery_plan(&order), &workspace).unwrap();
    outbox.retain_workspace(&desk, &workspace, "files").unwrap();
    drop(outbox);
    fs::create_dir_all(&workspace).unwrap();
    assert!(Command::new("cp").arg("-a").args([&original, &copy]).status().unwrap().success());

    let copied = DeliveryOutbox::open(&copy.join("outbox.sqlite")).unwrap();
    assert_eq!(copied.get(&job.id).unwrap().request.artifacts, copy.join("work/run-1"));
    assert_eq!(copied.workspace(&desk.id).unwrap().workspace, copy.join("work/run-2/workspace"));
    copied.discard_item(&desk.id).unwrap();
    assert!(workspace.exists() && !copy.join("work/run-2").exists());

    let second = place.path().join("second");
    assert!(Command::new("cp").arg("-a").args([&original, &second]).status().unwrap().success());
    let file = second.join("outbox.sqlite");
    let damage = "UPDATE job SET \"order\" = '{'";
    rusqlite::Connection::open(&file).unwrap().execute(damage, []).unwrap();
    let damaged =
        DeliveryOutbox::open(&file).expect("one damaged row keeps no outbox from opening");
    assert_eq!(damaged.workspace(&desk.id).unwrap().workspace, second.join("work/run-2/workspace"));

    let alias = place.path().join("alias");
    std::os::unix::fs::symlink(&original, &alias).unwrap();
    let same = DeliveryOutbox::open(&alias.join("outbox.sqlite")).unwrap();
    assert_eq!(same.get(&job.id).unwrap().request.artifacts, original.join("work/run-1"));
}

/// L7: Work that is collected from a workspace replaces the workspace's row and takes its id.
#[test]
fn a_workspace_row_becomes_the_row_of_its_work() {
    let place = tempfile::tempdir().unwrap();
    let outbox = open_outbox(&place);
    let order = delivery_request("run-1");
    let plan = delivery_plan(&order);
    let desk = outbox.register_workspace(&plan, &plan.artifacts.join("workspace")).unwrap();
    assert_eq!((outbox.workspaces().unwrap(), desk.is_exclusive()), (vec![desk.clone()], true));
    assert!(matches!(outbox.discard_item(&desk.id), Err(OutboxError::StillNeeded { .. })));
    assert_eq!(outbox.add_job(&order).unwrap().id, desk.id);
    assert_eq!(outbox.workspaces().unwrap(), []);
    assert!(matches!(outbox.discard_item(&desk.id), Err(OutboxError::StillNeeded { .. })));

    let plan = DeliveryPlan { artifacts: place.path().join("kept"), ..plan };
    let desk = outbox.register_workspace(&plan, Path::new("/of/others")).unwrap();
    let key = order.branch().key();
    assert_eq!(outbox.workspaces_at(&order.repository, key).unwrap(), std::slice::from_ref(&desk));
    let kept = plan.artifacts.join("workspace");
    fs::create_dir_all(&kept).unwrap();
    let left = outbox.retain_workspace(&desk, &kept, "files").unwrap();
    assert_eq!(
        (left.left.as_deref(), &left.workspace, left.is_exclusive()),
        (Some("files"), &kept, true)
    );
    assert_eq!(outbox.workspaces_at(&order.repository, key).unwrap(), []);
    outbox.discard_item(&left.id).unwrap();
    assert!(outbox.workspaces().unwrap().is_empty() && !plan.artifacts.exists());
}

/// L7: A workspace whose collection failed because of this machine has a due time and is open until then; one that
/// waits for a person has none.
#[test]
fn a_rescheduled_workspace_is_open_and_has_a_due_time() {
    let place = tempfile::tempdir().unwrap();
    let outbox = open_outbox(&place);
    let order = delivery_request("run-1");
    let plan = delivery_plan(&order);
    let desk = outbox.register_workspace(&plan, &plan.artifacts.join("workspace")).unwrap();
    assert!(desk.needs_collection() && desk.is_due());
    let hour = Duration::from_hours(1);
    let put_off = outbox.reschedule_workspace(&desk, hour, "the disk is full").unwrap();
    assert_eq!((put_off.left.as_deref(), put_off.attempts), (Some("the disk is full"), 1));
    assert!(put_off.needs_collection() && !put_off.is_due() && !put_off.needs_archiving());
    let key = order.branch().key();
    assert_eq!(
        outbox.workspaces_at(&order.repository, key).unwrap(),
        std::slice::from_ref(&put_off)
    );
    // A person's attempt before that time has not waited for disk space.
    let again = outbox.reschedule_workspace(&put_off, Duration::ZERO, "the disk is full").unwrap();
    assert_eq!((again.attempts, again.due), (1, put_off.due));
    let left = outbox.retain_workspace(&again, &again.workspace, "files").unwrap();
    assert!(!left.needs_collection() && left.due.is_none());

    let put_off = outbox.reschedule_workspace(&left, hour, "the disk is full").unwrap();
    let beside = DeliveryRequest { artifacts: "/somewhere/else".into(), ..order };
    let (_, left) = outbox.add_keeping_workspace(&beside, &put_off, "commits").unwrap();
    assert!(left.due.is_none(), "what is delivered would come out again");
}

/// L3, L7: The delivered work and the remaining files of a workspace are written in one transaction. The known id stays
/// with the work.
#[test]
fn the_rest_of_a_workspace_is_written_with_its_work() {
    let place = tempfile::tempdir().unwrap();
    let outbox = open_outbox(&place);
    let plan = delivery_plan(&delivery_request("run-1"));
    let shared = outbox.register_workspace(&plan, Path::new("/of/others")).unwrap();
    let beside =
        DeliveryRequest { artifacts: "/somewhere/else".into(), ..delivery_request("run-1") };
    let (job, left) = outbox.add_keeping_workspace(&beside, &shared, "commits").unwrap();
    assert_eq!((&job.id, &job.request, job.step), (&shared.id, &beside, DeliveryStep::Extracted));
    assert_eq!(outbox.workspaces().unwrap(), std::slice::from_ref(&left));
    assert_eq!((left.left.as_deref(), &left.workspace), (Some("commits"), &shared.workspace));
    // The rest must still be archived before another run uses the workspace.
    assert!(left.id != job.id && left.needs_collection());
    let key = beside.branch().key();
    assert_eq!(outbox.workspaces_at(&beside.repository, key).unwrap(), std::slice::from_ref(&left));
    let put = outbox.retain_workspace(&left, &plan.artifacts.join("workspace"), "commits").unwrap();
    assert!(
        !put.needs_collection()
            && outbox.workspaces_at(&beside.repository, key).unwrap().is_empty()
    );

    let again = outbox.add_keeping_workspace(&beside, &shared, "commits");
    assert!(matches!(again, Err(OutboxError::NoSuchDelivery(_))));
    assert_eq!(outbox.list_jobs(false).unwrap().len(), 1);
}

/// L7: A path that cannot be written as text is refused, without further effects.
#[test]
fn a_path_that_is_no_text_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let outbox = open_outbox(&place);
    let odd = PathBuf::from(OsStr::from_bytes(b"/run/\xff"));
    let plan = DeliveryPlan { run_dir: odd.clone(), ..delivery_plan(&delivery_request("run-1")) };
    let refused = outbox.register_workspace(&plan, Path::new("/of/others")).unwrap_err();
    insta::assert_snapshot!(refused, @"the outbox cannot store a path that is not UTF-8");
    let order = DeliveryRequest { artifacts: odd, ..delivery_request("run-1") };
    assert!(matches!(outbox.add_job(&order), Err(OutboxError::PathNotUtf8(_))));
    assert!(outbox.workspaces().unwrap().is_empty() && outbox.list_jobs(false).unwrap().is_empty());
}

/// L7: A lost or emptied lease file does not block rows of its earlier holders.
#[test]
fn a_lost_lease_file_blocks_no_row() {
    let place = tempfile::tempdir().unwrap();
    let outbox = open_outbox(&place);
    let key = BranchKey::parse("task-1").unwrap();
    let first = BranchLease::try_acquire(place.path(), &key).unwrap();
    let job = outbox
        .claim_job(&outbox.add_job(&delivery_request("run-1")).unwrap(), first.fence())
        .unwrap();
    drop(first);
    let file = place.path().join("task-1/lease");
    for harm in [|path: &Path| fs::write(path, ""), |path: &Path| fs::remove_file(path)] {
        harm(&file).unwrap();
        let lease = BranchLease::try_acquire(place.path(), &key).unwrap();
        assert!(lease.fence() > 1);
        outbox.claim_job(&job, lease.fence()).unwrap();
    }
}

/// L7: A database of a later version is not touched.
#[test]
fn a_database_of_a_later_version_is_not_touched() {
    let place = tempfile::tempdir().unwrap();
    drop(open_outbox(&place));
    let path = place.path().join("state/relay.sqlite");
    let connection = rusqlite::Connection::open(&path).unwrap();
    connection.pragma_update(None, "user_version", 99).unwrap();
    let error = DeliveryOutbox::open(&path).unwrap_err();
    insta::assert_snapshot!(error, @"the outbox is of a later version (99; this program knows 6)");
}

proptest! {
    // Each case waits for the disk many times.
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// L7: Whatever point processes end at, there is one update of the branch and one pull request.
    #[test]
    fn a_crash_anywhere_brings_one_update_and_one_pull_request(
        crashes in proptest::collection::vec(0_u32..14, 0..6),
    ) {
        let place = tempfile::tempdir().unwrap();
        let mut world = OutsideState::default();
        for (fence, fuel) in crashes.into_iter().chain([u32::MAX]).enumerate() {
            let mut process = OutboxProcess { outbox: open_outbox(&place), world: &mut world, fuel };
            let _ = process.deliver(fence as u64);
        }
        prop_assert_eq!(world.branch, Some(parse_sha("tip")));
        prop_assert_eq!((world.updates, world.pulls.len()), (1, 1));
        let jobs = open_outbox(&place).list_jobs(false).unwrap();
        prop_assert_eq!(jobs.iter().map(|job| job.step).collect::<Vec<_>>(), [DeliveryStep::Done]);
    }
}

/// The state outside the process, which survives it.
#[derive(Default)]
struct OutsideState {
    branch: Option<ObjectId>,
    updates: u32,
    pulls: BTreeMap<u64, String>,
}

/// A model of the relay's process, which ends when its fuel does.
struct OutboxProcess<'a> {
    outbox: DeliveryOutbox,
    world: &'a mut OutsideState,
    fuel: u32,
}

struct KilledProcess;

impl OutboxProcess<'_> {
    fn deliver(&mut self, fence: u64) -> Result<(), KilledProcess> {
        self.alive()?;
        let mut job = self.outbox.add_job(&delivery_request("run-1")).unwrap();
        self.alive()?;
        if job.step.is_terminal() {
            return Ok(());
        }
        job = self.outbox.claim_job(&job, fence).unwrap();
        while !job.step.is_terminal() {
            self.alive()?;
            let progress = self.step(&job)?;
            self.alive()?;
            job = self.outbox.advance_job(&job, progress).unwrap();
        }
        Ok(())
    }

    fn step(&mut self, job: &DeliveryJob) -> Result<StepOutcome, KilledProcess> {
        Ok(match job.step {
            DeliveryStep::Extracted => quarantined_step(),
            DeliveryStep::Quarantined => reviewed_step(review::ReviewVerdict::Push),
            DeliveryStep::Judged => {
                // The push succeeds if the branch is where it was expected, or already has the work.
                if self.world.branch.is_none() {
                    self.world.branch = job.head;
                    self.world.updates += 1;
                }
                assert_eq!(self.world.branch, job.head);
                StepOutcome::Pushed
            }
            DeliveryStep::Pushed => {
                if self.world.pulls.is_empty() {
                    self.alive()?;
                    self.world.pulls.insert(1, job.request.facts.run.clone());
                }
                let number = 1;
                StepOutcome::PullRequested(PullRequestRef {
                    number,
                    url: format!("https://x/{number}"),
                })
            }
            _ => StepOutcome::Done,
        })
    }

    fn alive(&mut self) -> Result<(), KilledProcess> {
        self.fuel = self.fuel.checked_sub(1).ok_or(KilledProcess)?;
        Ok(())
    }
}

fn pending_jobs(outbox: &DeliveryOutbox) -> Result<Vec<DeliveryJob>, OutboxError> {
    let order = delivery_request("run-2");
    outbox.pending_jobs(&order.repository, order.branch().key())
}

fn open_outbox(place: &TempDir) -> DeliveryOutbox {
    DeliveryOutbox::open(&place.path().join("state/relay.sqlite")).unwrap()
}

fn quarantined_step() -> StepOutcome {
    StepOutcome::Quarantined { head: parse_sha("tip") }
}

fn reviewed_step(verdict: review::ReviewVerdict) -> StepOutcome {
    StepOutcome::Judged { verdict, mode: "bundled: merge" }
}

fn review_reasons() -> Vec<ReviewReason> {
    let path = Some("AGENTS.md".to_owned());
    vec![ReviewReason {
        ruling: ReviewAction::Review,
        path,
        why: "it tells agents what to do".to_owned(),
    }]
}

/// G12: Work is counted as undelivered until it is delivered or kept, with the time of the oldest.
#[test]
fn undelivered_work_is_counted() {
    let place = tempfile::tempdir().unwrap();
    let outbox = open_outbox(&place);
    assert_eq!(outbox.undelivered_totals().unwrap(), UndeliveredTotals::default());
    let [first, second] = ["run-1", "run-2"].map(|run| {
        let artifacts = place.path().join(run);
        outbox.add_job(&DeliveryRequest { artifacts, ..delivery_request(run) }).unwrap()
    });
    let both = outbox.undelivered_totals().unwrap();
    assert_eq!((both.works, both.oldest), (2, Some(first.created)));
    let held = || StepOutcome::Held { code: "policy", why: "it is ours".to_owned() };
    outbox.advance_job(&first, held()).unwrap();
    let one = outbox.undelivered_totals().unwrap();
    assert_eq!((one.works, one.oldest), (1, Some(second.created)));
    outbox.advance_job(&second, held()).unwrap();
    assert_eq!(outbox.undelivered_totals().unwrap(), UndeliveredTotals::default());
}

/// L5: Retained work is counted per grant and in total, and removed when it is old.
#[test]
fn retained_work_is_counted_and_expires() {
    let place = tempfile::tempdir().unwrap();
    let outbox = open_outbox(&place);
    for (run, grant) in [("run-1", Some("one")), ("run-2", Some("one")), ("run-3", None)] {
        let artifacts = match run {
            "run-2" => place.path().join("in").join(run),
            _ => place.path().join(run),
        };
        let workspace = artifacts.join("workspace");
        fs::create_dir_all(&workspace).unwrap();
        fs::write(workspace.join("file"), vec![7; 100_000]).unwrap();
        let order = DeliveryRequest { artifacts, ..delivery_request(run) };
        let plan = DeliveryPlan { grant: grant.map(str::to_owned), ..delivery_plan(&order) };
        let desk = outbox.register_workspace(&plan, &workspace).unwrap();
        assert_eq!(outbox.retained_totals(Some("two")).unwrap(), RetainedTotals::default());
        if run == "run-1" {
            outbox.retain_workspace(&desk, &workspace, "files").unwrap();
        } else {
            let job = outbox.add_job(&order).unwrap();
            let held = StepOutcome::Held { code: "policy", why: "it is ours".to_owned() };
            outbox.advance_job(&job, held).unwrap();
        }
    }
    let (of_one, of_all) =
        (outbox.retained_totals(Some("one")).unwrap(), outbox.retained_totals(None).unwrap());
    assert_eq!((of_one.works, of_all.works), (2, 3));
    assert!(of_one.bytes >= 200_000 && of_all.bytes >= of_one.bytes + 100_000, "{of_all:?}");
    let now = SystemTime::now();
    assert_eq!(outbox.expire_retained(now - Duration::from_hours(1)).unwrap(), 0);
    // A directory that cannot be removed keeps its row, and stops no other item.
    let (inner, aside) = (place.path().join("in"), place.path().join("aside"));
    fs::rename(&inner, &aside).unwrap();
    fs::write(&inner, "no directory").unwrap();
    outbox.expire_retained(now + Duration::from_hours(1)).unwrap_err();
    assert_eq!(outbox.retained_totals(None).unwrap().works, 1);
    assert!(!place.path().join("run-3").exists());
    fs::remove_file(&inner).and_then(|()| fs::rename(&aside, &inner)).unwrap();
    assert_eq!(outbox.expire_retained(now + Duration::from_hours(1)).unwrap(), 1);
    assert_eq!(
        (outbox.retained_totals(None).unwrap(), place.path().join("run-1").exists()),
        (RetainedTotals::default(), false)
    );
}

/// L5: A clock that is set back while work becomes held does not make the work old: its times only advance.
#[test]
fn a_clock_that_is_set_back_makes_no_held_work_old() {
    let place = tempfile::tempdir().unwrap();
    let outbox = open_outbox(&place);
    let job = outbox.add_job(&delivery_request("run-1")).unwrap();
    // The present clock is 40 days behind the clock that wrote the row.
    let written = SystemTime::now() + Duration::from_hours(24 * 40);
    let millis = written.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis();
    let millis = i64::try_from(millis).unwrap();
    let file = rusqlite::Connection::open(place.path().join("state/relay.sqlite")).unwrap();
    file.execute("UPDATE job SET created = ?1, updated = ?1", [millis]).unwrap();
    let held = StepOutcome::Held { code: "policy", why: "it is ours".to_owned() };
    outbox.advance_job(&job, held).unwrap();
    assert_eq!(outbox.expire_retained(written - Duration::from_mins(1)).unwrap(), 0);
    assert_eq!(outbox.retained_totals(None).unwrap().works, 1);
}
