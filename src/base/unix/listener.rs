//! A listening socket with a path. A stale socket at the path is replaced, a live one is an error, and the path is
//! removed when the listener is dropped.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::PeerCredentials;

/// A bound socket. Dropping it removes the path, if the path is still this socket's.
#[derive(Debug)]
pub struct UnixListenerGuard {
    socket: UnixListener,
    path: PathBuf,
    inode: (u64, u64),
}

/// The permissions of a socket: its mode, and its owner if the process may set one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketPermissions {
    pub mode: u32,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
}

#[derive(Debug, thiserror::Error)]
pub enum UnixListenerError {
    #[error("`{}` is {length} bytes long, the limit for a socket is {MAX_PATH_BYTES}; use a shorter path", path.display())]
    PathTooLong { path: PathBuf, length: usize },
    #[error("`{}` is served by a live process; stop it or use another path", .0.display())]
    InUse(PathBuf),
    #[error("`{}` exists and is not a socket; remove it or use another path", .0.display())]
    NotASocket(PathBuf),
    #[error("cannot bind `{}`", path.display())]
    Bind { path: PathBuf, source: io::Error },
}

impl UnixListenerGuard {
    /// Binds `path`. A socket file left by a dead process is replaced; one that answers is an error.
    ///
    /// Permissions are set before the socket listens, so no client connects under wrong permissions.
    pub fn bind_socket(
        path: &Path,
        permissions: SocketPermissions,
    ) -> Result<Self, UnixListenerError> {
        let length = path.as_os_str().as_bytes().len();
        if length > MAX_PATH_BYTES {
            return Err(UnixListenerError::PathTooLong { path: path.into(), length });
        }
        let bind_error = |source| UnixListenerError::Bind { path: path.into(), source };
        let _one_at_a_time = lock_directory(path).map_err(bind_error)?;
        remove_stale(path)?;
        // From here on this listener owns the path: if the next steps fail, dropping the listener removes the path.
        let listener = Self::bind_path(path).map_err(bind_error)?;
        listener.apply_permissions(permissions).map_err(bind_error)?;
        Ok(listener)
    }

    fn bind_path(path: &Path) -> io::Result<Self> {
        let socket = create_socket()?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self { socket: socket.into(), path: path.into(), inode: socket_inode(path)? })
    }

    fn apply_permissions(
        &self,
        SocketPermissions { mode, uid, gid }: SocketPermissions,
    ) -> io::Result<()> {
        fs::set_permissions(&self.path, fs::Permissions::from_mode(mode))?;
        if uid.is_some() || gid.is_some() {
            std::os::unix::fs::lchown(&self.path, uid, gid)?;
        }
        Ok(rustix::net::listen(&self.socket, LISTEN_BACKLOG)?)
    }

    /// Returns a second handle for another thread that accepts connections. The handle does not own the path.
    pub fn accept_handle(&self) -> io::Result<UnixListener> {
        self.socket.try_clone()
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for UnixListenerGuard {
    fn drop(&mut self) {
        if socket_inode(&self.path).is_ok_and(|found| found == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Locks the directory of the socket. Without the lock, two processes that start at the same time could each take the
/// other's new socket for a stale one.
fn lock_directory(path: &Path) -> io::Result<File> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = File::open(parent.unwrap_or(Path::new(".")))?;
    directory.lock()?;
    Ok(directory)
}

fn remove_stale(path: &Path) -> Result<(), UnixListenerError> {
    let bind_error = |source| UnixListenerError::Bind { path: path.into(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(bind_error(error)),
        Ok(found) if !found.file_type().is_socket() => {
            Err(UnixListenerError::NotASocket(path.into()))
        }
        Ok(_) if has_live_listener(path).map_err(bind_error)? => {
            Err(UnixListenerError::InUse(path.into()))
        }
        Ok(_) => fs::remove_file(path).map_err(bind_error),
    }
}

/// Returns true if a process listens, even with a full backlog. Only a refused connection proves that no process
/// listens. A dead process' child may hold the socket for a moment without accepting.
fn has_live_listener(path: &Path) -> io::Result<bool> {
    let socket = create_socket()?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(!is_connection_abandoned(&socket)),
        Err(Errno::AGAIN) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn is_connection_abandoned(socket: &OwnedFd) -> bool {
    let listening = PeerCredentials::from_socket(socket.as_fd()).ok().and_then(|peer| peer.pid);
    listening.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
}

fn create_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

fn socket_inode(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

/// The largest length of a socket path, in bytes. `sun_path` has 108 bytes with its closing zero (`unix(7)`).
pub const MAX_PATH_BYTES: usize = 107;

/// The largest number of connections that wait to be accepted. Our choice; the kernel limits it to
/// `net.core.somaxconn`.
const LISTEN_BACKLOG: i32 = 1024;
