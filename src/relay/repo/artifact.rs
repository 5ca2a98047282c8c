//! What came out of a sandbox, on this machine's disk until it is delivered.

use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{RepoError, SandboxBranch};
use crate::base::dir_tree;

/// The directory of one relay. It is kept where the work is held, so that none is ever lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArtifactDir {
    directory: PathBuf,
}

/// How much of what is held, has failed or was left is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetentionLimits {
    /// Of one grant's runs. With so many, or with so many bytes, its next run that has a branch is refused.
    pub grant_works: u64,
    pub grant_bytes: u64,
    /// Of all runs.
    pub works: u64,
    pub bytes: u64,
    /// A service throws away what was kept for so long.
    #[serde(with = "humantime_serde")]
    pub age: Duration,
}

impl Default for RetentionLimits {
    fn default() -> Self {
        Self {
            grant_works: 200,
            grant_bytes: 16 << 30,
            works: 5_000,
            bytes: 128 << 30,
            age: Duration::from_hours(90 * 24),
        }
    }
}

/// A file that takes so much and no more.
#[derive(Debug)]
pub struct BoundedFile {
    file: File,
    path: PathBuf,
    left: u64,
    limit: u64,
}

impl ArtifactDir {
    /// The directory is made, for us alone; it is there after a power cut.
    pub fn create(directory: &Path) -> Result<Self, RepoError> {
        let disk = |source| RepoError::Disk { path: directory.to_owned(), source };
        if !directory.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(disk)?;
            for made in directory.ancestors().skip(1).take(CREATED_DIR_DEPTH) {
                sync_directory(made).map_err(disk)?;
            }
        }
        Ok(Self::from_path(directory))
    }

    /// The same, whether it is there or not.
    pub fn from_path(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The agent's commits, exactly.
    pub fn bundle_path(&self) -> PathBuf {
        self.directory.join("bundle")
    }

    /// The same for people to read.
    pub fn patches_path(&self) -> PathBuf {
        self.directory.join("patches")
    }

    /// Where the agent works, or has worked. Git must never be run in it on this machine.
    pub fn workspace_path(&self) -> PathBuf {
        self.directory.join("workspace")
    }

    /// Starts one of the files anew.
    pub fn create_bounded(&self, path: PathBuf, limit: u64) -> Result<BoundedFile, RepoError> {
        let file =
            File::create(&path).map_err(|source| RepoError::Disk { path: path.clone(), source })?;
        Ok(BoundedFile { file, path, left: limit, limit })
    }

    /// The line that brings held work into any clone of the repository, as a branch of its own beside what is there: that
    /// of the row `id`.
    pub fn apply_command(&self, branch: &SandboxBranch, id: &str) -> String {
        let bundle = self.bundle_path().display().to_string().replace('\'', r"'\''");
        let (from, to) = (branch.to_ref(), held_branch_name(branch, id));
        format!("git -c fetch.fsckObjects=true fetch '{bundle}' '{from}:refs/heads/{to}'")
    }

    /// After delivery.
    pub fn discard(self) -> Result<(), RepoError> {
        let disk = |source| RepoError::Disk { path: self.directory.clone(), source };
        dir_tree::remove_tree(&self.directory).map_err(disk)
    }
}

impl BoundedFile {
    /// # Errors
    /// [`RepoError::TooMuch`] where it is more than the file may have: what has come by then is kept, and nothing else.
    pub fn push(&mut self, piece: &[u8]) -> Result<(), RepoError> {
        let Some(left) = self.left.checked_sub(piece.len() as u64) else {
            return Err(RepoError::TooMuch { path: self.path.clone(), limit: self.limit });
        };
        self.left = left;
        let disk = |source| RepoError::Disk { path: self.path.clone(), source };
        self.file.write_all(piece).map_err(disk)
    }

    /// On disk, also after a power cut.
    pub fn finish(self) -> Result<(), RepoError> {
        let synced = self
            .file
            .sync_all()
            .and_then(|()| sync_directory(self.path.parent().unwrap_or(&self.path)));
        synced.map_err(|source| RepoError::Disk { path: self.path, source })
    }
}

/// Where held work is put in a clone. The last of an id is what differs most.
pub fn held_branch_name(branch: &SandboxBranch, id: &str) -> String {
    let short = &id[id.floor_char_boundary(id.len().saturating_sub(SHORT_ID_BYTES))..];
    format!("held/{}-{short}", branch.key())
}

const SHORT_ID_BYTES: usize = 8;

/// A name in a directory is on the disk when the directory is.
fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Of a work's directory below what was there before: `work`, and the relay's own.
const CREATED_DIR_DEPTH: usize = 2;
