//! R5: The embedded driver passes the same tests, and has a second process that may be killed.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::super::driver::{TestedRunner, shell_argv};
use super::super::sweep::run_sweep;
use crate::support::process::{ChildProcess, pause_for, wait_until};

/// R5: The runner may be killed at any moment, and nothing remains. Which step a moment falls into depends on the
/// machine.
#[test]
fn whenever_the_runner_is_killed_its_next_start_leaves_nothing() {
    let (runner, run) = (TestedRunner::new(), process_name("moment"));
    for moment in 0..30 {
        let mut command = run_command(&runner, &run, &shell_argv("sleep 600"));
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        pause_for(Duration::from_millis(5 * moment));
        child.kill().unwrap();
        child.wait().unwrap();
        restart_run(&runner, &run);
    }
}

/// R5: The helper notices that its runner has gone, and ends what it has made.
#[test]
fn the_helper_ends_with_its_runner() {
    let (runner, run) = (TestedRunner::new(), process_name("runner"));
    let mut process = start_run(&runner, &run);
    process.signal("KILL");
    process.wait();
    wait_until(|| runner.left(&run) == "directory", || runner.left(&run));
    restart_run(&runner, &run);
}

/// R5: No process is left to clean up, and the sandbox's processes still end.
#[test]
fn leftovers_of_a_killed_runner_and_helper_are_removed() {
    let (runner, run) = (TestedRunner::new(), process_name("both"));
    killed_with_its_helper(&runner, &run);
    restart_run(&runner, &run);
}

/// R5: The control group is removed even if the directory that names it is gone.
#[test]
fn a_control_group_without_a_directory_is_removed() {
    let (runner, run) = (TestedRunner::new(), process_name("group"));
    killed_with_its_helper(&runner, &run);
    fs::remove_dir_all(runner.run_dir()).unwrap();
    let (status, output) = run_sweep(&runner, &[]);
    assert!(status == 1 && output.contains("group /cogni-"), "{output}");
    assert!(output.contains(": orphaned\n"), "{output}");
    assert_eq!(run_sweep(&runner, &["--apply"]).0, 0);
    assert_eq!(runner.left(&run), "nothing");
    // Leftovers of another installation are not even reported.
    assert_eq!(run_sweep(&TestedRunner::new(), &[]).1, "nothing is left behind\n");
}

/// Its directory and its control groups remain.
fn killed_with_its_helper(runner: &TestedRunner, run: &str) {
    let mut process = start_run(runner, run);
    let helper = child_of(process.id());
    send_signal("-STOP", helper);
    process.signal("KILL");
    process.wait();
    send_signal("-KILL", helper);
    wait_until(|| runner.left(run) == "directory, groups", || runner.left(run));
}

/// R5: The sandbox ends with the process that made it, and the run reports that.
#[test]
fn a_helper_that_is_killed_ends_the_run() {
    let (runner, run) = (TestedRunner::new(), process_name("helper"));
    let mut process = start_run(&runner, &run);
    send_signal("-KILL", child_of(process.id()));
    assert_eq!(process.wait().code(), Some(1));
    assert_eq!(run_result(&process)["error_code"], "internal");
    runner.assert_nothing_is_left(&run);
}

/// R5: The runner does not wait for a helper that hangs, and what the helper has made ends with it.
#[test]
fn a_helper_that_hangs_costs_a_bounded_time() {
    let (runner, run) = (TestedRunner::new(), process_name("hang"));
    let mut process = start_run(&runner, &run);
    send_signal("-STOP", child_of(process.id()));
    process.terminate();
    assert_eq!(run_result(&process)["error_code"], "cancelled");
    runner.assert_nothing_is_left(&run);
}

fn run_command(runner: &TestedRunner, run: &str, argv: &[&str]) -> Command {
    let flags = ["--driver", "embedded", "--run-id", run, "--grace", "300ms"];
    let mut command = runner.prepare(&flags, argv);
    command.env_remove("COGNI_IMAGE");
    command
}

fn start_run(runner: &TestedRunner, run: &str) -> ChildProcess {
    let mut process =
        ChildProcess::start(&mut run_command(runner, run, &shell_argv("echo up; sleep 600")), "");
    process.until(|output| output.contains("up\n"));
    process
}

/// Makes the same run once more, to its end.
fn restart_run(runner: &TestedRunner, run: &str) {
    let output = run_command(runner, run, &["true"]).output().unwrap();
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["error_code"], json!(null), "{result}");
    runner.assert_nothing_is_left(run);
}

fn run_result(process: &ChildProcess) -> Value {
    let output = process.output();
    let line = output.lines().find(|line| line.starts_with("{\"run_id\"")).expect("a result");
    serde_json::from_str(line).unwrap()
}

fn child_of(pid: u32) -> u32 {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.trim().parse().unwrap_or_else(|_| panic!("not one child: `{children}`"))
}

fn send_signal(name: &str, pid: u32) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

fn process_name(of: &str) -> String {
    format!("run-embedded-killed-{of}-{}", std::process::id())
}
