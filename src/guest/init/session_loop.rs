//! A sandbox in which several agents run one after the other, each for its own run.
//!
//! Each agent starts with a claim, like the only agent of a [slot](super::claim), with its own output and its own run's
//! socket. After the agent and all its processes have ended, the host receives the exit status. After everything but
//! the agent's workspace is wiped, the host receives a ready byte and may send the next claim. Between these two bytes
//! no process of an agent exists.
//!
//! **Invariant:** if something of an agent remains, or this process has changed, no further agent starts: the sandbox
//! ends.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::process::{self, Resource, Rlimit, WaitOptions};
use rustix::stdio::{dup2_stderr, dup2_stdout, stderr, stdout};
use rustix::thread;

use super::claim::{AgentClaim, HostChannel};
use super::reaper::ProcessReaper;
use super::{EXIT_SETUP_FAILED, InitFailure, cleanup, exit_status, run_agent};

/// Serves one claim after the other until the host disconnects.
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
    // Copies of our own outputs, above the standard descriptors, to restore between two agents.
    let own = [stdout(), stderr()].map(|own| rustix::io::fcntl_dupfd_cloexec(own, 3));
    let [own_stdout, own_stderr] = own;
    let (own_stdout, own_stderr) = (own_stdout.map_err(setup)?, own_stderr.map_err(setup)?);
    // The reference for the check after each agent.
    let before = InheritedState::capture().map_err(setup)?;
    loop {
        let AgentClaim { options, output } = claim;
        let [stdout, stderr] = <[OwnedFd; 2]>::try_from(output).map_err(|_| {
            InitFailure::setup_failure("take the claim", "it comes without its output")
        })?;
        // Messages of this program about the run go to the run's own error output, as in a sandbox of its own.
        redirect_stdio(stdout, stderr).map_err(setup)?;
        let status = exit_status(run_agent(supervisor, &options, Some(host)));
        dup2_stdout(&own_stdout).map_err(setup)?;
        dup2_stderr(&own_stderr).map_err(setup)?;
        // The status first: the host has the result even if the checks below end the sandbox.
        host.send_bytes(&[status])?;
        // The agent has our uid, and may have changed limits or priorities of this process.
        if InheritedState::capture().ok().as_ref() != Some(&before) {
            return Err(unusable_failure(
                "the limits or priorities of the first process have changed",
            ));
        }
        // Only ECHILD proves that no child is left, not even a zombie.
        if !matches!(process::wait(WaitOptions::NOHANG), Err(Errno::CHILD)) {
            return Err(unusable_failure("a process does not exit"));
        }
        cleanup::clear_tmpfs().map_err(|error| unusable_failure(&error.to_string()))?;
        cleanup::clear_sysv_ipc().map_err(|error| unusable_failure(&error.to_string()))?;
        host.send_bytes(&[READY_BYTE])?;
        // From here on the sandbox is as clean as at its start.
        claim = host.receive_claim(supervisor)?;
    }
}

fn redirect_stdio(stdout: OwnedFd, stderr: OwnedFd) -> Result<(), Errno> {
    dup2_stdout(stdout)?;
    dup2_stderr(stderr)
}

fn unusable_failure(why: &str) -> InitFailure {
    let message = format!("the sandbox ends, because the agent has left something in it: {why}");
    InitFailure { status: EXIT_SETUP_FAILED, message }
}

/// The properties of this process that an agent, which has the same uid, can change, and that the next agent would
/// inherit.
#[derive(PartialEq)]
struct InheritedState {
    limits: [Rlimit; 16],
    priority: i32,
    scheduling: SchedAttributes,
    processors: Vec<bool>,
}

/// The kernel's scheduling of processors and disks: `struct sched_attr` in its first version, and the I/O priority. A
/// value that the kernel does not report keeps its default.
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
        // SAFETY: the kernel writes at most `size` bytes, which belong to the array, and any value is valid.
        unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut this.attributes, size, 0) };
        // SAFETY: the kernel takes two numbers, and writes no memory.
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

/// `IOPRIO_WHO_PROCESS` of `linux/ioprio.h`.
const IOPRIO_WHO_PROCESS: libc::c_int = 1;

/// The byte that ends the work for one agent: the sandbox is ready for the next.
const READY_BYTE: u8 = 0;
