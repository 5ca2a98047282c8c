//! R5: Tests of runs that do not end by themselves.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::driver::{TestedRunner, list_containers, shell_argv};
use crate::support::process::{ChildProcess, wait_until};

/// R5: The program first gets SIGTERM, and its output from then on is still captured.
#[test]
fn a_run_over_its_time_gets_sigterm_first() {
    let polite =
        shell_argv("trap 'echo bye; exit 7' TERM; echo hi; while true; do sleep 0.1; done");
    let result = TestedRunner::new().run(&["--max-runtime", "20s"], &polite);
    assert_eq!(result.facts(), json!([false, 7, "timeout"]));
    assert_eq!(result.json["stdout"], "hi\nbye\n");
}

#[test]
fn a_run_that_does_not_listen_is_killed() {
    let deaf = shell_argv("trap '' TERM; while true; do sleep 0.1; done");
    let result = TestedRunner::new().run(&["--max-runtime", "20s", "--grace", "300ms"], &deaf);
    assert_eq!(result.facts(), json!([false, 137, "timeout"]));
}

/// R5: A program that the kernel killed for lack of memory is distinguished from one that was killed, although both
/// have the same exit code.
#[test]
fn an_out_of_memory_run_is_distinguished_from_a_killed_one() {
    let result = TestedRunner::new().run(&["--max-memory", "32m"], &["tail", "/dev/zero"]);
    assert_eq!(result.facts(), json!([false, 137, "oom_killed"]));
}

/// R5: A process whose parent has ended holds neither the output nor the run.
#[test]
fn a_grandchild_that_holds_the_output_does_not_hold_the_run() {
    let result = TestedRunner::new().run(&[], &shell_argv("sleep 600 & echo done"));
    assert_eq!(result.facts(), json!([true, 0, null]));
    assert_eq!(result.json["stdout"], "done\n");
    assert!(result.json["timings"]["total_ms"].as_u64().unwrap() < 60_000);
}

#[test]
fn a_run_that_is_cancelled_says_so_and_is_gone() {
    let runner = TestedRunner::new();
    let stdout = runner.path().join("result");
    for signal in ["-TERM", "-INT"] {
        let run = format!("run-cancelled{signal}-{}", std::process::id());
        let mut command =
            runner.prepare(&["--run-id", &run, "--grace", "300ms"], &["sleep", "600"]);
        let output = fs::File::create(&stdout).unwrap();
        let mut child = command.stdout(output).stderr(Stdio::null()).spawn().unwrap();
        wait_until(|| !list_containers(&run).is_empty(), || "there is no container".to_owned());
        let killed = Command::new("kill").args([signal, &child.id().to_string()]).status();
        assert!(killed.unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(1));
        let result: Value = serde_json::from_slice(&fs::read(&stdout).unwrap()).unwrap();
        assert_eq!(result["error_code"], "cancelled", "{result}");
        runner.assert_nothing_is_left(&run);
    }
}

/// R5: A terminal interrupts every process in its foreground; the program still gets its grace time.
#[test]
fn an_interrupt_from_a_terminal_leaves_the_program_its_grace() {
    let runner = TestedRunner::new();
    let run = format!("run-interrupted-{}", std::process::id());
    let polite =
        shell_argv("trap 'echo bye; exit 7' TERM; echo up; while true; do sleep 0.1; done");
    let mut command = runner.prepare(&["--run-id", &run], &polite);
    let mut process = ChildProcess::start(command.process_group(0), "");
    process.until(|output| output.contains("up\n"));
    let group = format!("-{}", process.id());
    assert!(Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    assert_eq!(process.wait().code(), Some(1));
    let printed = process.output();
    let result = printed.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()).unwrap();
    let facts = json!([result["exit_code"], result["error_code"], result["stdout"]]);
    assert_eq!(facts, json!([7, "cancelled", "up\nbye\n"]), "{printed}");
    runner.assert_nothing_is_left(&run);
}

/// R5: A second interrupt ends the run without waiting.
#[test]
fn a_run_that_is_cancelled_twice_has_no_grace() {
    let runner = TestedRunner::new();
    let run = format!("run-hurried-{}", std::process::id());
    let deaf = shell_argv("trap 'echo asked' TERM; echo up; while true; do sleep 0.1; done");
    let flags = ["--run-id", &run, "--grace", "1h"];
    let mut process = ChildProcess::start(&mut runner.prepare(&flags, &deaf), "");
    process.until(|output| output.contains("up\n"));
    process.signal("INT");
    process.until(|text| text.contains("asked\n"));
    process.signal("INT");
    assert_eq!(process.wait().code(), Some(1));
    assert!(process.output().contains(r#""error_code":"cancelled""#), "{}", process.output());
    runner.assert_nothing_is_left(&run);
}

/// R8: If the result cannot be written, the run has failed, but it was not wrong use.
#[test]
fn a_result_that_cannot_be_written_is_a_failure() {
    let runner = TestedRunner::new();
    let mut command = runner.prepare(&[], &["true"]);
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let status = command.stdout(full).stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

/// R1: A second run with the same name is refused, and the first one is not touched.
#[test]
fn a_run_has_one_sandbox_at_a_time() {
    let runner = TestedRunner::new();
    let run = format!("run-twice-{}", std::process::id());
    let flags = ["--run-id", &run, "--grace", "300ms"];
    let mut first =
        ChildProcess::start(&mut runner.prepare(&flags, &shell_argv("echo up; sleep 600")), "");
    first.until(|output| output.contains("up\n"));
    let (status, stdout, _) = runner.command(&flags, &["true"]);
    let second: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((status, &second["error_code"]), (2, &json!("sandbox_unavailable")), "{second}");
    assert!(!list_containers(&run).is_empty(), "the first is gone");
    first.terminate();
    assert!(first.output().contains(r#""error_code":"cancelled""#));
    runner.assert_nothing_is_left(&run);
}
