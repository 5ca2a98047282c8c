//! The process that makes one container, waits for the container's end, and ends with it. The helper has one thread and
//! prints nothing: its standard input is the driver's socket, its output and error are the container's.
//!
//! Before the container runs, the helper dies with its driver. Afterwards a helper whose driver was killed lives on
//! until the container is killed and its cgroups are removed.

use std::error::Error;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::iter;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use libcontainer::container::Container;
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::syscall::syscall::SyscallType;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    self, Pid, PidfdFlags, Signal as Kill, WaitOptions, pidfd_open, pidfd_send_signal, waitpid,
};

use super::executor::{ERR_SECCOMP_FILTER, ERR_SWITCH_USER, SandboxExecutor};
use super::messages::{HelperEvent, HelperSignal, HelperTask, encode_line};
use super::{cgroup, network, privilege};
use crate::sandbox::spec::{SECCOMP_PROFILE, seccomp};

/// The program name (`argv[0]`) that makes this program run as the helper.
pub const HELPER_PROGRAM_NAME: &str = "cogni-sandbox";

/// Makes the container that the driver requests, and stays until the container has ended.
pub fn main() -> ExitCode {
    match run_helper() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn run_helper() -> io::Result<()> {
    let mut driver = BufReader::new(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?));
    // The first line is the task; the lines after it are signals for the container.
    let mut first = vec![];
    driver.read_until(b'\n', &mut first)?;
    let task: HelperTask = serde_json::from_slice(&first)?;
    let event = match PreparedContainer::new(&task, driver.get_ref()) {
        Ok(made) => match made.start() {
            Ok(running) => return running.wait_and_report(driver, &task),
            Err(event) => event,
        },
        Err(error) => failure_event(&*error),
    };
    send_event(&mut driver, &event)?;
    // A driver that is gone cannot read the event, and has no use for the cgroup either.
    remove_cgroup(&task);
    Ok(())
}

/// A container that waits for its start.
struct PreparedContainer {
    container: Container,
    process: OwnedFd,
    pid: Pid,
    /// The pipe for the error of execve; it is closed without bytes if the program has started.
    report: OwnedFd,
}

impl PreparedContainer {
    fn new(task: &HelperTask, driver: &UnixStream) -> Result<Self, Box<dyn Error>> {
        // The order of the steps:
        // 1. The privileges come first. They may change the process's credentials, which clears a parent death signal.
        // 2. The death signal is armed, and only then is the driver checked: the driver may have died before.
        // 3. The network namespace is made before the container's process, which inherits it.
        privilege::acquire_privileges(task)?;
        process::umask(0o022.into());
        process::set_parent_process_death_signal(Some(Kill::KILL))?;
        if has_driver_left(driver)? {
            return Err("the driver died before its death could end the helper".into());
        }
        network::unshare_network()?;
        let filters = seccomp::compile_profile(SECCOMP_PROFILE)?;
        let (report, reporter) = pipe_with(PipeFlags::CLOEXEC)?;
        let own_process = pidfd_open(process::getpid(), PidfdFlags::empty())?;
        let payload = SandboxExecutor::new(&task.config, filters, own_process, reporter)?
            .with_rootless(task.is_rootless);
        fs::create_dir(&task.directory)?;
        task.config.save(task.directory.join("config.json"))?;
        // Every path is absolute, so the container does not depend on the caller's working directory.
        let container = ContainerBuilder::new(task.name.clone(), SyscallType::default())
            .with_root_path(&task.directory)?
            .with_executor(payload)
            .with_stdin(File::open("/dev/null")?)
            .validate_id()?
            .as_init(&task.directory)
            .with_systemd(false)
            .build()?;
        let pid = container.pid().and_then(|pid| Pid::from_raw(pid.as_raw()));
        let pid = pid.ok_or("the container has no process")?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { container, process, pid, report })
    }

    fn start(mut self) -> Result<HelperContainer, HelperEvent> {
        // The output is closed before the start, so that a container that ends at once also ends its pipes.
        close_output().map_err(|error| failure_event(&error))?;
        self.container.start().map_err(|error| failure_event(&error))?;
        let mut number = [0; 4];
        match File::from(self.report).read_exact(&mut number) {
            // execve has closed the pipe (`CLOEXEC`): the program runs.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Ok(HelperContainer { process: self.process, pid: self.pid })
            }
            Ok(()) => Err(start_failure_event(i32::from_ne_bytes(number))),
            Err(error) => Err(failure_event(&error)),
        }
    }
}

/// Returns the event for a failure, with the whole chain of causes.
fn failure_event(error: &dyn Error) -> HelperEvent {
    let reasons = iter::successors(Some(error), |error| (*error).source()).map(ToString::to_string);
    HelperEvent::Failed { message: reasons.collect::<Vec<_>>().join(": ") }
}

/// Replaces the helper's output by `/dev/null`. The container has its own copies; the helper's copies would keep the
/// pipes open after the container's end.
fn close_output() -> io::Result<()> {
    let null = File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}

fn start_failure_event(number: i32) -> HelperEvent {
    let refused = |why: &str| HelperEvent::Failed { message: why.to_owned() };
    let error = io::Error::from_raw_os_error(number);
    match number {
        ERR_SECCOMP_FILTER => refused("this kernel does not accept the filter of system calls"),
        ERR_SWITCH_USER => {
            refused("this kernel does not create a user namespace for the sandbox's user")
        }
        libc::ENOENT | libc::ENOTDIR => HelperEvent::NotStarted {
            exit_code: EXIT_NOT_FOUND,
            message: format!("the program is not found: {error}"),
        },
        _ => HelperEvent::NotStarted {
            exit_code: EXIT_CANNOT_EXECUTE,
            message: format!("the program cannot be executed: {error}"),
        },
    }
}

struct HelperContainer {
    process: OwnedFd,
    pid: Pid,
}

impl HelperContainer {
    fn wait_and_report(
        self,
        mut driver: BufReader<UnixStream>,
        task: &HelperTask,
    ) -> io::Result<()> {
        // From here on, the driver's end is seen on its socket, and the container gets its kill from this process.
        process::set_parent_process_death_signal(None)?;
        // A failed write means that the driver is gone, which the wait below sees too.
        let _ = send_event(&mut driver, &HelperEvent::Started);
        self.wait_for_exit(&mut driver)?;
        let exit_code = self.reap_process()?;
        // The counter of OOM kills must be read before the cgroup is removed.
        let oom_killed = task.cgroup.as_deref().is_some_and(cgroup::was_oom_killed);
        remove_cgroup(task);
        let _ = send_event(&mut driver, &HelperEvent::Ended { exit_code, oom_killed });
        Ok(())
    }

    /// Returns when the first process is dead. The kernel kills all other processes of its pid namespace with it.
    fn wait_for_exit(&self, driver: &mut BufReader<UnixStream>) -> io::Result<()> {
        let mut is_there = true;
        loop {
            // A driver that is gone is not polled again: its socket would stay readable for ever.
            let flags = if is_there { PollFlags::IN } else { PollFlags::empty() };
            let (process, has_request) = {
                let mut polled = [
                    PollFd::new(&self.process, PollFlags::IN),
                    PollFd::new(driver.get_ref(), flags),
                ];
                match poll(&mut polled[..if is_there { 2 } else { 1 }], None) {
                    Err(Errno::INTR) => continue,
                    polled => polled?,
                };
                (!polled[0].revents().is_empty(), !polled[1].revents().is_empty())
            };
            if process {
                return Ok(());
            }
            if has_request {
                // No signal means that the driver is gone, and its container is killed.
                let signal = next_signal(driver);
                is_there = signal.is_some();
                self.send_signal(signal.unwrap_or(HelperSignal::Kill));
            }
        }
    }

    /// Sends a signal to the container's first process; a process that is dead already needs none.
    fn send_signal(&self, signal: HelperSignal) {
        let signal = match signal {
            HelperSignal::Terminate => Kill::TERM,
            HelperSignal::Kill => Kill::KILL,
        };
        let _ = pidfd_send_signal(&self.process, signal);
    }

    /// Returns the exit code as a shell reports it: 128 and the signal's number after a signal.
    fn reap_process(&self) -> io::Result<i64> {
        let (_, status) = waitpid(Some(self.pid), WaitOptions::empty())?.expect("it waits");
        let signal = status.terminating_signal().map(|signal| 128 + signal);
        Ok(status.exit_status().or(signal).unwrap_or_default().into())
    }
}

fn has_driver_left(driver: &UnixStream) -> io::Result<bool> {
    let mut polled = [PollFd::new(driver, PollFlags::RDHUP)];
    Ok(poll(&mut polled, Some(&Timespec::default()))? > 0)
}

/// Reads the driver's next signal; `None` if the driver is gone or sends an invalid line.
fn next_signal(driver: &mut BufReader<UnixStream>) -> Option<HelperSignal> {
    let mut line = vec![];
    driver.read_until(b'\n', &mut line).ok().filter(|read| *read > 0)?;
    serde_json::from_slice(&line).ok()
}

fn send_event(driver: &mut BufReader<UnixStream>, event: &HelperEvent) -> io::Result<()> {
    driver.get_mut().write_all(&encode_line(event))
}

/// Removes the cgroup, as far as possible. The driver tries again afterwards, and reports a failure.
fn remove_cgroup(task: &HelperTask) {
    if let Some(cgroup) = &task.cgroup {
        let _ = cgroup::remove_cgroup(cgroup);
    }
}

/// The exit code of a shell for a file that it may not execute.
const EXIT_CANNOT_EXECUTE: i64 = 126;
/// The exit code of a shell for a file that does not exist.
const EXIT_NOT_FOUND: i64 = 127;
