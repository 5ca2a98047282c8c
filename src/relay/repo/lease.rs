//! The lease of a branch: one run at a time holds a branch, on this machine and across restarts.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::{BranchKey, RepoError, SandboxBranch};

/// The exclusive right to move a branch, as long as a clone of this value lives. The kernel releases the file lock of a
/// killed process, so no lease outlives its holder.
#[derive(Clone, Debug)]
pub struct BranchLease {
    file: Arc<LeaseFile>,
}

#[derive(Debug)]
struct LeaseFile {
    branch: SandboxBranch,
    directory: PathBuf,
    fence: u64,
    lock: File,
}

impl BranchLease {
    /// Acquires the lease of a branch, whose files are in a directory of its own below `parent`. Does not wait.
    ///
    /// # Errors
    /// Returns [`RepoError::BranchInUse`] if another run or process holds the lease, or an error if the disk cannot be
    /// used.
    pub fn try_acquire(parent: &Path, key: &BranchKey) -> Result<Self, RepoError> {
        let directory = parent.join(key.as_str());
        let disk = |source| RepoError::Io { path: directory.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(disk)?;
        let path = directory.join("lease");
        // Never truncated on opening: the file's number is still needed, and another holder may be reading it.
        let open = File::options().read(true).write(true).create(true).truncate(false).open(path);
        let mut lock = open.map_err(disk)?;
        let branch = SandboxBranch::from_key(key.clone());
        match lock.try_lock() {
            Ok(()) => (),
            Err(TryLockError::WouldBlock) => return Err(RepoError::BranchInUse { branch }),
            Err(TryLockError::Error(source)) => return Err(disk(source)),
        }
        // Only the holder of the lock may read and advance the number.
        let fence = next_fence(&mut lock).map_err(disk)?;
        Ok(Self { file: Arc::new(LeaseFile { branch, directory, fence, lock }) })
    }

    /// Acquires the lease as soon as no other holder has it. Returns [`RepoError::BranchInUse`] after `max_wait`.
    pub async fn acquire_with_timeout(
        parent: &Path,
        key: &BranchKey,
        max_wait: Duration,
    ) -> Result<Self, RepoError> {
        let start = Instant::now();
        loop {
            match Self::try_acquire(parent, key) {
                Err(RepoError::BranchInUse { .. }) if start.elapsed() < max_wait => {
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
                result => return result,
            }
        }
    }

    /// Returns true if a process holds the lease of a branch. The check writes nothing. A process that tries to acquire
    /// the lease at this very moment may see it as held.
    pub fn is_leased(parent: &Path, key: &BranchKey) -> Result<bool, RepoError> {
        let path = parent.join(key.as_str()).join("lease");
        let disk = |source| RepoError::Io { path: path.clone(), source };
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            opened => opened.map_err(disk)?,
        };
        match file.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(source)) => Err(disk(source)),
        }
    }

    pub fn branch(&self) -> &SandboxBranch {
        &self.file.branch
    }

    /// Returns the fence, a number that is greater than in every earlier lease of this branch. A store that keeps the
    /// number can refuse a late writer.
    pub fn fence(&self) -> u64 {
        self.file.fence
    }

    /// Creates an empty directory of this name, which lives as long as the lease. Leftovers of an earlier holder are
    /// removed.
    pub(super) fn create_scratch_dir(&self, name: &str) -> Result<PathBuf, RepoError> {
        let path = self.file.directory.join(name);
        let disk = |source| RepoError::Io { path: path.clone(), source };
        if path.exists() {
            fs::remove_dir_all(&path).map_err(disk)?;
        }
        DirBuilder::new().mode(0o700).create(&path).map_err(disk)?;
        Ok(path)
    }
}

/// Removes the scratch directories while the lock is still held, so that no other holder can be using them.
impl Drop for LeaseFile {
    fn drop(&mut self) {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        for used in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            // The next holder removes what cannot be removed now.
            let _ = fs::remove_dir_all(used.path());
        }
        // Closing the file is not enough: a child process that another thread just starts may have inherited the file.
        let _ = self.lock.unlock();
    }
}

/// Reads, advances and stores the fence. A power cut or a person may have emptied the file. So the fence is never less
/// than the time in milliseconds, which is greater than every fence that a row has stored before.
fn next_fence(file: &mut File) -> io::Result<u64> {
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(since.as_millis()).unwrap_or_default();
    let fence = text.trim().parse().unwrap_or(0_u64).saturating_add(1).max(now);
    file.rewind()?;
    // The new number has at least as many digits as the old one, so no digit of the old one remains.
    file.write_all(format!("{fence}\n").as_bytes())?;
    file.sync_data()?;
    Ok(fence)
}

/// The interval between two attempts to acquire a lease. Runs take minutes, so a tenth of a second is short enough.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
