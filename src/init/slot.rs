//! A sandbox that is started ahead, and waits to be told what for.
//!
//! What it is told stands for its command line: the same options, the program and its arguments, each with a zero byte
//! after it, and before all of them their length in four bytes, the highest first. It answers with one byte.
//!
//! **Invariant:** nothing is started of a claim that is cut, whoever ends first.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::Signal;

use super::options::{self, Invocation, Options};
use super::socket::RunSocket;
use super::supervisor::Supervisor;
use super::{Failure, SOCKET_DEAD};

/// Waits for the claim. The connection ends with it, so the agent never meets it.
pub(crate) fn claimed(path: &Path, supervisor: &Supervisor) -> Result<Box<Options>, Failure> {
    let socket = RunSocket::new(path).map_err(Failure::socket)?;
    let host = socket.connect().map_err(|error| Failure::socket(socket.explain(error)))?;
    let claim = read(&host, supervisor)?;
    let wrong = |why: &str| Failure::setup("take the claim", why);
    let arguments = claim.strip_suffix(&[0]).ok_or_else(|| wrong("it does not end"))?;
    let arguments = arguments.split(|byte| *byte == 0).map(|text| OsString::from_vec(text.into()));
    match options::parse(arguments) {
        Ok(Invocation::Start(options)) => {
            rustix::io::write(&host, &[0]).map_err(|_| abandoned())?;
            Ok(options)
        }
        Ok(Invocation::Print(_) | Invocation::Wait(_)) => Err(wrong("it has no program")),
        Err(why) => Err(wrong(&why)),
    }
}

/// Without its length.
fn read(host: &OwnedFd, supervisor: &Supervisor) -> Result<Vec<u8>, Failure> {
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
        wait(host, supervisor)?;
        match rustix::io::read(host, &mut chunk) {
            Ok(0) => return Err(abandoned()),
            Ok(length) => claim.extend_from_slice(&chunk[..length]),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(Failure::setup("read the claim", io::Error::from(error))),
        }
    }
}

/// Until there is something to read. There is no agent yet that a signal could be for.
fn wait(host: &OwnedFd, supervisor: &Supervisor) -> Result<(), Failure> {
    let mut either =
        [PollFd::new(host, PollFlags::IN), PollFd::new(supervisor.signals(), PollFlags::IN)];
    match poll(&mut either, None) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(Failure::setup("wait for the claim", io::Error::from(error))),
    }
    match supervisor.next_signal() {
        None | Some(Signal::CHILD) => Ok(()),
        Some(signal) => {
            let status = u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX);
            Err(Failure { status, message: "it is told to end, and was never claimed".to_owned() })
        }
    }
}

fn abandoned() -> Failure {
    let message = "whoever has started it is gone, and it was never claimed".to_owned();
    Failure { status: SOCKET_DEAD, message }
}

/// What the kernel takes at most for one program's arguments and variables, of a usual stack (execve(2)).
const MOST: usize = 2 << 20;

const CHUNK: usize = 16 << 10;
