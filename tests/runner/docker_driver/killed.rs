//! R5: Tests of a runner that is killed with `kill -9` at every step, and of what its next start finds and removes.

mod embedded;

use std::fmt::Write;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::driver::{TestedRunner, list_containers, run_find, shell_argv};
use crate::support::docker_engine;
use crate::support::engine_proxy::{EngineFault, EngineProxy, ProxiedCall};
use crate::support::process::wait_until;

/// R5: Whenever the runner is killed, nothing remains after the same run has been started again and has ended.
#[test]
fn whenever_the_runner_is_killed_its_next_start_leaves_nothing() {
    let mut table = String::new();
    let mut row = |at: &str, [left, after]: [String; 2]| {
        writeln!(table, "{at:34} | {left:30} | {after}").unwrap();
    };
    row("killed while", ["left behind".into(), "after the next start".into()]);
    row("the directory is made", killed_at_the_directory());
    for (call, deeds) in CALLS {
        for (fault, when) in
            [(EngineFault::Lost, "is asked for"), (EngineFault::AnswerLost, "is done")]
        {
            row(&format!("{deeds} {when}"), killed_at(*call, fault));
        }
    }
    row("the result is told", killed_at_the_result());
    insta::assert_snapshot!(table);
}

const CALLS: &[(ProxiedCall, &str)] = &[
    (ProxiedCall::Version, "the engine's version"),
    (ProxiedCall::Image, "the image"),
    (ProxiedCall::Create, "the creation"),
    (ProxiedCall::Attach, "the output"),
    (ProxiedCall::Start, "the start"),
    (ProxiedCall::Wait, "the exit code"),
    (ProxiedCall::Kill, "the signal"),
    (ProxiedCall::Inspect, "the cause of the end"),
    (ProxiedCall::Remove, "the removal"),
];

/// Kills the runner while it waits for an answer. Returns what remained then, and what remained after the next start.
fn killed_at(call: ProxiedCall, fault: EngineFault) -> [String; 2] {
    let (runner, run) = (TestedRunner::new(), container_name("call"));
    let engine_proxy = EngineProxy::new(&runner.path(), Path::new(docker_engine::SOCKET));
    engine_proxy.inject_always(call, fault);
    let ends = matches!(
        (call, fault),
        (ProxiedCall::Wait, EngineFault::AnswerLost)
            | (ProxiedCall::Inspect | ProxiedCall::Remove, _)
    );
    let script = if ends { "true" } else { "trap '' TERM; echo up; while true; do sleep 1; done" };
    let flags = ["--run-id", &run, "--docker-socket", engine_proxy.socket()];
    let mut command = runner.prepare(&flags, &shell_argv(script));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    if call == ProxiedCall::Kill {
        read_until(&mut child, "up\n");
        send_signal(&child, "-TERM");
    }
    engine_proxy.wait_until_injected();
    restart_run(&runner, &run, child)
}

/// The directory is made before the first request to the engine, which gets no answer. So the runner is killed between the
/// two, while it opens its logs and sockets.
fn killed_at_the_directory() -> [String; 2] {
    let (runner, run) = (TestedRunner::new(), container_name("directory"));
    let engine_proxy = EngineProxy::new(&runner.path(), Path::new(docker_engine::SOCKET));
    engine_proxy.inject_always(ProxiedCall::Version, EngineFault::Lost);
    let flags = ["--run-id", &run, "--docker-socket", engine_proxy.socket()];
    let mut command = runner.prepare(&flags, &["true"]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until(|| runner.left(&run) == "directory", || "there is no directory".to_owned());
    restart_run(&runner, &run, child)
}

/// A result without a reader is larger than its pipe.
fn killed_at_the_result() -> [String; 2] {
    let (runner, run) = (TestedRunner::new(), container_name("result"));
    let script = shell_argv("head -c 200000 /dev/zero | tr '\\0' x");
    let mut command = runner.prepare(&["--run-id", &run], &script);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut byte = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
    restart_run(&runner, &run, child)
}

fn restart_run(runner: &TestedRunner, run: &str, mut child: Child) -> [String; 2] {
    assert!(child.try_wait().unwrap().is_none(), "it has ended before it was killed");
    child.kill().unwrap();
    child.wait().unwrap();
    let left = runner.left(run);
    let ids = list_containers(run);
    let (_, result, shown) = runner.command(&["--run-id", run], &["true"]);
    let result: Value = serde_json::from_str(&result).unwrap();
    assert_eq!(result["ok"], true, "{result} {shown}");
    let mut after = runner.left(run);
    if ids.lines().any(has_cgroup) {
        after.push_str(", cgroup");
    }
    [left, after]
}

/// Returns whether the kernel still has a control group of a container's processes.
fn has_cgroup(id: &str) -> bool {
    !run_find(&["/sys/fs/cgroup", "-maxdepth", "4", "-name", &format!("*{id}*")]).is_empty()
}

fn read_until(child: &mut Child, line: &str) {
    let mut messages = String::new();
    let stderr = child.stderr.as_mut().unwrap();
    let mut byte = [0];
    while !messages.ends_with(line) {
        stderr.read_exact(&mut byte).unwrap();
        messages.push(byte[0].into());
    }
}

fn send_signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

fn container_name(of: &str) -> String {
    format!("run-killed-at-{of}-{}", std::process::id())
}
