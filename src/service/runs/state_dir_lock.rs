//! The lock that gives one process the state directory.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio::time::{Instant, sleep};

use crate::base::private_dir;

/// A lock on a state directory. The kernel releases the lock when the value is dropped or the process ends.
#[derive(Debug)]
pub struct StateDirLock {
    _directory: File,
}

impl StateDirLock {
    /// Takes the lock, and waits a moment if another holder exists: a child between fork and exec may still hold the
    /// lock of a dead process.
    ///
    /// # Errors
    /// Returns an error if another process holds the directory, or the directory cannot be used.
    pub async fn acquire(state_dir: &Path) -> anyhow::Result<Self> {
        let shown = state_dir.display();
        let unusable = || format!("the state directory `{shown}` cannot be used");
        let audit = state_dir.join("audit");
        private_dir::make(state_dir, 0o700).with_context(unusable)?;
        DirBuilder::new().recursive(true).mode(0o700).create(audit).with_context(unusable)?;
        // The directory itself is locked. A file in it could be deleted, and a second process would lock a new file.
        let directory = File::open(state_dir).with_context(unusable)?;
        let patience = Instant::now() + LOCK_TIMEOUT;
        let taken = loop {
            match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::AGAIN) if Instant::now() < patience => sleep(RETRY_INTERVAL).await,
                taken => break taken,
            }
        };
        match taken {
            Ok(()) => Ok(Self { _directory: directory }),
            Err(Errno::AGAIN) => {
                bail!(
                    "another service has the state directory `{shown}`; stop it, or choose another"
                )
            }
            Err(error) => Err(error).with_context(unusable),
        }
    }
}

/// The maximum wait for the lock. Our choice: longer than a child needs from fork to exec on a busy machine.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
/// The interval between two attempts to take the lock. Our choice.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
