//! Counts a subject's system calls with strace, outside every timed measurement.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::meter::ProcessTree;
use crate::subject::pause_for;

/// Returns whether strace works here.
pub(crate) fn are_countable() -> bool {
    Path::new("/usr/bin/strace").exists()
}

/// Returns the number of calls by all threads of the tree while `work` runs.
pub(crate) fn count_calls<T>(
    tree: &ProcessTree,
    work: impl FnOnce() -> Result<T>,
) -> Result<(u64, T)> {
    let dir = tempfile::TempDir::new()?;
    let summary = dir.path().join("summary");
    let mut command = Command::new("/usr/bin/strace");
    command.args(["-f", "-c", "-qq", "-o"]).arg(&summary).stderr(Stdio::null());
    for pid in tree.pids() {
        command.arg("-p").arg(pid.to_string());
    }
    let mut strace = command.spawn()?;
    let done = wait_until_attached(tree).and_then(|()| work());
    interrupt_strace(&mut strace)?;
    let calls = total_calls(&fs::read_to_string(&summary)?)?;
    Ok((calls, done?))
}

/// Waits until every process is traced.
fn wait_until_attached(tree: &ProcessTree) -> Result<()> {
    for pid in tree.pids() {
        let status = format!("/proc/{pid}/status");
        let mut tries = 0;
        while fs::read_to_string(&status)?.contains("TracerPid:\t0\n") {
            ensure!(tries < 500, "strace does not attach; is ptrace allowed?");
            tries += 1;
            pause_for(Duration::from_millis(2));
        }
    }
    pause_for(Duration::from_millis(20));
    Ok(())
}

/// Interrupts strace, which then detaches and writes its summary.
fn interrupt_strace(strace: &mut Child) -> Result<()> {
    kill(Pid::from_raw(i32::try_from(strace.id())?), Signal::SIGINT)?;
    strace.wait()?;
    Ok(())
}

/// Reads the number of calls from the last line: `100.00 0.001 2 1234 56 total`.
fn total_calls(summary: &str) -> Result<u64> {
    let line = summary.lines().find(|line| line.ends_with(" total"));
    let calls = line.and_then(|line| line.split_whitespace().nth(3));
    Ok(calls.context("a summary of strace without its total")?.parse()?)
}
