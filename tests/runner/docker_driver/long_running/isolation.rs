//! R5, R7: Tests of what a run in a long-running sandbox has of an earlier run: only the workspace of their key,
//! however the earlier run ended.

use std::fs;
use std::process::Command;
use std::time::{Duration, SystemTime};

use cogni_gateway::runner::RunPlan;
use cogni_gateway::runner::long_running::{
    LongRunningClaimError, LongRunningPool, LongRunningPoolLimits, SandboxKey,
};
use cogni_gateway::sandbox::SandboxSpec;
use cogni_gateway::sandbox::spec::SandboxLimits;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{
    LIMITS, LongRunningPoolFixture, claim_sandbox, sandbox_key, wait_for_file, workspace_store,
};
use crate::docker_driver::driver::shell_argv;
use crate::support::docker_engine::docker_output;
use crate::support::installation::{TestInstallation, both_installations, run};
use crate::support::process::wait_until;

/// R7: Two concurrent branches have two sandboxes and two workspaces.
#[tokio::test(flavor = "multi_thread")]
async fn two_concurrent_branches_share_nothing() {
    let meet = shell_argv(
        "echo $RUN_ID > state; while [ ! -e go ]; do sleep 0.05; done; cat state; ls; stat -c %i /proc/1/ns/pid >&2",
    );
    for installation in both_installations() {
        let pool = LongRunningPoolFixture::new(&installation, LIMITS);
        let mut both = vec![];
        for branch in ["one", "two"] {
            let plan = installation.run_plan(&format!("run-{branch}"), &meet);
            both.push(pool.claim_for(SandboxKey::new("agent", branch), plan).await);
        }
        let workspaces: Vec<_> =
            both.iter().map(|prepared| prepared.workspace_path().unwrap().to_owned()).collect();
        assert_ne!(workspaces[0], workspaces[1]);
        let host = async {
            for workspace in &workspaces {
                wait_for_file(&workspace.join("state")).await;
            }
            assert_eq!(pool.pool.count(), 2);
            for workspace in &workspaces {
                fs::write(workspace.join("go"), "").unwrap();
            }
        };
        let (two, one) = (run(both.pop().unwrap()), run(both.pop().unwrap()));
        let (one, two, ()) = tokio::join!(one, two, host);
        assert_eq!(one["stdout"], "run-one\ngo\nstate\n", "{one}");
        assert_eq!(two["stdout"], "run-two\ngo\nstate\n", "{two}");
        assert_ne!(one["stderr"], two["stderr"], "they see the same processes");
        pool.stop().await;
    }
}

/// R5, R7: A cancelled run leaves no process, no file in memory, no socket and no name for the next run.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_was_cancelled_leaves_its_workspace_and_nothing_else() {
    let litter = shell_argv("
        trap '' TERM
        for place in /tmp /dev/shm /run; do mkdir -p $place/deep/er; mkfifo $place/deep/pipe; echo x > $place/deep/er/file; done
        (trap '' TERM; exec setsid sh -c 'while :; do sleep 0.05; curl --silent -o /dev/null localhost:8080/run/status; done') &
        echo > begun
        sleep 1000; sleep 1000
    ");
    let look = shell_argv("
        ls -A /tmp /dev/shm /dev/mqueue /run; set -- /proc/[0-9]*; echo $#; ls /llm-sock; echo $RUN_ID
        curl --silent localhost:8080/run/status | grep -o run-[a-z]*
    ");
    for installation in both_installations() {
        let pool = LongRunningPoolFixture::new(&installation, LIMITS);
        let plan = installation.run_plan("run-first", &litter);
        let grace = Duration::from_millis(100);
        let plan = RunPlan { spec: SandboxSpec { grace, ..plan.spec.clone() }, ..plan };
        let first = pool.claim(plan).await;
        let begun = first.workspace_path().unwrap().join("begun");
        let cancel = CancellationToken::new();
        let (ended, ()) =
            tokio::join!(Box::pin(first.run(cancel.clone(), tokio::io::sink())), async {
                wait_for_file(&begun).await;
                cancel.cancel();
            },);
        let ended = serde_json::to_value(&ended).unwrap();
        assert_eq!(ended["error_code"], "cancelled", "{ended}");
        assert_eq!(
            bound_sockets(&installation),
            Vec::<String>::new(),
            "no run has the sandbox, and a socket is there"
        );
        let next = run(pool.claim(installation.run_plan("run-next", &look)).await).await;
        let clean = "/dev/mqueue:\n\n/dev/shm:\n\n/run:\ncogni-tool\n\n/tmp:\n2\nhosts\nllm.sock\nrun-next\n";
        assert!(next["stdout"].as_str().unwrap().starts_with(clean), "{next}");
        assert_eq!(next["stdout"].as_str().unwrap().matches("run-").count(), 2, "{next}");
        pool.stop().await;
    }
}

/// R7: A sandbox that exists but does not answer is replaced, and its remains are removed.
#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_does_not_answer_is_replaced() {
    let look = ["stat", "-c", "%i", "/proc/1/ns/pid"];
    for installation in both_installations() {
        let pool = LongRunningPoolFixture::new(&installation, LIMITS);
        let first = run(pool.claim(installation.run_plan("run-1", &look)).await).await;
        let stopped = installation.waiting_slots();
        for pid in &stopped {
            assert!(Command::new("kill").args(["-STOP", pid]).status().unwrap().success());
        }
        let second = run(pool.claim(installation.run_plan("run-2", &look)).await).await;
        assert_eq!(second["ok"], true, "{second}");
        assert_ne!(first["stdout"], second["stdout"]);
        let is_gone = || installation.waiting_slots().iter().all(|pid| !stopped.contains(pid));
        wait_until(is_gone, || "the first is still there".to_owned());
        pool.stop().await;
    }
}

/// R7: A sandbox is replaced because of its age, and after the kernel killed it for lack of memory, but not after a
/// failed run.
#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_replaced_for_its_age_and_after_a_kill_for_want_of_memory() {
    let look = shell_argv("stat -c %i /proc/1/ns/pid; exit 1");
    let greedy = shell_argv(
        "stat -c %i /proc/1/ns/pid; x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo $x | wc -c",
    );
    for installation in both_installations() {
        let pool = LongRunningPoolFixture::new(&installation, LIMITS);
        let mut seen = vec![];
        for (name, argv) in [("run-1", &look), ("run-2", &greedy), ("run-3", &look)] {
            let plan = installation.run_plan(name, argv);
            let limits = SandboxLimits { max_memory: 64 << 20, ..SandboxLimits::default() };
            let spec = SandboxSpec { limits, ..plan.spec.clone() };
            seen.push(run(pool.claim(RunPlan { spec, ..plan }).await).await);
        }
        let codes: Vec<_> = seen.iter().map(|result| result["error_code"].clone()).collect();
        assert_eq!(codes, ["container_failed", "oom_killed", "container_failed"]);
        assert_eq!(first_line(&seen[0]), first_line(&seen[1]), "it failed, and no more");
        assert_ne!(first_line(&seen[1]), first_line(&seen[2]), "it was short of memory");
        pool.stop().await;

        let pool = LongRunningPoolFixture::new(
            &installation,
            LongRunningPoolLimits { max_age: Duration::ZERO, ..LIMITS },
        );
        let first = run(pool.claim(installation.run_plan("run-4", &look)).await).await;
        assert_eq!(pool.pool.count(), 0, "it is old, and still there");
        let second = run(pool.claim(installation.run_plan("run-5", &look)).await).await;
        assert_ne!(first["stdout"], second["stdout"]);
        pool.stop().await;
    }
}

/// R7: No process of an abandoned run writes to the workspace when the next run's branch is checked out.
#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_run_ends_before_the_next_run_gets_the_workspace() {
    for installation in both_installations() {
        // The pool has no background tasks, so only the next run cleans up.
        let pool = LongRunningPool::new(&workspace_store(&installation), LIMITS);
        let key = sandbox_key();
        let script = shell_argv("echo > begun; trap '' TERM; while :; do sleep 1; done");
        let given_up = claim_sandbox(&pool, &key, installation.run_plan("run-1", &script));
        let given_up = Box::pin(given_up).await.unwrap();
        let begun = given_up.workspace_path().unwrap().join("begun");
        tokio::select! {
            result = run(given_up) => panic!("{result}"),
            () = wait_for_file(&begun) => (),
        }
        assert_eq!(pool.count(), 1);
        // This run fails after the point where the workspace would be filled, before there is another sandbox.
        let mut plan = installation.run_plan("run-2", &script);
        plan.run_dir = begun;
        let next = Box::pin(claim_sandbox(&pool, &key, plan)).await;
        assert!(matches!(next.err(), Some(LongRunningClaimError::Failed(_))));
        assert_eq!(pool.count(), 0);
        assert_eq!(installation.waiting_slots(), Vec::<String>::new());
        let stop = CancellationToken::new();
        stop.cancel();
        pool.maintain(stop).await;
    }
}

/// R7: A change that a run makes to its sandbox's first process would affect the next run, so the sandbox is replaced.
#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_whose_first_process_was_changed_is_replaced() {
    let installation = TestInstallation::embedded();
    let pool = LongRunningPoolFixture::new(&installation, LIMITS);
    for (count, change) in [
        (1, "true"),
        (0, "prlimit --pid 1 --nofile=512:512"),
        (0, "renice 5 1"),
        (0, "chrt --idle --pid 0 1"),
        (0, "chrt --batch --pid 0 1"),
        (0, "ionice -c 3 -p 1"),
        (1, "ionice -p 1"),
    ] {
        let name = change.replace([' ', '='], "-");
        let result = run(pool.claim(installation.run_plan(&name, &shell_argv(change))).await).await;
        assert_eq!((&result["exit_code"], change), (&json!(0), change), "{result}");
        assert_eq!((pool.pool.count(), change), (count, change));
    }
    pool.stop().await;
}

/// R5, R7: A process that can see the container's owner goes by the owner; other processes go by the end time in the
/// container's label.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_says_that_it_lasts_as_long_as_each_of_its_runs() {
    let installation = TestInstallation::docker();
    let pool = LongRunningPoolFixture::new(&installation, LIMITS);
    let mut messages = vec![];
    for (name, hours) in [("run-1", 1), ("run-2", 72), ("run-3", 72), ("run-4", 1)] {
        let mut plan = installation.run_plan(name, &["true"]);
        plan.spec.limits.max_runtime = Duration::from_hours(hours);
        let needed = SystemTime::now() + plan.spec.limits.max_runtime;
        let result = run(pool.claim(plan).await).await;
        assert_eq!(result["ok"], true, "{result}");
        let filter = format!("label=cogni.dir={}", installation.run_dir().display());
        let format = "{{.Label \"cogni.deadline\"}}";
        let label = docker_output(&["ps", "--filter", &filter, "--format", format]);
        let label = label.trim().parse().unwrap();
        assert!(SystemTime::UNIX_EPOCH + Duration::from_secs(label) >= needed, "{name}");
        messages.push(label);
    }
    assert_ne!(messages[0], messages[1]);
    assert!(messages[1..].iter().all(|label| *label == messages[1]), "{messages:?}");
    pool.stop().await;
}

fn first_line(result: &Value) -> &str {
    result["stdout"].as_str().unwrap().lines().next().unwrap()
}

/// Returns the sockets that are bound below the run directory.
fn bound_sockets(installation: &TestInstallation) -> Vec<String> {
    let table = fs::read_to_string("/proc/net/unix").unwrap();
    let run_dir = installation.run_dir().display().to_string();
    let paths = table.lines().filter_map(|line| line.split(' ').next_back());
    paths.filter(|path| path.starts_with(&run_dir)).map(str::to_owned).collect()
}
