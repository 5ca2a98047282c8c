//! Tests of the agent's end, and of other processes in the sandbox.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::{AS_PID_1, InitEnd, InitFixture};
use crate::support::process::ChildProcess;

/// R4: The exit status is the agent's own.
#[test]
fn the_exit_status_is_the_agents() {
    let sandbox = InitFixture::new();
    for (script, code) in [
        ("exit 0", 0),
        ("exit 1", 1),
        ("exit 2", 2),
        ("exit 42", 42),
        ("exit 255", 255),
        ("kill -KILL $$", 137),
        ("kill -TERM $$", 143),
    ] {
        let ended = sandbox.script(&[], script);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(code), ""), "{script}");
        let mut first = sandbox.under(&AS_PID_1, &[], &["sh", "-c", script]);
        assert_eq!(InitEnd::of(&mut first).code, Some(code), "{script}, as the first process");
    }
}

/// R4: The agent is started with execve and without a shell, also if only a shell could interpret the command.
#[test]
fn a_program_that_cannot_start_is_reported_as_a_shell_does() {
    let sandbox = InitFixture::new();
    let (plain, script, missing) =
        (sandbox.path("plain"), sandbox.path("script"), sandbox.path("missing"));
    fs::write(&plain, "echo a shell has run this").unwrap();
    fs::write(&script, "echo a shell has run this").unwrap();
    fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    let mut messages = vec![];
    for (program, code) in [
        (plain.as_str(), 126),
        (&script, 126),
        (sandbox.folder.path().to_str().unwrap(), 126),
        (&missing, 127),
        ("no-such-program", 127),
        ("echo hello", 127),
    ] {
        let ended = sandbox.run(&[program]);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(code), ""), "{program}");
        messages.push(ended.stderr.replace(sandbox.folder.path().to_str().unwrap(), "/workspace"));
    }
    insta::assert_snapshot!(messages.concat(), @r"
    cogni-init: uid 0 may not execute `/workspace/plain`
    cogni-init: `/workspace/script` is no program of this machine, and has no `#!` line; there is no shell to guess with
    cogni-init: uid 0 may not execute `/workspace`
    cogni-init: there is no `/workspace/missing`, or the interpreter that it names is not in the image
    cogni-init: `no-such-program` is not found in `PATH`; give its path, or set `PATH`
    cogni-init: `echo hello` is not found in `PATH`; give its path, or set `PATH`
    ");
}

#[test]
fn arguments_and_environment_arrive_as_they_are() {
    let sandbox = InitFixture::new();
    let argv = ["printf", "%s|", "a b", "", "$HOME", "--listen", "\"'\\"];
    assert_eq!(sandbox.run(&argv).stdout, "a b||$HOME|--listen|\"'\\|");
    let mut command = sandbox.command(&[], &["env"]);
    command.env_clear().env("COGNI_MODEL", "a=b").env("PATH", "/usr/bin:/bin");
    assert_eq!(InitEnd::of(&mut command).stdout.lines().count(), 2);
}

/// R4: Signals are forwarded.
#[test]
fn signals_reach_the_agent() {
    for wrapper in [&[][..], &AS_PID_1] {
        for signal in ["TERM", "INT", "QUIT", "HUP", "USR1", "USR2"] {
            let sandbox = InitFixture::new();
            let script = format!("trap 'exit 40' {signal}; sleep 1000 & echo $PPID; wait; exit 41");
            let mut command = sandbox.under(wrapper, &[], &["sh", "-c", &script]);
            let mut process = ChildProcess::start(&mut command, "util-linux is installed");
            process.until(|output| output.ends_with('\n'));
            let own = wrapper.is_empty().then(|| process.id());
            signal_to(own.unwrap_or_else(|| child_of(process.id())), signal);
            assert_eq!(process.wait().code(), Some(40), "{signal}: {}", process.output());
        }
    }
}

/// R4: Orphans are reaped while the agent runs.
#[test]
fn zombies_are_reaped() {
    let sandbox = InitFixture::new();
    // Each subshell ends before its child, which `cogni-init` then inherits.
    let script = "
        for i in 1 2 3 4 5 6 7 8 9 10; do (sleep 0.05 &); done
        tries=0
        while grep -qs -e 'State:.Z' -e 'Name:.sleep' /proc/[0-9]*/status; do
            tries=$((tries + 1)); [ $tries -lt 1000 ] || exit 1; cat /dev/null
        done";
    let mut command = sandbox.under(&AS_PID_1, &[], &["sh", "-c", script]);
    let ended = InitEnd::of(&mut command);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
}

/// R5: Processes that the agent leaves running end with it, whatever session they are in and whatever signals they
/// ignore.
#[test]
fn nothing_outlives_the_agent() {
    for wrapper in [&[][..], &["unshare", "--pid", "--fork"]] {
        let sandbox = InitFixture::new();
        let stubborn = sandbox.path("stubborn");
        // The process is an orphan, not the shell's own child, in its own session, and ignores every signal that it
        // can.
        let script = format!(
            "(setsid sh -c 'trap \"\" TERM; exec 9>{stubborn}; echo > {stubborn}.ready; sleep 1000; sleep 1000' &)
             until [ -e {stubborn}.ready ]; do sleep 0.01; done; exit 3"
        );
        let mut command = sandbox.under(wrapper, &["--grace=50ms"], &["sh", "-c", &script]);
        assert_eq!(InitEnd::of(&mut command).code, Some(3));
        assert!(!is_open(Path::new(&stubborn)), "a process still has {stubborn} open");
    }
}

#[test]
fn remaining_processes_get_sigterm_before_sigkill() {
    let sandbox = InitFixture::new();
    // A signal that arrives in a shell's child between fork and exec is lost, so `ready` is printed after the exec.
    let script = "
        (sh -c 'trap \"trap : TERM; echo asked; exit\" TERM; sleep 1000 &
            until grep -q sleep /proc/$!/comm; do :; done; echo ready; wait' > $0 &)
        until grep -qs ready $0; do sleep 0.01; done";
    let out = sandbox.path("out");
    let mut command = sandbox.command(&["--grace=60s"], &["sh", "-c", script, &out]);
    assert_eq!(InitEnd::of(&mut command).code, Some(0));
    assert_eq!(fs::read_to_string(out).unwrap(), "ready\nasked\n");
}

/// R5: The sandbox has its own deadline, in case its runner has gone.
#[test]
fn the_agent_ends_at_its_longest_runtime() {
    let sandbox = InitFixture::new();
    let ended = sandbox.script(&["--max-runtime=50ms"], "sleep 1000");
    assert_eq!(ended.code, Some(124));
    insta::assert_snapshot!(ended.stderr, @"cogni-init: the agent has reached --max-runtime and is terminated");
    let stubborn = "trap '' TERM; while :; do sleep 1000; done";
    let ended = sandbox.script(&["--max-runtime=50ms", "--grace=50ms"], stubborn);
    assert_eq!(ended.code, Some(124));
}

/// R5: If the first process is killed, the agent ends too, also without a PID namespace.
#[test]
fn the_agent_does_not_outlive_its_first_process() {
    let sandbox = InitFixture::new();
    let held = sandbox.path("held");
    let script = format!("exec 9>{held}; echo ready; exec sleep 1000");
    let mut process = ChildProcess::start(&mut sandbox.command(&[], &["sh", "-c", &script]), "");
    process.until(|output| output.contains("ready"));
    process.signal("KILL");
    process.wait();
    crate::support::process::wait_until(|| !is_open(Path::new(&held)), || "it lives".to_owned());
}

fn signal_to(pid: u32, signal: &str) {
    let line = [format!("-{signal}"), pid.to_string()];
    assert!(std::process::Command::new("kill").args(line).status().unwrap().success());
}

/// Returns the namespace's first process, as seen from here.
fn child_of(pid: u32) -> u32 {
    let path = format!("/proc/{pid}/task/{pid}/children");
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// Returns whether any process of this machine has the file open.
fn is_open(path: &Path) -> bool {
    let processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path().join("fd"));
    let descriptors = processes.filter_map(|directory| fs::read_dir(directory).ok()).flatten();
    descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()).any(|file| file == path)
}
