//! Who has a state directory.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Held for as long as this lives, and given up by the kernel when the process ends.
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    pub(super) fn take(state_dir: &Path) -> anyhow::Result<Self> {
        let shown = state_dir.display();
        let unusable = || format!("the state directory `{shown}` cannot be used");
        let audit = state_dir.join("audit");
        DirBuilder::new().recursive(true).mode(0o700).create(audit).with_context(unusable)?;
        let path = state_dir.join("serve.lock");
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let file = file.with_context(unusable)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
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
