//! The test driver for runs in containers of the embedded driver.

use std::fs;
use std::process::Command;

use cogni_gateway::sandbox::{embedded, sandbox_name};
use rustix::process::geteuid;

use crate::support::run_command::{self, TestDriver};

pub(super) use crate::support::run_command::{list_entries, shell_argv};

/// The tests of both drivers know the runner of their driver by one name.
pub(super) use EmbeddedRunner as TestedRunner;

pub(super) type EmbeddedRunner = run_command::SandboxedRunner<EmbeddedDriver>;

pub(super) struct EmbeddedDriver;

impl TestDriver for EmbeddedDriver {
    fn check() {
        assert!(geteuid().is_root(), "this test sets limits, which needs root");
    }

    fn choose(command: &mut Command) {
        command
            .env("COGNI_DRIVER", "embedded")
            .env("COGNI_INIT", concat!(env!("OUT_DIR"), "/cogni-init"));
    }

    fn traces(run: &str) -> String {
        let groups = embedded::list_leftovers().unwrap();
        let groups = groups.iter().map(|group| group.name.display().to_string());
        let groups: Vec<_> = groups.filter(|name| name.contains(&sandbox_name(run))).collect();
        format!("{}{}", groups.join(" "), list_containers(run))
    }
}

/// Returns the pids of a run's processes, including those that make its sandbox.
pub(super) fn list_containers(run: &str) -> String {
    let processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap());
    let is_ours = |pid: &str| {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).into_owned();
        groups.contains(&sandbox_name(run)) || command.contains(&sandbox_name(run))
    };
    let pids = processes.map(|process| process.file_name().into_string().unwrap());
    pids.filter(|pid| is_ours(pid)).collect::<Vec<_>>().join(" ")
}
