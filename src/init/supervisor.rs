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
use super::bridge::Bridge;
use super::options::Options;
use super::slot::{Host, Word};
use super::{TIMED_OUT, say};

pub(crate) struct Supervisor {
    signals: OwnedFd,
}

impl Supervisor {
    /// Before anything is started: from here on signals wait for us, and orphans come to us.
    pub(crate) fn prepare() -> io::Result<Self> {
        // The agent has our uid. It must not attach to us, who are not behind its filter, nor take our descriptors.
        process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
        if !process::getpid().is_init() {
            process::set_child_subreaper(Some(process::getpid()))?;
        }
        Ok(Self { signals: signals()? })
    }

    /// Serves the bridge until the agent and all that it has started are gone. What the host says meanwhile is done.
    pub(crate) fn run(
        &self,
        mut bridge: Bridge,
        agent: Pid,
        options: &Options,
        mut host: Option<&Host>,
    ) -> u8 {
        let mut watch = Watch {
            agent,
            status: None,
            timed_out: false,
            stage: Stage::Running,
            deadline: options.max_runtime.map(|time| Instant::now() + time),
            grace: options.grace,
        };
        let mut next_check = Instant::now() + CHECK_INTERVAL;
        loop {
            let until = watch.deadline.map_or(next_check, |deadline| deadline.min(next_check));
            let left = Some(until.saturating_duration_since(Instant::now()));
            let guests = [Some(self.signals.as_fd()), host.map(AsFd::as_fd)];
            if bridge.turn(left, &guests.into_iter().flatten().collect::<Vec<_>>()) {
                self.take_signals(&watch);
                host = host.filter(|host| watch.obey(host));
                if watch.reap() == Left::Nobody {
                    return watch.status();
                }
            }
            let now = Instant::now();
            if watch.deadline.is_some_and(|at| at <= now) && watch.escalate() == Left::Nobody {
                return watch.status();
            }
            if next_check <= now {
                watch.check_accept_queues();
                next_check = now + CHECK_INTERVAL;
            }
        }
    }

    fn take_signals(&self, watch: &Watch) {
        while let Some(signal) = self.next_signal() {
            if signal != Signal::CHILD {
                watch.forward(signal);
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
    pub(crate) fn signals(&self) -> &OwnedFd {
        &self.signals
    }
}

/// One agent's life.
struct Watch {
    agent: Pid,
    /// How it ended.
    status: Option<WaitStatus>,
    timed_out: bool,
    stage: Stage,
    /// When the next stage begins, if nothing happens before.
    deadline: Option<Instant>,
    grace: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Running,
    /// Everybody has been asked to end.
    Asked,
    /// Everybody has been killed.
    Killed,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Left {
    Nobody,
    Somebody,
}

impl Watch {
    fn forward(&self, signal: Signal) {
        // The pid of an agent that was reaped may be another process by now.
        if self.status.is_none() {
            let _ = process::kill_process(self.agent, signal);
        }
    }

    /// Does what the host has said. Tells whether it may say more.
    fn obey(&mut self, host: &Host) -> bool {
        while let Some(word) = host.word() {
            match word {
                Word::Terminate => self.forward(Signal::TERM),
                Word::Kill => self.kill(),
                Word::Gone => {
                    self.kill();
                    return false;
                }
            }
        }
        true
    }

    /// Takes every child's end. With the agent's own, the others' begins.
    fn reap(&mut self) -> Left {
        loop {
            match process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.agent => self.status = Some(status),
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => return Left::Nobody,
            }
        }
        match self.stage {
            Stage::Running if self.status.is_some() => self.ask(),
            // An orphan of one that was killed has just become our child.
            Stage::Killed => signal_children(Signal::KILL),
            _ => {}
        }
        Left::Somebody
    }

    /// The deadline has passed.
    fn escalate(&mut self) -> Left {
        match self.stage {
            Stage::Running => {
                say("the agent has reached --max-runtime, and is ended");
                self.timed_out = true;
                self.ask();
            }
            Stage::Asked => self.kill(),
            Stage::Killed => {
                say("a process does not die, and is left to the kernel");
                return Left::Nobody;
            }
        }
        Left::Somebody
    }

    /// Ends everything at once where connections that no process accepts hold too much.
    fn check_accept_queues(&mut self) {
        if self.stage == Stage::Killed {
            return;
        }
        let waiting = WaitingConnections::read();
        if waiting.is_too_much() {
            let WaitingConnections { count, bytes } = waiting;
            say(format_args!(
                "{count} TCP connections with {bytes} bytes wait for a process to accept them, which is more than a sandbox may \
                 have; it is ended"
            ));
            self.kill();
        }
    }

    fn ask(&mut self) {
        signal_all(self.agent, Signal::TERM);
        // One that is stopped would hear of it only when it is continued.
        signal_all(self.agent, Signal::CONT);
        self.stage = Stage::Asked;
        self.deadline = Some(Instant::now() + self.grace);
    }

    fn kill(&mut self) {
        signal_all(self.agent, Signal::KILL);
        self.stage = Stage::Killed;
        self.deadline = Some(Instant::now() + LAST_WAIT);
    }

    fn status(&self) -> u8 {
        let Some(status) = self.status.filter(|_| !self.timed_out) else {
            return TIMED_OUT;
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
fn signals() -> io::Result<OwnedFd> {
    let set = mask(libc::SIG_BLOCK)?;
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
    mask(libc::SIG_UNBLOCK).map(drop)
}

/// Blocks or unblocks our signals, and returns the set of them.
#[expect(unsafe_code, reason = "there are no safe calls for masks of signals")]
fn mask(how: libc::c_int) -> io::Result<libc::sigset_t> {
    // SAFETY: a set of signals is plain data, for which zeroes are a value.
    let mut set: libc::sigset_t = unsafe { mem::zeroed() };
    for signal in SIGNALS {
        // SAFETY: the set is ours, and the number is a signal's.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    // SAFETY: the call only reads the set; this process has one thread, so that its mask is this one's.
    let done = unsafe { libc::sigprocmask(how, &raw const set, ptr::null_mut()) };
    if done == 0 { Ok(set) } else { Err(io::Error::last_os_error()) }
}

/// The end of a child, and what is passed on to the agent.
const SIGNALS: [libc::c_int; 7] = [
    libc::SIGCHLD,
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

/// For processes in the middle of something that the kernel does not interrupt.
const LAST_WAIT: Duration = Duration::from_secs(2);
