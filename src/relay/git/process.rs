//! A child process that one thread feeds, reads and, at its limits, kills.
//!
//! **Invariant:** no process that git has started outlives this process. A guard leads the process group of each call. It
//! waits for the end of a pipe that only this process holds, and kills the group when this process ends, however it
//! ends. A signal of the kernel at the parent's death would reach git alone, and none of git's helpers.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, kill_process_group, pidfd_open, setrlimit,
};
use tokio_util::sync::CancellationToken;

/// The standard input of git.
#[derive(Debug, Default)]
pub enum GitInput {
    #[default]
    Empty,
    Bytes(Vec<u8>),
    /// The file, read from its current position.
    File(File),
}

/// Limits of one call. The defaults are for questions about a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GitLimits {
    pub time: Duration,
    /// The longest standard output, in bytes.
    pub output_bytes: u64,
    /// The largest address space of each process (`RLIMIT_AS`).
    pub memory_bytes: u64,
    /// The largest file that a process may write (`RLIMIT_FSIZE`).
    pub file_bytes: u64,
}

/// The destination of a process's standard output.
pub(super) enum OutputSink<'a> {
    Bytes(&'a mut Vec<u8>),
    Chunks(&'a mut dyn FnMut(&[u8])),
}

/// The end of a process that exited by itself or by a signal.
#[derive(Debug)]
pub(super) struct ProcessExit {
    pub(super) status: ExitStatus,
    /// The beginning and the end of the process's standard error.
    pub(super) stderr: String,
}

/// Reasons why a process could not be run to its own end.
#[derive(Debug)]
pub(super) enum ProcessError {
    Io(io::Error),
    Timeout(Duration),
    OutputTooLarge(u64),
    Cancelled,
}

impl Default for GitLimits {
    fn default() -> Self {
        Self {
            time: Duration::from_mins(1),
            output_bytes: 64 << 20,
            memory_bytes: 1 << 30,
            file_bytes: 1 << 30,
        }
    }
}

impl From<io::Error> for ProcessError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<Errno> for ProcessError {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

/// Runs a process until it exits, or until `cancel` is cancelled. When this function returns, the process and all processes of its group are dead.
pub(super) fn run_process(
    command: &mut Command,
    input: GitInput,
    sink: &mut OutputSink<'_>,
    (limits, cancel): (&GitLimits, &CancellationToken),
) -> Result<ProcessExit, ProcessError> {
    let deadline = Instant::now() + limits.time.min(MAX_TIME);
    let (stdin, bytes) = match input {
        GitInput::Empty => (Stdio::null(), vec![]),
        GitInput::Bytes(bytes) => (Stdio::piped(), bytes),
        GitInput::File(file) => (file.into(), vec![]),
    };
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    set_rlimits(command, limits);
    let mut group = ProcessGroup::start(command)?;
    let feed = StdinFeed { bytes, written: 0 };
    let stderr = GitProcessIo { group: &mut group, feed, sink, limits, cancel, deadline }
        .pump_until_exit()?;
    let status = group.child.wait()?;
    Ok(ProcessExit { status, stderr })
}

/// Sets the resource limits before the program begins, so that the program and its children never run without limits. A
/// limit that this process has itself is never raised.
#[expect(unsafe_code, reason = "only what runs between fork and exec comes before the program")]
fn set_rlimits(command: &mut Command, limits: &GitLimits) {
    let maxima = [
        (Resource::As, limits.memory_bytes),
        (Resource::Fsize, limits.file_bytes),
        // One second above the deadline: the CPU limit stops helpers even if this process is stopped.
        (Resource::Cpu, limits.time.min(MAX_TIME).as_secs() + 1),
        // Core files would contain credentials of the environment.
        (Resource::Core, 0),
    ]
    .map(|(resource, maxima)| {
        // An unprivileged process cannot raise its own maximum; asking for more would fail.
        let maxima =
            Some(getrlimit(resource).maximum.map_or(maxima, |own_maximum| own_maximum.min(maxima)));
        (resource, Rlimit { current: maxima, maximum: maxima })
    });
    let limit =
        move || maxima.iter().try_for_each(|(resource, maxima)| Ok(setrlimit(*resource, *maxima)?));
    // SAFETY: in the child, the closure makes one system call per limit. It neither allocates nor takes a lock.
    unsafe { command.pre_exec(limit) };
}

/// A process in the process group of its guard. The group is killed when it is dropped.
struct ProcessGroup {
    child: Child,
    guard: GroupGuard,
}

impl ProcessGroup {
    /// Starts the guard, and then the process in the guard's group. If this process is killed in between, the new process
    /// cannot join the group any more, and ends before it is git: until then it holds the guard's pipe open itself.
    fn start(command: &mut Command) -> io::Result<Self> {
        let guard = GroupGuard::start()?;
        let child = command.process_group(guard.group().as_raw_pid()).spawn()?;
        Ok(Self { child, guard })
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.guard.kill_group();
        let _ = self.child.wait();
    }
}

/// The leader of a process group, a shell that kills its group when this process ends. The group is killed when the guard
/// is dropped.
struct GroupGuard(Child);

impl GroupGuard {
    fn start() -> io::Result<Self> {
        // The pipe's other end is in the `Child`. It closes by itself in every program that this process starts.
        let guard = Command::new(GUARD_SHELL)
            .args(["-c", GUARD_SCRIPT, GUARD_NAME])
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        guard.map(Self).map_err(|error| {
            io::Error::new(error.kind(), format!("`{GUARD_SHELL}` cannot be started: {error}"))
        })
    }

    fn group(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Kills the group. No other group can have its id, because the leader is not reaped before the guard is dropped.
    fn kill_group(&self) {
        let _ = kill_process_group(self.group(), Signal::KILL);
    }
}

impl Drop for GroupGuard {
    fn drop(&mut self) {
        self.kill_group();
        let _ = self.0.wait();
    }
}

struct StdinFeed {
    bytes: Vec<u8>,
    written: usize,
}

struct GitProcessIo<'a, 'b> {
    group: &'a mut ProcessGroup,
    feed: StdinFeed,
    sink: &'a mut OutputSink<'b>,
    limits: &'a GitLimits,
    cancel: &'a CancellationToken,
    deadline: Instant,
}

impl GitProcessIo<'_, '_> {
    /// Feeds and reads the process until it has exited and its outputs are closed. Returns its standard error.
    fn pump_until_exit(mut self) -> Result<String, ProcessError> {
        // A pidfd becomes readable when the process exits, so one `poll` watches the exit and all pipes.
        let ending = pidfd_open(Pid::from_child(&self.group.child), PidfdFlags::empty())?;
        let child = &mut self.group.child;
        let (mut stdin, mut stdout, mut stderr) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let inputs = stdin.as_ref().map(AsFd::as_fd);
        let outputs = [stdout.as_ref().map(AsFd::as_fd), stderr.as_ref().map(AsFd::as_fd)];
        for pipe in inputs.into_iter().chain(outputs.into_iter().flatten()) {
            // A blocking read or write could wait past the deadline.
            ioctl_fionbio(pipe, true)?;
        }
        let (mut stderr_bytes, mut printed, mut has_ended) = (vec![], 0, false);
        while !has_ended || stdout.is_some() || stderr.is_some() {
            self.wait_ready([
                (!has_ended).then(|| PollFd::new(&ending, PollFlags::IN)),
                stdin.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::OUT)),
                stdout.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)),
                stderr.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)),
            ])?;
            if !has_ended && is_ready(&ending)? {
                has_ended = true;
                // Helpers that git left running would keep the pipes open for ever.
                self.group.guard.kill_group();
            }
            stdin = self.write_stdin(stdin)?;
            stdout = read_pipe(stdout, |piece| self.take_output(piece, &mut printed))?;
            stderr = read_pipe(stderr, |piece| {
                stderr_bytes.extend_from_slice(piece);
                // The middle is dropped: the first lines name the cause, and the last line is git's own reason.
                let over = stderr_bytes.len().saturating_sub(STDERR_BYTES);
                stderr_bytes.drain(
                    STDERR_HALF_BYTES.min(stderr_bytes.len())
                        ..(STDERR_HALF_BYTES + over).min(stderr_bytes.len()),
                );
                Ok(())
            })?;
        }
        Ok(String::from_utf8_lossy(&stderr_bytes).trim_end().to_owned())
    }

    /// Waits until one of the descriptors is ready.
    fn wait_ready(&self, watched: [Option<PollFd<'_>>; 4]) -> Result<(), ProcessError> {
        let mut watched: Vec<_> = watched.into_iter().flatten().collect();
        loop {
            if self.cancel.is_cancelled() {
                return Err(ProcessError::Cancelled);
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ProcessError::Timeout(self.limits.time));
            }
            // No descriptor becomes ready when the token is cancelled.
            let left = left.min(CANCEL_INTERVAL);
            let left = Timespec::try_from(left).expect("a call's time is no age");
            match poll(&mut watched, Some(&left)) {
                Ok(0) | Err(Errno::INTR) => (),
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Writes as much as the pipe accepts. Returns `None`, which closes the pipe, after the last byte or when git
    /// closes its end.
    fn write_stdin(
        &mut self,
        stdin: Option<ChildStdin>,
    ) -> Result<Option<ChildStdin>, ProcessError> {
        let Some(mut stdin) = stdin else { return Ok(None) };
        let StdinFeed { bytes, written: at } = &mut self.feed;
        while *at < bytes.len() {
            match stdin.write(&bytes[*at..]) {
                Ok(written) => *at += written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Some(stdin)),
                Err(error) if error.kind() == ErrorKind::Interrupted => (),
                Err(error) if error.kind() == ErrorKind::BrokenPipe => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }

    fn take_output(&mut self, piece: &[u8], printed: &mut u64) -> Result<(), ProcessError> {
        *printed += piece.len() as u64;
        if *printed > self.limits.output_bytes {
            return Err(ProcessError::OutputTooLarge(self.limits.output_bytes));
        }
        match self.sink {
            OutputSink::Bytes(bytes) => bytes.extend_from_slice(piece),
            OutputSink::Chunks(take) => {
                // The time that the consumer needs for a piece is not git's time, so the deadline moves.
                let start = Instant::now();
                take(piece);
                self.deadline += start.elapsed();
            }
        }
        Ok(())
    }
}

/// Reads what is available. Returns `None` at the end of the output, which closes the pipe.
fn read_pipe<P: Read>(
    pipe: Option<P>,
    mut take: impl FnMut(&[u8]) -> Result<(), ProcessError>,
) -> Result<Option<P>, ProcessError> {
    let Some(mut pipe) = pipe else { return Ok(None) };
    let mut piece = [0; READ_BUFFER_BYTES];
    // The reads per turn are bounded: a process that prints without end must not prevent the check of the deadline.
    for _ in 0..MAX_READS_PER_TURN {
        match pipe.read(&mut piece) {
            Ok(0) => return Ok(None),
            Ok(length) => take(&piece[..length])?,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => (),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Some(pipe))
}

fn is_ready(fd: &impl AsFd) -> Result<bool, Errno> {
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&Timespec::default())).map(|ready| ready > 0)
}

/// The interval of checks whether a call is cancelled. Our choice.
const CANCEL_INTERVAL: Duration = Duration::from_millis(100);

/// The shell of the guard. Git itself needs a shell at this path.
const GUARD_SHELL: &str = "/bin/sh";
/// Waits for the end of the pipe, then kills the group, which contains the shell.
const GUARD_SCRIPT: &str = "read -r end; kill -KILL 0";
/// The name of the guard in a list of processes.
const GUARD_NAME: &str = "cogni-git-guard";

/// The longest time limit (our choice): one year. A larger value could overflow the clock's arithmetic.
const MAX_TIME: Duration = Duration::from_hours(24 * 365);

/// The longest stored standard error, in bytes (our choice). Git's error messages have a few lines.
const STDERR_BYTES: usize = 8 << 10;
const STDERR_HALF_BYTES: usize = STDERR_BYTES / 2;

/// The size of one read: a quarter of a Linux pipe's 64 KiB.
const READ_BUFFER_BYTES: usize = 16 << 10;
/// The most reads of one pipe before the deadline is checked again (our choice): 256 KiB.
const MAX_READS_PER_TURN: usize = 16;
