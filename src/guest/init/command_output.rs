//! The output of one command of a list: read from the command's pipes, and reported in
//! [frames](super::command_frames).

use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::stdio::stdout;

use super::command_frames::{
    CommandEnd, MAX_OUTPUT_FRAME_BYTES, MAX_SAID_BYTES, encode_end, encode_output,
};

/// The reading ends of a command's pipes.
pub(crate) struct CommandOutput {
    /// `None` after the end of the output.
    stdout: Option<PipeReader>,
    stderr: Option<PipeReader>,
    /// The number of bytes that may still be reported.
    left: u64,
    is_over_limit: bool,
    /// The beginning and the end of the standard error.
    said: Vec<u8>,
    scratch: Vec<u8>,
    /// True if the command was signalled from outside of the sandbox.
    pub(crate) is_signalled: bool,
    /// The error of a write to the own standard output.
    failure: Option<Errno>,
}

/// States if a command may go on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputState {
    Open,
    /// The command has printed more than its limit, or its output cannot be reported.
    Refused,
}

impl CommandOutput {
    /// Makes the pipes of a command. Returns their writing ends, too, for its standard output and standard error.
    pub(crate) fn new(max_output_bytes: u64) -> io::Result<(Self, [OwnedFd; 2])> {
        let ((stdout, to_stdout), (stderr, to_stderr)) = (io::pipe()?, io::pipe()?);
        for pipe in [&stdout, &stderr] {
            rustix::io::ioctl_fionbio(pipe, true)?;
        }
        let output = Self {
            stdout: Some(stdout),
            stderr: Some(stderr),
            left: max_output_bytes,
            is_over_limit: false,
            said: vec![],
            scratch: vec![0; MAX_OUTPUT_FRAME_BYTES],
            is_signalled: false,
            failure: None,
        };
        Ok((output, [to_stdout.into(), to_stderr.into()]))
    }

    /// Returns the pipes that are open, to wait for.
    pub(crate) fn pipes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.stdout.iter().chain(&self.stderr).map(AsFd::as_fd)
    }

    /// Reads each pipe once, and reports what was read.
    pub(crate) fn forward(&mut self) -> OutputState {
        self.read_pipes();
        if self.is_over_limit || self.failure.is_some() {
            OutputState::Refused
        } else {
            OutputState::Open
        }
    }

    /// Reports what is left in the pipes, and the command's end. No process writes to the pipes any more.
    pub(crate) fn finish(mut self, status: u8) -> io::Result<()> {
        // If the kernel could not end a writer, its pipe stays open and empty.
        while self.read_pipes() {}
        let Self { is_over_limit, said: stderr, failure, .. } = self;
        match failure {
            Some(error) => Err(error.into()),
            None => {
                Ok(write_all(&encode_end(&CommandEnd { status, is_over_limit, said: stderr }))?)
            }
        }
    }

    /// Reads each pipe once. Returns true if a pipe had anything to read.
    fn read_pipes(&mut self) -> bool {
        let stdout_length = read_once(&mut self.stdout, &mut self.scratch);
        if let Some(length) = stdout_length {
            self.report(length);
        }
        let stderr_length = read_once(&mut self.stderr, &mut self.scratch);
        if let Some(length) = stderr_length {
            self.said.extend_from_slice(&self.scratch[..length]);
            // The middle is dropped: the first lines name the cause, and the last line is the program's own reason.
            let over = self.said.len().saturating_sub(MAX_SAID_BYTES);
            let begin = (MAX_SAID_BYTES / 2).min(self.said.len());
            self.said.drain(begin..begin + over);
        }
        stdout_length.is_some() || stderr_length.is_some()
    }

    /// Reports the first bytes of the scratch buffer, as far as the limit allows. The output ends with the limit.
    fn report(&mut self, length: usize) {
        let allowed = usize::try_from(self.left).unwrap_or(usize::MAX).min(length);
        self.left -= allowed as u64;
        self.is_over_limit |= allowed < length;
        if self.failure.is_none() && allowed > 0 {
            self.failure = write_all(&encode_output(&self.scratch[..allowed])).err();
        }
        if self.is_over_limit || self.failure.is_some() {
            self.stdout = None;
        }
    }
}

/// Reads a pipe once, and closes it at its end. Returns the number of bytes, if there are any.
fn read_once(pipe: &mut Option<PipeReader>, buffer: &mut [u8]) -> Option<usize> {
    match pipe.as_mut()?.read(buffer) {
        Ok(length @ 1..) => return Some(length),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
        Ok(0) | Err(_) => *pipe = None,
    }
    None
}

/// Writes to the own standard output, and waits for its reader. The reader is the host, which reads as long as the
/// sandbox runs.
fn write_all(mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(stdout(), bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
