//! The process that writes an audit log at this moment, as the kernel's list of file locks names it.
//!
//! A gateway holds an exclusive lock on its log for as long as it writes the log. Taking the lock would also show that,
//! but a gateway that starts at that moment would then refuse to open its log. Reading `/proc/locks` disturbs no
//! process.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{major, minor};

use crate::base::regular_file::open_regular_file;

/// Returns the ID of the process that writes a log, or `None` if no process of this PID namespace does.
///
/// # Errors
/// Returns an error if the log or the list of locks cannot be read.
pub fn find_writer(log: &Path) -> io::Result<Option<u32>> {
    let file = open_regular_file(log)?;
    let name = lock_name(&file)?;
    Ok(find_lock_holder(&fs::read_to_string(LOCKS_FILE)?, &name))
}

/// Returns the name that the list of locks gives a file, such as `fe:01:1835`.
///
/// The list has the device of the mounted file system. `stat` gives a file of an overlay or a btrfs subvolume another
/// device, so the name is taken from the file's mount.
fn lock_name(file: &File) -> io::Result<String> {
    let descriptor = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let mounts = fs::read_to_string(MOUNTS_FILE)?;
    if let Some(name) = mounted_name(&descriptor, &mounts) {
        return Ok(name);
    }
    // An older kernel does not name the inode, and a detached mount has no line.
    let metadata = file.metadata()?;
    let device = metadata.dev();
    Ok(format!("{:02x}:{:02x}:{}", major(device), minor(device), metadata.ino()))
}

/// Finds the device and inode of a file in the kernel's texts about its descriptor and about all mounts.
fn mounted_name(descriptor: &str, mounts: &str) -> Option<String> {
    let field = |name: &str| descriptor.lines().find_map(|line| line.strip_prefix(name));
    let (mount, inode) = (field("mnt_id:")?.trim(), field("ino:")?.trim());
    // A line is like `36 35 254:1 / / rw,noatime - ext4 /dev/vda1 rw`.
    let device = mounts.lines().find_map(|line| {
        let mut columns = line.split_ascii_whitespace();
        (columns.next() == Some(mount)).then(|| columns.nth(1)).flatten()
    })?;
    let (major, minor) = device.split_once(':')?;
    let (major, minor) = (major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?);
    Some(format!("{major:02x}:{minor:02x}:{inode}"))
}

/// Finds the holder of an exclusive lock in a text of lines like `1: FLOCK  ADVISORY  WRITE 708 fe:01:1835 0 EOF`.
fn find_lock_holder(locks: &str, name: &str) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut columns = line.split_ascii_whitespace().skip(1);
        let is_exclusive = columns.next() == Some("FLOCK") && columns.nth(1) == Some("WRITE");
        let process = columns.next()?.parse().ok()?;
        (is_exclusive && columns.next() == Some(name)).then_some(process)
    })
}

/// The kernel's list of file locks, as the manual page `proc_locks(5)` describes it.
const LOCKS_FILE: &str = "/proc/locks";

/// The mounts of this process, as the manual page `proc_pid_mountinfo(5)` describes them.
const MOUNTS_FILE: &str = "/proc/self/mountinfo";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exclusive_lock_of_the_file_names_its_process() {
        let locks = "\
            1: POSIX  ADVISORY  WRITE 11 fe:01:1835 0 EOF\n\
            2: FLOCK  ADVISORY  READ  12 fe:01:1835 0 EOF\n\
            3: FLOCK  ADVISORY  WRITE 13 fe:01:1836 0 EOF\n\
            4: FLOCK  ADVISORY  WRITE 14 fe:01:1835 0 EOF\n";
        assert_eq!(find_lock_holder(locks, "fe:01:1835"), Some(14));
        assert_eq!(find_lock_holder(locks, "fe:01:1837"), None);
        // The kernel marks a process that waits for the lock with an arrow. That process does not write.
        let waiter = "4: -> FLOCK  ADVISORY  WRITE 14 fe:01:1835 0 EOF\n";
        assert_eq!(find_lock_holder(waiter, "fe:01:1835"), None);
    }

    /// G11: The writer is found on an overlay and in a subvolume, whose device in `stat` is not that of the list.
    #[test]
    fn a_file_is_named_by_the_device_of_its_mount() {
        let descriptor = "pos:\t0\nflags:\t0100000\nmnt_id:\t612\nino:\t1835\n";
        let mounts = "\
            61 1 254:1 / / rw,noatime - ext4 /dev/vda1 rw\n\
            612 61 0:73 / /srv/logs rw shared:1 - overlay overlay rw\n";
        assert_eq!(mounted_name(descriptor, mounts).as_deref(), Some("00:49:1835"));
        assert_eq!(mounted_name("pos:\t0\nmnt_id:\t612\n", mounts), None);
        assert_eq!(mounted_name("mnt_id:\t7\nino:\t1835\n", mounts), None);
    }
}
