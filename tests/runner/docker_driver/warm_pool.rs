//! R7: Tests of warm slots: they are started ahead, claimed once, and removed with their run; with both drivers.

use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::{self, net::UnixListener};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use std::{future, process};

use cogni_gateway::runner::warm_pool::{WarmClaimError, WarmPool, WarmPoolConfig};
use cogni_gateway::runner::{PreparedRun, RunInputs, RunPlan};
use cogni_gateway::sandbox::SandboxSpec;
use cogni_gateway::sandbox::spec::{BindMount, MountAccess, SandboxLimits, WorkspaceMount};
use serde_json::{Value, json};
use uuid::Uuid;

use super::driver::shell_argv;
use crate::support::docker_daemon::{ContainerFate, DockerDaemon};
use crate::support::docker_engine;
use crate::support::engine_proxy::EngineProxy;
use crate::support::installation::{
    self, BackgroundPool, TestInstallation, both_installations, run,
};
use crate::support::process::wait_until;

/// R7: A run in a warm slot differs from another run only in its start.
#[tokio::test(flavor = "multi_thread")]
async fn a_claimed_slot_runs_the_program_as_any_sandbox() {
    let look = shell_argv(
        "sort /proc/self/environ -z | tr '\\0' '\\n'; ls /llm-sock; [ $(id -u) -ge 2100000000 ] && echo own; echo told >&2; exit 3",
    );
    for installation in both_installations() {
        let plan = |run| RunPlan {
            spec: SandboxSpec {
                env: [string_pair("COGNI_MODEL", "m")].into(),
                ..installation.spec(&look)
            },
            ..installation.run_plan(run, &look)
        };
        let cold = run(PreparedRun::new(plan("run-cold"), RunInputs::default()).unwrap()).await;
        let pool = keep_slots(&installation, 1);
        let claimed = run(pool.claim(&plan("run-slot"))).await;
        pool.stop().await;
        let expected = serde_json::to_string(&cold).unwrap().replace("run-cold", "run-slot");
        assert_eq!(claimed, serde_json::from_str::<Value>(&expected).unwrap());
        assert_eq!(claimed["exit_code"], 3, "{claimed}");
        let stdout = claimed["stdout"].as_str().unwrap();
        assert!(stdout.contains("RUN_ID=run-slot\n") && stdout.contains("COGNI_MODEL=m\n"));
        assert!(stdout.ends_with("hosts\nllm.sock\nown\n"), "{stdout}");
    }
}

/// R7: Before its claim, a slot knows nothing of a run, and two runs share nothing.
#[tokio::test(flavor = "multi_thread")]
async fn each_slot_is_claimed_once() {
    for installation in both_installations() {
        let pool = keep_slots(&installation, 2);
        let look = shell_argv("ls; touch left-behind; ls / >/dev/null");
        let fresh = |run| RunPlan {
            spec: SandboxSpec { workspace: WorkspaceMount::Fresh, ..installation.spec(&look) },
            ..installation.run_plan(run, &look)
        };
        assert!(matches!(
            pool.pool.claim(fresh("run-x"), RunInputs::default()),
            Err(WarmClaimError::ProfileMismatch(_))
        ));
        pool.stop().await;

        let pool = keep_for(&installation, &fresh("run-kind"), 2);
        pool.until_full();
        let variables =
            fs::read(format!("/proc/{}/environ", installation.waiting_slots()[0])).unwrap();
        let variables = String::from_utf8(variables).unwrap();
        assert!(!variables.contains("RUN_ID") && !variables.contains("LITELLM"), "{variables}");

        let (one, other) = (pool.claim(&fresh("run-1")), pool.claim(&fresh("run-2")));
        fs::write(one.workspace_path().unwrap().join("of-one"), "").unwrap();
        assert_ne!(one.workspace_path(), other.workspace_path());
        let (one, other) = tokio::join!(run(one), run(other));
        let third = run(pool.claim(&fresh("run-3"))).await;
        let found = [one, other, third].map(|result| result["stdout"].clone());
        assert_eq!(found, ["of-one\n", "", ""]);
        pool.stop().await;
    }
}

/// R7: A slot that has died is never given to a run.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_dies_while_it_waits_is_replaced() {
    for installation in both_installations() {
        let pool = keep_slots(&installation, 1);
        pool.until_full();
        let dead = installation.waiting_slots();
        for pid in &dead {
            assert!(Command::new("kill").args(["-KILL", pid]).status().unwrap().success());
        }
        let is_replaced = || {
            let waiting = installation.waiting_slots();
            !waiting.is_empty() && waiting.iter().all(|pid| !dead.contains(pid))
        };
        wait_until(is_replaced, || "there is no other slot".to_owned());
        let result = run(pool.claim(&installation.run_plan("run-after", &["true"]))).await;
        assert_eq!(result["ok"], json!(true), "{result}");
        pool.stop().await;
    }
}

/// R7: A slot whose output would be lost is never given to a run: the engine has closed the connection, and the container
/// lives on.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_without_its_output_is_replaced() {
    let place = tempfile::tempdir().unwrap();
    let proxy = EngineProxy::new(place.path(), Path::new(docker_engine::SOCKET));
    let installation = TestInstallation::docker_at(Path::new(proxy.socket()));
    let pool = keep_slots(&installation, 1);
    pool.until_full();
    let cut = installation.waiting_slots();
    proxy.cut_attached();
    // The pool looks at its slots twice a second.
    let is_replaced = || installation.waiting_slots().iter().all(|pid| !cut.contains(pid));
    wait_until(is_replaced, || "the slot is still there".to_owned());
    let plan = installation.run_plan("run-heard", &shell_argv("echo heard"));
    let result = run(pool.claim(&plan)).await;
    assert_eq!((&result["ok"], &result["stdout"]), (&json!(true), &json!("heard\n")), "{result}");
    pool.stop().await;
}

/// R5, R7: The same holds after an engine was restarted that keeps its containers.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_of_a_restarted_engine_is_replaced() {
    let mut dockerd = DockerDaemon::start(ContainerFate::LiveOn, docker_engine::HOST);
    let installation = TestInstallation::docker_at(&dockerd.socket());
    let pool = keep_slots(&installation, 1);
    pool.until_full();
    dockerd.kill();
    dockerd.start_again(ContainerFate::LiveOn);
    let plan = installation.run_plan("run-heard", &shell_argv("echo heard"));
    let result = run(pool.claim(&plan)).await;
    assert_eq!((&result["ok"], &result["stdout"]), (&json!(true), &json!("heard\n")), "{result}");
    pool.stop().await;
    assert_eq!(dockerd.containers(), "");
}

/// R7: A claimed slot has its run's deadline, and is removed with its run.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_ends_at_the_deadline_of_its_run() {
    for installation in both_installations() {
        let pool = keep_slots(&installation, 1);
        let forever = ["sleep", "1000"];
        let limits =
            SandboxLimits { max_runtime: Duration::from_secs(1), ..SandboxLimits::default() };
        let plan = RunPlan {
            spec: SandboxSpec { limits, ..installation.spec(&forever) },
            ..installation.run_plan("run-late", &forever)
        };
        let result = run(pool.claim(&plan)).await;
        assert_eq!(result["error_code"], "timeout", "{result}");
        pool.stop().await;
    }
}

/// R7: A run that needs a different slot is distinguished from a run with a mistake.
#[test]
fn the_error_says_why_a_run_does_not_fit_a_slot() {
    let installation = TestInstallation::embedded();
    let config = WarmPoolConfig { count: 0, max_age: Duration::from_mins(1) };
    let usual = installation.run_plan("run-1", &["true"]);
    let pool = WarmPool::new(&usual, config).unwrap();
    let spec = || usual.spec.clone();
    let workspace = installation.path().join("given");
    fs::create_dir(&workspace).unwrap();
    fs::set_permissions(&workspace, Permissions::from_mode(0o777)).unwrap();
    let tools = BindMount {
        source: workspace.clone(),
        target: "/opt/tools".into(),
        access: MountAccess::ReadOnly,
    };
    let directory = WorkspaceMount::Directory { path: workspace, access: MountAccess::ReadWrite };
    let messages = [
        spec(),
        SandboxSpec { mounts: vec![tools], ..spec() },
        SandboxSpec { workspace: directory, ..spec() },
        SandboxSpec { workspace: WorkspaceMount::Fresh, ..spec() },
        SandboxSpec { init: None, ..spec() },
        SandboxSpec { limits: SandboxLimits { pids: 9, ..SandboxLimits::default() }, ..spec() },
        SandboxSpec { argv: vec![], ..spec() },
    ]
    .map(|spec| {
        pool.claim(RunPlan { spec, ..usual.clone() }, RunInputs::default())
            .err()
            .unwrap()
            .to_string()
    });
    insta::assert_snapshot!(messages.join("\n"), @r"
    no slot is ready
    a warm sandbox cannot take a mount: it is fixed when the sandbox is created
    a warm sandbox cannot take a directory as its workspace: it is fixed when the sandbox is created
    the run needs a different kind of workspace than the warm sandboxes have
    warm sandboxes need `cogni-init` as their first process; leave out `--init none`
    the run needs a different limit of memory, processes or processors than the warm sandboxes have
    argv is `[]`; give a program and its arguments after `--`
    ");
}

/// R3, R7: A claimed slot refuses every escape attempt that other sandboxes refuse.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_gets_out_of_a_claimed_slot() {
    let probe = Path::new(env!("CARGO_BIN_EXE_cogni-gateway")).with_file_name("examples/escape");
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = format!("cogni-{}", Uuid::now_v7());
    let address = unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let _abstract = UnixListener::bind_addr(&address).unwrap();
    let facts = [
        format!("abstract={name}"),
        format!("host-pid={}", process::id()),
        format!("port={}", port.local_addr().unwrap().port()),
        format!("pids={}", SandboxLimits::default().pids),
    ];
    let argv: Vec<_> =
        ["/workspace/escape"].into_iter().chain(facts.iter().map(String::as_str)).collect();
    // The program needs a library of this machine, which the image may not have.
    let installation = TestInstallation::embedded();
    let plan = RunPlan {
        spec: SandboxSpec { workspace: WorkspaceMount::Fresh, ..installation.spec(&argv) },
        ..installation.run_plan("run-escape", &argv)
    };
    let pool = keep_for(&installation, &plan, 1);
    let prepared = pool.claim(&plan);
    let program = prepared.workspace_path().unwrap().join("escape");
    // Another process writes the program: the pool starts processes of this one at the same time, and a program that such a
    // child still has open for writing cannot be executed (ETXTBSY).
    let installed = Command::new("install").arg("--mode=755").args([probe, program]).status();
    assert!(installed.unwrap().success());
    let result = run(prepared).await;
    pool.stop().await;
    assert_eq!(result["ok"], json!(true), "{result}");
    let stdout = result["stdout"].as_str().unwrap();
    assert!(stdout.contains("held") && !stdout.contains("ESCAPED"), "{stdout}");
}

/// R5, R7: Slots of a killed process end by themselves, and a sweep removes their remains.
#[tokio::test(flavor = "multi_thread")]
async fn slots_end_with_their_process() {
    if let Some(installation) = installation::inherited_installation() {
        let _kept = keep_slots(&installation, 1);
        return future::pending().await;
    }
    for installation in both_installations() {
        let test = "docker_driver::warm_pool::slots_end_with_their_process";
        let keeper = installation.start_keeper(test);
        wait_until(|| !installation.waiting_slots().is_empty(), || "it keeps no slot".to_owned());
        keeper.kill(&installation).await;
    }
}

/// A pool with its background tasks.
struct WarmPoolFixture<'place> {
    pool: Arc<WarmPool>,
    count: usize,
    keeping: BackgroundPool<'place>,
}

fn keep_slots(installation: &TestInstallation, count: usize) -> WarmPoolFixture<'_> {
    keep_for(installation, &installation.run_plan("run-kind", &["true"]), count)
}

fn keep_for<'place>(
    installation: &'place TestInstallation,
    plan: &RunPlan,
    count: usize,
) -> WarmPoolFixture<'place> {
    let config = WarmPoolConfig { count, max_age: Duration::from_hours(1) };
    let pool = Arc::new(WarmPool::new(plan, config).unwrap());
    let pool_handle = Arc::clone(&pool);
    let keeping =
        BackgroundPool::new(installation, async move |stop| pool_handle.maintain(stop).await);
    WarmPoolFixture { pool, count, keeping }
}

impl WarmPoolFixture<'_> {
    fn until_full(&self) {
        let is_full = || self.pool.ready_count() == self.count;
        wait_until(is_full, || {
            format!("{} of {} slots are ready", self.pool.ready_count(), self.count)
        });
    }

    /// Waits for a ready slot and claims it.
    fn claim(&self, plan: &RunPlan) -> PreparedRun {
        let mut claimed = None;
        let is_claimed = || {
            claimed = match self.pool.claim(plan.clone(), RunInputs::default()) {
                Ok(prepared) => Some(prepared),
                Err(WarmClaimError::NoneReady) => None,
                Err(error) => panic!("{error}"),
            };
            claimed.is_some()
        };
        wait_until(is_claimed, || "no slot is ready".to_owned());
        claimed.unwrap()
    }

    /// Stops the pool; afterwards nothing of it remains.
    async fn stop(self) {
        self.keeping.stop().await;
    }
}

fn string_pair(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}
