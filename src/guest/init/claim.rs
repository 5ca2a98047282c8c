//! A sandbox that is started ahead, and waits to be told what for.
//!
//! What it is told stands for its command line: the same options, the program and its arguments, each with a zero byte
//! after it, and before all of them their length in four bytes, the highest first. It answers with one byte. A claim of
//! nothing is a question, whether it waits, and has the same answer.
//!
//! With the claim of a [resident](super::session_loop) come two descriptors: where the agent's output and error go.
//!
//! **Invariant:** nothing is started of a claim that is cut, whoever ends first.

use std::ffi::OsString;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::Signal;

use super::options::{self, InitCommand, InitOptions};
use super::reaper::ProcessReaper;
use super::run_socket::RunSocket;
use super::{EXIT_SOCKET_UNAVAILABLE, InitFailure};

/// Whoever has started this sandbox, and says what it is for.
pub(crate) struct HostChannel(OwnedFd);

/// What a sandbox is told.
pub(crate) struct AgentClaim {
    pub(crate) options: Box<InitOptions>,
    /// Standard output and error, where they come with it.
    pub(crate) output: Vec<OwnedFd>,
}

/// What a host says while an agent runs.
pub(crate) enum HostCommand {
    Terminate,
    Kill,
    /// Nothing any more, for good.
    Gone,
}

impl HostChannel {
    pub(crate) fn connect(path: &Path) -> Result<Self, InitFailure> {
        let socket = RunSocket::new(path).map_err(InitFailure::socket_failure)?;
        let host = socket
            .connect()
            .map_err(|error| InitFailure::socket_failure(socket.describe_error(error)))?;
        Ok(Self(host))
    }

    /// Waits for one, and says that it was heard.
    pub(crate) fn receive_claim(
        &self,
        supervisor: &ProcessReaper,
    ) -> Result<AgentClaim, InitFailure> {
        let wrong = |why: &str| InitFailure::setup_failure("take the claim", why);
        let (mut text, mut output) = (vec![], vec![]);
        while text.is_empty() {
            text = self.read_claim(supervisor, &mut output)?;
            if text.is_empty() {
                self.send_bytes(&[ACK_BYTE])?;
            }
        }
        let arguments = text.strip_suffix(&[0]).ok_or_else(|| wrong("it does not end"))?;
        let arguments = arguments.split(|byte| *byte == 0);
        match options::parse(arguments.map(|text| OsString::from_vec(text.into()))) {
            Ok(InitCommand::Start(options)) => {
                self.send_bytes(&[ACK_BYTE])?;
                Ok(AgentClaim { options, output })
            }
            Ok(InitCommand::Print(_) | InitCommand::Wait(_)) => Err(wrong("it has no program")),
            Err(why) => Err(wrong(&why)),
        }
    }

    /// Without its length.
    fn read_claim(
        &self,
        supervisor: &ProcessReaper,
        output: &mut Vec<OwnedFd>,
    ) -> Result<Vec<u8>, InitFailure> {
        let (mut claim, mut chunk) = (vec![], vec![0; READ_BUFFER_BYTES]);
        loop {
            if let Some((length, rest)) = claim.split_first_chunk() {
                let length = u32::from_be_bytes(*length) as usize;
                if length > MAX_CLAIM_BYTES || rest.len() > length {
                    return Err(InitFailure::setup_failure("take the claim", "it is too long"));
                }
                if rest.len() == length {
                    return Ok(rest.to_owned());
                }
            }
            self.wait_readable(supervisor)?;
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

    fn receive_chunk(&self, chunk: &mut [u8], output: &mut Vec<OwnedFd>) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.0, &mut [IoSliceMut::new(chunk)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                output.extend(descriptors);
            }
        }
        Ok(received.bytes)
    }

    /// Until there is something to read. There is no agent now that a signal could be for.
    fn wait_readable(&self, supervisor: &ProcessReaper) -> Result<(), InitFailure> {
        let mut either = [
            PollFd::new(&self.0, PollFlags::IN),
            PollFd::new(supervisor.signal_fd(), PollFlags::IN),
        ];
        match poll(&mut either, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                return Err(InitFailure::setup_failure(
                    "wait for the claim",
                    io::Error::from(error),
                ));
            }
        }
        match supervisor.next_signal() {
            None | Some(Signal::CHILD) => Ok(()),
            Some(signal) => {
                let status = u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX);
                Err(InitFailure {
                    status,
                    message: "it is told to end, and has no agent".to_owned(),
                })
            }
        }
    }

    /// What it has said, if it has.
    pub(crate) fn poll_command(&self) -> Option<HostCommand> {
        let mut word = [0];
        match rustix::io::read(&self.0, &mut word) {
            Err(Errno::AGAIN | Errno::INTR) => None,
            Ok(1) if word == [TERMINATE_COMMAND] => Some(HostCommand::Terminate),
            Ok(1) => Some(HostCommand::Kill),
            Ok(_) | Err(_) => Some(HostCommand::Gone),
        }
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8]) -> Result<(), InitFailure> {
        rustix::io::write(&self.0, bytes).map(drop).map_err(|_| host_gone())
    }
}

impl AsFd for HostChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn host_gone() -> InitFailure {
    let message = "whoever has started it is gone, and it has no agent".to_owned();
    InitFailure { status: EXIT_SOCKET_UNAVAILABLE, message }
}

const ACK_BYTE: u8 = 0;

/// Any other word is the end.
const TERMINATE_COMMAND: u8 = b'T';

/// What the kernel takes at most for one program's arguments and variables, of a usual stack (execve(2)).
const MAX_CLAIM_BYTES: usize = 2 << 20;

const READ_BUFFER_BYTES: usize = 16 << 10;
