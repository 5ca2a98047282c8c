//! R5, R8: Tests of the sweep: what a killed runner leaves behind, and which process removes it.

use std::fs;
use std::process::{Child, Command, Output, Stdio};

use super::driver::{TestedRunner, list_containers, list_entries, shell_argv};
use crate::support::process::{ChildProcess, wait_until};
use cogni_gateway::sandbox::sandbox_name;

/// R5: After `kill -9`, the sweep finds the container and the directory, and removes both.
#[test]
fn leftovers_of_a_killed_runner_are_swept() {
    let runner = TestedRunner::new();
    let run = format!("run-killed-{}", std::process::id());
    let mut process = start_run(&runner, &run);
    let container = sandbox_name(&run);
    let directory = list_entries(&runner.run_dir()).pop().unwrap();

    let output = run_sweep(&runner, &["--apply"]).1;
    assert!(output.contains(&format!("container {container}: in use\n")), "{output}");
    assert!(output.contains(&format!("directory {directory}: in use\n")), "{output}");

    process.signal("KILL");
    process.wait();
    let (status, output) = run_sweep(&runner, &[]);
    assert_eq!(status, 1);
    assert!(output.contains(&format!("container {container}: orphaned\n")), "{output}");
    assert!(output.contains(&format!("directory {directory}: orphaned\n")), "{output}");
    assert!(!list_containers(&run).is_empty(), "a dry run has removed it");

    let output = run_sweep(&runner, &["--apply"]).1;
    assert!(output.contains(&format!("container {container}: removed\n")), "{output}");
    assert!(output.contains(&format!("directory {directory}: removed\n")), "{output}");
    runner.assert_nothing_is_left(&run);
}

/// R5: One engine may have runs of several installations; each installation sweeps its own.
#[test]
fn leftovers_of_another_installation_are_reported_and_not_touched() {
    let (own_host, other_host) = (TestedRunner::new(), TestedRunner::new());
    let run = format!("run-theirs-{}", std::process::id());
    let mut process = start_run(&other_host, &run);
    process.signal("KILL");
    process.wait();

    assert_eq!(run_sweep(&own_host, &["--apply"]), (0, "nothing is left behind\n".to_owned()));
    let output = run_sweep(&own_host, &["--apply", "--all"]).1;
    let line = format!(
        "container {}: kept: of the runs in `{}`\n",
        sandbox_name(&run),
        other_host.run_dir().display()
    );
    assert!(output.contains(&line), "{output}");
    assert!(!list_containers(&run).is_empty(), "it is removed");
    assert_eq!(run_sweep(&other_host, &["--apply"]).0, 0);
    other_host.assert_nothing_is_left(&run);
}

/// R5: The second of two concurrent sweeps waits for the first and finds nothing to do.
#[test]
fn concurrent_sweeps_do_not_conflict() {
    let runner = TestedRunner::new();
    let run = format!("run-twice-swept-{}", std::process::id());
    let mut process = start_run(&runner, &run);
    process.signal("KILL");
    process.wait();
    let start = |_| sweep_command(&runner, &["--apply"]).stdout(Stdio::piped()).spawn().unwrap();
    let sweeps: Vec<Child> = (0..4).map(start).collect();
    for sweep in sweeps {
        let (status, output) = exit_and_output(sweep.wait_with_output().unwrap());
        assert_eq!(status, 0, "{output}");
    }
    runner.assert_nothing_is_left(&run);
}

/// R5: Objects without a known owner are kept and reported.
#[test]
fn objects_without_a_known_owner_are_kept() {
    let runner = TestedRunner::new();
    fs::create_dir_all(runner.run_dir().join("other-owner")).unwrap();
    let output = run_sweep(&runner, &["--apply"]).1;
    assert!(output.contains("directory other-owner: kept: its owner is unknown\n"), "{output}");
    assert_eq!(list_entries(&runner.run_dir()), ["other-owner"]);
}

/// R8: Without an engine, nothing can be left in it. An engine that cannot be reached is not taken for an empty one.
#[test]
fn an_engine_that_cannot_be_reached_is_reported() {
    let runner = TestedRunner::new();
    let socket = runner.path().join("engine.sock");
    let flags = ["--docker-socket", socket.to_str().unwrap()];
    let redacted = |(status, output): (i32, String)| {
        format!("{status}\n{}", output.replace(socket.to_str().unwrap(), "SOCKET"))
    };
    insta::assert_snapshot!(redacted(run_sweep(&runner, &flags)), @r"
    0
    engine SOCKET: not found, so it has no containers
    nothing is left behind
    ");
    fs::write(&socket, "").unwrap();
    insta::assert_snapshot!(redacted(run_sweep(&runner, &flags)), @r"
    1
    engine SOCKET: container engine at `SOCKET` does not answer: Connection refused (os error 111); start it, name its socket with `--docker-socket`, or leave the image out for the driver `embedded`, which needs no engine
    nothing else is left behind
    ");
}

/// R5: Any driver's next run sweeps.
#[test]
fn a_run_of_the_other_driver_sweeps_too() {
    let runner = TestedRunner::new();
    let run = format!("run-half-swept-{}", std::process::id());
    let mut process = start_run(&runner, &run);
    process.signal("KILL");
    process.wait();
    let next = format!("run-embedded-after-{}", std::process::id());
    let flags = ["--driver", "embedded", "--run-id", &next, "--grace", "300ms"];
    let mut command = runner.prepare(&flags, &["sleep", "600"]);
    let mut process = ChildProcess::start(command.env_remove("COGNI_IMAGE"), "");
    wait_until(|| list_containers(&run).is_empty(), || list_containers(&run));
    wait_until(
        || list_entries(&runner.run_dir()).len() == 1,
        || list_entries(&runner.run_dir()).join(" "),
    );
    process.terminate();
    runner.assert_nothing_is_left(&next);
}

/// R5, R8: A container may still use the directory while the engine cannot be asked.
#[test]
fn a_directory_is_kept_while_a_container_may_have_it() {
    let runner = TestedRunner::new();
    let [docker, embedded] = ["0", "1"].map(|digit| {
        let name = format!("cogni-{}-00000000000000ff-1-1-1", digit.repeat(16));
        fs::create_dir_all(runner.run_dir().join(&name)).unwrap();
        name
    });
    // The driver marks a directory before it asks the engine for the container.
    fs::write(runner.run_dir().join(&docker).join("engine-container"), "").unwrap();
    let socket = runner.path().join("engine.sock");
    fs::write(&socket, "").unwrap();
    let (status, output) =
        run_sweep(&runner, &["--apply", "--docker-socket", socket.to_str().unwrap()]);
    assert_eq!(status, 1);
    let reason = "a container may have it, and the engine cannot be asked";
    assert!(
        output.contains(&format!("directory {docker}: cannot be removed: {reason}\n")),
        "{output}"
    );
    assert!(output.contains(&format!("directory {embedded}: removed\n")), "{output}");
    assert_eq!(run_sweep(&runner, &["--apply"]).0, 0);
    assert_eq!(list_entries(&runner.run_dir()), [""; 0]);
}

fn start_run(runner: &TestedRunner, run: &str) -> ChildProcess {
    let command = &mut runner.prepare(&["--run-id", run], &shell_argv("echo up; sleep 600"));
    let mut process = ChildProcess::start(command, "");
    process.until(|output| output.contains("up\n"));
    process
}

pub(super) fn run_sweep(runner: &TestedRunner, flags: &[&str]) -> (i32, String) {
    exit_and_output(sweep_command(runner, flags).output().unwrap())
}

fn sweep_command(runner: &TestedRunner, flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    command.env_clear().env("COGNI_RUN_DIR", runner.run_dir()).arg("sweep").args(flags);
    command
}

fn exit_and_output(output: Output) -> (i32, String) {
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}
