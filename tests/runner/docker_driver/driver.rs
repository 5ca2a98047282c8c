//! The test driver for runs in containers of Docker Engine.

use std::fs;
use std::path::Path;
use std::process::Command;

use cogni_gateway::sandbox::sandbox_name;

use crate::support::docker_engine::{self, docker_output};
use crate::support::run_command::{self, TestDriver};

pub(super) use crate::support::run_command::{list_entries, shell_argv};

/// The tests of both drivers know the runner of their driver by one name.
pub(super) use DockerRunner as TestedRunner;

pub(super) type DockerRunner = run_command::SandboxedRunner<DockerDriver>;

pub(super) struct DockerDriver;

impl TestDriver for DockerDriver {
    /// Checks the engine and its images, and reports what is missing.
    fn check() {
        docker_engine::need_images(&[docker_engine::HOST]);
    }

    fn choose(command: &mut Command) {
        command
            .env("COGNI_IMAGE", docker_engine::HOST)
            .env("COGNI_INIT", docker_engine::init_path());
    }

    fn traces(run: &str) -> String {
        list_containers(run)
    }
}

impl TestedRunner {
    /// Describes everything that exists of a run.
    pub(super) fn left(&self, run: &str) -> String {
        let filter = format!("label=cogni.run={run}");
        let states = docker_output(&[
            "ps",
            "--all",
            "--filter",
            &filter,
            "--format",
            "container ({{.State}})",
        ]);
        let directories = list_entries(&self.run_dir()).into_iter().map(|_| "directory");
        // A running container always has processes; at its start they appear a moment later.
        let is_news = !states.contains("running") && has_processes(run);
        let processes = is_news.then_some("processes");
        let name = sandbox_name(run);
        let groups = run_find(&["/sys/fs/cgroup", "-maxdepth", "2", "-name", &format!("{name}-*")]);
        let groups = (!groups.is_empty()).then_some("groups");
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mounts = mounts.contains(self.run_dir().to_str().unwrap()).then_some("mounts");
        let others = processes.into_iter().chain(groups).chain(mounts);
        let left: Vec<_> = directories.chain(states.lines()).chain(others).collect();
        if left.is_empty() { "nothing".to_owned() } else { left.join(", ") }
    }
}

/// Returns the output of `find`.
pub(super) fn run_find(line: &[&str]) -> String {
    String::from_utf8(Command::new("find").args(line).output().unwrap().stdout).unwrap()
}

/// Returns whether any process of this machine has this run's id in its environment.
fn has_processes(run: &str) -> bool {
    let variable = format!("RUN_ID={run}");
    let environments =
        list_entries(Path::new("/proc")).into_iter().map(|pid| format!("/proc/{pid}/environ"));
    environments.filter_map(|path| fs::read(path).ok()).any(|environment| {
        environment.split(|byte| *byte == 0).any(|part| part == variable.as_bytes())
    })
}

/// Returns the ids of a run's containers, in any state.
pub(super) fn list_containers(run: &str) -> String {
    docker_output(&[
        "ps",
        "--all",
        "--quiet",
        "--no-trunc",
        "--filter",
        &format!("label=cogni.run={run}"),
    ])
}
