//! Removes what an ended agent leaves beside its processes: files in memory, and the kernel's System V objects.
//!
//! Files of another user existed before any agent and stay: the image may have put them there.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{Access, access};
use rustix::process::getuid;

/// Removes the agent's entries below the directories that are in memory.
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

/// Removes the entries of a directory that belong to this user. No other process runs that could change the directory
/// during the removal.
fn remove_owned_entries(directory: &Path, depth: usize) -> io::Result<()> {
    if depth == 0 {
        return Err(io::Error::other("its directories are nested too deep"));
    }
    // The agent may have taken its own directory's permissions away.
    if is_owned(&fs::symlink_metadata(directory)?) {
        fs::set_permissions(directory, Permissions::from_mode(0o700))?;
    }
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let (path, found) = (entry.path(), entry.metadata()?);
        if found.is_dir() {
            match remove_owned_entries(&path, depth - 1) {
                // A directory of another user that this user may not read is skipped, unless the agent may have made
                // files in it: their names cannot be listed here, but the next agent may know them.
                Err(error)
                    if error.kind() == ErrorKind::PermissionDenied
                        && !is_owned(&found)
                        && access(&path, Access::WRITE_OK | Access::EXEC_OK).is_err() => {}
                emptied => emptied.map_err(|error| error_with_path(&path, &error))?,
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

/// Removes System V shared memory, semaphores and message queues, which outlive their processes.
pub(crate) fn clear_sysv_ipc() -> io::Result<()> {
    for (kind, call) in IPC_KINDS {
        let path = Path::new("/proc/sysvipc").join(kind);
        let listed = match fs::read_to_string(&path) {
            // This kernel is built without System V objects of this kind.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            listed => listed.map_err(|error| error_with_path(&path, &error))?,
        };
        // The first line has the column names; the columns of the others are the key, the id, and more.
        let ids = listed.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1));
        for id in ids.filter_map(|id| id.parse().ok()) {
            remove_ipc_object(call, id).map_err(|error| error_with_path(&path, &error))?;
        }
    }
    Ok(())
}

#[expect(unsafe_code, reason = "there is no safe call that removes one")]
fn remove_ipc_object(call: libc::c_long, id: libc::c_int) -> io::Result<()> {
    // `semctl` takes the command as its third argument and ignores the second when it removes. The other calls take the
    // command as their second argument.
    let command = libc::IPC_RMID;
    // SAFETY: the kernel takes no pointer for a removal.
    let done = unsafe { libc::syscall(call, id, command, command, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn error_with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("`{}`: {error}", path.display()))
}

/// The directories of a sandbox that are in memory.
const TMPFS_DIRECTORIES: [&str; 4] = ["/dev/mqueue", "/dev/shm", "/run", "/tmp"];

/// The maximum nesting of directories. Our choice: more than programs create, and less than the stack can hold.
const MAX_DEPTH: usize = 128;

/// The names in `/proc/sysvipc`, each with the system call that removes such an object.
const IPC_KINDS: [(&str, libc::c_long); 3] =
    [("shm", libc::SYS_shmctl), ("sem", libc::SYS_semctl), ("msg", libc::SYS_msgctl)];

#[cfg(test)]
mod tests {
    use std::os::unix::fs::chown;

    use rustix::process::geteuid;
    use rustix::thread::set_thread_uid;

    use super::*;

    /// The removal fails for a directory in which an agent may make files but not list them, so that no such file is
    /// left to the next agent.
    #[test]
    fn a_directory_that_takes_files_and_shows_none_is_told() {
        assert!(geteuid().is_root(), "this test has two users, which needs root");
        let agent = rustix::process::Uid::from_raw(54_321);
        for (mode, is_told) in [(0o1733, true), (0o1777, false), (0o711, false), (0o700, false)] {
            let temp_dir = tempfile::tempdir().unwrap();
            let other = temp_dir.path().join("other");
            fs::create_dir(&other).unwrap();
            fs::write(other.join("left"), "by the agent").unwrap();
            chown(other.join("left"), Some(agent.as_raw()), None).unwrap();
            fs::set_permissions(&other, Permissions::from_mode(mode)).unwrap();
            fs::set_permissions(temp_dir.path(), Permissions::from_mode(0o755)).unwrap();
            let path = temp_dir.path().to_owned();
            let removed = std::thread::spawn(move || {
                // The call changes the user of this thread only.
                set_thread_uid(agent).unwrap();
                remove_owned_entries(&path, MAX_DEPTH)
            });
            let removed = removed.join().unwrap();
            assert_eq!(removed.is_err(), is_told, "{mode:o} {removed:?}");
            assert_eq!(other.join("left").exists(), mode != 0o1777, "{mode:o}");
        }
    }
}
