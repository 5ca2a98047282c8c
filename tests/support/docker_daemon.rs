//! A Docker Engine for one test, beside the machine's own: the test can stop and kill it without affecting others.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::process::wait_until;

/// A Docker Engine; dropping it removes its containers and ends all its processes.
pub(crate) struct DockerDaemon {
    directory: TempDir,
    child: Option<Child>,
}

/// The treatment of running containers while the engine is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContainerFate {
    EndWithIt,
    LiveOn,
}

impl DockerDaemon {
    /// Starts the engine with an image of the machine's engine.
    pub(crate) fn start(containers: ContainerFate, image: &str) -> Self {
        let mut engine = Self { directory: tempfile::tempdir().unwrap(), child: None };
        engine.start_again(containers);
        let mut save =
            Command::new("docker").args(["save", image]).stdout(Stdio::piped()).spawn().unwrap();
        let mut load = engine.docker();
        let load = load.arg("load").stdin(save.stdout.take().unwrap()).output().unwrap();
        assert!(save.wait().unwrap().success() && load.status.success(), "{load:?}");
        engine
    }

    pub(crate) fn start_again(&mut self, containers: ContainerFate) {
        assert!(self.child.is_none(), "it runs already");
        let log = File::options().append(true).create(true).open(self.path("log")).unwrap();
        // An engine without a bridge removes the machine's, so it gets a network namespace of its own. `unshare` becomes
        // the engine, and is found by its process id.
        let mut command = Command::new("unshare");
        command.args(["--net", "--", "dockerd"]);
        for (flag, name) in [("--data-root", "data"), ("--exec-root", "exec"), ("--pidfile", "pid")]
        {
            command.arg(flag).arg(self.path(name));
        }
        // The engine does not change the machine's network.
        command.args(["--bridge=none", "--iptables=false", "--ip6tables=false"]);
        command.args(["--ip-forward=false", "--ip-masq=false"]);
        command.arg(format!("--live-restore={}", containers == ContainerFate::LiveOn));
        command.arg(format!("--host=unix://{}", self.socket().display()));
        let started =
            command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn();
        self.child = Some(started.expect("dockerd is installed; `tests/run image` does it"));
        let is_up = || {
            UnixStream::connect(self.socket()).is_ok() && self.docker_output(&["version"]).is_some()
        };
        wait_until(is_up, || {
            let log = fs::read_to_string(self.path("log")).unwrap();
            format!("dockerd does not start; as root it does: {log}")
        });
    }

    /// Ends the engine with SIGTERM and waits for its end.
    pub(crate) fn stop(&mut self) {
        self.end("-TERM");
    }

    pub(crate) fn kill(&mut self) {
        self.end("-KILL");
    }

    /// Ends the engine. Its containerd ends with it and must be reaped, because the next engine would take its remains
    /// for a running containerd.
    fn end(&mut self, signal: &str) {
        let Some(mut child) = self.child.take() else { return };
        let pid_file = self.path("exec/containerd/containerd.pid");
        let containerd = fs::read_to_string(&pid_file).unwrap_or_default();
        kill_process(signal, &child.id().to_string());
        child.wait().unwrap();
        wait_until(|| !is_alive(&containerd), || format!("containerd {containerd} does not end"));
        let _ = fs::remove_file(pid_file);
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path("docker.sock")
    }

    /// Returns the ids of all its containers.
    pub(crate) fn containers(&self) -> String {
        self.docker_output(&["ps", "--all", "--quiet"]).expect("it answers")
    }

    /// Returns the output of Docker's command line for this engine; `None` if the command fails.
    fn docker_output(&self, line: &[&str]) -> Option<String> {
        let output = self.docker().args(line).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }

    fn docker(&self) -> Command {
        let mut command = Command::new("docker");
        command.arg("--host").arg(format!("unix://{}", self.socket().display()));
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for DockerDaemon {
    fn drop(&mut self) {
        for id in self.docker_output(&["ps", "--all", "--quiet"]).unwrap_or_default().lines() {
            self.docker_output(&["rm", "--force", "--volumes", id]);
        }
        self.end("-TERM");
        // A failed test may leave mounts.
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let ours = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        for mount in ours.filter(|at| Path::new(at).starts_with(self.directory.path())) {
            let _ = Command::new("umount").args(["--lazy", mount]).status();
        }
    }
}

fn kill_process(signal: &str, pid: &str) {
    assert!(Command::new("kill").args([signal, pid]).status().unwrap().success());
}

fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !pid.is_empty() && stat.contains(") ") && !stat.contains(") Z ")
}
