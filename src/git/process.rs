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

use super::call::Input;

/// What one call may take. The defaults are for questions about a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub time: Duration,
    /// What it may print.
    pub output_bytes: u64,
    /// Its address space.
    pub memory_bytes: u64,
    /// The largest file that it may write.
    pub file_bytes: u64,
}

/// What becomes of what a process prints.
pub(super) enum Sink<'a> {
    Bytes(&'a mut Vec<u8>),
    Pieces(&'a mut dyn FnMut(&[u8])),
}

/// How a process ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    /// The beginning of its standard error, and the end.
    pub(super) said: String,
}

/// Why it did not end by itself.
#[derive(Debug)]
pub(super) enum Fault {
    Io(io::Error),
    Late(Duration),
    TooMuch(u64),
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            time: Duration::from_mins(1),
            output_bytes: 64 << 20,
            memory_bytes: 1 << 30,
            file_bytes: 1 << 30,
        }
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<Errno> for Fault {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

/// Runs a process to its end; it and what it has started are gone when this returns.
pub(super) fn run(
    command: &mut Command,
    input: Input,
    sink: &mut Sink<'_>,
    limits: &Limits,
) -> Result<Ended, Fault> {
    let deadline = Instant::now() + limits.time.min(LONGEST);
    let (stdin, bytes) = match input {
        Input::Nothing => (Stdio::null(), vec![]),
        Input::Bytes(bytes) => (Stdio::piped(), bytes),
        Input::File(file) => (file.into(), vec![]),
    };
    // A group of its own, so that git's helpers go with it.
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    restrain(command, limits);
    let mut group = Group { child: command.spawn()?, is_reaped: false };
    let feed = Feed { bytes, at: 0 };
    let said = Conversation { group: &mut group, feed, sink, limits, deadline }.hold()?;
    let status = group.child.wait()?;
    group.is_reaped = true;
    Ok(Ended { status, said })
}

/// Has the process limited before its program begins, so that nothing which it starts is ever without limits. A limit that
/// this process has itself is never raised.
#[expect(unsafe_code, reason = "only what runs between fork and exec comes before the program")]
fn restrain(command: &mut Command, limits: &Limits) {
    let most = [
        (Resource::As, limits.memory_bytes),
        (Resource::Fsize, limits.file_bytes),
        (Resource::Cpu, limits.time.min(LONGEST).as_secs() + 1),
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
struct Group {
    child: Child,
    is_reaped: bool,
}

impl Group {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Before the first process is waited for: until then its id can be nobody else's.
    fn kill(&self) {
        let _ = kill_process_group(self.pid(), Signal::KILL);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.is_reaped {
            self.kill();
            let _ = self.child.wait();
        }
    }
}

struct Feed {
    bytes: Vec<u8>,
    at: usize,
}

struct Conversation<'a, 'b> {
    group: &'a mut Group,
    feed: Feed,
    sink: &'a mut Sink<'b>,
    limits: &'a Limits,
    deadline: Instant,
}

impl Conversation<'_, '_> {
    /// Until the process has ended and its outputs are read; returns what it said on standard error.
    fn hold(mut self) -> Result<String, Fault> {
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
            self.wait([
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
            stdin = self.write(stdin)?;
            stdout = read(stdout, |piece| self.take(piece, &mut printed))?;
            stderr = read(stderr, |piece| {
                said.extend_from_slice(piece);
                // What goes is in the middle: the last line says why.
                let over = said.len().saturating_sub(SAID_BYTES);
                said.drain(HALF.min(said.len())..(HALF + over).min(said.len()));
                Ok(())
            })?;
        }
        Ok(String::from_utf8_lossy(&said).trim_end().to_owned())
    }

    /// Until one of them has something, or the time is up.
    fn wait(&self, watched: [Option<PollFd<'_>>; 4]) -> Result<(), Fault> {
        let mut watched: Vec<_> = watched.into_iter().flatten().collect();
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Fault::Late(self.limits.time));
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
    fn write(&mut self, stdin: Option<ChildStdin>) -> Result<Option<ChildStdin>, Fault> {
        let Some(mut stdin) = stdin else { return Ok(None) };
        let Feed { bytes, at } = &mut self.feed;
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

    fn take(&mut self, piece: &[u8], printed: &mut u64) -> Result<(), Fault> {
        *printed += piece.len() as u64;
        if *printed > self.limits.output_bytes {
            return Err(Fault::TooMuch(self.limits.output_bytes));
        }
        match self.sink {
            Sink::Bytes(bytes) => bytes.extend_from_slice(piece),
            Sink::Pieces(take) => {
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
fn read<P: Read>(
    pipe: Option<P>,
    mut take: impl FnMut(&[u8]) -> Result<(), Fault>,
) -> Result<Option<P>, Fault> {
    let Some(mut pipe) = pipe else { return Ok(None) };
    let mut piece = [0; PIECE_BYTES];
    // Not to the end: a process that never stops must not keep the deadline from being looked at.
    for _ in 0..PIECES_AT_A_TIME {
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
const LONGEST: Duration = Duration::from_hours(24 * 365);

/// Git's complaints are a few lines.
const SAID_BYTES: usize = 8 << 10;
const HALF: usize = SAID_BYTES / 2;

/// A full pipe, in four.
const PIECE_BYTES: usize = 16 << 10;
const PIECES_AT_A_TIME: usize = 16;
