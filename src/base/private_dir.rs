//! Creates and checks directories that no other user may change: another user could replace the files in them.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// An error for a directory that another user could change.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    #[error("directory `{}` cannot be made or read; choose another, or make it for this user", path.display())]
    Unusable { path: PathBuf, source: io::Error },
    #[error(
        "directory `{}` has mode {mode:04o}: other users of this machine could replace what is kept there; \
         `chmod go-w {}`, or choose another",
        path.display(),
        path.display()
    )]
    WritableByOthers { path: PathBuf, mode: u32 },
    #[error(
        "directory `{}` belongs to user {uid}, who could replace what is kept there; choose a directory of your own",
        path.display()
    )]
    OtherOwner { path: PathBuf, uid: u32 },
}

/// Creates a directory and its missing parents with a mode, and checks the directory.
///
/// # Errors
/// Returns an error if the directory cannot be made, or other users may change its content.
pub fn make(path: &Path, mode: u32) -> Result<(), DirectoryError> {
    let tried = DirBuilder::new().recursive(true).mode(mode).create(path);
    tried.map_err(|source| DirectoryError::Unusable { path: path.to_owned(), source })?;
    check(path)
}

/// Checks that no other user may write to a directory, and that root or this process's user owns it. A process of root
/// accepts every owner.
///
/// # Errors
/// Returns an error if other users may change the directory's content, or the directory cannot be read.
pub fn check(path: &Path) -> Result<(), DirectoryError> {
    let path = path.to_owned();
    let found = match fs::metadata(&path) {
        Ok(found) => found,
        Err(source) => return Err(DirectoryError::Unusable { path, source }),
    };
    let user = rustix::process::geteuid();
    if found.mode() & OTHERS_MAY_WRITE != 0 {
        return Err(DirectoryError::WritableByOthers { path, mode: found.mode() & 0o7777 });
    }
    if !user.is_root() && ![0, user.as_raw()].contains(&found.uid()) {
        return Err(DirectoryError::OtherOwner { path, uid: found.uid() });
    }
    Ok(())
}

/// The permission bits that let the group and all other users write.
const OTHERS_MAY_WRITE: u32 = 0o022;

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_directory_that_others_may_write_to_is_refused() {
        let place = tempfile::tempdir().expect("there is a place for it");
        let state = place.path().join("state");
        make(&state, 0o700).expect("it is new");
        for (mode, is_good) in [
            (0o700, true),
            (0o711, true),
            (0o755, true),
            (0o775, false),
            (0o777, false),
            (0o1777, false),
        ] {
            fs::set_permissions(&state, Permissions::from_mode(mode)).expect("it is ours");
            assert_eq!(make(&state, 0o700).is_ok(), is_good, "{mode:o}");
        }
        let message = check(&state).expect_err("all may write there").to_string();
        assert!(message.contains("mode 1777") && message.contains("`chmod go-w /"), "{message}");
    }
}
