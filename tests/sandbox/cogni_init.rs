//! R4: Tests of `cogni-init` as a process: a run's socket, an agent, and what happens to both.

mod bridge;
mod claim;
mod command_frames;
mod landlock;
mod options;
mod processes;
mod seccomp;
mod tunnel_trust;

use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{self, Command, Output};
use std::sync::atomic::{AtomicU16, Ordering};

use tempfile::TempDir;

/// A run's socket, and the test's own address for the bridge.
struct InitFixture {
    folder: TempDir,
    address: SocketAddr,
    /// Accepts connections up to its backlog, which is enough to start the agent.
    gateway: Option<UnixListener>,
}

/// The result of one start.
struct InitEnd {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl InitFixture {
    fn new() -> Self {
        let mut sandbox = Self::without_gateway();
        sandbox.gateway = Some(UnixListener::bind(sandbox.socket()).unwrap());
        sandbox
    }

    fn without_gateway() -> Self {
        static PORT: AtomicU16 = AtomicU16::new(8080);
        // All of 127.0.0.0/8 is loopback, so each test process uses its own address with the same port.
        let [_, high, middle, low] = process::id().to_be_bytes();
        let port = PORT.fetch_add(1, Ordering::Relaxed);
        let address = SocketAddr::from(([127, high + 1, middle, low], port));
        Self { folder: tempfile::tempdir().unwrap(), address, gateway: None }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("llm.sock")
    }

    /// Returns the path of a file of the sandbox.
    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn command(&self, options: &[&str], argv: &[&str]) -> Command {
        self.under(&[], options, argv)
    }

    /// Starts `cogni-init` through another program, such as `unshare`.
    fn under(&self, wrapper: &[&str], options: &[&str], argv: &[&str]) -> Command {
        let mut line = wrapper.to_vec();
        line.push(PROGRAM);
        let mut command = Command::new(line[0]);
        command.args(&line[1..]).arg(format!("--listen={}", self.address));
        command.arg("--socket").arg(self.socket()).args(options).arg("--").args(argv);
        command
    }

    fn run(&self, argv: &[&str]) -> InitEnd {
        InitEnd::of(&mut self.command(&[], argv))
    }

    fn script(&self, options: &[&str], script: &str) -> InitEnd {
        InitEnd::of(&mut self.command(options, &["sh", "-c", script]))
    }
}

impl InitEnd {
    fn of(command: &mut Command) -> Self {
        command.output().unwrap().into()
    }
}

impl From<Output> for InitEnd {
    fn from(Output { status, stdout, stderr }: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
    }
}

const PROGRAM: &str = concat!(env!("OUT_DIR"), "/cogni-init");

/// Runs it in its own PID namespace, as in a container; tests that use it need root, as CI has.
const AS_PID_1: [&str; 5] = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
