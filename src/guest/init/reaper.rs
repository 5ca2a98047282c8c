//! The duties of a first process: it receives signals, reaps dead children, and leaves no process running.

use std::fs;
use std::io;
use std::mem;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{self, DumpableBehavior, Pid, Signal, WaitOptions, WaitStatus};

use super::accept_queue::{CHECK_INTERVAL, WaitingConnections};
use super::bridge::SocketBridge;
use super::command_output::{CommandOutput, OutputState};
use super::host_channel::{HostChannel, HostCommand};
use super::options::InitOptions;
use super::{EXIT_TIMED_OUT, log_line};

/// The receiver of signals and the reaper of all children.
pub(crate) struct ProcessReaper {
    signals: OwnedFd,
}

impl ProcessReaper {
    /// Prepares this process before any other is started: from now on signals wait in a descriptor, and orphans become
    /// this process's children.
    pub(crate) fn prepare() -> io::Result<Self> {
        // The agent has the same uid. It must not trace this process, which runs without the agent's filter, nor take
        // its descriptors.
        process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
        if !process::getpid().is_init() {
            process::set_child_subreaper(Some(process::getpid()))?;
        }
        Ok(Self { signals: block_signals()? })
    }

    /// Serves the bridge until the agent and all processes that it started are gone. Executes the host's commands and
    /// reports the agent's output in the same loop. Returns the agent's exit status.
    pub(crate) fn run_until_exit(
        &self,
        mut bridge: SocketBridge,
        agent: Pid,
        options: &InitOptions,
        AgentPeers { mut host, mut output }: AgentPeers<'_>,
    ) -> u8 {
        let mut watch = AgentLifecycle {
            agent,
            status: None,
            timed_out: false,
            stage: AgentStage::Running,
            deadline: options.max_runtime.map(|time| Instant::now() + time),
            grace: options.grace,
        };
        let mut next_check = Instant::now() + CHECK_INTERVAL;
        loop {
            // The loop wakes for the next deadline or for the next check of the accept queues.
            let until = watch.deadline.map_or(next_check, |deadline| deadline.min(next_check));
            let left = Some(until.saturating_duration_since(Instant::now()));
            // The descriptors that the bridge polls for this loop: signals, the host's commands if a host is connected,
            // and the agent's output if this process reports it.
            let watched_fds =
                [Some(self.signals.as_fd()), host.map(AsFd::as_fd)].into_iter().flatten();
            let pipes = output.iter().flat_map(|output| output.pipes());
            let watched_fds: Vec<_> = watched_fds.chain(pipes).collect();
            if bridge.poll_once(left, &watched_fds) {
                let is_signalled = self.handle_signals(&watch);
                host = host.filter(|host| watch.handle_host_commands(host));
                if let Some(output) = &mut output {
                    output.is_signalled |= is_signalled;
                    watch.forward_output(output);
                }
                if watch.reap_children() == ChildrenLeft::AllReaped {
                    return watch.exit_status();
                }
            }
            let now = Instant::now();
            if watch.deadline.is_some_and(|at| at <= now)
                && watch.on_deadline() == ChildrenLeft::AllReaped
            {
                return watch.exit_status();
            }
            if next_check <= now {
                watch.check_accept_queues();
                next_check = now + CHECK_INTERVAL;
            }
        }
    }

    /// Forwards the signals that have arrived. Returns true if there was one for the agent.
    fn handle_signals(&self, watch: &AgentLifecycle) -> bool {
        let mut is_signalled = false;
        while let Some(signal) = self.next_signal() {
            if signal != Signal::CHILD {
                watch.forward_signal(signal);
                is_signalled = true;
            }
        }
        is_signalled
    }

    /// Returns the next signal that has arrived, if any.
    pub(crate) fn next_signal(&self) -> Option<Signal> {
        let mut buffer = [0; size_of::<libc::signalfd_siginfo>()];
        let length = rustix::io::read(&self.signals, &mut buffer).ok()?;
        // The number is the structure's first field (signalfd(2)).
        let number = i32::from_ne_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]);
        Signal::from_named_raw(number).filter(|_| length == buffer.len())
    }

    /// Returns the descriptor that is readable after a signal has arrived.
    pub(crate) fn signal_fd(&self) -> &OwnedFd {
        &self.signals
    }
}

/// The parties that the first process serves beside the agent.
#[derive(Default)]
pub(crate) struct AgentPeers<'a> {
    pub(crate) host: Option<&'a HostChannel>,
    /// The agent's output, if this process reports it.
    pub(crate) output: Option<&'a mut CommandOutput>,
}

/// The state of one agent and its descendants.
struct AgentLifecycle {
    agent: Pid,
    /// The agent's wait status, after it has ended.
    status: Option<WaitStatus>,
    timed_out: bool,
    stage: AgentStage,
    /// The time at which the next stage begins, if the agent does not end before.
    deadline: Option<Instant>,
    grace: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AgentStage {
    Running,
    /// Every process has received SIGTERM.
    Terminating,
    /// Every process has received SIGKILL.
    Killed,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ChildrenLeft {
    AllReaped,
    Remaining,
}

impl AgentLifecycle {
    fn forward_signal(&self, signal: Signal) {
        // The pid of a reaped agent may belong to another process already.
        if self.status.is_none() {
            let _ = process::kill_process(self.agent, signal);
        }
    }

    /// Reports the agent's output, and kills an agent whose output is refused.
    fn forward_output(&mut self, output: &mut CommandOutput) {
        if output.forward() == OutputState::Refused && self.stage != AgentStage::Killed {
            self.send_sigkill();
        }
    }

    /// Executes the host's commands. Returns false if the host has disconnected.
    fn handle_host_commands(&mut self, host: &HostChannel) -> bool {
        while let Some(word) = host.poll_command() {
            match word {
                HostCommand::Terminate => self.forward_signal(Signal::TERM),
                HostCommand::Kill => self.send_sigkill(),
                HostCommand::Disconnected => {
                    // Without a host, the agent's result has no reader.
                    self.send_sigkill();
                    return false;
                }
            }
        }
        true
    }

    /// Reaps every child that has ended. The agent's own end also ends the other processes.
    fn reap_children(&mut self) -> ChildrenLeft {
        loop {
            match process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.agent => self.status = Some(status),
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                // The only error is ECHILD: this process has no children.
                Err(_) => return ChildrenLeft::AllReaped,
            }
        }
        match self.stage {
            AgentStage::Running if self.status.is_some() => self.send_sigterm(),
            // The parent of an orphan was just killed, so that the orphan has become our child and has not received the
            // signal.
            AgentStage::Killed => signal_children(Signal::KILL),
            _ => {}
        }
        ChildrenLeft::Remaining
    }

    /// Begins the next stage after the deadline has passed: TERM, then KILL, then giving up.
    fn on_deadline(&mut self) -> ChildrenLeft {
        match self.stage {
            AgentStage::Running => {
                log_line("the agent has reached --max-runtime and is terminated");
                self.timed_out = true;
                self.send_sigterm();
            }
            AgentStage::Terminating => self.send_sigkill(),
            AgentStage::Killed => {
                log_line(
                    "a process does not exit after SIGKILL; the kernel has to end it with the sandbox",
                );
                return ChildrenLeft::AllReaped;
            }
        }
        ChildrenLeft::Remaining
    }

    /// Kills all processes if connections that no process accepts hold too much memory.
    fn check_accept_queues(&mut self) {
        if self.stage == AgentStage::Killed {
            return;
        }
        let waiting = WaitingConnections::read();
        if waiting.is_too_much() {
            let WaitingConnections { count, bytes } = waiting;
            log_line(format_args!(
                "{count} TCP connections with {bytes} bytes wait for a process to accept them, which is more than a sandbox may \
                 have; the sandbox is killed"
            ));
            self.send_sigkill();
        }
    }

    fn send_sigterm(&mut self) {
        signal_all(self.agent, Signal::TERM);
        // A stopped process would handle SIGTERM only after it is continued.
        signal_all(self.agent, Signal::CONT);
        self.stage = AgentStage::Terminating;
        self.deadline = Some(Instant::now() + self.grace);
    }

    // The deadline bounds the wait for processes that the kernel cannot end now.
    fn send_sigkill(&mut self) {
        signal_all(self.agent, Signal::KILL);
        self.stage = AgentStage::Killed;
        self.deadline = Some(Instant::now() + REAP_TIMEOUT);
    }

    fn exit_status(&self) -> u8 {
        // A run that its time limit has ended reports the timeout, whatever status the agent had. A run whose agent did
        // not exit reports the timeout, too.
        let Some(status) = self.status.filter(|_| !self.timed_out) else {
            return EXIT_TIMED_OUT;
        };
        let code = status.exit_status().or(status.terminating_signal().map(|signal| 128 + signal));
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
    }
}

/// Signals all other processes of the namespace, if this is a first process. Otherwise signals the agent's group and
/// all children of this process.
fn signal_all(agent: Pid, signal: Signal) {
    if process::getpid().is_init() {
        // For the first process the kernel takes its group as every process but the caller.
        let _ = process::kill_process_group(Pid::INIT, signal);
    } else {
        let _ = process::kill_process_group(agent, signal);
        signal_children(signal);
    }
}

/// Signals the processes that the kernel lists as children of this one. Their own children become ours after their
/// death.
fn signal_children(signal: Signal) {
    let children = fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    let children = children.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?));
    for child in children {
        let _ = process::kill_process(child, signal);
    }
}

/// Blocks the handled signals and returns a descriptor from which they are read. The kernel drops a first process's
/// signals that would have their default effect, so blocking is the only way to receive them.
#[expect(unsafe_code, reason = "there is no safe call that makes a descriptor of signals")]
fn block_signals() -> io::Result<OwnedFd> {
    let set = change_signal_mask(libc::SIG_BLOCK)?;
    // SAFETY: the call only reads the set.
    let descriptor =
        unsafe { libc::signalfd(-1, &raw const set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and no other value owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Unblocks the signals in a child that is about to become the agent, because blocked signals stay blocked through
/// execve.
pub(crate) fn unblock_signals() -> io::Result<()> {
    change_signal_mask(libc::SIG_UNBLOCK).map(drop)
}

/// Blocks or unblocks the handled signals, and returns their set.
#[expect(unsafe_code, reason = "there are no safe calls for masks of signals")]
fn change_signal_mask(how: libc::c_int) -> io::Result<libc::sigset_t> {
    // SAFETY: a set of signals is plain data, and all zeroes are a valid value.
    let mut set: libc::sigset_t = unsafe { mem::zeroed() };
    for signal in HANDLED_SIGNALS {
        // SAFETY: the set is a local variable, and the number is a signal's.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    // SAFETY: the call only reads the set. This process has one thread, so the thread's mask is the mask of the
    // process.
    let done = unsafe { libc::sigprocmask(how, &raw const set, ptr::null_mut()) };
    if done == 0 { Ok(set) } else { Err(io::Error::last_os_error()) }
}

/// The handled signals: the end of a child, and the signals that are forwarded to the agent.
const HANDLED_SIGNALS: [libc::c_int; 7] = [
    libc::SIGCHLD,
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// The time that killed processes have to disappear. A process may be in an operation that the kernel does not
/// interrupt.
const REAP_TIMEOUT: Duration = Duration::from_secs(2);
