//! The execution of a list of commands, each as confined as an agent, and none beside a process of another.
//!
//! **Invariant:** a command finds the sandbox as the first command found it. If something of a command remains, no
//! further command starts, and the sandbox ends.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use super::bridge::SocketBridge;
use super::clean_state::CleanState;
use super::command_list::ListedCommand;
use super::command_output::CommandOutput;
use super::options::InitOptions;
use super::reaper::{AgentPeers, ProcessReaper};
use super::run_socket::RunSocket;
use super::{EXIT_TIMED_OUT, InitFailure, spawn};

/// Runs the commands in their order, also after one that has failed, until a signal arrives. Returns 0 after the end of the last one was
/// reported. The time limit holds for all commands together.
pub(crate) fn run_commands(
    run_service: &ProcessReaper,
    mut options: InitOptions,
    commands: Vec<ListedCommand>,
) -> Result<u8, InitFailure> {
    let clean = CleanState::capture("run several commands")?;
    // A process that a command leaves behind has nothing to save.
    options.grace = Duration::ZERO;
    let deadline = options.max_runtime.map(|time| Instant::now() + time);
    let strings = |texts: Vec<String>| texts.into_iter().map(OsString::from).collect();
    for ListedCommand { max_output_bytes, env, argv } in commands {
        (options.env, options.argv) = (strings(env), strings(argv));
        options.max_runtime =
            deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        run_command(run_service, &options, max_output_bytes)?;
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Ok(EXIT_TIMED_OUT);
        }
        clean.restore()?;
    }
    Ok(0)
}

/// Runs one command, and reports its output and its end.
fn run_command(
    run_service: &ProcessReaper,
    options: &InitOptions,
    max_output_bytes: u64,
) -> Result<(), InitFailure> {
    let setup = |error| InitFailure::setup_failure("report a command's output", error);
    let (mut output, pipes) = CommandOutput::new(max_output_bytes).map_err(setup)?;
    let socket = RunSocket::new(&options.socket).map_err(InitFailure::socket_failure)?;
    let bridge = SocketBridge::new(None, socket);
    let command = spawn::start_agent(options, Some(pipes))?;
    let peers = AgentPeers { output: Some(&mut output), ..AgentPeers::default() };
    let status = run_service.run_until_exit(bridge, command, options, peers);
    if output.is_signalled {
        // The host stops the sandbox. The command's end says nothing, and no further command may start.
        return Err(InitFailure { status, message: "a signal has ended the commands".to_owned() });
    }
    output.finish(status).map_err(setup)
}
