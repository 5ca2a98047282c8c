//! The space of this machine's disks, and errors that pass when a disk has free space again.
//!
//! The functions for errors check the types of errors and never their texts, because an agent's program can print any text.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::path::Path;

use rustix::io::Errno;

use super::db;

/// The space of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskSpace {
    /// The bytes that a user other than root can still write.
    pub free_bytes: u64,
    /// All bytes of the file system.
    pub size_bytes: u64,
}

/// Returns the space of the file system that has this path.
///
/// # Errors
/// Returns an error if the path does not exist, or if its file system does not answer.
pub fn measure_space(path: &Path) -> io::Result<DiskSpace> {
    let found = rustix::fs::statvfs(path)?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Ok(DiskSpace { free_bytes: bytes(found.f_bavail), size_bytes: bytes(found.f_blocks) })
}

/// Returns true if an error, or one of its causes, says that a disk or a quota is full.
pub fn is_disk_full(error: &(dyn Error + 'static)) -> bool {
    error_chain(error).any(|cause| {
        has_io_error(cause, |error| DISK_FULL_KINDS.contains(&error.kind()))
            || has_sqlite_error(cause, &[SQLITE_DISK_FULL])
    })
}

/// Returns true if the same call may succeed later without another change: the disk is full or fails, or this process
/// or machine has no file descriptors or memory left.
pub fn is_transient(error: &(dyn Error + 'static)) -> bool {
    let passes = |error: &io::Error| {
        DISK_FULL_KINDS.contains(&error.kind())
            || Errno::from_io_error(error).is_some_and(is_resource_shortage)
    };
    let codes = [SQLITE_DISK_FULL, rusqlite::ErrorCode::SystemIoFailure];
    error_chain(error).any(|cause| has_io_error(cause, passes) || has_sqlite_error(cause, &codes))
}

fn error_chain<'e>(
    error: &'e (dyn Error + 'static),
) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

fn has_io_error(error: &(dyn Error + 'static), is_it: impl Fn(&io::Error) -> bool) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(&is_it)
        || error.downcast_ref::<Errno>().is_some_and(|errno| is_it(&(*errno).into()))
}

fn has_sqlite_error(error: &(dyn Error + 'static), codes: &[rusqlite::ErrorCode]) -> bool {
    let shared =
        error.downcast_ref::<db::DatabaseError>().and_then(db::DatabaseError::as_sqlite_error);
    let sqlite = shared.or_else(|| error.downcast_ref());
    sqlite.and_then(rusqlite::Error::sqlite_error_code).is_some_and(|code| codes.contains(&code))
}

fn is_resource_shortage(errno: Errno) -> bool {
    [Errno::IO, Errno::NFILE, Errno::MFILE, Errno::NOMEM].contains(&errno)
}

const DISK_FULL_KINDS: [ErrorKind; 2] = [ErrorKind::StorageFull, ErrorKind::QuotaExceeded];

const SQLITE_DISK_FULL: rusqlite::ErrorCode = rusqlite::ErrorCode::DiskFull;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_full_disk_is_found_wherever_it_stands_in_an_error() {
        let full = || io::Error::from_raw_os_error(28);
        let sqlite = || {
            let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_FULL);
            rusqlite::Error::SqliteFailure(code, None)
        };
        let errors: [anyhow::Error; 5] = [
            full().into(),
            anyhow::Error::from(full()).context("one").context("two"),
            io::Error::from_raw_os_error(122).into(),
            anyhow::Error::from(sqlite()).context("one"),
            anyhow::Error::from(db::DatabaseError::Sqlite(Arc::new(sqlite()))).context("one"),
        ];
        for error in &errors {
            assert!(is_disk_full(error.as_ref()) && is_transient(error.as_ref()), "{error:?}");
        }
    }

    #[test]
    fn what_does_not_pass_is_no_full_disk() {
        let errno = |number| anyhow::Error::from(io::Error::from_raw_os_error(number));
        for number in [5, 12, 23, 24] {
            let error = errno(number);
            assert!(is_transient(error.as_ref()) && !is_disk_full(error.as_ref()), "{error:?}");
        }
        // An error that has only the text of a full disk does not count.
        let text_only = anyhow::anyhow!("No space left on device (os error 28)");
        for error in [errno(2), errno(13), errno(30), text_only] {
            assert!(!is_transient(error.as_ref()) && !is_disk_full(error.as_ref()), "{error:?}");
        }
    }
}
