//! The first process of a sandbox: a static program that needs nothing of the image it runs in.
//!
//! It connects a local TCP port to the run's socket, starts the agent, forwards signals to it, reaps what it leaves
//! behind, and ends with its exit status. One thread and one loop around poll(2) do all of it.
//!
//! Reading order: [`options`], [`slot`], [`socket`] and [`listener`] prepare; [`agent`] starts, behind the [`filter`]
//! and [`landlock`]; [`supervisor`] waits, looks at the [`accept_queue`], and turns the [`bridge`]. A [`resident`] does all that again, after a [`wipe`].
//!
//! **Invariant:** nothing of the house is in here, and no runtime: `cogni-init` is these files and little else.

mod accept_queue;
mod agent;
mod bridge;
mod filter;
mod landlock;
mod listener;
mod options;
mod resident;
mod slot;
mod socket;
mod supervisor;
mod wipe;

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use bridge::Bridge;
use options::{Gateway, Invocation, Options};
use slot::Host;
use socket::RunSocket;
use supervisor::Supervisor;

/// Runs the program; `arguments` are those after its own name.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    match options::parse(arguments) {
        Ok(Invocation::Print(text)) => print(&text),
        Ok(Invocation::Start(options)) if !options.is_resident => end(start(&options)),
        Ok(Invocation::Start(_)) => wrong_use("`--resident` is for a slot, which is told so"),
        Ok(Invocation::Wait(path)) => end(wait(&path)),
        Err(wrong) => wrong_use(&wrong),
    }
}

fn wrong_use(wrong: &str) -> ExitCode {
    say(format_args!("{wrong}; see `cogni-init --help`"));
    ExitCode::from(WRONG_USE)
}

fn end(ended: Result<u8, Failure>) -> ExitCode {
    ExitCode::from(status_of(ended))
}

/// The status that is told, and why, where it is not the agent's own.
fn status_of(ended: Result<u8, Failure>) -> u8 {
    ended.unwrap_or_else(|failure| {
        say(&failure.message);
        failure.status
    })
}

fn start(options: &Options) -> Result<u8, Failure> {
    go_on(&prepare()?, options, None)
}

/// Once it is told, a sandbox that was started ahead is as any other, or a resident.
fn wait(path: &Path) -> Result<u8, Failure> {
    let supervisor = prepare()?;
    let host = Host::connect(path)?;
    let claim = host.claim(&supervisor)?;
    if claim.options.is_resident {
        return resident::serve(&host, &supervisor, claim);
    }
    // The agent never meets it.
    drop(host);
    go_on(&supervisor, &claim.options, None)
}

fn prepare() -> Result<Supervisor, Failure> {
    Supervisor::prepare().map_err(|error| Failure::setup("prepare", error))
}

/// In this order, so that the agent finds everything ready: the socket answers, the port listens, then the agent runs.
fn go_on(supervisor: &Supervisor, options: &Options, host: Option<&Host>) -> Result<u8, Failure> {
    let socket = RunSocket::new(&options.socket).map_err(Failure::socket)?;
    let listener = match options.gateway {
        Gateway::Bridged => {
            socket.wait_until_it_answers(options.socket_timeout).map_err(Failure::socket)?;
            Some(listener::bind(options.listen)?)
        }
        Gateway::None => None,
    };
    let bridge = Bridge::new(listener, socket);
    let agent = agent::start(options)?;
    Ok(supervisor.run(bridge, agent, options, host))
}

/// Why the agent was not started, and the exit status that says so.
struct Failure {
    status: u8,
    message: String,
}

impl Failure {
    fn setup(what: &str, error: impl Display) -> Self {
        Self { status: SETUP_FAILED, message: format!("cannot {what}: {error}") }
    }

    fn socket(message: String) -> Self {
        Self { status: SOCKET_DEAD, message }
    }
}

fn print(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// One line for whoever reads the sandbox's stderr, in one write, so that the agent's own lines do not cut it.
fn say(message: impl Display) {
    let line = format!("cogni-init: {message}\n");
    // There is nobody left to tell when this fails.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// The exit status of every program for arguments that make no sense.
const WRONG_USE: u8 = 2;

/// The run's socket does not answer; `EX_UNAVAILABLE` in sysexits.h.
const SOCKET_DEAD: u8 = 69;

/// `--max-runtime` has ended the agent; what timeout(1) says in that case.
const TIMED_OUT: u8 = 124;

/// The sandbox is not as it has to be; what `docker run` says when it is Docker that failed.
const SETUP_FAILED: u8 = 125;

/// As a shell says it: found, but not to be executed; and not found.
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
