//! What came out of a sandbox, on this machine's disk until it is delivered.

use std::fs::{self, DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::{Branch, Error};

/// The directory of one relay. It is kept where the work is held, so that none is ever lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifacts {
    directory: PathBuf,
}

/// A file that takes so much and no more.
#[derive(Debug)]
pub struct Spool {
    file: File,
    path: PathBuf,
    left: u64,
    limit: u64,
}

impl Artifacts {
    /// The directory is made, for us alone.
    pub fn create(directory: &Path) -> Result<Self, Error> {
        let disk = |source| Error::Disk { path: directory.to_owned(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(disk)?;
        Ok(Self { directory: directory.to_owned() })
    }

    /// A directory that was made before, and may be gone.
    pub fn at(directory: PathBuf) -> Self {
        Self { directory }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The agent's commits, exactly.
    pub fn bundle(&self) -> PathBuf {
        self.directory.join("bundle")
    }

    /// The same for people to read.
    pub fn patches(&self) -> PathBuf {
        self.directory.join("patches")
    }

    /// Starts one of the files anew.
    pub fn spool(&self, path: PathBuf, limit: u64) -> Result<Spool, Error> {
        let file =
            File::create(&path).map_err(|source| Error::Disk { path: path.clone(), source })?;
        Ok(Spool { file, path, left: limit, limit })
    }

    /// The line that brings held work into any clone of the repository, as a branch of its own beside what is there.
    pub fn apply_line(&self, branch: &Branch) -> String {
        let bundle = self.bundle().display().to_string().replace('\'', r"'\''");
        format!("git fetch '{bundle}' '{}:refs/heads/held/{}'", branch.to_ref(), branch.key())
    }

    /// After delivery.
    pub fn discard(self) -> Result<(), Error> {
        let disk = |source| Error::Disk { path: self.directory.clone(), source };
        fs::remove_dir_all(&self.directory).map_err(disk)
    }
}

impl Spool {
    /// # Errors
    /// [`Error::TooMuch`] where it is more than the file may have: what has come by then is kept, and nothing else.
    pub fn push(&mut self, piece: &[u8]) -> Result<(), Error> {
        let Some(left) = self.left.checked_sub(piece.len() as u64) else {
            return Err(Error::TooMuch { path: self.path.clone(), limit: self.limit });
        };
        self.left = left;
        let disk = |source| Error::Disk { path: self.path.clone(), source };
        self.file.write_all(piece).map_err(disk)
    }

    /// On disk, also after a power cut.
    pub fn finish(self) -> Result<(), Error> {
        self.file.sync_all().map_err(|source| Error::Disk { path: self.path, source })
    }
}
