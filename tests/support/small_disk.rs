//! A disk so small that a test can fill it. Mounting it needs root, as the Docker tests do.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

/// A tmpfs that is unmounted when dropped.
pub(crate) struct SmallDisk(TempDir);

impl SmallDisk {
    pub(crate) fn mount(bytes: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={bytes}");
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(dir.path())
            .output()
            .unwrap();
        assert!(
            mount.status.success(),
            "cannot mount a tmpfs; run the tests as root: {}",
            String::from_utf8_lossy(&mount.stderr)
        );
        Self(dir)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Fills every free page.
    pub(crate) fn fill(&self) {
        let mut ballast =
            OpenOptions::new().append(true).create(true).open(self.ballast()).unwrap();
        loop {
            match ballast.write(&[0; PAGE]) {
                Ok(_) => (),
                Err(error) if error.kind() == ErrorKind::StorageFull => return,
                Err(error) => panic!("filling the disk: {error}"),
            }
        }
    }

    /// Frees one page that [`fill`](Self::fill) took.
    pub(crate) fn free_one_page(&self) {
        let ballast = File::options().write(true).open(self.ballast()).unwrap();
        let pages = ballast.metadata().unwrap().len() / PAGE as u64;
        ballast.set_len((pages - 1) * PAGE as u64).unwrap();
    }

    pub(crate) fn free(&self) {
        fs::remove_file(self.ballast()).unwrap();
    }

    fn ballast(&self) -> PathBuf {
        self.path("ballast")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // The unmount is lazy, because a failing test may still hold files open.
        let unmounted = Command::new("umount").arg("-l").arg(self.0.path()).status().unwrap();
        assert!(unmounted.success() || std::thread::panicking());
    }
}

const PAGE: usize = 4096;
