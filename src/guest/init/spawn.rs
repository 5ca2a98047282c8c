//! The agent's process: its program is searched like execvp searches, and executed with execve and nothing between.

use std::env;
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::ptr;

use rustix::process::{self, Pid, Signal};
use rustix::thread;

use super::options::{InitOptions, UnixSocketPolicy};
use super::tunnel_trust::tunnel_variables;
use super::{
    EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_SETUP_FAILED, InitFailure, landlock, reaper, seccomp,
};

/// Starts the agent in its own session, and returns its pid. `output` is the agent's standard output and standard error
/// if the agent does not have this process's own, nor a socket for its standard input and output.
pub(crate) fn start_agent(
    options: &InitOptions,
    output: Option<[OwnedFd; 2]>,
) -> Result<Pid, InitFailure> {
    // Everything that allocates is made before the fork.
    let image = AgentExecArgs::new(options)?;
    let confinement = AgentConfinement::new(options)?;
    let mut command = Command::new(&options.argv[0]);
    if let Some([stdout, stderr]) = output {
        command.stdout(stdout).stderr(stderr);
    }
    if let Some(path) = &options.stdio {
        let [input, output] = connect_stdio(path)
            .map_err(|error| InitFailure::setup_failure("connect the standard input", error))?;
        command.stdin(input).stdout(output);
    }
    let child = spawn(&mut command, move || Err(image.exec_agent(&confinement)));
    match child {
        // The reaper waits for the child by its pid, together with the orphans that this process inherits.
        Ok(pid) => Ok(pid),
        Err(error) => Err(spawn_failure(&options.argv[0], &error)),
    }
}

/// Connects to the socket that becomes the agent's standard input and output. No other process keeps the connection.
fn connect_stdio(path: &Path) -> io::Result<[OwnedFd; 2]> {
    let input = UnixStream::connect(path)?;
    let output = input.try_clone()?;
    Ok([input.into(), output.into()])
}

/// Forks with the standard library, which reports to the parent why the child has failed, if it has.
#[expect(
    unsafe_code,
    reason = "what runs between fork and exec is for the caller to keep harmless"
)]
fn spawn(
    command: &mut Command,
    between: impl FnMut() -> io::Result<()> + Send + Sync + 'static,
) -> io::Result<Pid> {
    // SAFETY: this process has one thread, so the child's copy holds no lock of another thread.
    let child = unsafe { command.pre_exec(between) }.spawn()?;
    Ok(Pid::from_child(&child))
}

/// The arguments of execve, made before the fork.
struct AgentExecArgs {
    /// The paths to try, in order.
    candidates: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
}

impl AgentExecArgs {
    fn new(options: &InitOptions) -> Result<Self, InitFailure> {
        let InitOptions { argv, env, .. } = options;
        let mut env = merged_environment(env);
        if options.has_tunnels {
            add_tunnel_variables(&mut env, options.listen.port());
        }
        let path = env.iter().find_map(|variable| variable.as_bytes().strip_prefix(b"PATH="));
        let strings = || -> Result<Self, std::ffi::NulError> {
            Ok(Self {
                candidates: candidate_paths(&argv[0], path.map(OsStr::from_bytes))?,
                argv: argv.iter().cloned().map(c_string).collect::<Result<_, _>>()?,
                env: env.iter().cloned().map(c_string).collect::<Result<_, _>>()?,
            })
        };
        strings().map_err(|error| InitFailure::setup_failure("pass the arguments on", error))
    }

    /// Replaces the child by the agent. The function returns only on failure.
    ///
    /// It calls execve itself, because the standard library's execvp would run a file without a `#!` line in a shell.
    fn exec_agent(&self, confinement: &AgentConfinement) -> io::Error {
        if let Err(error) = confinement.apply() {
            return error;
        }
        let (argv, env) =
            (null_terminated_pointers(&self.argv), null_terminated_pointers(&self.env));
        // The result if `PATH` has no such program.
        let mut outcome = io::Error::from_raw_os_error(libc::ENOENT);
        for path in &self.candidates {
            let error = execve(path, &argv, &env);
            match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) => {}
                // Like execvp: a later directory may have an executable one. If not, this error is the reason.
                Some(libc::EACCES) => outcome = error,
                _ => return error,
            }
        }
        outcome
    }
}

/// The restrictions of the agent that this process does not have, made before the fork.
struct AgentConfinement {
    unix_sockets: UnixSocketPolicy,
    files: Option<OwnedFd>,
}

impl AgentConfinement {
    fn new(InitOptions { writable, unix_sockets, .. }: &InitOptions) -> Result<Self, InitFailure> {
        let files = if writable.is_empty() {
            Ok(None)
        } else {
            landlock::prepare_ruleset(writable, *unix_sockets)
        };
        let files =
            files.map_err(|error| InitFailure::setup_failure("make rules for Landlock", error))?;
        Ok(Self { unix_sockets: *unix_sockets, files })
    }

    /// Applies the restrictions to the child. The new session makes the agent the leader of a process group without
    /// this process in it.
    fn apply(&self) -> io::Result<()> {
        // `no_new_privs` comes before both filters, because the kernel demands it for them.
        reaper::unblock_signals()?;
        process::setsid()?;
        process::set_parent_process_death_signal(Some(Signal::KILL))?;
        thread::set_no_new_privs(true)?;
        // Special error numbers, because execve returns EINVAL and EACCES too.
        if let Some(files) = &self.files {
            landlock::restrict_self(files)
                .map_err(|_| io::Error::from_raw_os_error(ERR_LANDLOCK))?;
        }
        seccomp::restrict_calls(self.unix_sockets)
            .map_err(|_| io::Error::from_raw_os_error(ERR_SECCOMP))
    }
}

#[expect(unsafe_code, reason = "there is no safe call that executes a program and nothing else")]
fn execve(path: &CString, argv: &[*const libc::c_char], env: &[*const libc::c_char]) -> io::Error {
    // SAFETY: both lists end with a null pointer, and their strings outlive the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

fn null_terminated_pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

/// Returns the paths to try. A name with a slash is a path. Any other name is searched in `PATH`, or in execvp's
/// default directories.
fn candidate_paths(
    program: &OsStr,
    path: Option<&OsStr>,
) -> Result<Vec<CString>, std::ffi::NulError> {
    if program.as_bytes().contains(&b'/') {
        return Ok(vec![c_string(program.to_owned())?]);
    }
    let path = path.unwrap_or(OsStr::new(DEFAULT_PATH));
    env::split_paths(path)
        .map(|directory| c_string(directory.join(program).into_os_string()))
        .collect()
}

/// Returns the variables of this process and the given ones. A given variable overrides one of this process.
fn merged_environment(agent_variables: &[OsString]) -> Vec<OsString> {
    let is_given = |name: &OsStr| {
        let rest = |variable| OsStr::as_bytes(variable).strip_prefix(name.as_bytes());
        agent_variables
            .iter()
            .any(|variable| rest(variable).is_some_and(|rest| rest.starts_with(b"=")))
    };
    let own = env::vars_os().filter(|(name, _)| !is_given(name)).map(|(mut variable, value)| {
        variable.push("=");
        variable.push(value);
        variable
    });
    own.chain(agent_variables.iter().cloned()).collect()
}

/// Adds the variables of tunnels that are not set yet. The operator's choice stays.
fn add_tunnel_variables(env: &mut Vec<OsString>, port: u16) {
    for (name, value) in tunnel_variables(&format!("http://localhost:{port}")) {
        let is_set = |variable: &OsString| {
            variable
                .as_bytes()
                .strip_prefix(name.as_bytes())
                .is_some_and(|rest| rest.starts_with(b"="))
        };
        if !env.iter().any(is_set) {
            env.push(format!("{name}={value}").into());
        }
    }
}

fn c_string(text: OsString) -> Result<CString, std::ffi::NulError> {
    CString::new(text.into_vec())
}

fn spawn_failure(program: &OsStr, error: &io::Error) -> InitFailure {
    let program = program.to_string_lossy();
    let failure = |status, message| InitFailure { status, message };
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) if program.contains('/') => failure(
            EXIT_NOT_FOUND,
            format!("there is no `{program}`, or the interpreter that it names is not in the image"),
        ),
        Some(libc::ENOENT) => {
            failure(EXIT_NOT_FOUND, format!("`{program}` is not found in `PATH`; give its path, or set `PATH`"))
        }
        Some(libc::EACCES) => {
            failure(EXIT_NOT_EXECUTABLE, format!("uid {} may not execute `{program}`", process::getuid().as_raw()))
        }
        Some(libc::ENOEXEC) => failure(
            EXIT_NOT_EXECUTABLE,
            format!("`{program}` is no program of this machine, and has no `#!` line; there is no shell to guess with"),
        ),
        Some(ERR_SECCOMP) => failure(
            EXIT_SETUP_FAILED,
            "this kernel does not take a filter of system calls; --allow-unix-sockets starts the agent without one".to_owned(),
        ),
        Some(ERR_LANDLOCK) => failure(
            EXIT_SETUP_FAILED,
            "this kernel has Landlock, and does not take its rules; without --write the agent starts without them".to_owned(),
        ),
        Some(libc::EAGAIN | libc::ENOMEM) => failure(
            EXIT_SETUP_FAILED,
            format!("cannot start a process for `{program}`: {error}; see the sandbox's limits of processes and memory"),
        ),
        _ => failure(EXIT_NOT_EXECUTABLE, format!("cannot execute `{program}`: {error}")),
    }
}

/// The value of `confstr(_CS_PATH)`. glibc and musl have the same directories in a different order.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// Error numbers that no call between fork and exec returns, so that the parent can recognize the restrictions'
/// failures.
const ERR_SECCOMP: i32 = libc::ENOTSUP;
const ERR_LANDLOCK: i32 = libc::ENOPKG;
