//! A sandbox that is started ahead, and waits to be told what for.
//!
//! What it is told stands for its command line: the same options, the program and its arguments, each with a zero byte
//! after it, and before all of them their length in four bytes, the highest first. It answers with one byte. A claim of
//! nothing is a question, whether it waits, and has the same answer.
//!
//! With the claim of a [resident](super::resident) come two descriptors: where the agent's output and error go.
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

use super::options::{self, Invocation, Options};
use super::socket::RunSocket;
use super::supervisor::Supervisor;
use super::{Failure, SOCKET_DEAD};

/// Whoever has started this sandbox, and says what it is for.
pub(crate) struct Host(OwnedFd);

/// What a sandbox is told.
pub(crate) struct Claim {
    pub(crate) options: Box<Options>,
    /// Standard output and error, where they come with it.
    pub(crate) output: Vec<OwnedFd>,
}

/// What a host says while an agent runs.
pub(crate) enum Word {
    Terminate,
    Kill,
    /// Nothing any more, for good.
    Gone,
}

impl Host {
    pub(crate) fn connect(path: &Path) -> Result<Self, Failure> {
        let socket = RunSocket::new(path).map_err(Failure::socket)?;
        let host = socket.connect().map_err(|error| Failure::socket(socket.explain(error)))?;
        Ok(Self(host))
    }

    /// Waits for one, and says that it was heard.
    pub(crate) fn claim(&self, supervisor: &Supervisor) -> Result<Claim, Failure> {
        let wrong = |why: &str| Failure::setup("take the claim", why);
        let (mut text, mut output) = (vec![], vec![]);
        while text.is_empty() {
            text = self.read(supervisor, &mut output)?;
            if text.is_empty() {
                self.say(&[HEARD])?;
            }
        }
        let arguments = text.strip_suffix(&[0]).ok_or_else(|| wrong("it does not end"))?;
        let arguments = arguments.split(|byte| *byte == 0);
        match options::parse(arguments.map(|text| OsString::from_vec(text.into()))) {
            Ok(Invocation::Start(options)) => {
                self.say(&[HEARD])?;
                Ok(Claim { options, output })
            }
            Ok(Invocation::Print(_) | Invocation::Wait(_)) => Err(wrong("it has no program")),
            Err(why) => Err(wrong(&why)),
        }
    }

    /// Without its length.
    fn read(&self, supervisor: &Supervisor, output: &mut Vec<OwnedFd>) -> Result<Vec<u8>, Failure> {
        let (mut claim, mut chunk) = (vec![], vec![0; CHUNK]);
        loop {
            if let Some((length, rest)) = claim.split_first_chunk() {
                let length = u32::from_be_bytes(*length) as usize;
                if length > MOST || rest.len() > length {
                    return Err(Failure::setup("take the claim", "it is too long"));
                }
                if rest.len() == length {
                    return Ok(rest.to_owned());
                }
            }
            self.wait(supervisor)?;
            match self.receive(&mut chunk, output) {
                Ok(0) => return Err(abandoned()),
                Ok(length) => claim.extend_from_slice(&chunk[..length]),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(Failure::setup("read the claim", io::Error::from(error))),
            }
        }
    }

    fn receive(&self, chunk: &mut [u8], output: &mut Vec<OwnedFd>) -> Result<usize, Errno> {
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
    fn wait(&self, supervisor: &Supervisor) -> Result<(), Failure> {
        let mut either =
            [PollFd::new(&self.0, PollFlags::IN), PollFd::new(supervisor.signals(), PollFlags::IN)];
        match poll(&mut either, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                return Err(Failure::setup("wait for the claim", io::Error::from(error)));
            }
        }
        match supervisor.next_signal() {
            None | Some(Signal::CHILD) => Ok(()),
            Some(signal) => {
                let status = u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX);
                Err(Failure { status, message: "it is told to end, and has no agent".to_owned() })
            }
        }
    }

    /// What it has said, if it has.
    pub(crate) fn word(&self) -> Option<Word> {
        let mut word = [0];
        match rustix::io::read(&self.0, &mut word) {
            Err(Errno::AGAIN | Errno::INTR) => None,
            Ok(1) if word == [TERMINATE] => Some(Word::Terminate),
            Ok(1) => Some(Word::Kill),
            Ok(_) | Err(_) => Some(Word::Gone),
        }
    }

    pub(crate) fn say(&self, bytes: &[u8]) -> Result<(), Failure> {
        rustix::io::write(&self.0, bytes).map(drop).map_err(|_| abandoned())
    }
}

impl AsFd for Host {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn abandoned() -> Failure {
    let message = "whoever has started it is gone, and it has no agent".to_owned();
    Failure { status: SOCKET_DEAD, message }
}

const HEARD: u8 = 0;

/// Any other word is the end.
const TERMINATE: u8 = b'T';

/// What the kernel takes at most for one program's arguments and variables, of a usual stack (execve(2)).
const MOST: usize = 2 << 20;

const CHUNK: usize = 16 << 10;
