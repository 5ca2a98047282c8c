//! The first process of a sandbox: the `cogni-init` that this program carries, or a file that the operator names.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{self, Path, PathBuf};

use uuid::Uuid;

use crate::base::private_dir::{self, DirectoryError};

/// The first process of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum InitBinary {
    /// No file: the root brings a bridge of its own.
    #[default]
    None,
    /// A file that the operator has named. Every root gets it.
    Configured(PathBuf),
    /// The `cogni-init` that this program carries. It is static, so every root can have it.
    BuiltIn {
        /// The directory that the file is written to when the first sandbox needs it. Container engines mount the file
        /// from there.
        directory: PathBuf,
    },
}

/// `cogni-init` cannot be written to the directory that sandboxes get it from.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot write `{}`: {source}; choose a writable state directory, or give your own cogni-init with `--init`",
    path.display()
)]
pub struct InitInstallError {
    path: PathBuf,
    source: io::Error,
}

impl InitBinary {
    /// Returns the file that a sandbox mounts, and writes the file first if it does not exist yet.
    ///
    /// # Errors
    /// Returns an error if the directory of a built-in `cogni-init` cannot be written.
    pub fn install_file(&self) -> Result<Option<PathBuf>, InitInstallError> {
        match self {
            Self::None => Ok(None),
            Self::Configured(path) => Ok(Some(path.clone())),
            Self::BuiltIn { directory } => {
                // A container engine mounts by absolute paths only.
                let path = path::absolute(directory.join(INIT_FILE_NAME));
                let path =
                    path.map_err(|source| InitInstallError { path: directory.clone(), source })?;
                match install_built_in(&path) {
                    Ok(()) => Ok(Some(path)),
                    Err(source) => Err(InitInstallError { path, source }),
                }
            }
        }
    }
}

/// Makes sure that the built-in `cogni-init` is at this path.
fn install_built_in(path: &Path) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    // The mode of a run's directory: other users pass through the directory, and cannot list it.
    private_dir::make(directory, 0o711).map_err(|error| match error {
        DirectoryError::Unusable { source, .. } => source,
        error => io::Error::other(error),
    })?;
    // Another owner could replace the program that all later sandboxes execute.
    if !is_safely_owned(directory)? {
        return Err(io::Error::other("another user owns the directory"));
    }
    match is_safely_owned(path) {
        // The file's name holds a digest of the program, so the same length means the same program.
        Ok(true) if fs::metadata(path)?.len() == BUILT_IN_INIT.len() as u64 => Ok(()),
        _ => write_program_atomically(path, BUILT_IN_INIT),
    }
}

/// Returns true if root or this process's user owns the file, and no other user can write to the file.
fn is_safely_owned(path: &Path) -> io::Result<bool> {
    let found = fs::metadata(path)?;
    let owners = [0, rustix::process::geteuid().as_raw()];
    Ok(owners.contains(&found.uid()) && found.mode() & 0o022 == 0)
}

/// Writes a program in one step: a file of this name is complete at any time, also while sandboxes execute it.
///
/// # Errors
/// Returns an error if the directory does not exist or cannot be written.
pub fn write_program_atomically(path: &Path, program: &[u8]) -> io::Result<()> {
    // Two runs may need the program at the same moment: each writes a partial file of its own.
    let mut partial = path.to_owned().into_os_string();
    partial.push(format!(".{}", Uuid::now_v7()));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o755)
        .open(&partial)
        .and_then(|mut file| {
            // The agent's user executes the file, whatever the umask of this process is.
            file.set_permissions(Permissions::from_mode(0o755))?;
            file.write_all(program)
        })
        // The rename replaces an old file in one step; a sandbox that executes the old file keeps it.
        .and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

/// The file's name, with a digest of the program: runs of two versions of this program may share a state directory.
const INIT_FILE_NAME: &str = concat!("cogni-init-", env!("COGNI_INIT_DIGEST"));

/// The static program that `docker/cogni-init/embed.rs` has built.
pub const BUILT_IN_INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/cogni-init"));

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn runs_that_need_the_program_at_the_same_moment_all_get_it_whole() {
        let state = tempfile::tempdir().expect("there is a place for it");
        for round in 0..20 {
            let directory = state.path().join(round.to_string());
            let first = InitBinary::BuiltIn { directory: directory.clone() };
            thread::scope(|threads| {
                for _ in 0..16 {
                    threads.spawn(|| {
                        let file = first.install_file().expect("the directory can be written");
                        let file = file.expect("a built-in program has a file");
                        assert_eq!(fs::read(file).expect("it is there"), BUILT_IN_INIT);
                    });
                }
            });
            let left = fs::read_dir(&directory).expect("the directory is there").count();
            assert_eq!(left, 1, "a partial file is left");
        }
    }
}
