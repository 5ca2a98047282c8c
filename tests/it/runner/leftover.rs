//! R5, R8: what a killed runner leaves behind, and who takes it away.

use std::fs;
use std::process::Command;

use super::sandboxed::{Sandboxed, containers, entries, sh};
use crate::support::process::Process;

/// R5: after `kill -9`, the sweep finds the container and the directory, and nothing of them is left.
#[test]
fn what_a_killed_runner_leaves_is_swept_away() {
    let runner = Sandboxed::new();
    let run = format!("run-killed-{}", std::process::id());
    let mut process =
        Process::start(&mut runner.prepare(&["--run-id", &run], &sh("echo up; sleep 600")), "");
    process.until(|said| said.contains("up\n"));
    let container = name_of_container(&run);
    let directory = entries(&runner.run_dir()).pop().unwrap();

    let said = sweep(&runner, &["--apply"]).1;
    assert!(said.contains(&format!("container {container}: in use\n")), "{said}");
    assert!(said.contains(&format!("directory {directory}: in use\n")), "{said}");

    process.signal("KILL");
    process.wait();
    let (status, said) = sweep(&runner, &[]);
    assert_eq!(status, 1);
    assert!(said.contains(&format!("container {container}: orphaned\n")), "{said}");
    assert!(said.contains(&format!("directory {directory}: orphaned\n")), "{said}");
    assert!(!containers(&run).is_empty(), "a dry run has removed it");

    let said = sweep(&runner, &["--apply"]).1;
    assert!(said.contains(&format!("container {container}: removed\n")), "{said}");
    assert!(said.contains(&format!("directory {directory}: removed\n")), "{said}");
    runner.assert_nothing_is_left(&run);
}

/// R5: what nobody can answer for is kept, and told.
#[test]
fn what_nobody_can_tell_the_owner_of_is_kept() {
    let runner = Sandboxed::new();
    fs::create_dir_all(runner.run_dir().join("somebody-elses")).unwrap();
    let said = sweep(&runner, &["--apply"]).1;
    assert!(
        said.contains("directory somebody-elses: kept: nobody can tell whose it is\n"),
        "{said}"
    );
    assert_eq!(entries(&runner.run_dir()), ["somebody-elses"]);
}

fn sweep(runner: &Sandboxed, flags: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
    command.env_clear().env("COGNI_RUN_DIR", runner.run_dir()).arg("sweep").args(flags);
    let output = command.output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

fn name_of_container(run: &str) -> String {
    cogni_gateway::sandbox::name_of(run)
}
