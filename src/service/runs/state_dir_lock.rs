//! Who has a state directory.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio::time::{Instant, sleep};

use crate::base::private_dir;

/// Held for as long as this lives, and given up by the kernel when the process ends.
#[derive(Debug)]
pub struct StateDirLock {
    _file: File,
}

impl StateDirLock {
    /// Waits a moment for one whose holder is dead: a child that it was about to start may have it still.
    ///
    /// # Errors
    /// Another process has the directory, or it cannot be used.
    pub async fn acquire(state_dir: &Path) -> anyhow::Result<Self> {
        let shown = state_dir.display();
        let unusable = || format!("the state directory `{shown}` cannot be used");
        let audit = state_dir.join("audit");
        private_dir::make(state_dir, 0o700).with_context(unusable)?;
        DirBuilder::new().recursive(true).mode(0o700).create(audit).with_context(unusable)?;
        let path = state_dir.join("serve.lock");
        let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = file.with_context(unusable)?;
        let patience = Instant::now() + LOCK_TIMEOUT;
        let taken = loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::AGAIN) if Instant::now() < patience => sleep(RETRY_INTERVAL).await,
                taken => break taken,
            }
        };
        match taken {
            Ok(()) => Ok(Self { _file: file }),
            Err(Errno::AGAIN) => {
                bail!(
                    "another service has the state directory `{shown}`; stop it, or choose another"
                )
            }
            Err(error) => Err(error).with_context(unusable),
        }
    }
}

/// From a fork to an exec, on a busy machine.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
