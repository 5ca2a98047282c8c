//! R7: Tests of long-running sandboxes: what a run finds of the run before, what it does not find, and when a sandbox
//! is replaced; with both drivers.

mod isolation;
mod orphaned_work;
mod workspace_store;

use std::collections::BTreeSet;
use std::fs;
use std::future;
use std::path::Path;
use std::pin::Pin;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cogni_gateway::runner::agents::AgentCatalog;
use cogni_gateway::runner::long_running::workspace_store::WorkspaceStore;
use cogni_gateway::runner::long_running::{
    LongRunningClaimError, LongRunningPool, LongRunningPoolLimits, SandboxKey,
};
use cogni_gateway::runner::{AgentInvocation, ChatMessage, PreparedRun, RunInputs, RunPlan};
use cogni_gateway::sandbox::SandboxSpec;
use cogni_gateway::sandbox::spec::SandboxLimits;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::driver::shell_argv;
use crate::support::installation::{
    self, BackgroundPool, TestInstallation, both_installations, run,
};
use crate::support::model_provider;
use crate::support::process::wait_until;

/// R7: Two runs share the sandbox and the workspace, and nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn two_runs_share_a_sandbox_and_a_workspace_and_nothing_else() {
    let script = shell_argv("
        cat state 2>/dev/null; echo $RUN_ID >> state
        ls -A /tmp /dev/shm /dev/mqueue /run; set -- /proc/[0-9]*; echo $#; ls /llm-sock
        tail -n +2 /proc/sysvipc/shm; stat -c %i /proc/1/ns/pid /proc/1/ns/net
        for place in /tmp /dev/shm /run; do mkdir -p $place/a/b; echo mine > $place/a/b/c; chmod 0 $place/a; done
        (trap '' TERM; setsid sleep 1000 & sleep 1000) &
        curl --silent -o /dev/null -H 'content-type: application/json' -d '{\"model\":\"fake/chunks=1\",\"messages\":[]}' $OPENAI_BASE_URL/chat/completions
        echo told >&2; exit 3
    ");
    let provider = model_provider::start_default().await;
    for installation in both_installations() {
        let pool = LongRunningPoolFixture::new(&installation, LIMITS);
        let mut results = vec![];
        for name in ["run-one", "run-two"] {
            let mut plan = installation.run_plan(name, &script);
            plan.config.upstream.url = format!("http://{}", provider.addr).parse().unwrap();
            plan.config.audit.path = Some(installation.path().join(name));
            results.push(run(pool.claim(plan).await).await);
        }
        let [one, two] = &results[..] else { unreachable!() };
        let stdout = |result: &Value| result["stdout"].as_str().unwrap().to_owned();
        // The only processes are the first process and the shell.
        let clean = "/dev/mqueue:\n\n/dev/shm:\n\n/run:\ncogni-tool\n\n/tmp:\n2\nhosts\nllm.sock\n";
        assert!(stdout(one).starts_with(clean), "{one}");
        assert_eq!(stdout(two), format!("run-one\n{}", stdout(one)), "{two}");
        for (name, result) in ["run-one", "run-two"].into_iter().zip(&results) {
            assert_eq!(result["exit_code"], 3);
            assert_eq!(result["stderr"], "told\n");
            assert_eq!(result["usage"]["turns"], 1, "{result}");
            let log = fs::read_to_string(installation.path().join(name)).unwrap();
            let records = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            let runs: BTreeSet<_> = records.map(|record| record["run"].to_string()).collect();
            assert!(runs.iter().all(|run| run.contains(name)), "{runs:?}");
            assert!(log.contains("request.settled"), "{log}");
        }
        pool.stop().await;
    }
}

/// R1, R7: A run in a long-running sandbox ends with the same results as in its own sandbox.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_ends_in_a_long_running_sandbox_as_elsewhere() {
    for installation in both_installations() {
        let pool = LongRunningPoolFixture::new(&installation, LIMITS);
        let mut ends = vec![];
        for (number, argv) in [
            vec!["true"],
            vec!["/nowhere"],
            vec!["/etc/passwd"],
            shell_argv("kill -KILL $$").into(),
            shell_argv("head -c 3000000 /dev/zero | tr '\\0' x").into(),
            shell_argv("x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo $x | wc -c").into(),
            vec!["true"],
        ]
        .into_iter()
        .enumerate()
        {
            let limits = SandboxLimits { max_memory: 64 << 20, ..SandboxLimits::default() };
            let plan = installation.run_plan(&format!("run-{number}"), &argv);
            let spec = SandboxSpec { limits, ..plan.spec.clone() };
            let result = run(pool.claim(RunPlan { spec, ..plan }).await).await;
            ends.push(format!("{} {}", result["exit_code"], result["error_code"]));
        }
        insta::allow_duplicates!(insta::assert_snapshot!(ends.join("\n"), @r#"
        0 null
        127 "container_failed"
        126 "container_failed"
        137 "container_failed"
        0 "output_truncated"
        137 "oom_killed"
        0 null
        "#));
        pool.stop().await;
    }
}

/// R5, R7: A run that does not end is ended with all its processes, and the next run gets the same sandbox.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_ended_at_its_deadline_leaves_nothing_running() {
    let stubborn =
        shell_argv("trap '' TERM; (trap '' TERM; setsid sleep 1000) & sleep 1000; sleep 1000");
    let bomb = shell_argv("bomb() { bomb | bomb & }; trap '' TERM; (bomb) & exec sleep 1000");
    let look = shell_argv("set -- /proc/[0-9]*; echo $#; stat -c %i /proc/1/ns/pid");
    for installation in both_installations() {
        let pool = LongRunningPoolFixture::new(&installation, LIMITS);
        let short = |run: &str, argv: &[&str]| {
            let plan = installation.run_plan(run, argv);
            let max_runtime = Duration::from_secs(2);
            let limits = SandboxLimits { max_runtime, pids: 32, ..SandboxLimits::default() };
            let grace = Duration::from_millis(100);
            RunPlan { spec: SandboxSpec { limits, grace, ..plan.spec.clone() }, ..plan }
        };
        let like_them = |run: &str| {
            let mut plan = short(run, &look);
            plan.spec.limits.max_runtime = Duration::from_mins(1);
            plan
        };
        let first = run(pool.claim(like_them("run-before")).await).await;
        assert_eq!(first["ok"], json!(true), "{first}");
        for (name, argv) in [("run-stubborn", &stubborn), ("run-bomb", &bomb)] {
            let ended = run(pool.claim(short(name, argv)).await).await;
            assert_eq!(ended["error_code"], "timeout", "{ended}");
            let next = format!("{name}-next");
            let next = run(pool.claim(like_them(&next)).await).await;
            assert_eq!(next["stdout"], first["stdout"], "{next}");
        }
        pool.stop().await;
    }
}

/// R7: A sandbox that has died, or whose run was abandoned, is never given to another run.
#[tokio::test(flavor = "multi_thread")]
async fn an_unhealthy_sandbox_is_replaced() {
    let look = ["stat", "-c", "%i", "/proc/1/ns/pid"];
    for installation in both_installations() {
        let pool = LongRunningPoolFixture::new(&installation, LIMITS);
        let first = run(pool.claim(installation.run_plan("run-1", &look)).await).await;
        for pid in installation.waiting_slots() {
            assert!(Command::new("kill").args(["-KILL", &pid]).status().unwrap().success());
        }
        let second = run(pool.claim(installation.run_plan("run-2", &look)).await).await;
        assert_eq!(second["ok"], json!(true), "{second}");
        assert_ne!(first["stdout"], second["stdout"]);

        let forever = shell_argv("echo > begun; sleep 1000");
        let abandoned = pool.claim(installation.run_plan("run-3", &forever)).await;
        let begun = abandoned.workspace_path().unwrap().join("begun");
        tokio::select! {
            result = run(abandoned) => panic!("{result}"),
            () = wait_for_file(&begun) => (),
        }
        let fourth = run(pool.claim(installation.run_plan("run-4", &look)).await).await;
        assert_eq!(fourth["ok"], json!(true), "{fourth}");
        assert_ne!(second["stdout"], fourth["stdout"]);
        pool.stop().await;
    }
}

/// R7: A sandbox serves a limited number of runs and is removed when it is idle; the workspace stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_replaced_at_its_limits() {
    let look =
        shell_argv("[ -e state ] && wc -l < state; echo >> state; stat -c %i /proc/1/ns/pid >&2");
    let installation = TestInstallation::embedded();
    let pool = LongRunningPoolFixture::new(
        &installation,
        LongRunningPoolLimits { max_runs: 2, max_idle: Duration::from_secs(2), ..LIMITS },
    );
    let mut seen = vec![];
    for name in ["run-1", "run-2", "run-3"] {
        let result = run(pool.claim(installation.run_plan(name, &look)).await).await;
        seen.push((result["stdout"].clone(), result["stderr"].clone()));
    }
    let states: Vec<_> = seen.iter().map(|(state, _)| state.as_str().unwrap()).collect();
    assert_eq!(states, ["", "1\n", "2\n"]);
    assert!(seen[0].1 == seen[1].1 && seen[1].1 != seen[2].1, "{seen:?}");
    let is_gone = || installation.left().is_empty() && pool.pool.count() == 0;
    wait_until(is_gone, || installation.left());

    let result = run(pool.claim(installation.run_plan("run-4", &look)).await).await;
    assert_eq!(result["stdout"], "3\n", "{result}");
    pool.stop().await;
}

/// R7: A key has one run at a time, and the number of sandboxes is limited.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_without_a_free_sandbox_is_refused() {
    let installation = TestInstallation::embedded();
    let wait = Duration::from_millis(50);
    let pool = LongRunningPoolFixture::new(
        &installation,
        LongRunningPoolLimits { max_sandboxes: 1, wait, ..LIMITS },
    );
    let first = pool.claim(installation.run_plan("run-1", &["true"])).await;
    let other = SandboxKey::new("agent", "other");
    let claim = async |key: &SandboxKey, run, change: fn(&mut RunPlan)| {
        let mut plan = installation.run_plan(run, &["true"]);
        change(&mut plan);
        Box::pin(claim_sandbox(&pool.pool, key, plan)).await.err().map(|error| error.to_string())
    };
    let messages = [
        claim(&sandbox_key(), "run-2", |_| ()).await,
        claim(&other, "run-3", |_| ()).await,
        claim(&other, "run-4", |plan| plan.spec.init = None).await,
        claim(&other, "run-5", |plan| plan.spec.argv.clear()).await,
    ];
    let messages: Vec<_> = messages.into_iter().flatten().collect();
    insta::assert_snapshot!(messages.join("\n"), @r"
    another run of `agent on branch` goes on
    there are 1 long-running sandboxes, and all are in use
    a long-running sandbox has no first process but cogni-init
    argv is `[]`; give a program and its arguments after `--`
    ");
    let first = run(first).await;
    assert_eq!(first["ok"], json!(true), "{first}");
    // A run that has ended makes room for another.
    let third = claim_sandbox(&pool.pool, &other, installation.run_plan("run-6", &["true"]));
    let third = Box::pin(third).await.unwrap();
    assert_eq!(run(third).await["ok"], json!(true));
    assert_eq!(pool.pool.count(), 1);
    pool.stop().await;
    let late = kept_claim_after_stop(&installation).await;
    assert!(matches!(late, Err(LongRunningClaimError::Closed)));
}

/// R7: The names that earlier runs have left in the way of an agent's files are removed off the workers: on a runtime with
/// one worker, another task sees the removal go on.
#[tokio::test]
async fn names_in_the_way_of_an_agents_files_hold_up_no_worker() {
    let installation = TestInstallation::embedded();
    let pool = LongRunningPoolFixture::new(&installation, LIMITS);
    run(pool.claim(installation.run_plan("run-1", &["true"])).await).await;
    let homes = installation.path().join("state/workspaces");
    let home = fs::read_dir(homes).unwrap().next().unwrap().unwrap().path();
    let obstacle = home.join("workspace/.cogni/messages.json");
    fs::create_dir_all(&obstacle).unwrap();
    for name in 0..NAMES {
        fs::write(obstacle.join(name.to_string()), "").unwrap();
    }
    let entry = AgentCatalog::builtin().find_agent("sandbox:agent").unwrap().clone();
    let agent = AgentInvocation {
        entry,
        messages: vec![ChatMessage::user("hello")],
        model: "fake".to_owned(),
        models: vec![],
        timeout: Duration::from_mins(1),
    };
    let plan = RunPlan { agent: Some(agent), ..installation.run_plan("run-2", &["true"]) };
    let watch = async {
        let mut has_seen_part = false;
        // In the end, the name is that of a file.
        while let Ok(left) = fs::read_dir(&obstacle) {
            has_seen_part |= (1..NAMES).contains(&left.count());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        has_seen_part
    };
    let (claimed, has_seen_part) = tokio::join!(pool.claim(plan), watch);
    assert!(has_seen_part, "no task ran while the names were removed");
    assert!(fs::read_to_string(&obstacle).unwrap().contains("hello"));
    drop(claimed);
    pool.stop().await;
}

/// R7: If all sandboxes are busy, the next run waits before it is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_waits_for_a_free_sandbox() {
    let installation = TestInstallation::embedded();
    let pool = LongRunningPoolFixture::new(
        &installation,
        LongRunningPoolLimits { max_sandboxes: 1, ..LIMITS },
    );
    let first = pool.claim(installation.run_plan("run-1", &["true"])).await;
    let other = SandboxKey::new("agent", "other");
    let mut second = pool.claim_for(other.clone(), installation.run_plan("run-2", &["true"]));
    let waits = tokio::time::timeout(Duration::from_secs(1), &mut second).await;
    assert!(waits.is_err(), "there is one place, and another run has it");
    let (first, second) = tokio::join!(run(first), second);
    assert_eq!(first["ok"], json!(true), "{first}");

    let cancel = CancellationToken::new();
    let key = sandbox_key();
    let third = claim_until(&cancel, &pool.pool, &key, installation.run_plan("run-3", &["true"]));
    let (third, ()) = tokio::join!(Box::pin(third), async { cancel.cancel() });
    assert!(matches!(third.err(), Some(LongRunningClaimError::Cancelled)));
    let second = run(second).await;
    assert_eq!(second["ok"], json!(true), "{second}");
    assert_eq!(pool.pool.count(), 1);
    pool.stop().await;
}

/// Claims a key's sandbox for a run that has no commits to deliver.
pub(crate) async fn claim_sandbox(
    pool: &LongRunningPool,
    key: &SandboxKey,
    plan: RunPlan,
) -> Result<PreparedRun, LongRunningClaimError> {
    Box::pin(claim_until(&CancellationToken::new(), pool, key, plan)).await
}

async fn claim_until(
    cancel: &CancellationToken,
    pool: &LongRunningPool,
    key: &SandboxKey,
    plan: RunPlan,
) -> Result<PreparedRun, LongRunningClaimError> {
    let lock = pool.lock_key(cancel, key).await?;
    Box::pin(pool.claim(cancel, lock, key, (plan, RunInputs::default()))).await
}

/// Waits as [`wait_until`] does, without blocking other tasks.
async fn wait_for_file(path: &Path) {
    let begun = Instant::now();
    while !path.exists() {
        assert!(begun.elapsed() < Duration::from_mins(1), "there is no `{}`", path.display());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn kept_claim_after_stop(
    installation: &TestInstallation,
) -> Result<(), LongRunningClaimError> {
    let pool = LongRunningPool::new(&workspace_store(installation), LIMITS);
    let stop = CancellationToken::new();
    stop.cancel();
    pool.maintain(stop).await;
    let plan = installation.run_plan("run-late", &["true"]);
    Box::pin(claim_sandbox(&pool, &sandbox_key(), plan)).await.map(drop)
}

/// R5, R7: Long-running sandboxes of a killed process end by themselves, and a sweep removes the rest.
#[tokio::test(flavor = "multi_thread")]
async fn long_running_sandboxes_end_with_their_process() {
    if let Some(installation) = installation::inherited_installation() {
        let pool = LongRunningPoolFixture::new(&installation, LIMITS);
        let idle = SandboxKey::new("agent", "idle");
        let plan = installation.run_plan("run-idle", &["true"]);
        run(Box::pin(claim_sandbox(&pool.pool, &idle, plan)).await.unwrap()).await;
        let busy = shell_argv("echo > begun; setsid sleep 1000 & sleep 1000");
        let busy = pool.claim(installation.run_plan("run-busy", &busy)).await;
        let begun = busy.workspace_path().unwrap().join("begun");
        std::os::unix::fs::symlink(begun, installation.path().join("begun")).unwrap();
        run(busy).await;
        return future::pending().await;
    }
    for installation in both_installations() {
        let keeper = installation.start_keeper(
            "docker_driver::long_running::long_running_sandboxes_end_with_their_process",
        );
        let begun = installation.path().join("begun");
        wait_until(|| begun.exists(), || "the run does not begin".to_owned());
        assert_eq!(installation.waiting_slots().len(), 2);
        keeper.kill(&installation).await;
    }
}

/// The number of names in the way of a file: their removal takes much longer than a look at them.
const NAMES: usize = 50_000;

/// Longer than a test.
const LIMITS: LongRunningPoolLimits = LongRunningPoolLimits {
    max_sandboxes: 4,
    max_runs: 100,
    max_age: Duration::from_hours(1),
    max_idle: Duration::from_hours(1),
    wait: Duration::from_mins(1),
};

fn sandbox_key() -> SandboxKey {
    SandboxKey::new("agent", "branch")
}

/// A pool of long-running sandboxes with its background tasks.
struct LongRunningPoolFixture<'place> {
    pool: Arc<LongRunningPool>,
    keeping: BackgroundPool<'place>,
}

impl<'place> LongRunningPoolFixture<'place> {
    fn new(installation: &'place TestInstallation, terms: LongRunningPoolLimits) -> Self {
        let pool = Arc::new(LongRunningPool::new(&workspace_store(installation), terms));
        let pool_handle = Arc::clone(&pool);
        Self {
            pool,
            keeping: BackgroundPool::new(installation, async move |stop| {
                pool_handle.maintain(stop).await;
            }),
        }
    }

    fn claim(&self, plan: RunPlan) -> Pin<Box<dyn Future<Output = PreparedRun> + '_>> {
        self.claim_for(sandbox_key(), plan)
    }

    fn claim_for(
        &self,
        key: SandboxKey,
        plan: RunPlan,
    ) -> Pin<Box<dyn Future<Output = PreparedRun> + '_>> {
        Box::pin(async move { Box::pin(claim_sandbox(&self.pool, &key, plan)).await.unwrap() })
    }

    /// Stops the pool; afterwards only workspaces remain.
    async fn stop(self) {
        self.keeping.stop().await;
    }
}

/// The store of the pool's workspaces.
fn workspace_store(installation: &TestInstallation) -> WorkspaceStore {
    WorkspaceStore::in_state_dir(&installation.path().join("state"))
}
