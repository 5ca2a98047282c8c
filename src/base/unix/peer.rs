//! The process at the other end of a unix socket, as the kernel reports it.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd};

/// The process that connected, as it was at that time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// The process id; `None` if the process is in a pid namespace that this process cannot see, such as another
    /// container's.
    pub pid: Option<u32>,
    pub uid: u32,
    pub gid: u32,
}

impl PeerCredentials {
    /// Reads the credentials of the peer from the kernel (`SO_PEERCRED`, `unix(7)`).
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
        // SAFETY: the pointers are to a `ucred` and to its size. This function owns both, they live during the call,
        // and any bits are a valid `ucred`.
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

    /// Returns the control group of the process, which names its container or unit; `None` if it cannot be read.
    ///
    /// The result is a hint and not a proof: the process may have ended since, and another process may have its pid.
    pub fn cgroup_path(&self) -> Option<String> {
        let file = File::open(format!("/proc/{}/cgroup", self.pid?)).ok()?;
        let mut text = String::new();
        file.take(MAX_CGROUP_BYTES).read_to_string(&mut text).ok()?;
        // `0::/path` is the unified hierarchy (`cgroups(7)`). Older hierarchies have a line for each controller.
        let path = |line: &str| line.splitn(3, ':').nth(2).map(str::to_owned);
        let unified = text.lines().find(|line| line.starts_with("0::")).and_then(path);
        unified.filter(|path| path != "/").or_else(|| text.lines().next().and_then(path))
    }
}

/// The largest part of a cgroup file that is read, in bytes. Our choice: the file has a line of a few hundred bytes for
/// each controller.
const MAX_CGROUP_BYTES: u64 = 8192;
