//! The last steps of the process that becomes the sandbox's first process. All restrictions hold by then, except for
//! the filters of system calls, which are applied right before the program is executed.

use std::collections::HashMap;
use std::ffi::{CString, NulError};
use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::rc::Rc;

use libcontainer::oci_spec::runtime::Spec;
use libcontainer::workload::{
    Executor, ExecutorError, ExecutorSetEnvsError, ExecutorValidationError,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, set_parent_process_death_signal};
use seccompiler::apply_filter;

use super::privilege;
use crate::sandbox::spec::seccomp::SeccompFilters;

/// The executor of the sandbox's first process, prepared in the helper before the fork.
#[derive(Clone)]
pub(super) struct SandboxExecutor {
    image: Rc<InitExecArgs>,
    filters: Rc<SeccompFilters>,
    /// A pidfd of the helper, readable once the helper is dead.
    helper: Rc<OwnedFd>,
    /// A pipe for the error of execve; a successful execve closes the pipe.
    report: Rc<OwnedFd>,
    is_rootless: bool,
}

/// The arguments of execve, prepared before the fork.
struct InitExecArgs {
    /// The paths to try, in order.
    candidates: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
}

impl SandboxExecutor {
    pub(super) fn new(
        config: &Spec,
        filters: SeccompFilters,
        helper: OwnedFd,
        report: OwnedFd,
    ) -> Result<Self, NulError> {
        let image = Rc::new(InitExecArgs::new(config)?);
        Ok(Self {
            image,
            filters: Rc::new(filters),
            helper: Rc::new(helper),
            report: Rc::new(report),
            is_rootless: false,
        })
    }

    /// Sets whether the process still has to switch to the sandbox's user, as in a rootless container.
    pub(super) fn with_rootless(self, is_rootless: bool) -> Self {
        Self { is_rootless, ..self }
    }
}

impl Executor for SandboxExecutor {
    /// Arms the parent death signal, and checks that the helper still lives. No other process starts a container whose
    /// helper has died, so the container must not wait for that. The runtime's changes of the user, which clear the
    /// signal, are over at this point.
    fn validate(&self, _: &Spec) -> Result<(), ExecutorValidationError> {
        let wrong =
            |error: io::Error| ExecutorValidationError::ArgValidationError(error.to_string());
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| wrong(error.into()))?;
        // The helper may have died before the signal was armed, so its pidfd is checked after that.
        let mut dead = [PollFd::new(&self.helper, PollFlags::IN)];
        match poll(&mut dead, Some(&Timespec::default())) {
            Ok(0) => Ok(()),
            Ok(_) => Err(wrong(io::ErrorKind::BrokenPipe.into())),
            Err(error) => Err(wrong(error.into())),
        }
    }

    /// Sets nothing: the variables are passed to execve.
    fn setup_envs(&self, _: HashMap<String, String>) -> Result<(), ExecutorSetEnvsError> {
        Ok(())
    }

    fn exec(&self, _: &Spec) -> Result<(), ExecutorError> {
        let error = self.exec_program();
        let number = error.raw_os_error().unwrap_or(libc::EIO);
        // The process ends in any case, so a failed write cannot be reported.
        let _ = rustix::io::write(&*self.report, &number.to_ne_bytes());
        Err(ExecutorError::Execution(error.into()))
    }
}

impl SandboxExecutor {
    /// Executes the program, and returns only if that fails.
    fn exec_program(&self) -> io::Error {
        restore_sigpipe();
        // The user namespace needs calls that the filters deny, so the switch comes before the filters.
        if self.is_rootless && privilege::switch_to_user().is_err() {
            return io::Error::from_raw_os_error(ERR_SWITCH_USER);
        }
        // Both filters check each call. If both deny a call, the error of the filter applied later is returned.
        for filter in [&self.filters.allow, &self.filters.deny] {
            if apply_filter(filter).is_err() {
                return io::Error::from_raw_os_error(ERR_SECCOMP_FILTER);
            }
        }
        self.image.exec_candidates()
    }
}

impl InitExecArgs {
    fn new(config: &Spec) -> Result<Self, NulError> {
        let process = config.process().as_ref().expect("the configuration has a process");
        let argv = process.args().clone().unwrap_or_default();
        let env = process.env().clone().unwrap_or_default();
        let path = env.iter().find_map(|variable| variable.strip_prefix("PATH="));
        Ok(Self {
            candidates: to_c_strings(candidate_paths(&argv[0], path.unwrap_or_default()))?,
            argv: to_c_strings(argv)?,
            env: to_c_strings(env)?,
        })
    }

    /// Executes the first candidate that exists. The standard library's `exec` is not used: its execvp hands a file
    /// without a `#!` line to a shell.
    fn exec_candidates(&self) -> io::Error {
        let (argv, env) =
            (null_terminated_pointers(&self.argv), null_terminated_pointers(&self.env));
        let mut outcome = io::Error::from_raw_os_error(libc::ENOENT);
        for path in &self.candidates {
            let error = execve(path, &argv, &env);
            match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) => (),
                // As in execvp: a later directory may have an executable file; if none has, this error is the result.
                Some(libc::EACCES) => outcome = error,
                _ => return error,
            }
        }
        outcome
    }
}

#[expect(unsafe_code, reason = "there is no safe call that executes a program and nothing else")]
fn execve(path: &CString, argv: &[*const libc::c_char], env: &[*const libc::c_char]) -> io::Error {
    // SAFETY: both lists end with a null pointer, and point to strings that outlive the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Restores the default disposition of SIGPIPE. Rust's runtime ignores the signal, execve keeps an ignored signal
/// ignored, and other programs expect to end by the signal.
#[expect(unsafe_code, reason = "there is no safe call that sets a signal's disposition")]
fn restore_sigpipe() {
    // SAFETY: the default has no handler that could do harm.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Returns the paths to try. A name with a slash is a path; every other name is looked up in `PATH`.
fn candidate_paths(program: &str, path: &str) -> Vec<String> {
    if program.contains('/') {
        return vec![program.to_owned()];
    }
    path.split(':').map(|directory| format!("{directory}/{program}")).collect()
}

fn to_c_strings(texts: Vec<String>) -> Result<Vec<CString>, NulError> {
    texts.into_iter().map(CString::new).collect()
}

fn null_terminated_pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

/// The reported error number of a filter that the kernel refused. execve never returns this number.
pub(super) const ERR_SECCOMP_FILTER: i32 = libc::ENOTSUP;
/// The reported error number of a failed switch to the sandbox's user. execve never returns this number.
pub(super) const ERR_SWITCH_USER: i32 = libc::EUSERS;
