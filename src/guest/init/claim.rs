//! A sandbox that is started ahead and waits for the claim of a run.
//!
//! A claim replaces the command line. It has the same options, the program and its arguments, each followed by a zero
//! byte. Their total length comes first, in four bytes, big-endian. The sandbox answers with one byte. An empty claim
//! only asks if the sandbox still waits, and has the same answer.
//!
//! The claim of a [long-running sandbox](super::session_loop) carries two descriptors: the agent's standard output and
//! standard error.
//!
//! **Invariant:** an incomplete claim starts nothing, whichever side closes the connection first.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::Signal;

use super::InitFailure;
use super::host_channel::{HostChannel, host_gone};
use super::options::{self, InitCommand, InitOptions};
use super::reaper::ProcessReaper;

/// The claim of a run.
pub(crate) struct AgentClaim {
    pub(crate) options: Box<InitOptions>,
    /// The descriptors for standard output and error, if the claim carries them.
    pub(crate) output: Vec<OwnedFd>,
}

impl HostChannel {
    /// Waits for a claim, and acknowledges it.
    pub(crate) fn receive_claim(
        &self,
        run_service: &ProcessReaper,
    ) -> Result<AgentClaim, InitFailure> {
        let wrong = |why: &str| InitFailure::setup_failure("take the claim", why);
        let (mut text, mut output) = (vec![], vec![]);
        // Empty claims are answered and do not end the wait.
        while text.is_empty() {
            text = self.read_claim(run_service, &mut output)?;
            if text.is_empty() {
                self.send_bytes(&[ACK_BYTE])?;
            }
        }
        // The last argument must be complete: without its zero byte the claim may be cut.
        let arguments = text.strip_suffix(&[0]).ok_or_else(|| wrong("it does not end"))?;
        let arguments = arguments.split(|byte| *byte == 0);
        match options::parse(arguments.map(|text| OsString::from_vec(text.into()))) {
            Ok(InitCommand::Start(options)) => {
                // The acknowledgement comes after parsing, so that the host learns of an invalid claim from its
                // absence.
                self.send_bytes(&[ACK_BYTE])?;
                Ok(AgentClaim { options, output })
            }
            Ok(InitCommand::StartList(..)) => Err(wrong("it has several programs")),
            Ok(InitCommand::Print(_) | InitCommand::Wait(_)) => Err(wrong("it has no program")),
            Err(why) => Err(wrong(&why)),
        }
    }

    /// Reads a claim and returns it without its length.
    fn read_claim(
        &self,
        run_service: &ProcessReaper,
        output: &mut Vec<OwnedFd>,
    ) -> Result<Vec<u8>, InitFailure> {
        let (mut claim, mut chunk) = (vec![], vec![0; READ_BUFFER_BYTES]);
        loop {
            // The length is complete from the fourth byte on.
            if let Some((length, rest)) = claim.split_first_chunk() {
                let length = u32::from_be_bytes(*length) as usize;
                // Bytes after the claim are refused: the host waits for the answer before it sends more.
                if length > MAX_CLAIM_BYTES || rest.len() > length {
                    return Err(InitFailure::setup_failure("take the claim", "it is too long"));
                }
                if rest.len() == length {
                    return Ok(rest.to_owned());
                }
            }
            // The descriptors arrive together with a part of the bytes.
            self.wait_readable(run_service)?;
            match self.receive_chunk(&mut chunk, output) {
                Ok(0) => return Err(host_gone()),
                Ok(length) => claim.extend_from_slice(&chunk[..length]),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => {
                    return Err(InitFailure::setup_failure(
                        "read the claim",
                        io::Error::from(error),
                    ));
                }
            }
        }
    }

    /// Waits until the host has sent something. A signal other than SIGCHLD ends the wait with an error, because no
    /// agent runs that could receive the signal.
    fn wait_readable(&self, run_service: &ProcessReaper) -> Result<(), InitFailure> {
        let mut either =
            [PollFd::new(self, PollFlags::IN), PollFd::new(run_service.signal_fd(), PollFlags::IN)];
        match poll(&mut either, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                return Err(InitFailure::setup_failure(
                    "wait for the claim",
                    io::Error::from(error),
                ));
            }
        }
        match run_service.next_signal() {
            None | Some(Signal::CHILD) => Ok(()),
            Some(signal) => {
                // The exit status that a shell reports for a process that the signal has killed.
                let status = u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX);
                Err(InitFailure {
                    status,
                    message: "a signal ended the wait for a claim; no agent was started".to_owned(),
                })
            }
        }
    }
}

/// The answer to a claim.
const ACK_BYTE: u8 = 0;

/// The maximum size of a claim: the kernel's limit for one program's arguments and variables with the usual stack size
/// (execve(2)).
const MAX_CLAIM_BYTES: usize = 2 << 20;

/// The size of one read of a claim. Our choice.
const READ_BUFFER_BYTES: usize = 16 << 10;
