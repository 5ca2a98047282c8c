//! The run's socket. The process that answers on it pays for the agent's calls and holds the provider's key.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process;
use rustix::thread;
use rustix::time::Timespec;

/// The address of the run's socket.
pub(crate) struct RunSocket {
    address: SocketAddrUnix,
    path: PathBuf,
}

impl RunSocket {
    /// Fails if the path is longer than a unix socket's address can be: 107 bytes (unix(7)).
    pub(crate) fn new(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let address = SocketAddrUnix::new(path).map_err(|_| {
            format!("the path of the socket, `{shown}`, is longer than 107 bytes; mount it at a shorter one")
        })?;
        Ok(Self { address, path: path.to_owned() })
    }

    /// Connects without waiting. Returns [`Errno::AGAIN`] if the socket's backlog is full.
    pub(crate) fn connect(&self) -> Result<OwnedFd, Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        net::connect(&socket, &self.address)?;
        Ok(socket)
    }

    /// Waits until the socket accepts a connection. The gateway may be started at the same time as this process and be
    /// slower, so a refusal is final only after `timeout`.
    pub(crate) fn wait_until_ready(&self, timeout: Duration) -> Result<(), String> {
        let start = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            let Err(error) = self.connect() else { return Ok(()) };
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(self.describe_error(error));
            }
            sleep(pause.min(left));
            // Exponential backoff from 1 ms to 50 ms: usually the gateway is almost ready.
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Returns a message with the cause of the error and its remedy.
    pub(crate) fn describe_error(&self, error: Errno) -> String {
        let path = self.path.display();
        match error {
            Errno::NOENT | Errno::NOTDIR => format!(
                "the run's socket `{path}` is not there; mount its directory into the sandbox, or name it with --socket"
            ),
            Errno::ACCESS => format!(
                "uid {} may not connect to the run's socket `{path}`; make the socket its own, or its mode 0666",
                process::getuid().as_raw()
            ),
            Errno::CONNREFUSED => format!(
                "no process listens on the run's socket `{path}`; start the run's gateway first, and check that it still runs"
            ),
            Errno::AGAIN => format!(
                "the gateway does not accept on the run's socket `{path}`; check whether the gateway hangs"
            ),
            other => {
                format!("cannot connect to the run's socket `{path}`: {}", io::Error::from(other))
            }
        }
    }
}

pub(crate) fn sleep(time: Duration) {
    let time = Timespec::try_from(time).expect("a pause is some milliseconds");
    // A signal ends the sleep early, which only means an earlier retry.
    let _ = thread::nanosleep(&time);
}
