//! One run at a time at a branch, on this machine and across its restarts.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::{BranchKey, RepoError, SandboxBranch};

/// The right to move a branch, for as long as a clone of it lives. The kernel takes it back from a process that is
/// killed, so nothing is ever left locked.
#[derive(Clone, Debug)]
pub struct BranchLease {
    held: Arc<LeaseFile>,
}

#[derive(Debug)]
struct LeaseFile {
    branch: SandboxBranch,
    directory: PathBuf,
    fence: u64,
    lock: File,
}

impl BranchLease {
    /// Takes the lease of a branch, whose files are in a directory of its own below `parent`.
    ///
    /// # Errors
    /// [`RepoError::Busy`] where another run has it.
    pub fn try_acquire(parent: &Path, key: &BranchKey) -> Result<Self, RepoError> {
        let directory = parent.join(key.as_str());
        let disk = |source| RepoError::Disk { path: directory.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(disk)?;
        let path = directory.join("lease");
        let open = File::options().read(true).write(true).create(true).truncate(false).open(path);
        let mut lock = open.map_err(disk)?;
        let branch = SandboxBranch::from_key(key.clone());
        match lock.try_lock() {
            Ok(()) => (),
            Err(TryLockError::WouldBlock) => return Err(RepoError::Busy { branch }),
            Err(TryLockError::Error(source)) => return Err(disk(source)),
        }
        let fence = next_fence(&mut lock).map_err(disk)?;
        Ok(Self { held: Arc::new(LeaseFile { branch, directory, fence, lock }) })
    }

    /// Takes the lease as soon as nobody else has it, or says [`RepoError::Busy`] after `patience`.
    pub async fn acquire_with_timeout(
        parent: &Path,
        key: &BranchKey,
        patience: Duration,
    ) -> Result<Self, RepoError> {
        let begun = Instant::now();
        loop {
            match Self::try_acquire(parent, key) {
                Err(RepoError::Busy { .. }) if begun.elapsed() < patience => {
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
                taken => return taken,
            }
        }
    }

    /// Whether somebody has the lease of a branch. To look is not to take: nothing is made or written, though whoever asks
    /// for it in the same moment may be told that it is taken.
    pub fn is_leased(parent: &Path, key: &BranchKey) -> Result<bool, RepoError> {
        let path = parent.join(key.as_str()).join("lease");
        let disk = |source| RepoError::Disk { path: path.clone(), source };
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
        &self.held.branch
    }

    /// Greater than that of every lease of this branch before: whoever writes it down can tell a late writer.
    pub fn fence(&self) -> u64 {
        self.held.fence
    }

    /// An empty directory of this name, for as long as the lease is held. What an earlier holder left in it is removed.
    pub(super) fn create_scratch_dir(&self, name: &str) -> Result<PathBuf, RepoError> {
        let path = self.held.directory.join(name);
        let disk = |source| RepoError::Disk { path: path.clone(), source };
        if path.exists() {
            fs::remove_dir_all(&path).map_err(disk)?;
        }
        DirBuilder::new().mode(0o700).create(&path).map_err(disk)?;
        Ok(path)
    }
}

/// What was looked at in quarantine goes with whoever looked at it, while nobody else can be here.
impl Drop for LeaseFile {
    fn drop(&mut self) {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        for used in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            // What cannot be removed now, the next holder removes.
            let _ = fs::remove_dir_all(used.path());
        }
        // Closing is not enough: a child that another thread is about to start may hold the file, too.
        let _ = self.lock.unlock();
    }
}

/// The file may have been lost, or emptied, by a power cut or by somebody; rows are older than that, so what it says is
/// never less than the time.
fn next_fence(file: &mut File) -> io::Result<u64> {
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(since.as_millis()).unwrap_or_default();
    let fence = text.trim().parse().unwrap_or(0_u64).saturating_add(1).max(now);
    file.rewind()?;
    // Longer than the number before it, or as long: no digit of that one is left.
    file.write_all(format!("{fence}\n").as_bytes())?;
    file.sync_data()?;
    Ok(fence)
}

/// Runs are minutes long.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
