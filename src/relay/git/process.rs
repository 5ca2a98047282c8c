//! A child process that is fed, listened to and ended within limits, by one thread.

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

use super::command::GitInput;

/// What one call may take. The defaults are for questions about a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GitLimits {
    pub time: Duration,
    /// What it may print.
    pub output_bytes: u64,
    /// Its address space.
    pub memory_bytes: u64,
    /// The largest file that it may write.
    pub file_bytes: u64,
}

/// What becomes of what a process prints.
pub(super) enum OutputSink<'a> {
    Bytes(&'a mut Vec<u8>),
    Pieces(&'a mut dyn FnMut(&[u8])),
}

/// How a process ended.
#[derive(Debug)]
pub(super) struct ProcessExit {
    pub(super) status: ExitStatus,
    /// The beginning of its standard error, and the end.
    pub(super) said: String,
}

/// Why it did not end by itself.
#[derive(Debug)]
pub(super) enum ProcessError {
    Io(io::Error),
    Late(Duration),
    TooMuch(u64),
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

/// Runs a process to its end; it and what it has started are gone when this returns.
pub(super) fn run_process(
    command: &mut Command,
    input: GitInput,
    sink: &mut OutputSink<'_>,
    limits: &GitLimits,
) -> Result<ProcessExit, ProcessError> {
    let deadline = Instant::now() + limits.time.min(MAX_TIME);
    let (stdin, bytes) = match input {
        GitInput::Nothing => (Stdio::null(), vec![]),
        GitInput::Bytes(bytes) => (Stdio::piped(), bytes),
        GitInput::File(file) => (file.into(), vec![]),
    };
    // A group of its own, so that git's helpers go with it.
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    set_rlimits(command, limits);
    let mut group = ProcessGroup { child: command.spawn()?, is_reaped: false };
    let feed = StdinFeed { bytes, at: 0 };
    let said =
        GitProcessIo { group: &mut group, feed, sink, limits, deadline }.pump_until_exit()?;
    let status = group.child.wait()?;
    group.is_reaped = true;
    Ok(ProcessExit { status, said })
}

/// Has the process limited before its program begins, so that nothing which it starts is ever without limits. A limit that
/// this process has itself is never raised.
#[expect(unsafe_code, reason = "only what runs between fork and exec comes before the program")]
fn set_rlimits(command: &mut Command, limits: &GitLimits) {
    let most = [
        (Resource::As, limits.memory_bytes),
        (Resource::Fsize, limits.file_bytes),
        (Resource::Cpu, limits.time.min(MAX_TIME).as_secs() + 1),
        (Resource::Core, 0),
    ]
    .map(|(resource, most)| {
        let most = Some(getrlimit(resource).maximum.map_or(most, |own| own.min(most)));
        (resource, Rlimit { current: most, maximum: most })
    });
    let limit =
        move || most.iter().try_for_each(|(resource, most)| Ok(setrlimit(*resource, *most)?));
    // SAFETY: in the child it makes one system call for each limit, and neither allocates nor takes a lock.
    unsafe { command.pre_exec(limit) };
}

/// A process and all that it starts, killed when dropped.
struct ProcessGroup {
    child: Child,
    is_reaped: bool,
}

impl ProcessGroup {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Before the first process is waited for: until then its id can be nobody else's.
    fn kill(&self) {
        let _ = kill_process_group(self.pid(), Signal::KILL);
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if !self.is_reaped {
            self.kill();
            let _ = self.child.wait();
        }
    }
}

struct StdinFeed {
    bytes: Vec<u8>,
    at: usize,
}

struct GitProcessIo<'a, 'b> {
    group: &'a mut ProcessGroup,
    feed: StdinFeed,
    sink: &'a mut OutputSink<'b>,
    limits: &'a GitLimits,
    deadline: Instant,
}

impl GitProcessIo<'_, '_> {
    /// Until the process has ended and its outputs are read; returns what it said on standard error.
    fn pump_until_exit(mut self) -> Result<String, ProcessError> {
        let ending = pidfd_open(self.group.pid(), PidfdFlags::empty())?;
        let child = &mut self.group.child;
        let (mut stdin, mut stdout, mut stderr) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let inputs = stdin.as_ref().map(AsFd::as_fd);
        let outputs = [stdout.as_ref().map(AsFd::as_fd), stderr.as_ref().map(AsFd::as_fd)];
        for pipe in inputs.into_iter().chain(outputs.into_iter().flatten()) {
            ioctl_fionbio(pipe, true)?;
        }
        let (mut said, mut printed, mut has_ended) = (vec![], 0, false);
        while !has_ended || stdout.is_some() || stderr.is_some() {
            self.wait_ready([
                (!has_ended).then(|| PollFd::new(&ending, PollFlags::IN)),
                stdin.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::OUT)),
                stdout.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)),
                stderr.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)),
            ])?;
            if !has_ended && is_ready(&ending)? {
                has_ended = true;
                // What it leaves running would hold the pipes open.
                self.group.kill();
            }
            stdin = self.write_stdin(stdin)?;
            stdout = read_pipe(stdout, |piece| self.take_output(piece, &mut printed))?;
            stderr = read_pipe(stderr, |piece| {
                said.extend_from_slice(piece);
                // What goes is in the middle: the last line says why.
                let over = said.len().saturating_sub(STDERR_BYTES);
                said.drain(
                    STDERR_HALF_BYTES.min(said.len())..(STDERR_HALF_BYTES + over).min(said.len()),
                );
                Ok(())
            })?;
        }
        Ok(String::from_utf8_lossy(&said).trim_end().to_owned())
    }

    /// Until one of them has something, or the time is up.
    fn wait_ready(&self, watched: [Option<PollFd<'_>>; 4]) -> Result<(), ProcessError> {
        let mut watched: Vec<_> = watched.into_iter().flatten().collect();
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ProcessError::Late(self.limits.time));
            }
            let left = Timespec::try_from(left).expect("a call's time is no age");
            match poll(&mut watched, Some(&left)) {
                Ok(0) | Err(Errno::INTR) => (),
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// As much as the pipe takes; it is closed after the last byte, or when git wants no more.
    fn write_stdin(
        &mut self,
        stdin: Option<ChildStdin>,
    ) -> Result<Option<ChildStdin>, ProcessError> {
        let Some(mut stdin) = stdin else { return Ok(None) };
        let StdinFeed { bytes, at } = &mut self.feed;
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
            return Err(ProcessError::TooMuch(self.limits.output_bytes));
        }
        match self.sink {
            OutputSink::Bytes(bytes) => bytes.extend_from_slice(piece),
            OutputSink::Pieces(take) => {
                // What is made of it here is not git's time.
                let begun = Instant::now();
                take(piece);
                self.deadline += begun.elapsed();
            }
        }
        Ok(())
    }
}

/// What there is; the pipe goes at its end.
fn read_pipe<P: Read>(
    pipe: Option<P>,
    mut take: impl FnMut(&[u8]) -> Result<(), ProcessError>,
) -> Result<Option<P>, ProcessError> {
    let Some(mut pipe) = pipe else { return Ok(None) };
    let mut piece = [0; READ_BUFFER_BYTES];
    // Not to the end: a process that never stops must not keep the deadline from being looked at.
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

/// More is no limit, and more than a clock can count would be none either.
const MAX_TIME: Duration = Duration::from_hours(24 * 365);

/// Git's complaints are a few lines.
const STDERR_BYTES: usize = 8 << 10;
const STDERR_HALF_BYTES: usize = STDERR_BYTES / 2;

/// A full pipe, in four.
const READ_BUFFER_BYTES: usize = 16 << 10;
const MAX_READS_PER_TURN: usize = 16;
