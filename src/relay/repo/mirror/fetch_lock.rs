//! The lock that fetches of one mirror share, with everything else that writes objects into it, and the disk space that
//! fetches may take together.
//!
//! A git that is killed at a limit leaves the pack that it was writing, up to the whole limit. Such files have random
//! names, so only the lock tells them from those of a fetch that is under way.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::{RepoError, RepoMirror, SandboxBranch};
use crate::base::dir_tree;
use crate::relay::git::GitError;
use crate::relay::repo::remote_error::map_network_error;

/// The lock of one or more gits that write objects, or of one that removes what they have left.
pub(super) struct FetchLock(File);

/// Closing the file is not enough: a child process that another thread just starts may have inherited the file.
impl Drop for FetchLock {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

impl FetchLock {
    /// Acquires the lock for a fetch, and waits at most `max_wait` for a process that packs the mirror, or until `cancel`
    /// is cancelled. The first of the fetches removes the unfinished files of earlier ones.
    #[expect(clippy::disallowed_methods, reason = "git's calls block a thread of their own")]
    fn acquire_shared(
        git_dir: &Path,
        max_wait: Duration,
        cancel: &CancellationToken,
    ) -> Result<Self, FetchLockError> {
        if let Some(alone) = Self::try_acquire_alone(git_dir)? {
            alone.remove_unfinished(git_dir)?;
        }
        let (file, start) = (File::create(git_dir.with_extension(EXTENSION))?, Instant::now());
        loop {
            match file.try_lock_shared() {
                Ok(()) => return Ok(Self(file)),
                Err(TryLockError::Error(error)) => return Err(error.into()),
                Err(TryLockError::WouldBlock) if cancel.is_cancelled() => {
                    return Err(FetchLockError::Cancelled);
                }
                Err(TryLockError::WouldBlock) if start.elapsed() >= max_wait => {
                    return Err(FetchLockError::Timeout(max_wait));
                }
                Err(TryLockError::WouldBlock) => sleep(POLL_INTERVAL),
            }
        }
    }

    /// Acquires the lock beside fetches, if no process packs the mirror alone.
    pub(super) fn try_acquire_shared(git_dir: &Path) -> io::Result<Option<Self>> {
        let file = File::create(git_dir.with_extension(EXTENSION))?;
        match file.try_lock_shared() {
            Ok(()) => Ok(Some(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Acquires the lock if no fetch of the mirror is under way.
    pub(super) fn try_acquire_alone(git_dir: &Path) -> io::Result<Option<Self>> {
        let file = File::create(git_dir.with_extension(EXTENSION))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Removes the files that a killed git has not finished. Only the sole holder of the lock may do so.
    pub(super) fn remove_unfinished(&self, git_dir: &Path) -> io::Result<()> {
        let Self(_held) = self;
        // Loose objects are written in directories of their own, packs in `pack`.
        for directory in fs::read_dir(git_dir.join("objects"))? {
            let directory = directory?;
            if !directory.file_type()?.is_dir() {
                continue;
            }
            for entry in fs::read_dir(directory.path())? {
                let entry = entry?;
                let name = entry.file_name();
                let is_unfinished =
                    UNFINISHED_PREFIXES.iter().any(|of| name.as_encoded_bytes().starts_with(of));
                if is_unfinished && entry.file_type()?.is_file() {
                    fs::remove_file(entry.path())?;
                }
            }
        }
        Ok(())
    }
}

/// The reasons for which a fetch cannot begin.
pub(super) enum FetchLockError {
    Io(io::Error),
    /// Another process packs the mirror for longer than a fetch may take.
    Timeout(Duration),
    Cancelled,
}

impl From<io::Error> for FetchLockError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl RepoMirror {
    /// Runs `fetch`, or anything else that writes objects into the mirror, under the lock. Removes what it leaves
    /// unfinished. The outer error is of the lock or the disk, and the inner one is that of `fetch`.
    pub(in crate::relay::repo) fn run_locked_fetch<T, E>(
        &self,
        fetch: impl FnOnce() -> Result<T, E>,
    ) -> Result<Result<T, E>, RepoError> {
        let disk = |source| RepoError::Io { path: self.git_dir.clone(), source };
        let (max_wait, cancel) = (self.limits.time, self.git.cancellation());
        let command = "fetch".to_owned();
        let lock = match FetchLock::acquire_shared(&self.git_dir, max_wait, cancel) {
            Ok(lock) => lock,
            Err(FetchLockError::Io(error)) => return Err(disk(error)),
            Err(FetchLockError::Cancelled) => return Err(GitError::Cancelled { command }.into()),
            Err(FetchLockError::Timeout(after)) => {
                return Err(map_network_error(GitError::Timeout { command, after }));
            }
        };
        let fetched = fetch();
        drop(lock);
        if fetched.is_err()
            && let Some(alone) = FetchLock::try_acquire_alone(&self.git_dir).map_err(disk)?
        {
            alone.remove_unfinished(&self.git_dir).map_err(disk)?;
        }
        Ok(fetched)
    }

    /// Removes the lock files that a killed git has left at refs of a branch, whose lease the caller holds. Only the holder
    /// moves these refs, and a sweep that packs them holds the fetch lock. The files stay while another fetch is under way.
    pub(super) fn remove_ref_locks(&self, refs: [&str; 2]) -> Result<(), RepoError> {
        let disk = |source| RepoError::Io { path: self.git_dir.clone(), source };
        let alone = FetchLock::try_acquire_alone(&self.git_dir).map_err(disk)?;
        let Some(_alone) = alone else { return Ok(()) };
        for name in refs {
            match fs::remove_file(self.git_dir.join(format!("{name}.lock"))) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(disk(error)),
                _ => (),
            }
        }
        Ok(())
    }

    /// Returns an error if the mirror takes more bytes than it may. Then the next sweep packs it as tightly as git can.
    pub(in crate::relay::repo) fn check_not_full(
        &self,
        branch: &SandboxBranch,
    ) -> Result<(), RepoError> {
        let disk = |source| RepoError::Io { path: self.git_dir.clone(), source };
        let max_bytes = self.limits.mirror_bytes;
        if dir_tree::disk_usage(&self.git_dir, max_bytes).map_err(disk)? <= max_bytes {
            return Ok(());
        }
        File::create(self.git_dir.join(FULL_MARKER)).map_err(disk)?;
        let why = format!(
            "its mirror on this machine has more than {max_bytes} bytes, until `cogni-gateway relay sweep` has packed it"
        );
        Err(RepoError::FetchLimitExceeded { branch: branch.clone(), why, limits: self.limits })
    }
}

/// The file that marks a mirror as full, for the next sweep.
pub(super) const FULL_MARKER: &str = "relay-full";

const EXTENSION: &str = "fetch";

/// The names that git gives to files that it is writing.
const UNFINISHED_PREFIXES: [&[u8]; 2] = [b"tmp_", b".tmp-"];

/// The interval of attempts to acquire the lock. Our choice.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
