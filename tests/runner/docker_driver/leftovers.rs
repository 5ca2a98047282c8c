//! R5: what a process could not take away when its run ended, it takes away later, and does not have to end for that.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cogni_gateway::runner::{PreparedRun, RunPlan};
use cogni_gateway::sandbox::{SandboxDriver, sandbox_name};

use super::driver::{entries, sh};
use crate::support::docker_engine;
use crate::support::engine_proxy::{Call, Fault, Middleman};
use crate::support::installation::{Place, run};
use crate::support::process::patience;

/// R5: an engine that is away when a run ends, for longer than anybody waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_an_engine_did_not_remove_in_time_is_swept() {
    let place = Place::docker();
    let middleman = Middleman::new(&place.path(), Path::new(docker_engine::SOCKET));
    let name = format!("run-away-{}", std::process::id());
    let prepared = prepare(&place, &middleman, &name, &sh("sleep 1000"));
    let goes = async {
        until(|| middleman.calls().contains(&Call::Wait)).await;
        middleman.go_down();
    };
    let (ended, ()) = tokio::join!(run(prepared), goes);
    assert_eq!(ended["error_code"], "internal", "{ended}");
    assert_eq!(place.left(), sandbox_name(&name), "it is removed already");
    place.sweep().await;
}

/// R5: an engine that makes a container after the connection has ended, and after anybody has looked for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_an_engine_makes_after_all_is_swept() {
    let place = Place::docker();
    let middleman = Middleman::new(&place.path(), Path::new(docker_engine::SOCKET));
    let name = format!("run-forsaken-{}", std::process::id());
    middleman.strike(Call::Create, Fault::Forsaken);
    let ended = run(prepare(&place, &middleman, &name, &["true"])).await;
    assert_eq!(ended["error_code"], "internal", "{ended}");
    assert_eq!(place.left(), sandbox_name(&name), "it was looked for, and found");
    place.sweep().await;

    // And its name is good for another.
    middleman.resume();
    let next = run(prepare(&place, &middleman, &name, &["true"])).await;
    assert_eq!(next["ok"], true, "{next}");
}

/// R5: something in a run's directory that cannot be removed.
#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_could_not_be_removed_is_swept() {
    let place = Place::embedded();
    let prepared = PreparedRun::new(place.order("run-mounted", &["true"])).unwrap();
    let [directory] = &entries(&place.run_dir())[..] else { panic!("{}", place.left()) };
    let mounted = Mounted::at(place.run_dir().join(directory).join("sock"));
    drop(prepared);
    patience(|| is_noted(directory), || "nobody tells that it is left behind".to_owned());
    drop(mounted);
    assert_eq!(place.left(), *directory);
    place.sweep().await;
}

fn is_noted(directory: &str) -> bool {
    cogni_gateway::sandbox::leftovers::is_registered(directory)
}

fn prepare(place: &Place, middleman: &Middleman, run: &str, argv: &[&str]) -> PreparedRun {
    let driver = SandboxDriver::Docker { socket: middleman.socket().into() };
    PreparedRun::new(RunPlan { driver, ..place.order(run, argv) }).unwrap()
}

/// As [`patience`], beside something that goes on.
async fn until(holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_mins(1), "it does not come to that");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A file system of nothing, as long as this lives.
struct Mounted(PathBuf);

impl Mounted {
    fn at(path: PathBuf) -> Self {
        let mut mount = Command::new("mount");
        let mount = mount.args(["-t", "tmpfs", "tmpfs"]).arg(&path).status().unwrap();
        assert!(mount.success(), "cannot mount a tmpfs; run the tests as root");
        Self(path)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}
