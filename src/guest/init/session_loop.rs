//! A sandbox in which one agent runs after the other, each for a run of its own.
//!
//! Each is told as a [slot](super::claim) is told its only one, with its own output, and finds its own run's socket. When
//! it has ended, and all that it has started is dead, the host is told its status; when nothing is left of it but what is
//! in its workspace, that the next may come. Between the two the host has nobody's processes to fear.
//!
//! **Invariant:** where something of an agent is left, or this process is not as it was before, no other follows: the
//! sandbox ends.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::process::{self, Resource, Rlimit, WaitOptions};
use rustix::stdio::{dup2_stderr, dup2_stdout, stderr, stdout};
use rustix::thread;

use super::claim::{AgentClaim, HostChannel};
use super::reaper::ProcessReaper;
use super::{EXIT_SETUP_FAILED, InitFailure, cleanup, exit_status, run_agent};

/// Serves one claim after the other, until the host is gone.
pub(crate) fn serve_claims(
    host: &HostChannel,
    supervisor: &ProcessReaper,
    mut claim: AgentClaim,
) -> Result<u8, InitFailure> {
    if !process::getpid().is_init() {
        return Err(InitFailure::setup_failure(
            "be a resident",
            "it is not its sandbox's first process",
        ));
    }
    let setup = |error: Errno| InitFailure::setup_failure("be a resident", error);
    let own = [stdout(), stderr()].map(|own| rustix::io::fcntl_dupfd_cloexec(own, 3));
    let [own_stdout, own_stderr] = own;
    let (own_stdout, own_stderr) = (own_stdout.map_err(setup)?, own_stderr.map_err(setup)?);
    let before = InheritedState::capture().map_err(setup)?;
    loop {
        let AgentClaim { options, output } = claim;
        let [stdout, stderr] = <[OwnedFd; 2]>::try_from(output).map_err(|_| {
            InitFailure::setup_failure("take the claim", "it comes without its output")
        })?;
        // As it would be in a sandbox of its own: what we have to say of it is in its error output, too.
        redirect_stdio(stdout, stderr).map_err(setup)?;
        let status = exit_status(run_agent(supervisor, &options, Some(host)));
        dup2_stdout(&own_stdout).map_err(setup)?;
        dup2_stderr(&own_stderr).map_err(setup)?;
        host.send_bytes(&[status])?;
        if InheritedState::capture().ok().as_ref() != Some(&before) {
            return Err(unusable_failure("its first process is not as it was"));
        }
        if !matches!(process::wait(WaitOptions::NOHANG), Err(Errno::CHILD)) {
            return Err(unusable_failure("a process does not die"));
        }
        cleanup::clear_tmpfs().map_err(|error| unusable_failure(&error.to_string()))?;
        cleanup::clear_sysv_ipc().map_err(|error| unusable_failure(&error.to_string()))?;
        host.send_bytes(&[READY_BYTE])?;
        claim = host.receive_claim(supervisor)?;
    }
}

fn redirect_stdio(stdout: OwnedFd, stderr: OwnedFd) -> Result<(), Errno> {
    dup2_stdout(stdout)?;
    dup2_stderr(stderr)
}

fn unusable_failure(why: &str) -> InitFailure {
    let message = format!("something of the agent is left, and the sandbox is given up: {why}");
    InitFailure { status: EXIT_SETUP_FAILED, message }
}

/// What an agent, whose user is ours, can change of this process, and would be the next one's.
#[derive(PartialEq)]
struct InheritedState {
    limits: [Rlimit; 16],
    priority: i32,
    scheduling: SchedAttributes,
    processors: Vec<bool>,
}

/// How the kernel shares out processors and disks: `struct sched_attr`, as it was first, and the class of input and output.
/// What a kernel does not say stays as it is made.
#[derive(Default, PartialEq)]
struct SchedAttributes {
    attributes: [u64; 6],
    class_of_io: libc::c_long,
}

impl InheritedState {
    fn capture() -> Result<Self, Errno> {
        let processors = thread::sched_getaffinity(None)?;
        Ok(Self {
            limits: RESOURCE_LIMITS.map(process::getrlimit),
            priority: process::getpriority_process(None)?,
            scheduling: SchedAttributes::capture(),
            processors: (0..thread::CpuSet::MAX_CPU).map(|cpu| processors.is_set(cpu)).collect(),
        })
    }
}

impl SchedAttributes {
    #[expect(unsafe_code, reason = "there are no safe calls that say this")]
    fn capture() -> Self {
        let mut this = Self::default();
        let size = size_of_val(&this.attributes);
        // SAFETY: the kernel writes `size` bytes at most, and these are ours, and may be any.
        unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut this.attributes, size, 0) };
        // SAFETY: the kernel takes two numbers, and writes nothing.
        this.class_of_io = unsafe { libc::syscall(libc::SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0) };
        this
    }
}

const RESOURCE_LIMITS: [Resource; 16] = [
    Resource::As,
    Resource::Core,
    Resource::Cpu,
    Resource::Data,
    Resource::Fsize,
    Resource::Locks,
    Resource::Memlock,
    Resource::Msgqueue,
    Resource::Nice,
    Resource::Nofile,
    Resource::Nproc,
    Resource::Rss,
    Resource::Rtprio,
    Resource::Rttime,
    Resource::Sigpending,
    Resource::Stack,
];

/// From `linux/ioprio.h`.
const IOPRIO_WHO_PROCESS: libc::c_int = 1;

/// The last word on an agent.
const READY_BYTE: u8 = 0;
