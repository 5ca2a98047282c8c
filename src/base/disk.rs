//! Errors that come from this machine's disk and pass when it has room again.
//!
//! Only types are looked at, never texts: what a program prints can be made to look like anything.

use std::error::Error;
use std::io::{self, ErrorKind};

use rustix::io::Errno;

use super::db;

/// Returns whether an error, or what has caused it, says that a disk or a quota is full.
pub fn is_full(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| {
        is_io(cause, |error| FULL.contains(&error.kind())) || is_sqlite(cause, &[DISK_FULL])
    })
}

/// Returns whether the same may succeed later without anything else being changed: the disk is full or fails, or this
/// process or machine has no file descriptors or memory left.
pub fn may_pass(error: &(dyn Error + 'static)) -> bool {
    let passes = |error: &io::Error| {
        FULL.contains(&error.kind()) || Errno::from_io_error(error).is_some_and(is_scarce)
    };
    let codes = [DISK_FULL, rusqlite::ErrorCode::SystemIoFailure];
    causes(error).any(|cause| is_io(cause, passes) || is_sqlite(cause, &codes))
}

fn causes<'e>(error: &'e (dyn Error + 'static)) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

fn is_io(error: &(dyn Error + 'static), is_it: impl Fn(&io::Error) -> bool) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(&is_it)
        || error.downcast_ref::<Errno>().is_some_and(|errno| is_it(&(*errno).into()))
}

fn is_sqlite(error: &(dyn Error + 'static), codes: &[rusqlite::ErrorCode]) -> bool {
    let shared = error.downcast_ref::<db::Error>().and_then(db::Error::sqlite);
    let sqlite = shared.or_else(|| error.downcast_ref());
    sqlite.and_then(rusqlite::Error::sqlite_error_code).is_some_and(|code| codes.contains(&code))
}

fn is_scarce(errno: Errno) -> bool {
    [Errno::IO, Errno::NFILE, Errno::MFILE, Errno::NOMEM].contains(&errno)
}

const FULL: [ErrorKind; 2] = [ErrorKind::StorageFull, ErrorKind::QuotaExceeded];

const DISK_FULL: rusqlite::ErrorCode = rusqlite::ErrorCode::DiskFull;

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
            anyhow::Error::from(db::Error::Sqlite(Arc::new(sqlite()))).context("one"),
        ];
        for error in &errors {
            assert!(is_full(error.as_ref()) && may_pass(error.as_ref()), "{error:?}");
        }
    }

    #[test]
    fn what_does_not_pass_is_no_full_disk() {
        let errno = |number| anyhow::Error::from(io::Error::from_raw_os_error(number));
        for number in [5, 12, 23, 24] {
            let error = errno(number);
            assert!(may_pass(error.as_ref()) && !is_full(error.as_ref()), "{error:?}");
        }
        // A text that says so is not believed.
        let said = anyhow::anyhow!("No space left on device (os error 28)");
        for error in [errno(2), errno(13), errno(30), said] {
            assert!(!may_pass(error.as_ref()) && !is_full(error.as_ref()), "{error:?}");
        }
    }
}
