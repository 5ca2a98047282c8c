//! The first process of a sandbox: a static program that needs nothing of the image it runs in.
//!
//! It connects a local TCP port to the run's socket, starts the agent, forwards signals to it, reaps what it leaves
//! behind, and ends with its exit status. One thread and one loop around poll(2) do all of it.
//!
//! Reading order: [`options`], [`claim`], [`run_socket`] and [`listener`] prepare; [`spawn`] starts, behind the [`seccomp`]
//! and [`landlock`]; [`reaper`] waits, looks at the [`accept_queue`], and turns the [`bridge`]. A [`session_loop`] does all that again, after a [`cleanup`].
//!
//! **Invariant:** nothing of the house is in here, and no runtime: `cogni-init` is these files and little else.

mod accept_queue;
mod bridge;
mod claim;
mod cleanup;
mod landlock;
mod listener;
mod options;
mod reaper;
mod run_socket;
mod seccomp;
mod session_loop;
mod spawn;

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use bridge::SocketBridge;
use claim::HostChannel;
use options::{GatewayMode, InitCommand, InitOptions};
use reaper::ProcessReaper;
use run_socket::RunSocket;

/// Runs the program; `arguments` are those after its own name.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    match options::parse(arguments) {
        Ok(InitCommand::Print(text)) => print_to_stdout(&text),
        Ok(InitCommand::Start(options)) if !options.is_resident => exit_with(start_agent(&options)),
        Ok(InitCommand::Start(_)) => {
            report_usage_error("`--resident` is for a slot, which is told so")
        }
        Ok(InitCommand::Wait(path)) => exit_with(wait_for_claim(&path)),
        Err(wrong) => report_usage_error(&wrong),
    }
}

fn report_usage_error(wrong: &str) -> ExitCode {
    log_line(format_args!("{wrong}; see `cogni-init --help`"));
    ExitCode::from(EXIT_USAGE)
}

fn exit_with(ended: Result<u8, InitFailure>) -> ExitCode {
    ExitCode::from(exit_status(ended))
}

/// The status that is told, and why, where it is not the agent's own.
fn exit_status(ended: Result<u8, InitFailure>) -> u8 {
    ended.unwrap_or_else(|failure| {
        log_line(&failure.message);
        failure.status
    })
}

fn start_agent(options: &InitOptions) -> Result<u8, InitFailure> {
    run_agent(&prepare_reaper()?, options, None)
}

/// Once it is told, a sandbox that was started ahead is as any other, or a resident.
fn wait_for_claim(path: &Path) -> Result<u8, InitFailure> {
    let supervisor = prepare_reaper()?;
    let host = HostChannel::connect(path)?;
    let claim = host.receive_claim(&supervisor)?;
    if claim.options.is_resident {
        return session_loop::serve_claims(&host, &supervisor, claim);
    }
    // The agent never meets it.
    drop(host);
    run_agent(&supervisor, &claim.options, None)
}

fn prepare_reaper() -> Result<ProcessReaper, InitFailure> {
    ProcessReaper::prepare().map_err(|error| InitFailure::setup_failure("prepare", error))
}

/// In this order, so that the agent finds everything ready: the socket answers, the port listens, then the agent runs.
fn run_agent(
    supervisor: &ProcessReaper,
    options: &InitOptions,
    host: Option<&HostChannel>,
) -> Result<u8, InitFailure> {
    let socket = RunSocket::new(&options.socket).map_err(InitFailure::socket_failure)?;
    let listener = match options.gateway {
        GatewayMode::Bridged => {
            socket.wait_until_ready(options.socket_timeout).map_err(InitFailure::socket_failure)?;
            Some(listener::bind_listener(options.listen)?)
        }
        GatewayMode::None => None,
    };
    let bridge = SocketBridge::new(listener, socket);
    let agent = spawn::start_agent(options)?;
    Ok(supervisor.run_until_exit(bridge, agent, options, host))
}

/// Why the agent was not started, and the exit status that says so.
struct InitFailure {
    status: u8,
    message: String,
}

impl InitFailure {
    fn setup_failure(what: &str, error: impl Display) -> Self {
        Self { status: EXIT_SETUP_FAILED, message: format!("cannot {what}: {error}") }
    }

    fn socket_failure(message: String) -> Self {
        Self { status: EXIT_SOCKET_UNAVAILABLE, message }
    }
}

fn print_to_stdout(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// One line for whoever reads the sandbox's stderr, in one write, so that the agent's own lines do not cut it.
fn log_line(message: impl Display) {
    let line = format!("cogni-init: {message}\n");
    // There is nobody left to tell when this fails.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// The exit status of every program for arguments that make no sense.
const EXIT_USAGE: u8 = 2;

/// The run's socket does not answer; `EX_UNAVAILABLE` in sysexits.h.
const EXIT_SOCKET_UNAVAILABLE: u8 = 69;

/// `--max-runtime` has ended the agent; what timeout(1) says in that case.
const EXIT_TIMED_OUT: u8 = 124;

/// The sandbox is not as it has to be; what `docker run` says when it is Docker that failed.
const EXIT_SETUP_FAILED: u8 = 125;

/// As a shell says it: found, but not to be executed; and not found.
const EXIT_NOT_EXECUTABLE: u8 = 126;
const EXIT_NOT_FOUND: u8 = 127;
