//! The last steps of the process that becomes the sandbox's first: all of it is hardened by now but for the filter of
//! system calls, which goes on right before the program takes over.

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

/// What is made ready in the helper, before it forks.
#[derive(Clone)]
pub(super) struct SandboxExecutor {
    image: Rc<InitExecArgs>,
    filters: Rc<SeccompFilters>,
    /// The helper: readable once it is dead.
    helper: Rc<OwnedFd>,
    /// For the error of execve; closed by it where there is none.
    report: Rc<OwnedFd>,
    is_rootless: bool,
}

/// What execve is given.
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

    /// Whether the sandbox's user is still to be made.
    pub(super) fn with_rootless(self, is_rootless: bool) -> Self {
        Self { is_rootless, ..self }
    }
}

impl Executor for SandboxExecutor {
    /// Nobody starts a container whose helper has died, so it must not wait for that either. From the last change of
    /// its user on, a process keeps what it has said about its parent's death.
    fn validate(&self, _: &Spec) -> Result<(), ExecutorValidationError> {
        let wrong =
            |error: io::Error| ExecutorValidationError::ArgValidationError(error.to_string());
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| wrong(error.into()))?;
        let mut dead = [PollFd::new(&self.helper, PollFlags::IN)];
        match poll(&mut dead, Some(&Timespec::default())) {
            Ok(0) => Ok(()),
            Ok(_) => Err(wrong(io::ErrorKind::BrokenPipe.into())),
            Err(error) => Err(wrong(error.into())),
        }
    }

    /// The program is given its variables when it is executed.
    fn setup_envs(&self, _: HashMap<String, String>) -> Result<(), ExecutorSetEnvsError> {
        Ok(())
    }

    fn exec(&self, _: &Spec) -> Result<(), ExecutorError> {
        let error = self.exec_program();
        let number = error.raw_os_error().unwrap_or(libc::EIO);
        // There is nobody left to tell when this fails.
        let _ = rustix::io::write(&*self.report, &number.to_ne_bytes());
        Err(ExecutorError::Execution(error.into()))
    }
}

impl SandboxExecutor {
    /// Returns only if it fails.
    fn exec_program(&self) -> io::Error {
        restore_sigpipe();
        if self.is_rootless && privilege::switch_to_user().is_err() {
            return io::Error::from_raw_os_error(ERR_SWITCH_USER);
        }
        // The later one counts for what both deny.
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
        let process = config.process().as_ref().expect("it has this part");
        let argv = process.args().clone().unwrap_or_default();
        let env = process.env().clone().unwrap_or_default();
        let path = env.iter().find_map(|variable| variable.strip_prefix("PATH="));
        Ok(Self {
            candidates: to_c_strings(candidate_paths(&argv[0], path.unwrap_or_default()))?,
            argv: to_c_strings(argv)?,
            env: to_c_strings(env)?,
        })
    }

    /// Not by the standard library, whose execvp would give a file without a `#!` line to a shell.
    fn exec_candidates(&self) -> io::Error {
        let (argv, env) =
            (null_terminated_pointers(&self.argv), null_terminated_pointers(&self.env));
        let mut outcome = io::Error::from_raw_os_error(libc::ENOENT);
        for path in &self.candidates {
            let error = execve(path, &argv, &env);
            match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) => (),
                // As execvp does: another directory may have one that is executable, and if not, this is the reason.
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

/// Rust's programs ignore it; others expect to end by it, and what is ignored stays so across execve.
#[expect(unsafe_code, reason = "there is no safe call that sets a signal's disposition")]
fn restore_sigpipe() {
    // SAFETY: the default has no handler that could do harm.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// A name with a slash is a path; another is looked for in `PATH`.
fn candidate_paths(program: &str, path: &str) -> Vec<String> {
    if program.contains('/') {
        return vec![program.to_owned()];
    }
    path.split(':').map(|folder| format!("{folder}/{program}")).collect()
}

fn to_c_strings(texts: Vec<String>) -> Result<Vec<CString>, NulError> {
    texts.into_iter().map(CString::new).collect()
}

fn null_terminated_pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

/// Not an answer of execve, so that it can be told from those.
pub(super) const ERR_SECCOMP_FILTER: i32 = libc::ENOTSUP;
pub(super) const ERR_SWITCH_USER: i32 = libc::EUSERS;
