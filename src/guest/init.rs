//! The first process of a sandbox: a static program that needs no file of the image.
//!
//! The program connects a local TCP port to the run's socket and starts the agent. It forwards signals to the agent,
//! reaps orphaned processes, and exits with the agent's exit status. One thread with one loop around poll(2) does all
//! of this.
//!
//! Reading order: [`options`], [`claim`], [`run_socket`], [`tunnel_trust`] and [`listener`] prepare. [`spawn`] starts the agent, confined
//! by [`seccomp`] and [`landlock`]. [`reaper`] waits, checks the [`accept_queue`] and drives the [`bridge`]. A
//! [`session_loop`] repeats this for further agents, after a [`cleanup`] to a [`clean_state`]. [`command_runner`]
//! repeats this for the commands of a [`command_list`], and reports each [`command_output`] in [`command_frames`].
//!
//! **Invariant:** these modules import no other module of the crate and no async runtime: `cogni-init` is these files
//! and little else.

mod accept_queue;
mod bridge;
mod claim;
mod clean_state;
mod cleanup;
pub mod command_frames;
pub mod command_list;
mod command_output;
mod command_runner;
mod host_channel;
mod landlock;
mod listener;
mod options;
mod reaper;
mod run_socket;
mod seccomp;
mod session_loop;
mod spawn;
pub mod tunnel_trust;

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use bridge::SocketBridge;
use command_list::ListedCommand;
use host_channel::HostChannel;
use options::{GatewayMode, InitCommand, InitOptions};
use reaper::{AgentPeers, ProcessReaper};
use run_socket::RunSocket;

/// Runs the program. `arguments` are the arguments after the program's name.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    match options::parse(arguments) {
        Ok(InitCommand::Print(text)) => print_to_stdout(&text),
        Ok(InitCommand::Start(options) | InitCommand::StartList(options, _))
            if options.is_long_running =>
        {
            report_usage_error("`--long-running` is valid only in a slot's claim")
        }
        Ok(InitCommand::Start(options)) => exit_with(start_agent(&options)),
        Ok(InitCommand::StartList(options, commands)) => {
            exit_with(start_commands(*options, commands))
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

/// Returns the exit status, and logs the failure if the status is not the agent's own.
fn exit_status(ended: Result<u8, InitFailure>) -> u8 {
    ended.unwrap_or_else(|failure| {
        log_line(&failure.message);
        failure.status
    })
}

fn start_agent(options: &InitOptions) -> Result<u8, InitFailure> {
    run_agent(&prepare_reaper()?, options, None)
}

fn start_commands(options: InitOptions, commands: Vec<ListedCommand>) -> Result<u8, InitFailure> {
    command_runner::run_commands(&prepare_reaper()?, options, commands)
}

/// Waits for a claim, and then serves it like a sandbox of its own, or as a long-running sandbox.
fn wait_for_claim(path: &Path) -> Result<u8, InitFailure> {
    let run_service = prepare_reaper()?;
    let host = HostChannel::connect(path)?;
    let claim = host.receive_claim(&run_service)?;
    if claim.options.is_long_running {
        return session_loop::serve_claims(&host, &run_service, claim);
    }
    // The agent must not inherit or reach the connection to the host.
    drop(host);
    run_agent(&run_service, &claim.options, None)
}

fn prepare_reaper() -> Result<ProcessReaper, InitFailure> {
    ProcessReaper::prepare().map_err(|error| InitFailure::setup_failure("prepare", error))
}

/// Prepares and starts the agent, and serves until it has ended. The order is: the socket answers, the port listens,
/// the agent starts. So the agent finds everything ready.
fn run_agent(
    run_service: &ProcessReaper,
    options: &InitOptions,
    host: Option<&HostChannel>,
) -> Result<u8, InitFailure> {
    let socket = RunSocket::new(&options.socket).map_err(InitFailure::socket_failure)?;
    let listener = match options.gateway {
        GatewayMode::Bridged => {
            socket.wait_until_ready(options.socket_timeout).map_err(InitFailure::socket_failure)?;
            link_tool_client();
            if options.has_tunnels {
                tunnel_trust::install_certificate(&socket, options.socket_timeout)?;
            }
            Some(listener::bind_listener(options.listen)?)
        }
        GatewayMode::None => None,
    };
    let bridge = SocketBridge::new(listener, socket);
    let agent = spawn::start_agent(options, None)?;
    let peers = AgentPeers { host, ..AgentPeers::default() };
    Ok(run_service.run_until_exit(bridge, agent, options, peers))
}

/// Gives the client of the run's tools a name in the sandbox. The file is this program, which its name selects.
///
/// Without a writable `/run` the link is missing; the same client is `cogni-init --tool`.
fn link_tool_client() {
    if let Ok(program) = std::env::current_exe() {
        let _ = std::os::unix::fs::symlink(program, TOOL_LINK);
    }
}

/// The reason why the agent was not started, with the exit status that reports it.
struct InitFailure {
    status: u8,
    message: String,
}

impl InitFailure {
    fn setup_failure(action: &str, error: impl Display) -> Self {
        Self { status: EXIT_SETUP_FAILED, message: format!("cannot {action}: {error}") }
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

/// Writes one line to the sandbox's standard error with one write, so that the agent's output is not mixed into the
/// line.
fn log_line(message: impl Display) {
    let line = format!("cogni-init: {message}\n");
    // A failed write to standard error cannot be reported anywhere.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// The path of the tools' client in a sandbox.
const TOOL_LINK: &str = "/run/cogni-tool";

/// The exit status of every program for invalid arguments.
const EXIT_USAGE: u8 = 2;

/// The run's socket does not answer: `EX_UNAVAILABLE` of sysexits.h.
const EXIT_SOCKET_UNAVAILABLE: u8 = 69;

/// `--max-runtime` has ended the agent: the exit status of timeout(1).
const EXIT_TIMED_OUT: u8 = 124;

/// The sandbox is not set up as required: the exit status of `docker run` when Docker itself fails.
const EXIT_SETUP_FAILED: u8 = 125;

/// The exit statuses of a shell: the program is found but not executable, and the program is not found.
const EXIT_NOT_EXECUTABLE: u8 = 126;
const EXIT_NOT_FOUND: u8 = 127;
