//! What an agent is to answer, put into its workspace.
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
    unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde_json::json;
use uuid::Uuid;

use crate::sandbox::spec::UID;

/// Why the conversation is not there.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("`{}` leads through a symlink; what is in a workspace must not lead out of it", .0.display())]
    Symlink(PathBuf),
    #[error("`{}` cannot be written", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// Writes one message of a user as the conversation at `place`, which is a relative path, in `workspace`.
///
/// # Errors
/// It cannot be written, or not without following a symlink.
pub(super) fn write(workspace: &Path, place: &Path, message: &str) -> Result<(), Error> {
    let conversation = json!({"messages": [{"role": "user", "content": message}]});
    let mut here = PathBuf::new();
    let mut folder = openat2(CWD, workspace, FOLDER, Mode::empty(), ResolveFlags::NO_SYMLINKS)
        .map_err(|error| failed(workspace, error))?;
    let mut names: Vec<_> = place
        .components()
        .filter_map(|part| match part {
            Component::Normal(name) => Some(name),
            _ => None,
        })
        .collect();
    let Some(file_name) = names.pop() else { return Err(failed(workspace, Errno::ISDIR)) };
    for name in names {
        here.push(name);
        folder = enter(&folder, Path::new(name)).map_err(|error| failed(&here, error))?;
    }
    here.push(file_name);
    replace(&folder, Path::new(file_name), conversation.to_string().as_bytes())
        .map_err(|error| failed(&here, error))
}

/// Opens a folder, which is made where it is not there.
fn enter(parent: &OwnedFd, name: &Path) -> Result<OwnedFd, Errno> {
    let is_new = match mkdirat(parent, name, Mode::from_raw_mode(0o755)) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => return Err(error),
    };
    let folder = openat2(parent, name, FOLDER, Mode::empty(), RESOLVE)?;
    if is_new {
        give_away(&folder, 0o755)?;
    }
    Ok(folder)
}

/// Puts a new file where another may be, or a symlink, which is replaced and not followed.
fn replace(folder: &OwnedFd, name: &Path, text: &[u8]) -> Result<(), Errno> {
    let temporary = format!(".{}", Uuid::now_v7());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = openat2(folder, &temporary, flags, Mode::from_raw_mode(0o600), RESOLVE)?;
    let written = give_away(&file, 0o644)
        .and_then(|()| File::from(file).write_all(text).map_err(|error| errno(&error)))
        .and_then(|()| renameat(folder, &temporary, folder, name));
    written.inspect_err(|_| {
        let _ = unlinkat(folder, &temporary, AtFlags::empty());
    })
}

/// Whoever may give files away gives this one to the sandbox's user.
fn give_away(file: &OwnedFd, mode: u32) -> Result<(), Errno> {
    fchmod(file, Mode::from_raw_mode(mode))?;
    if geteuid().is_root() {
        fchown(file, Some(Uid::from_raw(UID)), Some(Gid::from_raw(UID)))?;
    }
    Ok(())
}

fn failed(path: &Path, error: Errno) -> Error {
    match error {
        Errno::LOOP => Error::Symlink(path.to_owned()),
        error => Error::Io { path: path.to_owned(), source: error.into() },
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

const RESOLVE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);
