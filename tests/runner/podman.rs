//! R2: Tests of Podman's service in place of Docker Engine. Podman has its own storage and gets the test's image from
//! Docker.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::docker_engine;
use crate::support::process::{ChildProcess, wait_until};

/// R1–R5: Exit codes, isolation, calls, the deadline and the sweep work as with Docker Engine.
#[test]
fn podman_runs_sandboxes_as_docker_does() {
    let podman = PodmanService::start();
    // Without cgroup v2, Podman cannot do all of it, so the runner does not use it.
    if podman.docker(&["info", "--format", "{{.CgroupVersion}}"]) != "2" {
        return podman.assert_refused();
    }
    for code in [0, 42] {
        let facts = podman.run(&[], &format!("exit {code}")).0;
        let error = (code != 0).then_some("container_failed");
        assert_eq!(facts, json!([code == 0, code, error]));
    }
    let (facts, stdout) = podman.run(&["--workspace", "task:rw"], LOOK);
    assert_eq!(facts, json!([true, 0, null]), "{stdout}");
    insta::assert_snapshot!(stdout, @r"
    1001
    lo
    127.0.0.1 localhost sandbox
    CapBnd: 0000000000000000
    NoNewPrivs: 1
    Seccomp: 2
    ok
    /llm-sock ro
    /tmp rw
    /workspace rw
    ");
    assert_eq!(fs::read_to_string(podman.path().join("task/answer")).unwrap(), "because\n");

    let stubborn = "trap '' TERM; while true; do sleep 0.1; done";
    let facts = podman.run(&["--max-runtime", "20s", "--grace", "100ms"], stubborn).0;
    assert_eq!(facts, json!([false, 137, "timeout"]));

    let mut process = ChildProcess::start(&mut podman.runner("run", &[], "echo up; sleep 600"), "");
    process.until(|output| output.contains("up\n"));
    process.signal("KILL");
    process.wait();
    let sweep = podman.command("sweep").arg("--apply").output().unwrap();
    let printed = String::from_utf8(sweep.stdout).unwrap();
    assert_eq!(printed.matches(": removed\n").count(), 2, "{printed}");
    assert_eq!(podman.docker(&["ps", "--all", "--quiet"]), "");
}

/// A Podman service; dropping it ends the service and removes its storage.
struct PodmanService {
    service: ChildProcess,
    directory: TempDir,
}

impl PodmanService {
    fn start() -> Self {
        docker_engine::need_images(&[docker_engine::HOST]);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        fs::create_dir(path.join("task")).unwrap();
        let socket = format!("unix://{}", path.join("podman.sock").display());
        let mut service = podman_command(path);
        service.args(["system", "service", "--time=0", &socket]);
        let service = ChildProcess::start(&mut service, "`tests/run podman` installs it");
        let podman = Self { service, directory };
        let answers = || podman.client(&["version"]).output().unwrap().status.success();
        wait_until(answers, || podman.service.output());
        let archive = podman.path().join("image.tar");
        docker_engine::docker_output(&[
            "save",
            "--output",
            archive.to_str().unwrap(),
            docker_engine::HOST,
        ]);
        podman.docker(&["load", "--input", archive.to_str().unwrap()]);
        chown_to_agent(&podman.path().join("task"));
        podman
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Docker's command line, which also works with Podman's service.
    fn client(&self, line: &[&str]) -> Command {
        let mut command = Command::new("docker");
        command.env("DOCKER_HOST", self.host()).args(line).stdin(Stdio::null());
        command
    }

    fn docker(&self, line: &[&str]) -> String {
        let output = self.client(line).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn host(&self) -> String {
        format!("unix://{}", self.path().join("podman.sock").display())
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
        command
            .env_clear()
            .env("DOCKER_HOST", self.host())
            .env("COGNI_RUN_DIR", self.path().join("r"))
            .current_dir(self.path())
            .arg(name);
        command
    }

    fn runner(&self, name: &str, flags: &[&str], script: &str) -> Command {
        let mut command = self.command(name);
        command
            .env("BILLING_ACCOUNT_ID", "acct-1")
            .env("LITELLM_MASTER_KEY", "sk-real")
            .env("COGNI_INIT", docker_engine::init_path())
            .args(["--image", docker_engine::HOST])
            .args(flags)
            .args(["--", "sh", "-c", script]);
        command
    }

    /// R3: Without cgroup v2, Podman gives a container the machine's cgroup namespace, whatever the request says. Such a
    /// run does not begin, `doctor` says why, and no container is made.
    fn assert_refused(&self) {
        let output = self.runner("run", &[], "true").output().unwrap();
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["error_code"], "sandbox_unavailable", "{json:#}");
        insta::assert_snapshot!(json["error"].as_str().unwrap(), @"Podman gives sandboxes the machine's cgroup namespace, as it always does without cgroup v2; boot this machine with cgroup v2, use Docker Engine, or leave the image out for the driver `embedded`");
        assert_eq!(self.docker(&["ps", "--all", "--quiet"]), "");
        let doctor = self.command("doctor").arg("--json").output().unwrap();
        let report: Value = serde_json::from_slice(&doctor.stdout).unwrap();
        assert_eq!(report["drivers"]["docker"], false);
        let found = report["findings"].as_array().unwrap().iter();
        let mut found = found.filter(|finding| finding["name"] == "driver docker");
        let found = found.next().unwrap();
        assert!(found["found"].as_str().unwrap().contains("cgroup namespace"), "{found}");
    }

    /// Returns the result of a run, and its output.
    fn run(&self, flags: &[&str], script: &str) -> (Value, String) {
        let output = self.runner("run", flags, script).output().unwrap();
        let shown = String::from_utf8_lossy(&output.stderr);
        let json: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{shown}"));
        assert!(json["error"].is_null(), "{json:#}");
        assert_eq!(fs::read_dir(self.path().join("r")).unwrap().count(), 0);
        let facts = json!([json["ok"], json["exit_code"], json["error_code"]]);
        (facts, json["stdout"].as_str().unwrap().to_owned())
    }
}

impl Drop for PodmanService {
    /// Containers that a failed test leaves running are removed with the storage.
    fn drop(&mut self) {
        let _ = podman_command(self.path()).args(["rm", "--all", "--force", "--time=0"]).output();
        let _ = Command::new("umount").arg(self.path().join("root/overlay")).output();
    }
}

fn podman_command(path: &Path) -> Command {
    let mut command = Command::new("podman");
    command.arg("--root").arg(path.join("root")).arg("--runroot").arg(path.join("state"));
    command
}

fn chown_to_agent(directory: &Path) {
    std::os::unix::fs::chown(directory, Some(1001), Some(1001))
        .expect("Podman's service needs root");
}

/// Prints what a program finds in its sandbox, as the kernel reports it.
const LOOK: &str = "
    id -u; ls /sys/class/net; cat /etc/hosts
    grep -E '^(CapBnd|NoNewPrivs|Seccomp:)' /proc/self/status | tr '\\t' ' '
    curl --silent http://localhost:8080/health | grep -o ok
    for place in / /etc /usr /llm-sock /sys /var/tmp; do touch $place/x 2>/dev/null && echo \"wrote $place\"; done
    unshare -r true 2>/dev/null && echo unshared
    grep -E ' (/tmp|/workspace|/llm-sock) ' /proc/mounts | sed -E 's/^[^ ]+ ([^ ]+) [^ ]+ ([^ ,]+).*/\\1 \\2/' | sort
    echo because > answer
";
