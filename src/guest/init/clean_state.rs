//! The state of a sandbox between two programs that its first process starts one after the other.

use rustix::io::Errno;
use rustix::process::{self, Resource, Rlimit, WaitOptions};
use rustix::thread;

use super::{EXIT_SETUP_FAILED, InitFailure, cleanup};

/// The state of the first process before it starts a program.
pub(crate) struct CleanState {
    before: InheritedState,
}

impl CleanState {
    /// Captures the state. `action` names the work that needs several programs, for the error.
    ///
    /// # Errors
    /// Returns an error if this process is not the first process of its namespace. A program could leave a process
    /// there that this process does not see.
    pub(crate) fn capture(action: &str) -> Result<Self, InitFailure> {
        if !process::getpid().is_init() {
            return Err(InitFailure::setup_failure(
                action,
                "it is not its sandbox's first process",
            ));
        }
        let before =
            InheritedState::capture().map_err(|error| InitFailure::setup_failure(action, error))?;
        Ok(Self { before })
    }

    /// Checks that no process of a program is left and that this process is as it was, and removes the program's files.
    ///
    /// # Errors
    /// Returns an error if something is left. Then no further program may start.
    pub(crate) fn restore(&self) -> Result<(), InitFailure> {
        // The program has our uid, and may have changed limits or priorities of this process.
        if InheritedState::capture().ok().as_ref() != Some(&self.before) {
            return Err(unusable_failure(
                "the limits or priorities of the first process have changed",
            ));
        }
        // Only ECHILD proves that no child is left, not even a zombie.
        if !matches!(process::wait(WaitOptions::NOHANG), Err(Errno::CHILD)) {
            return Err(unusable_failure("a process does not exit"));
        }
        cleanup::clear_tmpfs().map_err(|error| unusable_failure(&error.to_string()))?;
        cleanup::clear_sysv_ipc().map_err(|error| unusable_failure(&error.to_string()))
    }
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
        let mut state = Self::default();
        let size = size_of_val(&state.attributes);
        // SAFETY: the kernel writes at most `size` bytes, which belong to the array, and any value is valid.
        unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut state.attributes, size, 0) };
        // SAFETY: the kernel takes two numbers, and writes no memory.
        state.class_of_io = unsafe { libc::syscall(libc::SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0) };
        state
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
