//! Removes, measures and changes the owner of directories that an agent has filled, of any depth and size.
//!
//! The agent chose the content and may want these functions to fail. Names a hundred thousand levels deep overflow the
//! stack of a recursive walk; symbolic links lead elsewhere; names appear and disappear during the walk. Every walk has
//! one directory open beside the first and follows no symbolic link.
//!
//! **Invariant:** stack and descriptors do not grow with the depth of a directory, and memory does not grow with its
//! width. Measuring and changing the owner hold some names for each level that a path can express.

use std::ffi::{CStr, CString, OsStr};
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Stat, Uid, chmodat,
    chownat, fchmod, fchown, openat, openat2, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use uuid::Uuid;

/// Removes a directory with its content, or a file, or a symlink. A name that does not exist is no error. Blocks.
///
/// # Errors
/// Returns an error if the name, or a part of the directory, could not be removed.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let open = || openat(CWD, path, DIRECTORY_FLAGS, Mode::empty());
    let top = match open() {
        Err(Errno::ACCESS) => {
            chmodat(CWD, path, OWNER_MODE, AtFlags::empty()).and_then(|()| open())
        }
        opened => opened,
    };
    let top = match top {
        Ok(top) => top,
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTDIR | Errno::LOOP) => return ignore_io_not_found(fs::remove_file(path)),
        Err(error) => return Err(error.into()),
    };
    loop {
        let names = list_names(&top, MAX_NAMES_PER_BATCH)?;
        if names.is_empty() {
            match fs::remove_dir(path) {
                // Another process removes the same directory and has moved an entry up.
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => continue,
                removed => return ignore_io_not_found(removed),
            }
        }
        for name in names {
            remove_one_level(&top, &name)?;
        }
    }
}

/// Removes a name below a directory as [`remove_tree`] does. No symlink on the way there is followed. Blocks.
///
/// # Errors
/// Returns an error if the name leads through a symlink or out of the directory, or could not be removed completely.
pub fn remove_below(top: &Path, name: &Path) -> io::Result<()> {
    let last = name.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let parent = Path::new(".").join(name.parent().unwrap_or(Path::new("")));
    let top = openat(CWD, top, DIRECTORY_FLAGS, Mode::empty())?;
    let folder = openat2(&top, &parent, DIRECTORY_FLAGS, Mode::empty(), RESOLVE_BENEATH)?;
    remove_tree(&Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(last))
}

/// Returns the bytes that a directory takes on disk, or a value above `limit`, at which counting stops. Each name
/// counts as at least one block, so that the number of names is bounded, too. An unreadable directory, or one deeper
/// than a path can express, counts as too much. Blocks.
///
/// # Errors
/// Returns an error if the directory cannot be opened or read.
pub fn disk_usage(path: &Path, limit: u64) -> io::Result<u64> {
    let top = openat(CWD, path, DIRECTORY_FLAGS, Mode::empty())?;
    let mut bytes = 0_u64;
    let walked = walk_tree(&top, |_, _, found| {
        let taken = u64::try_from(found.st_blocks).unwrap_or_default().saturating_mul(SECTOR_BYTES);
        bytes = bytes.saturating_add(taken.max(FILE_SYSTEM_BLOCK_BYTES));
        Ok(if bytes > limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    });
    match walked {
        Err(Errno::NAMETOOLONG | Errno::ACCESS) => Ok(u64::MAX),
        Err(error) => Err(error.into()),
        Ok(()) => Ok(bytes),
    }
}

/// Returns the name of the first pipe, device or symbolic link that `is_meant` accepts. A process that opens such a
/// name may block or be led elsewhere. This function opens directories only. Blocks.
///
/// # Errors
/// Returns an error if the path is not a directory or cannot be read.
pub fn find_special_entry(
    path: &Path,
    is_meant: impl Fn(&CStr, FileType) -> bool,
) -> io::Result<Option<CString>> {
    let top = openat(CWD, path, DIRECTORY_FLAGS, Mode::empty())?;
    let mut special = None;
    walk_tree(&top, |_, name, found| {
        let kind = FileType::from_raw_mode(found.st_mode);
        let is_plain =
            matches!(kind, FileType::Directory | FileType::RegularFile | FileType::Socket);
        if is_plain || !is_meant(name, kind) {
            return Ok(ControlFlow::Continue(()));
        }
        special = Some(name.to_owned());
        Ok(ControlFlow::Break(()))
    })?;
    Ok(special)
}

/// Changes the owner of a directory and its content, as deep as a path can express. The directory itself changes last:
/// until then its new owner cannot enter and place a link in the way. Blocks.
///
/// # Errors
/// Returns an error if the owner of an entry could not be changed.
pub fn chown_tree(path: &Path, uid: u32, gid: u32) -> io::Result<()> {
    let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    let top = openat(CWD, path, DIRECTORY_FLAGS, Mode::empty())?;
    walk_tree(&top, |folder, name, _| {
        chownat(folder, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(fchown(&top, uid, gid)?)
}

/// Calls `visit` once for each name below a directory, with the directory that contains the name, until `visit` breaks.
/// Names that disappear during the walk are left out.
fn walk_tree(
    top: &OwnedFd,
    mut visit: impl FnMut(BorrowedFd<'_>, &CStr, &Stat) -> Result<ControlFlow<()>, Errno>,
) -> Result<(), Errno> {
    let (mut here, mut levels) = (PathBuf::from("."), vec![DirectoryFrame::unread_frame()]);
    while let Some(level) = levels.last_mut() {
        // 1. Enter the next subdirectory. It is opened by its path from the first directory.
        if let Some(name) = level.unvisited.pop() {
            here.push(OsStr::from_bytes(name.as_bytes()));
            levels.push(DirectoryFrame::unread_frame());
        } else if let Some(from) = level.next_offset.take() {
            // 2. Read the directory, or the part of it that did not fit in memory before.
            let folder = match openat2(top, &here, DIRECTORY_FLAGS, Mode::empty(), RESOLVE_BENEATH)
            {
                Ok(folder) => folder,
                // Another process has removed the directory, or has replaced it by a file or a link.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(error) => return Err(error),
            };
            if level.read_entries(folder, from, &mut visit)?.is_break() {
                return Ok(());
            }
        } else {
            // 3. The directory is read to its end, and all its subdirectories are visited: go up.
            levels.pop();
            here.pop();
        }
    }
    Ok(())
}

/// A directory on the path from the first directory to the directory that is read now.
struct DirectoryFrame {
    /// Subdirectories that the walk has not visited yet.
    unvisited: Vec<CString>,
    /// The offset at which reading continues after `unvisited`; `None` at the end of the directory.
    next_offset: Option<i64>,
}

impl DirectoryFrame {
    fn unread_frame() -> Self {
        Self { unvisited: vec![], next_offset: Some(0) }
    }

    /// Reads entries and calls `visit` for each, until the names of subdirectories reach [`MAX_NAME_BYTES_PER_LEVEL`].
    fn read_entries(
        &mut self,
        folder: OwnedFd,
        from: i64,
        visit: &mut impl FnMut(BorrowedFd<'_>, &CStr, &Stat) -> Result<ControlFlow<()>, Errno>,
    ) -> Result<ControlFlow<()>, Errno> {
        let mut entries = Dir::new(folder)?;
        entries.seek(from)?;
        let mut held = 0;
        while held < MAX_NAME_BYTES_PER_LEVEL
            && let Some(entry) = entries.read()
        {
            let entry = entry?;
            let (name, folder) = (entry.file_name(), entries.fd()?);
            if is_dot_entry(name.to_bytes()) {
                continue;
            }
            let Ok(found) = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if visit(folder, name, &found)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
                held += name.to_bytes_with_nul().len() + size_of::<CString>();
                self.unvisited.push(name.to_owned());
                self.next_offset = (held >= MAX_NAME_BYTES_PER_LEVEL).then(|| entry.offset());
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// Removes a name of the first directory and one level below it. A deeper directory is moved up into the first
/// directory under a new name, and removed later. So the depth of the tree needs no recursion.
fn remove_one_level(top: &OwnedFd, name: &CString) -> Result<(), Errno> {
    if unlink_or_open(top, name)? == UnlinkOutcome::Removed {
        return Ok(());
    }
    let Some(folder) = open_directory(top, name)? else { return Ok(()) };
    loop {
        let names = list_names(&folder, MAX_NAMES_PER_BATCH)?;
        if names.is_empty() {
            break;
        }
        for inner in names {
            if unlink_or_open(&folder, &inner)? == UnlinkOutcome::Removed {
                continue;
            }
            let fresh = format!(".{}", Uuid::now_v7());
            let lift = || renameat_with(&folder, &inner, top, &fresh, RenameFlags::NOREPLACE);
            let lifted = match lift() {
                // A user other than root cannot move a directory without write permission.
                Err(Errno::ACCESS) => {
                    chmodat(&folder, &inner, OWNER_MODE, AtFlags::empty()).and_then(|()| lift())
                }
                lifted => lifted,
            };
            ignore_not_found(lifted)?;
        }
    }
    ignore_not_found(unlinkat(top, name, AtFlags::REMOVEDIR))
}

#[derive(PartialEq, Eq)]
enum UnlinkOutcome {
    Removed,
    /// The name is a directory that is not empty.
    NotEmpty,
}

fn unlink_or_open(folder: &OwnedFd, name: &CString) -> Result<UnlinkOutcome, Errno> {
    match unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(UnlinkOutcome::Removed),
        Err(Errno::ISDIR) => (),
        Err(error) => return Err(error),
    }
    match unlinkat(folder, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(UnlinkOutcome::Removed),
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(UnlinkOutcome::NotEmpty),
        Err(error) => Err(error),
    }
}

/// Opens a directory. If the owner has no permission to read or write the directory, the permission is added: the
/// directory is about to be removed.
fn open_directory(top: &OwnedFd, name: &CString) -> Result<Option<OwnedFd>, Errno> {
    let open = || openat(top, name, DIRECTORY_FLAGS, Mode::empty());
    let folder = match open() {
        Err(Errno::ACCESS) => {
            chmodat(top, name, OWNER_MODE, AtFlags::empty()).and_then(|()| open())
        }
        opened => opened,
    };
    match folder {
        Ok(folder) => {
            // This fails if another user owns the directory. If the mode matters, the removal of an entry fails later
            // and returns the error.
            let _ = fchmod(&folder, OWNER_MODE);
            Ok(Some(folder))
        }
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns at most `limit` names. A directory that another process has removed has no names.
fn list_names(folder: &OwnedFd, limit: usize) -> Result<Vec<CString>, Errno> {
    let is_kept = |name: &Result<rustix::fs::DirEntry, Errno>| {
        name.as_ref().map_or(true, |name| !is_dot_entry(name.file_name().to_bytes()))
    };
    let entries = match Dir::read_from(folder) {
        Err(Errno::NOENT) => return Ok(vec![]),
        entries => entries?,
    };
    let names = entries.filter(is_kept).take(limit);
    match names.map(|name| Ok(name?.file_name().to_owned())).collect() {
        Err(Errno::NOENT) => Ok(vec![]),
        names => names,
    }
}

fn is_dot_entry(name: &[u8]) -> bool {
    name == b"." || name == b".."
}

fn ignore_not_found(done: Result<(), Errno>) -> Result<(), Errno> {
    match done {
        Err(Errno::NOENT) => Ok(()),
        done => done,
    }
}

fn ignore_io_not_found(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

const DIRECTORY_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

const RESOLVE_BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// The mode of a directory that only its owner can use.
const OWNER_MODE: Mode = Mode::RWXU;

/// The largest number of names that a removal holds in memory. Our choice.
const MAX_NAMES_PER_BATCH: usize = 1024;

/// The largest size of the names that a walk holds for each level, in bytes. Our choice. A path has at most 2,000
/// levels.
const MAX_NAME_BYTES_PER_LEVEL: usize = 8 << 10;

/// The unit of `st_blocks` (stat(2)).
const SECTOR_BYTES: u64 = 512;

/// The block size of common file systems. An empty file counts as one block, for its entry in the table of files.
const FILE_SYSTEM_BLOCK_BYTES: u64 = 4096;
