//! The extracted work of a run, on this machine's disk until it is delivered.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{RepoError, SandboxBranch};
use crate::base::dir_tree;

/// The directory of one work's files. The directory stays while the work is held, so that no work is lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArtifactDir {
    directory: PathBuf,
}

/// Limits on retained items: work that is held or has failed, and leftover workspaces. The defaults are our choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetentionLimits {
    /// The most items of one grant's runs. At this limit, or at the limit of bytes, the grant's next run with a branch
    /// is refused.
    pub grant_works: u64,
    /// The most bytes of one grant's items.
    pub grant_bytes: u64,
    /// The most items of all runs.
    pub works: u64,
    /// The most bytes of all runs' items.
    pub bytes: u64,
    /// The age after which a service removes an item.
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

/// A file that accepts a limited number of bytes.
#[derive(Debug)]
pub struct BoundedFile {
    file: File,
    path: PathBuf,
    remaining: u64,
    limit: u64,
}

impl ArtifactDir {
    /// Creates the directory with access for the present user only. The directory survives a power cut.
    pub fn create(directory: &Path) -> Result<Self, RepoError> {
        let disk = |source| RepoError::Io { path: directory.to_owned(), source };
        if !directory.is_dir() {
            // Each new directory is an entry of its parent, so the parents are synced, too.
            DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(disk)?;
            for created in directory.ancestors().skip(1).take(CREATED_DIR_DEPTH) {
                sync_directory(created).map_err(disk)?;
            }
        }
        Ok(Self::from_path(directory))
    }

    /// Names a directory, and does not create it.
    pub fn from_path(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the path of the bundle, which has the agent's exact commits.
    pub fn bundle_path(&self) -> PathBuf {
        self.directory.join("bundle")
    }

    /// Returns the path of the patches, the commits in a form that people can read.
    pub fn patches_path(&self) -> PathBuf {
        self.directory.join("patches")
    }

    /// Returns the path of the agent's workspace. Git on this machine must never run in the workspace.
    pub fn workspace_path(&self) -> PathBuf {
        self.directory.join("workspace")
    }

    /// Creates or empties one of the files.
    pub fn create_bounded(&self, path: PathBuf, limit: u64) -> Result<BoundedFile, RepoError> {
        let file =
            File::create(&path).map_err(|source| RepoError::Io { path: path.clone(), source })?;
        Ok(BoundedFile { file, path, remaining: limit, limit })
    }

    /// Returns the command line that fetches held work into any clone of the repository. The command makes a new
    /// branch, whose name has the end of the row's `id`.
    pub fn apply_command(&self, branch: &SandboxBranch, id: &str) -> String {
        // The path is in single quotes, and `'\''` is a quote within them: a path cannot end the word of the shell.
        let bundle = self.bundle_path().display().to_string().replace('\'', r"'\''");
        let (from, to) = (branch.to_ref(), held_branch_name(branch, id));
        format!("git -c fetch.fsckObjects=true fetch '{bundle}' '{from}:refs/heads/{to}'")
    }

    /// Moves the patches and the bundle to another directory of the same disk.
    pub fn move_work_to(&self, other: &Self) -> Result<(), RepoError> {
        let disk = |source| RepoError::Io { path: self.directory.clone(), source };
        fs::rename(self.patches_path(), other.patches_path()).map_err(disk)?;
        fs::rename(self.bundle_path(), other.bundle_path()).map_err(disk)?;
        sync_directory(&other.directory).map_err(disk)
    }

    /// Removes the patches and the bundle, if they are there.
    pub fn remove_work(&self) -> Result<(), RepoError> {
        for path in [self.patches_path(), self.bundle_path()] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => (),
                removed => removed.map_err(|source| RepoError::Io { path, source })?,
            }
        }
        Ok(())
    }

    /// Removes the directory, after the delivery.
    pub fn discard(self) -> Result<(), RepoError> {
        let disk = |source| RepoError::Io { path: self.directory.clone(), source };
        dir_tree::remove_tree(&self.directory).map_err(disk)
    }
}

impl BoundedFile {
    /// Appends a piece to the file.
    ///
    /// # Errors
    /// Returns [`RepoError::TooLarge`] if the piece does not fit within the limit. The file keeps the pieces before it.
    pub fn push(&mut self, piece: &[u8]) -> Result<(), RepoError> {
        // The piece is refused as a whole, before any byte of it is written.
        let Some(left) = self.remaining.checked_sub(piece.len() as u64) else {
            return Err(RepoError::TooLarge { path: self.path.clone(), limit: self.limit });
        };
        self.remaining = left;
        let disk = |source| RepoError::Io { path: self.path.clone(), source };
        self.file.write_all(piece).map_err(disk)
    }

    /// Closes the file, and waits until the disk has it, so that it survives a power cut.
    pub fn finish(self) -> Result<(), RepoError> {
        let synced = self
            .file
            .sync_all()
            .and_then(|()| sync_directory(self.path.parent().unwrap_or(&self.path)));
        synced.map_err(|source| RepoError::Io { path: self.path, source })
    }
}

/// Returns the name of the branch that held work gets in a clone. The name ends with the last digits of the ID, which
/// differ most between IDs.
pub fn held_branch_name(branch: &SandboxBranch, id: &str) -> String {
    // IDs begin with their time, so IDs of the same hour differ mostly in their ends.
    let short = &id[id.floor_char_boundary(id.len().saturating_sub(SHORT_ID_BYTES))..];
    format!("held/{}-{short}", branch.key())
}

/// The number of an ID's last bytes in a branch's name. Our choice.
const SHORT_ID_BYTES: usize = 8;

/// Syncs a directory, so that new names in it are on the disk.
fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// The number of directory levels that may be new above a work's directory: `work`, and the relay's state directory.
const CREATED_DIR_DEPTH: usize = 2;
