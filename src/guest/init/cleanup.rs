//! What an agent leaves beside its processes, which are gone: files in memory, and queues of the kernel.
//!
//! What belongs to another user was there before any agent, and stays: the image may have put it there.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::process::getuid;

/// Everything below the directories that are in memory.
pub(crate) fn clear_tmpfs() -> io::Result<()> {
    for directory in TMPFS_DIRECTORIES.map(Path::new) {
        match remove_owned_entries(directory, MAX_DEPTH) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            emptied => {
                emptied.map_err(|error| error_with_path(directory, &error))?;
            }
        }
    }
    Ok(())
}

/// Nobody is there who could change anything under our hands.
fn remove_owned_entries(directory: &Path, depth: usize) -> io::Result<()> {
    if depth == 0 {
        return Err(io::Error::other("its directories are too deep"));
    }
    if is_owned(&fs::symlink_metadata(directory)?) {
        fs::set_permissions(directory, Permissions::from_mode(0o700))?;
    }
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let (path, found) = (entry.path(), entry.metadata()?);
        if found.is_dir() {
            match remove_owned_entries(&path, depth - 1) {
                Err(error) if error.kind() == ErrorKind::PermissionDenied && !is_owned(&found) => {}
                emptied => emptied?,
            }
            if is_owned(&found) {
                fs::remove_dir(&path)?;
            }
        } else if is_owned(&found) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

fn is_owned(found: &fs::Metadata) -> bool {
    found.uid() == getuid().as_raw()
}

/// Shared memory, semaphores and messages of System V, which live on without a process.
pub(crate) fn clear_sysv_ipc() -> io::Result<()> {
    for (kind, call) in IPC_KINDS {
        let path = Path::new("/proc/sysvipc").join(kind);
        let listed = match fs::read_to_string(&path) {
            // A kernel without them.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            listed => listed.map_err(|error| error_with_path(&path, &error))?,
        };
        // Below a line of names: its key, its id, and more.
        let ids = listed.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1));
        for id in ids.filter_map(|id| id.parse().ok()) {
            remove_ipc_object(call, id).map_err(|error| error_with_path(&path, &error))?;
        }
    }
    Ok(())
}

#[expect(unsafe_code, reason = "there is no safe call that removes one")]
fn remove_ipc_object(call: libc::c_long, id: libc::c_int) -> io::Result<()> {
    // `semctl` takes the command as its third argument, and the second is not looked at; the others have it as their
    // second.
    let command = libc::IPC_RMID;
    // SAFETY: to remove one, the kernel takes no pointer.
    let done = unsafe { libc::syscall(call, id, command, command, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn error_with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("`{}`: {error}", path.display()))
}

const TMPFS_DIRECTORIES: [&str; 4] = ["/dev/mqueue", "/dev/shm", "/run", "/tmp"];

/// Of directories in another. More than programs make, and less than the stack has room for.
const MAX_DEPTH: usize = 128;

const IPC_KINDS: [(&str, libc::c_long); 3] =
    [("shm", libc::SYS_shmctl), ("sem", libc::SYS_semctl), ("msg", libc::SYS_msgctl)];
