//! What an agent finds in its workspace: its conversation, its settings.
//!
//! The workspace may be one that other agents have written to, or write to now. So every step is taken from the
//! directory that the step before has opened, through no symlink and never upwards; the file is written under a name that
//! was not there, and takes its place in one step.
//!
//! **Invariant:** nothing outside of the workspace is touched, and nobody's file changes its owner but one made here.

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

/// Why it is not there.
#[derive(Debug, thiserror::Error)]
pub(super) enum WorkspaceWriteError {
    #[error("`{}` leads through a symlink; what is in a workspace must not lead out of it", .0.display())]
    Symlink(PathBuf),
    #[error("`{}` cannot be written", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// A workspace that is written to.
#[derive(Debug)]
pub(super) struct WorkspaceWriter {
    folder: OwnedFd,
    uid: u32,
}

impl WorkspaceWriter {
    /// What is written is for the sandbox's user, `uid`.
    ///
    /// # Errors
    /// It cannot be opened, or not without following a symlink.
    pub(super) fn open(workspace: &Path, uid: u32) -> Result<Self, WorkspaceWriteError> {
        let folder = openat2(CWD, workspace, DIR_FLAGS, Mode::empty(), ResolveFlags::NO_SYMLINKS);
        Ok(Self { folder: folder.map_err(|error| write_error(workspace, error))?, uid })
    }

    /// Writes a file at `place`, which is a relative path, in place of what is there.
    ///
    /// # Errors
    /// It cannot be written, or not without following a symlink.
    pub(super) fn write_file(&self, place: &Path, text: &str) -> Result<(), WorkspaceWriteError> {
        self.with_parent_dir(place, |folder, name| {
            replace_file(folder, name, text.as_bytes(), self.uid)
        })
    }

    /// Writes a file where nothing is, and says whether it did.
    ///
    /// # Errors
    /// It cannot be written, or not without following a symlink.
    pub(super) fn write_new_file(
        &self,
        place: &Path,
        text: &str,
    ) -> Result<bool, WorkspaceWriteError> {
        self.with_parent_dir(place, |folder, name| {
            match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => Ok(false),
                Err(Errno::NOENT) => {
                    replace_file(folder, name, text.as_bytes(), self.uid).map(|()| true)
                }
                Err(error) => Err(error),
            }
        })
    }

    /// Does something with a name in the folder that `place` leads to, which is made where it is not there.
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

/// Opens a folder, which is made where it is not there.
fn open_or_create_dir(parent: &OwnedFd, name: &Path, uid: u32) -> Result<OwnedFd, Errno> {
    let is_new = match mkdirat(parent, name, Mode::from_raw_mode(0o755)) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => return Err(error),
    };
    let folder = openat2(parent, name, DIR_FLAGS, Mode::empty(), RESOLVE_FLAGS)?;
    if is_new {
        chown_to_sandbox(&folder, 0o755, uid)?;
    }
    Ok(folder)
}

/// Puts a new file where another may be, or a symlink, which is replaced and not followed.
fn replace_file(folder: &OwnedFd, name: &Path, text: &[u8], uid: u32) -> Result<(), Errno> {
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

/// Whoever may give files away gives this one to the sandbox's user.
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

const DIR_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

const RESOLVE_FLAGS: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);
