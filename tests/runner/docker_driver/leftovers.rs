//! R5: Tests of objects that a process could not remove when their run ended: the process removes them later, without
//! having to end.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cogni_gateway::runner::{PreparedRun, RunInputs, RunPlan};
use cogni_gateway::sandbox::{SandboxDriver, sandbox_name};

use super::driver::{list_entries, shell_argv};
use crate::support::docker_engine;
use crate::support::engine_proxy::{EngineFault, EngineProxy, ProxiedCall};
use crate::support::installation::{TestInstallation, run};
use crate::support::process::wait_until;

/// R5: The engine is away when a run ends, for longer than the run waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_an_engine_did_not_remove_in_time_is_swept() {
    let installation = TestInstallation::docker();
    let engine_proxy = EngineProxy::new(&installation.path(), Path::new(docker_engine::SOCKET));
    let name = format!("run-away-{}", std::process::id());
    let prepared = prepare_run(&installation, &engine_proxy, &name, &shell_argv("sleep 1000"));
    let goes = async {
        wait_async(|| engine_proxy.calls().contains(&ProxiedCall::Wait)).await;
        engine_proxy.disconnect();
    };
    let (ended, ()) = tokio::join!(run(prepared), goes);
    assert_eq!(ended["error_code"], "internal", "{ended}");
    assert_eq!(installation.left(), sandbox_name(&name), "it is removed already");
    installation.sweep().await;
}

/// R5: The engine makes a container after the connection has ended, and after the runner has looked for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_an_engine_makes_late_is_swept() {
    let installation = TestInstallation::docker();
    let engine_proxy = EngineProxy::new(&installation.path(), Path::new(docker_engine::SOCKET));
    let name = format!("run-forsaken-{}", std::process::id());
    engine_proxy.inject(ProxiedCall::Create, EngineFault::Forsaken);
    let ended = run(prepare_run(&installation, &engine_proxy, &name, &["true"])).await;
    assert_eq!(ended["error_code"], "internal", "{ended}");
    assert_eq!(installation.left(), sandbox_name(&name), "it was looked for, and found");
    installation.sweep().await;

    // The container's name can be used again.
    engine_proxy.resume();
    let next = run(prepare_run(&installation, &engine_proxy, &name, &["true"])).await;
    assert_eq!(next["ok"], true, "{next}");
}

/// R5: The run's directory contains something that cannot be removed.
#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_could_not_be_removed_is_swept() {
    let installation = TestInstallation::embedded();
    let prepared =
        PreparedRun::new(installation.run_plan("run-mounted", &["true"]), RunInputs::default())
            .unwrap();
    let [directory] = &list_entries(&installation.run_dir())[..] else {
        panic!("{}", installation.left())
    };
    let mounted = MountedFileSystem::at(installation.run_dir().join(directory).join("sock"));
    drop(prepared);
    wait_until(|| is_noted(directory), || "the leftover is not registered".to_owned());
    drop(mounted);
    assert_eq!(installation.left(), *directory);
    installation.sweep().await;
}

fn is_noted(directory: &str) -> bool {
    cogni_gateway::sandbox::leftovers::is_registered(directory)
}

fn prepare_run(
    installation: &TestInstallation,
    engine_proxy: &EngineProxy,
    run: &str,
    argv: &[&str],
) -> PreparedRun {
    let driver = SandboxDriver::Docker { socket: engine_proxy.socket().into() };
    PreparedRun::new(RunPlan { driver, ..installation.run_plan(run, argv) }, RunInputs::default())
        .unwrap()
}

/// Waits as [`wait_until`] does, without blocking other tasks.
async fn wait_async(holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_mins(1), "it does not come to that");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// An empty file system that is mounted as long as this value lives.
struct MountedFileSystem(PathBuf);

impl MountedFileSystem {
    fn at(path: PathBuf) -> Self {
        let mut mount = Command::new("mount");
        let mount = mount.args(["-t", "tmpfs", "tmpfs"]).arg(&path).status().unwrap();
        assert!(mount.success(), "cannot mount a tmpfs; run the tests as root");
        Self(path)
    }
}

impl Drop for MountedFileSystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}
