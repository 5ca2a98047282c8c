//! The process that writes an audit log at this moment, as the kernel's list of file locks names it.
//!
//! A gateway holds an exclusive lock on its log for as long as it writes the log. Taking the lock would also show that,
//! but a gateway that starts at that moment would then refuse to open its log. Reading `/proc/locks` disturbs no
//! process.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{major, minor};

/// Returns the ID of the process that writes a log, or `None` if no process of this PID namespace does.
///
/// # Errors
/// Returns an error if the log or the list of locks cannot be read.
pub fn find_writer(log: &Path) -> io::Result<Option<u32>> {
    let metadata = log.metadata()?;
    let locks = fs::read_to_string(LOCKS_FILE)?;
    Ok(find_lock_holder(&locks, metadata.dev(), metadata.ino()))
}

/// Finds the holder of an exclusive lock in a text of lines like `1: FLOCK  ADVISORY  WRITE 708 fe:01:1835 0 EOF`.
fn find_lock_holder(locks: &str, device: u64, inode: u64) -> Option<u32> {
    let file = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    locks.lines().find_map(|line| {
        let mut columns = line.split_ascii_whitespace().skip(1);
        let is_exclusive = columns.next() == Some("FLOCK") && columns.nth(1) == Some("WRITE");
        let process = columns.next()?.parse().ok()?;
        (is_exclusive && columns.next() == Some(&file)).then_some(process)
    })
}

/// The kernel's list of file locks, as the manual page `proc_locks(5)` describes it.
const LOCKS_FILE: &str = "/proc/locks";

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
        let device = rustix::fs::makedev(0xfe, 1);
        assert_eq!(find_lock_holder(locks, device, 1835), Some(14));
        assert_eq!(find_lock_holder(locks, device, 1837), None);
        // The kernel marks a process that waits for the lock with an arrow. That process does not write.
        let waiter = "4: -> FLOCK  ADVISORY  WRITE 14 fe:01:1835 0 EOF\n";
        assert_eq!(find_lock_holder(waiter, device, 1835), None);
    }
}
