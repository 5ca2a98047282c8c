//! What a first process owes the others: signals arrive, the dead are buried, and nobody is left behind.

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
use super::claim::{HostChannel, HostCommand};
use super::options::InitOptions;
use super::{EXIT_TIMED_OUT, log_line};

pub(crate) struct ProcessReaper {
    signals: OwnedFd,
}

impl ProcessReaper {
    /// Before anything is started: from here on signals wait for us, and orphans come to us.
    pub(crate) fn prepare() -> io::Result<Self> {
        // The agent has our uid. It must not attach to us, who are not behind its filter, nor take our descriptors.
        process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
        if !process::getpid().is_init() {
            process::set_child_subreaper(Some(process::getpid()))?;
        }
        Ok(Self { signals: block_signals()? })
    }

    /// Serves the bridge until the agent and all that it has started are gone. What the host says meanwhile is done.
    pub(crate) fn run_until_exit(
        &self,
        mut bridge: SocketBridge,
        agent: Pid,
        options: &InitOptions,
        mut host: Option<&HostChannel>,
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
            let until = watch.deadline.map_or(next_check, |deadline| deadline.min(next_check));
            let left = Some(until.saturating_duration_since(Instant::now()));
            let guests = [Some(self.signals.as_fd()), host.map(AsFd::as_fd)];
            if bridge.poll_once(left, &guests.into_iter().flatten().collect::<Vec<_>>()) {
                self.handle_signals(&watch);
                host = host.filter(|host| watch.handle_host_commands(host));
                if watch.reap_children() == ChildrenLeft::Nobody {
                    return watch.exit_status();
                }
            }
            let now = Instant::now();
            if watch.deadline.is_some_and(|at| at <= now)
                && watch.on_deadline() == ChildrenLeft::Nobody
            {
                return watch.exit_status();
            }
            if next_check <= now {
                watch.check_accept_queues();
                next_check = now + CHECK_INTERVAL;
            }
        }
    }

    fn handle_signals(&self, watch: &AgentLifecycle) {
        while let Some(signal) = self.next_signal() {
            if signal != Signal::CHILD {
                watch.forward_signal(signal);
            }
        }
    }

    /// Of those that have arrived.
    pub(crate) fn next_signal(&self) -> Option<Signal> {
        let mut buffer = [0; size_of::<libc::signalfd_siginfo>()];
        let length = rustix::io::read(&self.signals, &mut buffer).ok()?;
        // The number is the structure's first field (signalfd(2)).
        let number = i32::from_ne_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]);
        Signal::from_named_raw(number).filter(|_| length == buffer.len())
    }

    /// Readable once a signal has arrived.
    pub(crate) fn signal_fd(&self) -> &OwnedFd {
        &self.signals
    }
}

/// One agent's life.
struct AgentLifecycle {
    agent: Pid,
    /// How it ended.
    status: Option<WaitStatus>,
    timed_out: bool,
    stage: AgentStage,
    /// When the next stage begins, if nothing happens before.
    deadline: Option<Instant>,
    grace: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AgentStage {
    Running,
    /// Everybody has been asked to end.
    Asked,
    /// Everybody has been killed.
    Killed,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ChildrenLeft {
    Nobody,
    Somebody,
}

impl AgentLifecycle {
    fn forward_signal(&self, signal: Signal) {
        // The pid of an agent that was reaped may be another process by now.
        if self.status.is_none() {
            let _ = process::kill_process(self.agent, signal);
        }
    }

    /// Does what the host has said. Tells whether it may say more.
    fn handle_host_commands(&mut self, host: &HostChannel) -> bool {
        while let Some(word) = host.poll_command() {
            match word {
                HostCommand::Terminate => self.forward_signal(Signal::TERM),
                HostCommand::Kill => self.send_sigkill(),
                HostCommand::Gone => {
                    self.send_sigkill();
                    return false;
                }
            }
        }
        true
    }

    /// Takes every child's end. With the agent's own, the others' begins.
    fn reap_children(&mut self) -> ChildrenLeft {
        loop {
            match process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.agent => self.status = Some(status),
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => return ChildrenLeft::Nobody,
            }
        }
        match self.stage {
            AgentStage::Running if self.status.is_some() => self.send_sigterm(),
            // An orphan of one that was killed has just become our child.
            AgentStage::Killed => signal_children(Signal::KILL),
            _ => {}
        }
        ChildrenLeft::Somebody
    }

    /// The deadline has passed.
    fn on_deadline(&mut self) -> ChildrenLeft {
        match self.stage {
            AgentStage::Running => {
                log_line("the agent has reached --max-runtime, and is ended");
                self.timed_out = true;
                self.send_sigterm();
            }
            AgentStage::Asked => self.send_sigkill(),
            AgentStage::Killed => {
                log_line("a process does not die, and is left to the kernel");
                return ChildrenLeft::Nobody;
            }
        }
        ChildrenLeft::Somebody
    }

    /// Ends everything at once where connections that no process accepts hold too much.
    fn check_accept_queues(&mut self) {
        if self.stage == AgentStage::Killed {
            return;
        }
        let waiting = WaitingConnections::read();
        if waiting.is_too_much() {
            let WaitingConnections { count, bytes } = waiting;
            log_line(format_args!(
                "{count} TCP connections with {bytes} bytes wait for a process to accept them, which is more than a sandbox may \
                 have; it is ended"
            ));
            self.send_sigkill();
        }
    }

    fn send_sigterm(&mut self) {
        signal_all(self.agent, Signal::TERM);
        // One that is stopped would hear of it only when it is continued.
        signal_all(self.agent, Signal::CONT);
        self.stage = AgentStage::Asked;
        self.deadline = Some(Instant::now() + self.grace);
    }

    fn send_sigkill(&mut self) {
        signal_all(self.agent, Signal::KILL);
        self.stage = AgentStage::Killed;
        self.deadline = Some(Instant::now() + REAP_TIMEOUT);
    }

    fn exit_status(&self) -> u8 {
        let Some(status) = self.status.filter(|_| !self.timed_out) else {
            return EXIT_TIMED_OUT;
        };
        let code = status.exit_status().or(status.terminating_signal().map(|signal| 128 + signal));
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
    }
}

/// As a first process: everybody else in the namespace. Otherwise the agent's group, and who has become our child.
fn signal_all(agent: Pid, signal: Signal) {
    if process::getpid().is_init() {
        // The kernel takes the group of the first process for everybody but the caller.
        let _ = process::kill_process_group(Pid::INIT, signal);
    } else {
        let _ = process::kill_process_group(agent, signal);
        signal_children(signal);
    }
}

/// Those the kernel lists as ours. Their own children become ours when they have died.
fn signal_children(signal: Signal) {
    let children = fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    let children = children.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?));
    for child in children {
        let _ = process::kill_process(child, signal);
    }
}

/// A descriptor from which the signals are read that are blocked by this, which is how the kernel lets a first process
/// have signals at all: it drops those that would have their default effect.
#[expect(unsafe_code, reason = "there is no safe call that makes a descriptor of signals")]
fn block_signals() -> io::Result<OwnedFd> {
    let set = change_signal_mask(libc::SIG_BLOCK)?;
    // SAFETY: the call only reads the set.
    let descriptor =
        unsafe { libc::signalfd(-1, &raw const set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// For a child that is about to be the agent: what is blocked stays so when a program is executed.
pub(crate) fn unblock_signals() -> io::Result<()> {
    change_signal_mask(libc::SIG_UNBLOCK).map(drop)
}

/// Blocks or unblocks our signals, and returns the set of them.
#[expect(unsafe_code, reason = "there are no safe calls for masks of signals")]
fn change_signal_mask(how: libc::c_int) -> io::Result<libc::sigset_t> {
    // SAFETY: a set of signals is plain data, for which zeroes are a value.
    let mut set: libc::sigset_t = unsafe { mem::zeroed() };
    for signal in HANDLED_SIGNALS {
        // SAFETY: the set is ours, and the number is a signal's.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    // SAFETY: the call only reads the set; this process has one thread, so that its mask is this one's.
    let done = unsafe { libc::sigprocmask(how, &raw const set, ptr::null_mut()) };
    if done == 0 { Ok(set) } else { Err(io::Error::last_os_error()) }
}

/// The end of a child, and what is passed on to the agent.
const HANDLED_SIGNALS: [libc::c_int; 7] = [
    libc::SIGCHLD,
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// For processes in the middle of something that the kernel does not interrupt.
const REAP_TIMEOUT: Duration = Duration::from_secs(2);
