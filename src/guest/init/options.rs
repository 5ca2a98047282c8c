//! What the command line asks for. By hand: a parser from a library would be larger than the rest of the program.

use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

/// How to start one agent.
pub(crate) struct InitOptions {
    /// Where the bridge listens.
    pub(crate) listen: SocketAddr,
    /// The run's socket.
    pub(crate) socket: PathBuf,
    pub(crate) gateway: GatewayMode,
    /// How long the socket may take to answer.
    pub(crate) socket_timeout: Duration,
    /// When the agent is ended, whoever else has forgotten it.
    pub(crate) max_runtime: Option<Duration>,
    /// How long processes have between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
    /// Whether the agent may make sockets of the family of the run's own.
    pub(crate) unix_sockets: UnixSocketPolicy,
    /// Where the agent may write; anywhere that mounts and modes let it, where nothing is said.
    pub(crate) writable: Vec<PathBuf>,
    /// Whether another agent may be started after this one. Only a slot can be told so.
    pub(crate) is_resident: bool,
    /// For the agent, each as NAME=VALUE; they win over our own.
    pub(crate) env: Vec<OsString>,
    /// The agent's program and its arguments; at least the program.
    pub(crate) argv: Vec<OsString>,
}

/// Whether there is anything at the run's socket.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum GatewayMode {
    Bridged,
    None,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnixSocketPolicy {
    Denied,
    Allowed,
}

pub(crate) enum InitCommand {
    Start(Box<InitOptions>),
    /// `--slot`: what to start is told there.
    Wait(PathBuf),
    /// `--help` or `--version`.
    Print(String),
}

/// Reads the arguments after the program's own name. An error says which one is wrong, and what would be right.
pub(crate) fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<InitCommand, String> {
    let mut options = InitOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
        socket: PathBuf::from("/llm-sock/llm.sock"),
        gateway: GatewayMode::Bridged,
        socket_timeout: Duration::from_secs(5),
        max_runtime: None,
        grace: Duration::from_secs(2),
        unix_sockets: UnixSocketPolicy::Denied,
        writable: vec![],
        is_resident: false,
        env: vec![],
        argv: vec![],
    };
    while let Some(argument) = arguments.next() {
        let Some(flag) = argument.to_str().filter(|text| text.starts_with('-')) else {
            options.argv.push(argument);
            break;
        };
        let (name, mut value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(OsString::from(value))),
            None => (flag, None),
        };
        let mut value =
            || value.take().or_else(|| arguments.next()).ok_or(format!("`{name}` needs a value"));
        match name {
            "--listen" => options.listen = parse_address(name, &value()?)?,
            "--socket" => options.socket = PathBuf::from(value()?),
            "--socket-timeout" => options.socket_timeout = parse_duration(name, &value()?)?,
            "--no-gateway" => options.gateway = GatewayMode::None,
            "--max-runtime" => options.max_runtime = Some(parse_duration(name, &value()?)?),
            "--grace" => options.grace = parse_duration(name, &value()?)?,
            "--env" => options.env.push(parse_variable(value()?)?),
            "--write" => options.writable.push(PathBuf::from(value()?)),
            "--resident" => options.is_resident = true,
            "--slot" => return Ok(InitCommand::Wait(PathBuf::from(value()?))),
            "--allow-unix-sockets" => options.unix_sockets = UnixSocketPolicy::Allowed,
            "--help" => return Ok(InitCommand::Print(HELP_TEXT.to_owned())),
            "--version" => return Ok(InitCommand::Print(VERSION_TEXT.to_owned())),
            "--" => break,
            _ => return Err(format!("there is no option `{flag}`")),
        }
    }
    options.argv.extend(arguments);
    match options.argv.first() {
        Some(program) if !program.is_empty() => Ok(InitCommand::Start(Box::new(options))),
        _ => {
            Err("there is no program to start; give one, with its arguments, after `--`".to_owned())
        }
    }
}

fn parse_address(name: &str, value: &OsStr) -> Result<SocketAddr, String> {
    let text = value.to_string_lossy();
    text.parse()
        .map_err(|_| format!("`{name}` is `{text}`; give an address such as `127.0.0.1:8080`"))
}

fn parse_variable(value: OsString) -> Result<OsString, String> {
    match value.as_bytes().iter().position(|byte| *byte == b'=') {
        Some(1..) => Ok(value),
        _ => Err(format!("`--env` is `{}`; give NAME=VALUE", value.to_string_lossy())),
    }
}

fn parse_duration(name: &str, value: &OsStr) -> Result<Duration, String> {
    let text = value.to_string_lossy();
    let (number, unit) =
        text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let seconds =
        |factor: u64| Some(Duration::from_secs(number.parse::<u64>().ok()?.checked_mul(factor)?));
    let parsed = match unit {
        "ms" => number.parse().ok().map(Duration::from_millis),
        "s" => seconds(1),
        "m" => seconds(60),
        "h" => seconds(3600),
        _ => None,
    };
    let parsed = parsed.filter(|duration| *duration <= MAX_DURATION);
    parsed.ok_or_else(|| format!("`{name}` is `{text}`; give a time of up to 10000h, such as `500ms`, `5s`, `10m` or `1h`"))
}

/// Above a year nobody means it, and arithmetic with clocks stays far from its ends.
const MAX_DURATION: Duration = Duration::from_hours(10_000);

const VERSION_TEXT: &str = concat!("cogni-init ", env!("CARGO_PKG_VERSION"), "\n");

const HELP_TEXT: &str = "\
The first process of a sandbox: gives the agent the run's socket as a local port, starts it, and ends with it.

Usage: cogni-init [OPTIONS] [--] PROGRAM [ARGUMENT]...

Options:
  --listen ADDRESS       where the agent finds its LLM [default: 127.0.0.1:8080]
  --socket PATH          the run's socket [default: /llm-sock/llm.sock]
  --socket-timeout TIME  how long the socket may take to answer before the agent starts [default: 5s]
  --no-gateway           there is no such socket: listen nowhere, and start the agent at once
  --max-runtime TIME     end the agent after this time, whatever became of its runner [default: none]
  --grace TIME           between SIGTERM and SIGKILL, for what has to end [default: 2s]
  --env NAME=VALUE       a variable for the agent; it wins over one of our own
  --write PATH           the agent may write below this, and nowhere else, if the kernel has Landlock; may be repeated
  --slot PATH            connect to this socket instead, and wait there to be told these options and the program
  --resident             told to a slot: when the agent has ended, wipe what is left of it and wait for the next
  --allow-unix-sockets   let the agent make unix sockets; without this it gets EPERM, and socketpair(2) works
  --help                 print this
  --version              print the version

A TIME is `500ms`, `5s`, `10m` or `1h`. PROGRAM is executed as it stands, without a shell.

Exit status: the agent's own, or 128 and the signal that killed it; and if it is not the agent's:
  2 wrong use, 69 the run's socket does not answer, 124 --max-runtime has passed, 125 the sandbox is not as it has to be,
  126 PROGRAM cannot be executed, 127 PROGRAM is not found
";
