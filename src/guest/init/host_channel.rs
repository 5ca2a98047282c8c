//! The connection to the process that started the sandbox. It carries claims and, while an agent runs, commands.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::run_socket::RunSocket;
use super::{EXIT_SOCKET_UNAVAILABLE, InitFailure};

/// The connection to the process that started this sandbox and sends the claims.
pub(crate) struct HostChannel(OwnedFd);

/// A command of the host while an agent runs.
pub(crate) enum HostCommand {
    Terminate,
    Kill,
    /// The host has disconnected, and no further command will come.
    Disconnected,
}

impl HostChannel {
    pub(crate) fn connect(path: &Path) -> Result<Self, InitFailure> {
        let socket = RunSocket::new(path).map_err(InitFailure::socket_failure)?;
        let host = socket
            .connect()
            .map_err(|error| InitFailure::socket_failure(socket.describe_error(error)))?;
        Ok(Self(host))
    }

    /// Reads the bytes that have arrived, and the descriptors with them.
    pub(super) fn receive_chunk(
        &self,
        chunk: &mut [u8],
        output: &mut Vec<OwnedFd>,
    ) -> Result<usize, Errno> {
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

    /// Reads the host's next command, if one has arrived.
    pub(crate) fn poll_command(&self) -> Option<HostCommand> {
        let mut word = [0];
        match rustix::io::read(&self.0, &mut word) {
            Err(Errno::AGAIN | Errno::INTR) => None,
            Ok(1) if word == [TERMINATE_COMMAND] => Some(HostCommand::Terminate),
            // An unknown command must end the agent, never leave it running.
            Ok(1) => Some(HostCommand::Kill),
            Ok(_) | Err(_) => Some(HostCommand::Disconnected),
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

/// Returns the error of a host that has disconnected before it claimed the sandbox.
pub(super) fn host_gone() -> InitFailure {
    let message =
        "the process that started this sandbox has disconnected; no agent was started".to_owned();
    InitFailure { status: EXIT_SOCKET_UNAVAILABLE, message }
}

/// The command to end the agent gently. Every other byte is a kill.
const TERMINATE_COMMAND: u8 = b'T';
