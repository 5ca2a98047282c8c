//! The process at the other end of a unix socket, as the kernel reports it.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd};

/// The process that connected, as it was then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// `None` where the process lives in a namespace that ours cannot see into, as in another container.
    pub pid: Option<u32>,
    pub uid: u32,
    pub gid: u32,
}

impl PeerCredentials {
    /// Asks the kernel (`SO_PEERCRED`, `unix(7)`).
    ///
    /// # Errors
    /// Returns an error if the socket is not a connected unix socket.
    #[expect(
        unsafe_code,
        reason = "rustix takes the 0 of an invisible process for a pid, which it is not"
    )]
    pub fn from_socket(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).expect("12 bytes");
        // SAFETY: the pointers are to a `ucred` and to its size, both ours and alive during the call, and
        // any bits are a valid `ucred`.
        let done = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut peer).cast(),
                &raw mut length,
            )
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        let pid = u32::try_from(peer.pid).ok().filter(|pid| *pid > 0);
        Ok(Self { pid, uid: peer.uid, gid: peer.gid })
    }

    /// The control group of the process, which names its container or unit; `None` where it cannot be read.
    ///
    /// The process may have ended since, and its pid have gone to another: this is a hint, not a proof.
    pub fn cgroup_path(&self) -> Option<String> {
        let file = File::open(format!("/proc/{}/cgroup", self.pid?)).ok()?;
        let mut text = String::new();
        file.take(MAX_CGROUP_BYTES).read_to_string(&mut text).ok()?;
        // `0::/path` is the unified hierarchy (`cgroups(7)`); older ones have a line for each controller.
        let path = |line: &str| line.splitn(3, ':').nth(2).map(str::to_owned);
        let unified = text.lines().find(|line| line.starts_with("0::")).and_then(path);
        unified.filter(|path| path != "/").or_else(|| text.lines().next().and_then(path))
    }
}

/// A line for each controller, of a few hundred bytes each.
const MAX_CGROUP_BYTES: u64 = 8192;
