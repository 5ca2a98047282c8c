//! The command line of `cogni-init`. It is parsed by hand, because an argument parser's code would be larger than the
//! rest of the program.

use std::ffi::{OsStr, OsString};
use std::mem;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use super::command_list::{ListedCommand, decode_commands};

/// The options for starting one agent.
pub(crate) struct InitOptions {
    /// The address at which the bridge listens.
    pub(crate) listen: SocketAddr,
    /// The run's socket.
    pub(crate) socket: PathBuf,
    pub(crate) gateway: GatewayMode,
    /// True if the run has tunnels, which the agent's programs must trust.
    pub(crate) has_tunnels: bool,
    /// The time that the socket has to answer before the agent starts.
    pub(crate) socket_timeout: Duration,
    /// The time after which the agent is ended, even if its runner no longer does so.
    pub(crate) max_runtime: Option<Duration>,
    /// The time between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
    /// States if the agent may create unix sockets, the family of the run's own socket.
    pub(crate) unix_sockets: UnixSocketPolicy,
    /// The paths below which the agent may write. If the list is empty, mounts and file modes alone decide.
    pub(crate) writable: Vec<PathBuf>,
    /// The socket that is the agent's standard input and output, if these are not this process's own.
    pub(crate) stdio: Option<PathBuf>,
    /// True if further agents may be started after this one. Only a claim may set it.
    pub(crate) is_long_running: bool,
    /// Variables for the agent, each as NAME=VALUE. They override the variables of this process.
    pub(crate) env: Vec<OsString>,
    /// The agent's program and its arguments. The program is always present.
    pub(crate) argv: Vec<OsString>,
}

/// States if the sandbox has a gateway at the run's socket.
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
    /// `--commands`: several programs run one after the other, with the same options.
    StartList(Box<InitOptions>, Vec<ListedCommand>),
    /// `--slot`: the claim that arrives at this socket names the program.
    Wait(PathBuf),
    /// `--help` or `--version`.
    Print(String),
}

/// Parses the arguments after the program's name. An error names the invalid argument and a valid value.
pub(crate) fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<InitCommand, String> {
    let mut options = InitOptions {
        listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
        socket: PathBuf::from("/llm-sock/llm.sock"),
        gateway: GatewayMode::Bridged,
        has_tunnels: false,
        socket_timeout: Duration::from_secs(5),
        max_runtime: None,
        grace: Duration::from_secs(2),
        unix_sockets: UnixSocketPolicy::Denied,
        writable: vec![],
        stdio: None,
        is_long_running: false,
        env: vec![],
        argv: vec![],
    };
    let mut has_commands = false;
    while let Some(argument) = arguments.next() {
        // The first argument that is not an option is the program; everything after it belongs to the program.
        let Some(flag) = argument.to_str().filter(|text| text.starts_with('-')) else {
            options.argv.push(argument);
            break;
        };
        let (name, mut value) = match flag.split_once('=') {
            // Both forms are accepted: `--name value` and `--name=value`.
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
            "--tunnels" => options.has_tunnels = true,
            "--max-runtime" => options.max_runtime = Some(parse_duration(name, &value()?)?),
            "--grace" => options.grace = parse_duration(name, &value()?)?,
            "--env" => options.env.push(parse_variable(value()?)?),
            "--write" => options.writable.push(PathBuf::from(value()?)),
            "--stdio" => options.stdio = Some(PathBuf::from(value()?)),
            "--commands" => has_commands = true,
            "--long-running" => options.is_long_running = true,
            // Options after `--slot` would be lost, because the claim brings its own.
            "--slot" => return Ok(InitCommand::Wait(PathBuf::from(value()?))),
            "--allow-unix-sockets" => options.unix_sockets = UnixSocketPolicy::Allowed,
            "--help" => return Ok(InitCommand::Print(HELP_TEXT.to_owned())),
            "--version" => return Ok(InitCommand::Print(VERSION_TEXT.to_owned())),
            // A program whose name begins with a dash needs this separator.
            "--" => break,
            _ => return Err(format!("there is no option `{flag}`")),
        }
    }
    options.argv.extend(arguments);
    if has_commands {
        let commands = decode_commands(mem::take(&mut options.argv))?;
        return Ok(InitCommand::StartList(Box::new(options), commands));
    }
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

/// The maximum of a duration. Our choice: more than a year is never meant, and clock arithmetic cannot overflow.
const MAX_DURATION: Duration = Duration::from_hours(10_000);

const VERSION_TEXT: &str = concat!("cogni-init ", env!("CARGO_PKG_VERSION"), "\n");

const HELP_TEXT: &str = "\
The first process of a sandbox: gives the agent the run's socket as a local port, starts it, and ends with it.

Usage: cogni-init [OPTIONS] [--] PROGRAM [ARGUMENT]...

Options:
  --listen ADDRESS       the address at which the agent finds its LLM [default: 127.0.0.1:8080]
  --socket PATH          the run's socket [default: /llm-sock/llm.sock]
  --socket-timeout TIME  how long the socket may take to answer before the agent starts [default: 5s]
  --no-gateway           the run has no socket: do not listen, and start the agent at once
  --tunnels              the run has tunnels: write their certificate to /run, and set the variables of programs for it
  --max-runtime TIME     end the agent after this time, also without its runner [default: none]
  --grace TIME           time between SIGTERM and SIGKILL [default: 2s]
  --env NAME=VALUE       a variable for the agent; it overrides an inherited one
  --write PATH           the agent may write below this, and nowhere else, if the kernel has Landlock; may be repeated
  --stdio PATH           connect to this socket, and make it the agent's standard input and output
  --slot PATH            connect to this socket, and wait for a claim with these options and the program
  --long-running         in a claim only: after the agent has ended, wipe its files and wait for the next claim
  --commands             run several commands one after the other, without a gateway, and report their output in frames
  --allow-unix-sockets   let the agent make unix sockets; without this it gets EPERM, and socketpair(2) works
  --help                 print this
  --version              print the version

A TIME is `500ms`, `5s`, `10m` or `1h`. PROGRAM is executed as it stands, without a shell.

Exit status: the agent's own, or 128 and the signal that killed it; and if it is not the agent's:
  2 wrong use, 69 the run's socket does not answer, 124 --max-runtime has passed, 125 the sandbox is not set up as required,
  126 PROGRAM cannot be executed, 127 PROGRAM is not found
";
