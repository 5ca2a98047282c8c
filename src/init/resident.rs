//! A sandbox in which one agent runs after the other, each for a run of its own.
//!
//! Each is told as a [slot](super::slot) is told its only one, with its own output, and finds its own run's socket. When
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

use super::slot::{Claim, Host};
use super::supervisor::Supervisor;
use super::{Failure, SETUP_FAILED, go_on, status_of, wipe};

/// Serves one claim after the other, until the host is gone.
pub(crate) fn serve(host: &Host, supervisor: &Supervisor, mut claim: Claim) -> Result<u8, Failure> {
    if !process::getpid().is_init() {
        return Err(Failure::setup("be a resident", "it is not its sandbox's first process"));
    }
    let setup = |error: Errno| Failure::setup("be a resident", error);
    let own = [stdout(), stderr()].map(|own| rustix::io::fcntl_dupfd_cloexec(own, 3));
    let [own_stdout, own_stderr] = own;
    let (own_stdout, own_stderr) = (own_stdout.map_err(setup)?, own_stderr.map_err(setup)?);
    let before = Nature::of_this().map_err(setup)?;
    loop {
        let Claim { options, output } = claim;
        let [stdout, stderr] = <[OwnedFd; 2]>::try_from(output)
            .map_err(|_| Failure::setup("take the claim", "it comes without its output"))?;
        // As it would be in a sandbox of its own: what we have to say of it is in its error output, too.
        wear(stdout, stderr).map_err(setup)?;
        let status = status_of(go_on(supervisor, &options, Some(host)));
        dup2_stdout(&own_stdout).map_err(setup)?;
        dup2_stderr(&own_stderr).map_err(setup)?;
        host.say(&[status])?;
        if Nature::of_this().ok().as_ref() != Some(&before) {
            return Err(spoiled("its first process is not as it was"));
        }
        if !matches!(process::wait(WaitOptions::NOHANG), Err(Errno::CHILD)) {
            return Err(spoiled("a process does not die"));
        }
        wipe::memory().map_err(|error| spoiled(&error.to_string()))?;
        wipe::queues().map_err(|error| spoiled(&error.to_string()))?;
        host.say(&[READY])?;
        claim = host.claim(supervisor)?;
    }
}

fn wear(stdout: OwnedFd, stderr: OwnedFd) -> Result<(), Errno> {
    dup2_stdout(stdout)?;
    dup2_stderr(stderr)
}

fn spoiled(why: &str) -> Failure {
    let message = format!("something of the agent is left, and the sandbox is given up: {why}");
    Failure { status: SETUP_FAILED, message }
}

/// What an agent, whose user is ours, can change of this process, and would be the next one's.
#[derive(PartialEq)]
struct Nature {
    limits: [Rlimit; 16],
    priority: i32,
    scheduling: Scheduling,
    processors: Vec<bool>,
}

/// How the kernel shares out processors and disks: `struct sched_attr`, as it was first, and the class of input and output.
/// What a kernel does not say stays as it is made.
#[derive(Default, PartialEq)]
struct Scheduling {
    attributes: [u64; 6],
    class_of_io: libc::c_long,
}

impl Nature {
    fn of_this() -> Result<Self, Errno> {
        let processors = thread::sched_getaffinity(None)?;
        Ok(Self {
            limits: LIMITS.map(process::getrlimit),
            priority: process::getpriority_process(None)?,
            scheduling: Scheduling::of_this(),
            processors: (0..thread::CpuSet::MAX_CPU).map(|cpu| processors.is_set(cpu)).collect(),
        })
    }
}

impl Scheduling {
    #[expect(unsafe_code, reason = "there are no safe calls that say this")]
    fn of_this() -> Self {
        let mut this = Self::default();
        let size = size_of_val(&this.attributes);
        // SAFETY: the kernel writes `size` bytes at most, and these are ours, and may be any.
        unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut this.attributes, size, 0) };
        // SAFETY: the kernel takes two numbers, and writes nothing.
        this.class_of_io = unsafe { libc::syscall(libc::SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0) };
        this
    }
}

const LIMITS: [Resource; 16] = [
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
const READY: u8 = 0;
