//! The writer of the files that an agent finds in its workspace: its conversation and its settings.
//!
//! Other agents may have written to the workspace, or may write to it now. So the writer opens each directory relative
//! to the directory that the step before has opened, follows no symlink and never goes upwards. The writer writes a
//! file under a new temporary name, and then renames the file in one step.
//!
//! **Invariant:** the writer touches nothing outside of the workspace, and changes the owner of no file or directory
//! but those that the writer made.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, ResolveFlags, Uid, fchmod, fchown, mkdirat, openat2, renameat,
    statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use uuid::Uuid;

/// An error of writing a file into a workspace.
#[derive(Debug, thiserror::Error)]
pub(super) enum WorkspaceWriteError {
    #[error("`{}` leads through a symlink; what is in a workspace must not lead out of it", .0.display())]
    Symlink(PathBuf),
    #[error("`{}` cannot be written", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// An open workspace and the user that its new files belong to.
#[derive(Debug)]
pub(super) struct WorkspaceWriter {
    folder: OwnedFd,
    uid: u32,
}

impl WorkspaceWriter {
    /// Opens a workspace for writing. The files will belong to `uid`, the sandbox's user.
    ///
    /// # Errors
    /// Returns `Symlink` if the path leads through a symlink, and `Io` if the workspace cannot be opened.
    pub(super) fn open(workspace: &Path, uid: u32) -> Result<Self, WorkspaceWriteError> {
        let folder = openat2(CWD, workspace, DIR_FLAGS, Mode::empty(), ResolveFlags::NO_SYMLINKS);
        Ok(Self { folder: folder.map_err(|error| write_error(workspace, error))?, uid })
    }

    /// Writes a file at `place`, a relative path. Replaces the file or symlink that is there.
    ///
    /// # Errors
    /// Returns `Symlink` if a directory of the path is a symlink, and `Io` if the file cannot be written.
    pub(super) fn write_file(&self, place: &Path, text: &str) -> Result<(), WorkspaceWriteError> {
        self.with_parent_dir(place, |folder, name| {
            replace_file(folder, name, text.as_bytes(), self.uid)
        })
    }

    /// Writes a file at `place` unless the path exists, and returns true if the file was written.
    ///
    /// # Errors
    /// Returns `Symlink` if a directory of the path is a symlink, and `Io` if the file cannot be written.
    pub(super) fn write_new_file(
        &self,
        place: &Path,
        text: &str,
    ) -> Result<bool, WorkspaceWriteError> {
        self.with_parent_dir(place, |folder, name| {
            // A dangling symlink counts as existing, too: the check does not follow symlinks.
            match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => Ok(false),
                Err(Errno::NOENT) => {
                    replace_file(folder, name, text.as_bytes(), self.uid).map(|()| true)
                }
                Err(error) => Err(error),
            }
        })
    }

    /// Calls `act` with the last name of `place` and the open directory that holds the name. Makes missing directories.
    fn with_parent_dir<T>(
        &self,
        place: &Path,
        act: impl FnOnce(&OwnedFd, &Path) -> Result<T, Errno>,
    ) -> Result<T, WorkspaceWriteError> {
        let mut names: Vec<_> = place
            .components()
            .filter_map(|part| match part {
                Component::Normal(name) => Some(Path::new(name)),
                _ => None,
            })
            .collect();
        // `..` and `/` are dropped above, so every name stays below the workspace. `here` is only for error messages.
        let Some(file_name) = names.pop() else { return Err(write_error(place, Errno::ISDIR)) };
        let (mut here, mut entered) = (PathBuf::new(), None);
        for name in names {
            here.push(name);
            let folder =
                open_or_create_dir(entered.as_ref().unwrap_or(&self.folder), name, self.uid);
            entered = Some(folder.map_err(|error| write_error(&here, error))?);
        }
        here.push(file_name);
        act(entered.as_ref().unwrap_or(&self.folder), file_name)
            .map_err(|error| write_error(&here, error))
    }
}

/// Opens a directory, and makes the directory if it does not exist.
fn open_or_create_dir(parent: &OwnedFd, name: &Path, uid: u32) -> Result<OwnedFd, Errno> {
    let is_new = match mkdirat(parent, name, Mode::from_raw_mode(0o755)) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => return Err(error),
    };
    // An agent may have put another directory under the name since `mkdirat`. That directory is inside the workspace,
    // too, as the kernel resolves the name beneath `parent` and through no symlink.
    let folder = openat2(parent, name, DIR_FLAGS, Mode::empty(), RESOLVE_FLAGS)?;
    if is_new {
        chown_to_sandbox(&folder, 0o755, uid)?;
    }
    Ok(folder)
}

/// Writes a new file at a name that may exist already. Replaces an existing file or symlink, and follows no symlink.
fn replace_file(folder: &OwnedFd, name: &Path, text: &[u8], uid: u32) -> Result<(), Errno> {
    // `EXCL` guarantees a new file: only such a file may change its owner. The rename replaces the name itself, so a
    // symlink or a hard link at the name keeps its target unchanged.
    let temporary = format!(".{}", Uuid::now_v7());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = openat2(folder, &temporary, flags, Mode::from_raw_mode(0o600), RESOLVE_FLAGS)?;
    let written = chown_to_sandbox(&file, 0o644, uid)
        .and_then(|()| File::from(file).write_all(text).map_err(|error| to_errno(&error)))
        .and_then(|()| renameat(folder, &temporary, folder, name));
    written.inspect_err(|_| {
        let _ = unlinkat(folder, &temporary, AtFlags::empty());
    })
}

/// Sets a file's mode, and gives the file to the sandbox's user if this process is root and so may change owners.
fn chown_to_sandbox(file: &OwnedFd, mode: u32, uid: u32) -> Result<(), Errno> {
    fchmod(file, Mode::from_raw_mode(mode))?;
    if geteuid().is_root() {
        fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(uid)))?;
    }
    Ok(())
}

fn write_error(path: &Path, error: Errno) -> WorkspaceWriteError {
    match error {
        Errno::LOOP => WorkspaceWriteError::Symlink(path.to_owned()),
        error => WorkspaceWriteError::Io { path: path.to_owned(), source: error.into() },
    }
}

fn to_errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The flags of every opened directory.
const DIR_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The restrictions of path resolution below the workspace: no way out of it, no symlink, no other file system.
const RESOLVE_FLAGS: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);
