//! R5: Tests of an embedded sandbox whose processes are killed: nothing keeps running.

use std::fs;
use std::os::unix::net::UnixListener;

use cogni_gateway::sandbox::embedded::{self, LeftoverCgroup};
use cogni_gateway::sandbox::owner_process::OwnerState;
use cogni_gateway::sandbox::sandbox_name;
use serde_json::{Value, json};

use super::branch_delivery::DeliverySetup;
use super::driver::{EmbeddedDriver, TestedRunner, list_containers, list_entries, shell_argv};
use crate::support::process::{ChildProcess, wait_until};
use crate::support::run_command::TestDriver;

/// R5: The sandbox ends and its control groups are removed; the directory names its owner.
#[test]
fn nothing_runs_on_when_the_runner_is_killed() {
    let runner = TestedRunner::new();
    let run = format!("run-killed-{}", std::process::id());
    let deaf = shell_argv("trap '' TERM; echo up; sleep 600");
    let mut process = ChildProcess::start(&mut runner.prepare(&["--run-id", &run], &deaf), "");
    process.until(|output| output.contains("up\n"));
    assert_ne!(list_containers(&run), "");
    process.signal("KILL");
    process.wait();
    wait_until(|| EmbeddedDriver::traces(&run).is_empty(), || EmbeddedDriver::traces(&run));
    let left = list_entries(&runner.run_dir());
    assert_eq!(left.len(), 1);
    fs::remove_dir_all(runner.run_dir().join(&left[0])).unwrap();
}

/// R5: The same holds while the sandbox is being made.
#[test]
fn nothing_runs_on_when_the_runner_is_killed_at_any_moment() {
    let runner = TestedRunner::new();
    for millis in (0..60).step_by(5) {
        let run = format!("run-early-{millis}-{}", std::process::id());
        let mut command = runner.prepare(&["--run-id", &run], &["sleep", "600"]);
        let mut process = ChildProcess::start(&mut command, "");
        // The sleep does not wait for an event; it varies the moment of the kill.
        std::thread::sleep(std::time::Duration::from_millis(millis));
        process.signal("KILL");
        process.wait();
        // The helper may start only now, and then notices that it is too late.
        let is_gone = || {
            if list_containers(&run).is_empty() {
                remove_groups(&run);
            }
            EmbeddedDriver::traces(&run).is_empty()
        };
        wait_until(is_gone, || EmbeddedDriver::traces(&run));
    }
}

fn remove_groups(run: &str) {
    let is_ours =
        |group: &LeftoverCgroup| group.name.display().to_string().contains(&sandbox_name(run));
    for group in embedded::list_leftovers().unwrap().into_iter().filter(is_ours) {
        assert_eq!(group.owner.unwrap().state(), OwnerState::Dead);
        embedded::remove_cgroup(&group.name).unwrap();
    }
}

/// R5: The helper's death ends the sandbox, and is the run's result.
#[test]
fn a_helper_that_is_killed_takes_the_container_with_it() {
    let runner = TestedRunner::new();
    let run = format!("run-helpless-{}", std::process::id());
    let stdout = runner.path().join("result");
    let mut command = runner.prepare(&["--run-id", &run], &["sleep", "600"]);
    command.stdout(fs::File::create(&stdout).unwrap()).stderr(std::process::Stdio::null());
    let mut child = command.spawn().unwrap();
    wait_until(|| !list_containers(&run).is_empty(), || "there is no container".to_owned());
    let helper = child_of(child.id());
    assert!(
        std::process::Command::new("kill").args(["-KILL", &helper]).status().unwrap().success()
    );
    child.wait().unwrap();
    let result: Value = serde_json::from_slice(&fs::read(&stdout).unwrap()).unwrap();
    assert_eq!(result["error_code"], json!("internal"), "{result}");
    runner.assert_nothing_is_left(&run);
}

fn child_of(pid: u32) -> String {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.split_whitespace().next().unwrap().to_owned()
}

/// R5, L7: A machine whose Docker Engine is stopped has the engine's socket, and no process answers there. The next run
/// removes what a killed run has left, delivers its work, and warns of nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_engine_keeps_no_leftovers_of_this_driver() {
    let setup = DeliverySetup::new().await;
    let socket = setup.runner.path().join("engine.sock");
    drop(UnixListener::bind(&socket).unwrap());
    let flags = ["--branch-key", "stopped", "--docker-socket", socket.to_str().unwrap()];
    let commit = "echo one > one && git add one && git commit -qm one; echo up; sleep 600";
    let mut process = ChildProcess::start(&mut setup.prepare(&flags, &shell_argv(commit)), "");
    process.until(|output| output.contains("up\n"));
    process.signal("KILL");
    process.wait();
    let next = setup.run(&flags, "cat one");
    assert_eq!(next.json["stdout"], "one\n", "{}", next.shown);
    assert!(!next.shown.contains("WARN"), "{}", next.shown);
    assert_eq!(list_entries(&setup.runner.run_dir()), [""; 0]);
}
