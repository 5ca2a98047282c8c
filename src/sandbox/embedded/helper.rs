//! The process that makes one container, waits for it, and goes with it. It has one thread, and prints nothing: its
//! standard input is the driver's socket, its output and error are the container's.
//!
//! Once the container runs, the helper outlives a driver that is killed for as long as it takes to end the container
//! and to take its groups away. Until then it dies with its driver.

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

/// What this program is called as to be the helper.
pub const HELPER_PROGRAM_NAME: &str = "cogni-sandbox";

/// Makes the container that the driver asks for, and sees it to its end.
pub fn main() -> ExitCode {
    match run_helper() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn run_helper() -> io::Result<()> {
    let mut driver = BufReader::new(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?));
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
    // Whoever has it by now has no use for it.
    remove_cgroup(&task);
    Ok(())
}

/// A container that waits for its start.
struct PreparedContainer {
    container: Container,
    process: OwnedFd,
    pid: Pid,
    /// The error of the program's start; none where it has started.
    report: OwnedFd,
}

impl PreparedContainer {
    fn new(task: &HelperTask, driver: &UnixStream) -> Result<Self, Box<dyn Error>> {
        privilege::acquire_privileges(task)?;
        process::umask(0o022.into());
        process::set_parent_process_death_signal(Some(Kill::KILL))?;
        if has_driver_left(driver)? {
            return Err("its driver died before it could have been the death of us".into());
        }
        network::unshare_network()?;
        let filters = seccomp::compile_profile(SECCOMP_PROFILE)?;
        let (report, reporter) = pipe_with(PipeFlags::CLOEXEC)?;
        let this = pidfd_open(process::getpid(), PidfdFlags::empty())?;
        let payload = SandboxExecutor::new(&task.config, filters, this, reporter)?
            .with_rootless(task.is_rootless);
        fs::create_dir(&task.directory)?;
        task.config.save(task.directory.join("config.json"))?;
        // What it says is given by name, so that nothing is asked of whoever called us.
        let container = ContainerBuilder::new(task.name.clone(), SyscallType::default())
            .with_root_path(&task.directory)?
            .with_executor(payload)
            .with_stdin(File::open("/dev/null")?)
            .validate_id()?
            .as_init(&task.directory)
            .with_systemd(false)
            .build()?;
        let pid = container.pid().and_then(|pid| Pid::from_raw(pid.as_raw()));
        let pid = pid.ok_or("it has no process")?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { container, process, pid, report })
    }

    fn start(mut self) -> Result<HelperContainer, HelperEvent> {
        close_output().map_err(|error| failure_event(&error))?;
        self.container.start().map_err(|error| failure_event(&error))?;
        let mut number = [0; 4];
        match File::from(self.report).read_exact(&mut number) {
            // It was closed by execve.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Ok(HelperContainer { process: self.process, pid: self.pid })
            }
            Ok(()) => Err(start_failure_event(i32::from_ne_bytes(number))),
            Err(error) => Err(failure_event(&error)),
        }
    }
}

/// With its reasons.
fn failure_event(error: &dyn Error) -> HelperEvent {
    let reasons = iter::successors(Some(error), |error| (*error).source()).map(ToString::to_string);
    HelperEvent::Failed { message: reasons.collect::<Vec<_>>().join(": ") }
}

/// The container has its own copies; ours would keep the pipes open when it is gone.
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
        ERR_SECCOMP_FILTER => refused("this kernel does not take the filter of system calls"),
        ERR_SWITCH_USER => refused("this kernel does not make a user of ours in there"),
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
        // From here on the driver's end is seen on its socket.
        process::set_parent_process_death_signal(None)?;
        // A driver that is gone by now is seen there too.
        let _ = send_event(&mut driver, &HelperEvent::Started);
        self.wait_for_exit(&mut driver)?;
        let exit_code = self.reap_process()?;
        let oom_killed = task.cgroup.as_deref().is_some_and(cgroup::was_oom_killed);
        remove_cgroup(task);
        let _ = send_event(&mut driver, &HelperEvent::Ended { exit_code, oom_killed });
        Ok(())
    }

    /// Returns when the first process is dead, and with it all that it has started.
    fn wait_for_exit(&self, driver: &mut BufReader<UnixStream>) -> io::Result<()> {
        let mut is_there = true;
        loop {
            let flags = if is_there { PollFlags::IN } else { PollFlags::empty() };
            let (process, asked) = {
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
            if asked {
                let signal = next_signal(driver);
                is_there = signal.is_some();
                self.send_signal(signal.unwrap_or(HelperSignal::Kill));
            }
        }
    }

    /// Best effort: a process that is dead by now is what was wanted.
    fn send_signal(&self, signal: HelperSignal) {
        let signal = match signal {
            HelperSignal::Terminate => Kill::TERM,
            HelperSignal::Kill => Kill::KILL,
        };
        let _ = pidfd_send_signal(&self.process, signal);
    }

    /// As a shell says it.
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

/// None where there is nobody left to say something.
fn next_signal(driver: &mut BufReader<UnixStream>) -> Option<HelperSignal> {
    let mut line = vec![];
    driver.read_until(b'\n', &mut line).ok().filter(|read| *read > 0)?;
    serde_json::from_slice(&line).ok()
}

fn send_event(driver: &mut BufReader<UnixStream>, event: &HelperEvent) -> io::Result<()> {
    driver.get_mut().write_all(&encode_line(event))
}

/// Best effort: the driver does it after us, and says what is in the way.
fn remove_cgroup(task: &HelperTask) {
    if let Some(cgroup) = &task.cgroup {
        let _ = cgroup::remove_cgroup(cgroup);
    }
}

/// What a shell says of a file that it may not execute, and of one that is not there.
const EXIT_CANNOT_EXECUTE: i64 = 126;
const EXIT_NOT_FOUND: i64 = 127;
