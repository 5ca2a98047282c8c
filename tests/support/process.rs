//! A program of its own: started, watched by what it says, and ended by its pid.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::process::{self, Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

/// LiteLLM takes half a minute on two idle cores, and minutes on busy ones; the bound ends a test that waits for nothing.
const START: Duration = Duration::from_mins(5);

/// A bound, not a measure: what takes a second on an idle machine takes a minute on a busy one. A test has five minutes.
pub(crate) const PATIENCE: Duration = Duration::from_mins(4);

/// Killed when it is dropped, also when a test panics.
pub(crate) struct Process {
    child: Child,
    output: NamedTempFile,
}

impl Process {
    /// Fails the test, with `remedy`, where the program is not installed.
    pub(crate) fn start(command: &mut Command, remedy: &str) -> Self {
        let output = NamedTempFile::new().unwrap();
        let file = || File::options().append(true).open(output.path()).unwrap();
        let started = command.stdin(Stdio::null()).stdout(file()).stderr(file()).spawn();
        let child = started.unwrap_or_else(|error| panic!("{command:?}: {error}; {remedy}"));
        Self { child, output }
    }

    /// Waits until `holds`; a program that ends meanwhile fails the test at once.
    pub(crate) fn until(&mut self, holds: impl Fn(&str) -> bool) {
        let begun = Instant::now();
        while !holds(&self.said()) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none() && begun.elapsed() < START, "{ended:?}: {}", self.said());
            pause();
        }
    }

    /// What it has printed so far.
    pub(crate) fn said(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.output.path()).unwrap()).into_owned()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal: `TERM`, `KILL`.
    pub(crate) fn signal(&self, name: &str) {
        let (signal, pid) = (format!("-{name}"), self.id().to_string());
        assert!(Command::new("kill").args([&signal, &pid]).status().unwrap().success());
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Asks it to end, and waits until it has.
    pub(crate) fn terminate(&mut self) -> ExitStatus {
        self.signal("TERM");
        self.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until `holds`, and fails with what `otherwise` says when [`PATIENCE`] is over.
pub(crate) fn patience(mut holds: impl FnMut() -> bool, otherwise: impl FnOnce() -> String) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "{}", otherwise());
        pause();
    }
}

fn pause() {
    pause_for(Duration::from_millis(20));
}

#[expect(
    clippy::disallowed_methods,
    reason = "the tests that wait for programs have no runtime to block"
)]
pub(crate) fn pause_for(time: Duration) {
    thread::sleep(time);
}

/// A port for programs that cannot say which one they took. The kernel gives it to nobody who asks for any port, and each
/// test, which is a process, begins to look at another place: so nobody takes it until the program does, which may be late.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let places = u32::from(FIXED.end - FIXED.start);
    loop {
        let at = process::id() * 7 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = FIXED.start + u16::try_from(at % places).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Where nobody listens: the old service that throws away what it is sent.
pub(crate) const NOBODY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9);

/// Below what `ip_local_port_range` is on any Linux that nobody has told otherwise, and above what services like.
const FIXED: Range<u16> = 20_000..32_000;
