//! The directories that a new run is written to.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::RunServiceConfig;

impl RunServiceConfig {
    /// Returns the directories that a run needs, each with the name of its check. They may be on disks of their own.
    pub fn written_directories(&self) -> [(&'static str, PathBuf); 3] {
        [
            ("storage", self.state_dir.clone()),
            ("audit", self.audit_dir()),
            ("run_dir", self.host.run_dir.clone()),
        ]
    }
}

/// Checks that a directory can take a new file of 64 KiB, by writing one.
///
/// # Errors
/// Returns the error of the file system.
pub fn check_writable(directory: &Path) -> io::Result<()> {
    let probe = directory.join(format!("probe-{}", Uuid::now_v7()));
    let made = File::options().write(true).create_new(true).open(&probe);
    made.and_then(|mut file| {
        let written = file.write_all(&vec![0; MIN_WRITABLE_BYTES]);
        fs::remove_file(&probe).and(written)
    })
}

/// The number of bytes that the check writes into a directory. Our choice: more than a run needs to begin.
const MIN_WRITABLE_BYTES: usize = 64 << 10;
