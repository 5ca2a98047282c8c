//! L3, L4, L7: Tests that a run's commits are not lost, whichever process is killed and at whatever step.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cogni_gateway::relay::delivery::outbox::DeliveryOutbox;
use rusqlite::Connection;
use serde_json::{Value, json};

use super::branch_delivery::DeliverySetup;
use super::driver::{list_entries, shell_argv};
use crate::support::process::{ChildProcess, wait_until};
use crate::support::repository::run_git;
use crate::support::small_disk::SmallDisk;

/// L7: The runner is killed while its agent works and has committed. A retry delivers the commits to the branch, and a
/// later run on the branch starts from them.
#[tokio::test(flavor = "multi_thread")]
async fn the_work_of_a_killed_runner_is_delivered() {
    let setup = DeliverySetup::new().await;
    let id = kill_runner(&setup, "retried");
    let (code, output) = setup.relay(&["status"]);
    let begun = format!("{id} begun: sandbox/retried of ");
    assert!(
        code == 1 && output.contains(&begun) && output.contains("its process died during the run"),
        "{output}"
    );
    assert_eq!(setup.relay(&["sweep", "--older-than", "0s"]).0, 0);
    let (code, output) = setup.relay(&["retry", &id]);
    assert_eq!(code, 0, "{output}");
    let status: Value = serde_json::from_str(output.lines().next().unwrap()).unwrap();
    assert_eq!(
        json!([status["id"], status["step"], status["is_pushed"]]),
        json!([id, "done", true])
    );
    assert_eq!(output.matches("the sandbox runs").count(), 1, "{output}");
    let log = run_git(&setup.forge.bare(), &["log", "--format=%s", "sandbox/retried"]);
    assert_eq!(log, "Add one\nchange README");
    assert_eq!(setup.relay(&["status"]), (0, "everything is delivered\n".to_owned()));

    kill_runner(&setup, "followed");
    let second = setup.run(&["--branch-key", "followed"], "cat one");
    assert_eq!(second.json["stdout"], "one\n", "{}", second.shown);

    kill_runner(&setup, "due");
    let (code, output) = setup.relay(&["retry", "--due"]);
    assert!(code == 0 && output.contains("sandbox/due"), "{output}");
    assert_eq!(list_entries(&setup.runner.path().join("state/work")), [""; 0]);
    assert_eq!(list_entries(&setup.runner.run_dir()), [""; 0]);
}

/// L3, L7: A pipe in place of a file that git reads blocks nothing: git is not started, and the workspace is kept with
/// the reason.
#[tokio::test(flavor = "multi_thread")]
async fn a_pipe_that_git_would_wait_for_is_reported_and_kept() {
    let setup = DeliverySetup::new().await;
    let script = "git commit -q --allow-empty -m x && rm .git/HEAD && mkfifo .git/HEAD";
    let id = killed_at(&setup, "pipe", script, "");
    let (code, output) = setup.relay(&["retry", &id]);
    assert!(code == 1 && output.contains("`HEAD` in .git is a pipe"), "{output}");
    let (code, output) = setup.relay(&["status"]);
    assert!(code == 1 && output.contains("which git would wait for"), "{output}");
}

/// L3, L7: Git opens no file because the repository's configuration includes it, neither a pipe nor any other file.
#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_that_includes_a_pipe_is_reported_and_kept() {
    let setup = DeliverySetup::new().await;
    let script =
        "git commit -q --allow-empty -m x && mkfifo pipe && git config include.path ../pipe";
    let begun = Instant::now();
    let id = killed_at(&setup, "include", script, "");
    let (code, output) = setup.relay(&["retry", &id]);
    assert!(code == 1 && output.contains("it includes other files"), "{output}");
    assert!(begun.elapsed() < Duration::from_mins(1), "something has waited for the pipe");
    let (code, output) = setup.relay(&["status"]);
    assert!(code == 1 && output.contains("`.git/config`: it includes other files"), "{output}");
}

/// L5: A process that collects the work later must know the credentials that must not be in it, as the run's own
/// process did.
#[tokio::test(flavor = "multi_thread")]
async fn orphaned_work_is_reviewed_with_its_runs_credentials() {
    let setup = DeliverySetup::new().await;
    let id = killed_with(&setup, "secret", &"7".repeat(64));
    let (code, output) = setup.relay(&["retry", &id]);
    let unknown = "cannot check this work for the secret `AUDIT_SIGNING_KEY`";
    assert!(code == 1 && output.contains(unknown), "{output}");
    assert_eq!(run_git(&setup.forge.bare(), &["branch", "--list", "sandbox/secret"]), "");
    let (code, output) = setup.relay(&["retry", "--new-rules", &id]);
    assert!(code == 0 && output.contains("\"step\":\"done\""), "{output}");
}

/// L3, L7: If the disk is full at any step of collecting work, the work stays where it is; the collection is retried
/// automatically and succeeds when there is room. If the outbox cannot be written either, the attempt does not count.
#[tokio::test(flavor = "multi_thread")]
async fn a_collection_that_a_full_disk_prevents_is_retried() {
    for (small, least) in [("work", 3), (".", 0)] {
        let setup = DeliverySetup::new().await;
        let disk = with_disk(&setup, small);
        let script = "head -c 40000 /dev/urandom > one && git add one && git commit -qm 'Add one'";
        let id = killed_at(&setup, "full", script, "");
        let outbox = setup.runner.path().join("state/outbox.sqlite");
        let (mut put_off, mut pages) = (0, 0);
        loop {
            disk.fill();
            (0..pages).for_each(|_| disk.free_one_page());
            let (_, output) = setup.relay(&["retry", "--due"]);
            disk.free();
            // Otherwise the work was collected, whatever happens to it later.
            let Ok(row) = DeliveryOutbox::open(&outbox).unwrap().workspace(&id) else { break };
            assert!(
                row.needs_collection() && row.workspace.join("one").exists(),
                "{pages}: {row:?}"
            );
            if row.due.is_some() {
                put_off += 1;
                let (code, shown) = setup.relay(&["status"]);
                let expected = format!("{id} left: sandbox/full of ");
                assert!(
                    code == 1 && shown.contains(&expected) && shown.contains("due in "),
                    "{output}"
                );
                let now = "UPDATE desk SET due = 0, attempts = 1";
                Connection::open(&outbox).unwrap().execute(now, []).unwrap();
            }
            pages += 1 + pages / 4;
        }
        assert!(put_off >= least, "{small}: it was put off {put_off} times");
        let (_, output) = setup.relay(&["retry", &id]);
        let log = run_git(&setup.forge.bare(), &["log", "--format=%s", "sandbox/full"]);
        assert_eq!(log, "Add one\nchange README", "{output}");
        assert_eq!(setup.relay(&["status"]), (0, "everything is delivered\n".to_owned()));
    }
}

/// L7: A run does not begin on a branch whose last work is still to be collected from its workspace.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_does_not_begin_before_older_work_is_collected() {
    let setup = DeliverySetup::new().await;
    let disk = with_disk(&setup, "work");
    let id = kill_runner(&setup, "full");
    disk.fill();
    let mut second = setup.prepare(&["--branch-key", "full"], &shell_argv("cat one"));
    let refused = second.output().unwrap();
    let output = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && output.contains("must reach this branch first"),
        "{output}"
    );
    assert!(output.contains(&id) && output.contains("No space left on device"), "{output}");
    disk.free();
    let second = setup.run(&["--branch-key", "full"], "cat one");
    assert_eq!(second.json["stdout"], "one\n", "{}", second.shown);
    assert_eq!(setup.relay(&["status"]), (0, "everything is delivered\n".to_owned()));
}

/// L3: Commits on a branch that is not delivered are kept and reported.
#[tokio::test(flavor = "multi_thread")]
async fn undelivered_work_is_kept_and_reported() {
    let setup = DeliverySetup::new().await;
    let commit = "echo one > one && git add one && git commit -qm 'Add one'";
    let elsewhere = "there are commits that are on other branches than the run's";
    let uncommitted = "nothing was committed, and files are left";
    for (key, script, left) in [
        ("branch", format!("git checkout -qb feature/x && {commit}"), elsewhere),
        ("detached", format!("git checkout -q --detach && {commit}"), elsewhere),
        ("stash", "echo one > README && git stash -q".to_owned(), elsewhere),
        ("file", "echo one > one".to_owned(), uncommitted),
        ("changed", "echo one > README".to_owned(), uncommitted),
    ] {
        let result = setup.run(&["--branch-key", key], &script);
        assert_eq!((result.json["ok"].clone(), result.status), (json!(true), 3), "{}", result.json);
        let relay = &result.json["relay"];
        let (why, id) = (relay["why"].as_str().unwrap(), relay["id"].as_str().unwrap());
        let kept_dir = why.strip_prefix(&format!("{left}; the workspace is kept in `")).unwrap();
        assert!(fs::exists(format!("{}/.git", kept_dir.trim_end_matches('`'))).unwrap(), "{why}");
        let (code, output) = setup.relay(&["status"]);
        assert!(code == 1 && output.contains(&format!("{id} left: sandbox/{key} of ")), "{output}");
        assert_eq!(setup.relay(&["sweep", "--older-than", "0s"]).0, 0);
        let (code, output) = setup.relay(&["retry", id]);
        assert!(code == 1 && output.contains(left), "{output}");
        assert_eq!(setup.relay(&["discard", id]), (0, "deleted\n".to_owned()));
        assert_eq!(setup.relay(&["status"]).0, 0);
    }
    // Ignored files are not kept.
    let script = "mkdir -p .git/info build deep && printf 'build\\n*.o\\n' > .git/info/exclude \
        && echo x > build/x && echo x > deep/x.o && echo one > one";
    let kept_dir = setup.run(&["--branch-key", "build"], script);
    let id = kept_dir.json["relay"]["id"].as_str().unwrap();
    let [work] = &list_entries(&setup.runner.path().join("state/work"))[..] else { panic!() };
    let workspace = setup.runner.path().join("state/work").join(work).join("workspace");
    let is_there = |name: &str| workspace.join(name).exists();
    let found = ["one", "README", ".git/config", "build", "deep/x.o"].map(is_there);
    assert_eq!(found, [true, true, true, false, false], "{}", kept_dir.json);
    assert_eq!(setup.relay(&["discard", id]).0, 0);
    // Ignored files are not part of the work, and a branch is delivered although there are other files.
    let ignored = setup
        .run(&["--branch-key", "i"], "mkdir -p .git/info; echo x > .git/info/exclude; echo x > x");
    assert_eq!(
        (&ignored.json["relay"]["why"], ignored.status),
        (&json!("nothing was committed"), 0)
    );
    let both = format!(
        "{commit} && git checkout -qb other && echo 2 > 2 && git add 2 && git commit -qm 2"
    );
    let result = setup.run(&["--branch-key", "both"], &both);
    assert_eq!(result.json["relay"]["step"], "done", "{}", result.json);
    let (code, output) = setup.relay(&["status"]);
    assert!(
        code == 1 && output.contains("left: sandbox/both of ") && output.contains(elsewhere),
        "{output}"
    );
    let [id] = &list_entries(&setup.runner.path().join("state/work"))[..] else { panic!() };
    assert_eq!(list_entries(&setup.runner.path().join("state/work").join(id)), ["workspace"]);
}

/// L3: If git cannot list something, it is not taken as absent: a broken ref hides no commit.
#[tokio::test(flavor = "multi_thread")]
async fn work_that_git_cannot_list_is_kept() {
    let setup = DeliverySetup::new().await;
    let script = "echo one > one && git add one && git commit -qm one && git checkout -qb other \
        && echo two > two && git add two && git commit -qm two \
        && printf '%040d\n' 7 > .git/refs/heads/broken";
    let result = setup.run(&["--branch-key", "unclear"], script);
    let relay = &result.json["relay"];
    assert_eq!(json!([relay["step"], relay["is_pushed"]]), json!(["done", true]), "{relay}");
    let log = run_git(&setup.forge.bare(), &["log", "--format=%s", "sandbox/unclear"]);
    assert_eq!(log, "one\nchange README");
    let (_, output) = setup.relay(&["status", "--json"]);
    let left: Value = serde_json::from_str(output.lines().next().unwrap()).unwrap();
    let why = left["why"].as_str().unwrap();
    let unclear =
        "it is not known whether there are commits on other branches than the run's: git cannot";
    assert!(why.starts_with(unclear) && left["step"] == "left", "{output}");
    assert_ne!(left["id"], relay["id"]);
    let workspace = Path::new(left["workspace"].as_str().unwrap());
    assert!(workspace.join(".git/refs/heads/other").exists(), "{left}");
    let id = left["id"].as_str().unwrap();
    assert_eq!(setup.relay(&["discard", id]), (0, "deleted\n".to_owned()));
    assert_eq!(list_entries(&setup.runner.path().join("state/work")), [""; 0]);
}

/// Mounts a small disk for part of the state directory, or for all of it.
fn with_disk(setup: &DeliverySetup, part: &str) -> SmallDisk {
    let disk = SmallDisk::mount(16 << 20);
    let (here, there) = (setup.runner.path().join("state").join(part), disk.path("part"));
    fs::create_dir(&there).unwrap();
    let here = here.components().collect::<PathBuf>();
    fs::create_dir_all(here.parent().unwrap()).unwrap();
    symlink(there, here).unwrap();
    disk
}

/// L3, R5: Programs in an agent's git configuration do not run after the agent's end. Its files are examined without
/// them, at once.
#[tokio::test(flavor = "multi_thread")]
async fn programs_in_an_agents_git_configuration_do_not_run_after_its_end() {
    let setup = DeliverySetup::new().await;
    let script = "git config filter.evil.clean 'sleep 100; cat' && git config filter.evil.required true \
        && git config core.fsmonitor 'sleep 100' && mkdir -p .git/info \
        && echo '* filter=evil' | tee .git/info/attributes > .gitattributes \
        && tr a-z b-za < README > x && cat x > README && rm x";
    let result = setup.run(&["--branch-key", "late"], script);
    let relay = &result.json["relay"];
    let why = relay["why"].as_str().unwrap();
    assert!(why.starts_with("nothing was committed, and files are left"), "{relay}");
    let took = result.json["timings"]["total_ms"].as_u64().unwrap();
    assert!(took < 60_000, "{took} ms: something of the agent's was waited for");
}

/// Starts a run that commits, kills its runner, and returns the name under which the workspace is kept.
fn kill_runner(setup: &DeliverySetup, key: &str) -> String {
    killed_with(setup, key, "")
}

fn killed_with(setup: &DeliverySetup, key: &str, signing_key: &str) -> String {
    killed_at(setup, key, "echo one > one && git add one && git commit -qm 'Add one'", signing_key)
}

fn killed_at(setup: &DeliverySetup, key: &str, script: &str, signing_key: &str) -> String {
    let script = format!("{script} && echo > .git/ready; exec sleep 1000");
    let mut command = setup.prepare(&["--branch-key", key], &shell_argv(&script));
    command.env("AUDIT_SIGNING_KEY", signing_key);
    let mut runner = ChildProcess::start(&mut command, "build it");
    let works = setup.runner.path().join("state/work");
    let is_ready = || {
        let mut works = list_entries(&works).into_iter().map(|work| works.join(work));
        works.any(|work| work.join("workspace/.git/ready").exists())
    };
    wait_until(is_ready, || runner.output());
    let (code, output) = setup.relay(&["status"]);
    assert!(code == 0 && output.contains("its run goes on"), "{output}");
    runner.signal("KILL");
    runner.wait();
    let (_, output) = setup.relay(&["status", "--json"]);
    let statuses: Vec<Value> =
        output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let [one] = &statuses[..] else { panic!("{output}") };
    one["id"].as_str().unwrap().to_owned()
}
