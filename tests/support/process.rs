//! A child process: started, watched by its output, and ended by its pid.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::path::Path;
use std::process::{self, Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

/// LiteLLM takes half a minute to start on two idle cores, and minutes on busy ones. The bound ends a test that waits
/// for nothing.
const START_TIMEOUT: Duration = Duration::from_mins(5);

/// A bound, not a measure: a step of a second on an idle machine takes a minute on a busy one. A test has five minutes.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_mins(4);

/// A child process; killed when dropped, also when a test panics.
pub(crate) struct ChildProcess {
    child: Child,
    output: NamedTempFile,
}

impl ChildProcess {
    /// Starts the program; if it is not installed, the test fails with `remedy`.
    pub(crate) fn start(command: &mut Command, remedy: &str) -> Self {
        let output = NamedTempFile::new().unwrap();
        let file = || File::options().append(true).open(output.path()).unwrap();
        let started = command.stdin(Stdio::null()).stdout(file()).stderr(file()).spawn();
        let child = started.unwrap_or_else(|error| panic!("{command:?}: {error}; {remedy}"));
        Self { child, output }
    }

    /// Waits until `holds` for the output; a program that ends meanwhile fails the test at once.
    pub(crate) fn until(&mut self, holds: impl Fn(&str) -> bool) {
        let begun = Instant::now();
        while !holds(&self.output()) {
            let ended = self.child.try_wait().unwrap();
            assert!(
                ended.is_none() && begun.elapsed() < START_TIMEOUT,
                "{ended:?}: {}",
                self.output()
            );
            pause_briefly();
        }
    }

    /// Returns the output so far.
    pub(crate) fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.output.path()).unwrap()).into_owned()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal: `TERM` or `KILL`.
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

    /// Sends SIGTERM and waits for the end.
    pub(crate) fn terminate(&mut self) -> ExitStatus {
        self.signal("TERM");
        self.wait()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until `holds`; fails with the text of `otherwise` after [`TEST_TIMEOUT`].
pub(crate) fn wait_until(mut holds: impl FnMut() -> bool, otherwise: impl FnOnce() -> String) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < TEST_TIMEOUT, "{}", otherwise());
        pause_briefly();
    }
}

fn pause_briefly() {
    pause_for(Duration::from_millis(20));
}

#[expect(
    clippy::disallowed_methods,
    reason = "the tests that wait for programs have no runtime to block"
)]
pub(crate) fn pause_for(time: Duration) {
    thread::sleep(time);
}

/// Lists the command lines of the git processes of a relay: git and its helpers have a home in the relay's state directory.
pub(crate) fn list_gits(state: &Path) -> Vec<String> {
    let home = format!("HOME={}", state.canonicalize().unwrap().join("home").display());
    let processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let gits = processes.filter(|process| {
        let variables = fs::read(process.join("environ")).unwrap_or_default();
        variables.split(|byte| *byte == 0).any(|variable| variable == home.as_bytes())
    });
    gits.filter_map(|process| fs::read_to_string(process.join("cmdline")).ok()).collect()
}

/// Returns a port for a program that cannot report its own port. The kernel never assigns a port of this range, and
/// each test process searches from a different start, so the port stays free until the program takes it.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let port_count = u32::from(FIXED.end - FIXED.start);
    loop {
        let at = process::id() * 7 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = FIXED.start + u16::try_from(at % port_count).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// An address without a listener: the port of the discard service.
pub(crate) const NO_LISTENER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9);

/// Below `ip_local_port_range` of any Linux with default settings, and above the ports of common services.
const FIXED: Range<u16> = 20_000..32_000;
