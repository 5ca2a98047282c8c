//! The writer of the files that an agent finds in its workspace: its conversation and its settings.
//!
//! Other agents may have written to the workspace, or may write to it now. So the writer opens each directory relative
//! to the directory that the step before has opened, follows no symlink and never goes upwards. The writer writes a
//! file under a new temporary name, and then renames the file in one step.
//!
//! An earlier agent may also have put something else at the writer's names: a symlink or a pipe where a directory
//! belongs, or a directory where a file belongs. In an agent's own workspace the writer removes such an obstacle;
//! otherwise one run could stop all later ones. In a workspace of the operator the writer refuses it.
//!
//! **Invariant:** the writer touches nothing outside of the workspace, and changes the owner of no file or directory
//! but those that the writer made.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, ResolveFlags, Uid, fchmod, fchown, fstat, mkdirat, openat2,
    renameat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use uuid::Uuid;

use crate::base::dir_tree;

/// The treatment of an obstacle: of anything but a directory where a directory belongs, or of a directory where a file
/// belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObstaclePolicy {
    /// The obstacle stays, and the run fails before it begins. This policy is for a workspace of the operator.
    Refuse,
    /// The writer removes the obstacle. This policy is for a workspace whose content is from agents, earlier runs or a
    /// branch.
    Remove,
}

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
    obstacles: ObstaclePolicy,
}

impl WorkspaceWriter {
    /// Opens a workspace for writing. The files will belong to `uid`, the sandbox's user.
    ///
    /// # Errors
    /// Returns `Symlink` if the path leads through a symlink, and `Io` if the workspace cannot be opened.
    pub(super) fn open(
        workspace: &Path,
        uid: u32,
        obstacles: ObstaclePolicy,
    ) -> Result<Self, WorkspaceWriteError> {
        let folder = openat2(CWD, workspace, DIR_FLAGS, Mode::empty(), ResolveFlags::NO_SYMLINKS);
        let folder = folder.map_err(|error| write_error(workspace, error))?;
        Ok(Self { folder, uid, obstacles })
    }

    /// Writes a file at `place`, a relative path. Replaces the file or symlink that is there.
    ///
    /// # Errors
    /// Returns `Symlink` if a directory of the path is a symlink that is not to be removed, and `Io` if the file cannot
    /// be written.
    pub(super) fn write_file(&self, place: &Path, text: &str) -> Result<(), WorkspaceWriteError> {
        let text = text.as_bytes();
        self.with_parent_dir(place, self.obstacles, |folder, name| {
            match replace_file(folder, name, text, self.uid) {
                Err(Errno::ISDIR) if self.obstacles == ObstaclePolicy::Remove => {
                    remove_obstacle(folder, name)?;
                    replace_file(folder, name, text, self.uid)
                }
                written => written,
            }
        })
    }

    /// Writes a file at `place` unless the path exists, and returns true if the file was written. An obstacle on the
    /// way there counts as existing, if obstacles are no error: the content of the workspace has precedence.
    ///
    /// # Errors
    /// Returns `Symlink` if a directory of the path is a symlink and obstacles are an error, and `Io` if the file cannot
    /// be written.
    pub(super) fn write_new_file(
        &self,
        place: &Path,
        text: &str,
    ) -> Result<bool, WorkspaceWriteError> {
        let written = self.with_parent_dir(place, ObstaclePolicy::Refuse, |folder, name| {
            // A dangling symlink counts as existing, too: the check does not follow symlinks.
            match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => Ok(false),
                Err(Errno::NOENT) => {
                    replace_file(folder, name, text.as_bytes(), self.uid).map(|()| true)
                }
                Err(error) => Err(error),
            }
        });
        match written {
            Err(error) if self.obstacles == ObstaclePolicy::Remove && error.is_obstacle() => {
                tracing::warn!(place = %place.display(), %error, "a file of the agent's entry is left out");
                Ok(false)
            }
            written => written,
        }
    }

    /// Calls `act` with the last name of `place` and the open directory that holds the name. Makes missing directories.
    fn with_parent_dir<T>(
        &self,
        place: &Path,
        obstacles: ObstaclePolicy,
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
            let parent = entered.as_ref().unwrap_or(&self.folder);
            let folder = open_or_create_dir(parent, name, self.uid, obstacles);
            entered = Some(folder.map_err(|error| write_error(&here, error))?);
        }
        here.push(file_name);
        act(entered.as_ref().unwrap_or(&self.folder), file_name)
            .map_err(|error| write_error(&here, error))
    }
}

impl WorkspaceWriteError {
    /// Returns true if the error means that the name of a directory belongs to another kind of file.
    fn is_obstacle(&self) -> bool {
        match self {
            Self::Symlink(_) => true,
            Self::Io { source, .. } => source.kind() == io::ErrorKind::NotADirectory,
        }
    }
}

/// Opens a directory, and makes the directory if it does not exist.
fn open_or_create_dir(
    parent: &OwnedFd,
    name: &Path,
    uid: u32,
    obstacles: ObstaclePolicy,
) -> Result<OwnedFd, Errno> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let is_new = match mkdirat(parent, name, NEW_DIR_MODE) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(error),
        };
        // An agent may have put another directory under the name since `mkdirat`. That directory is inside the
        // workspace, too, as the kernel resolves the name beneath `parent` and through no symlink.
        match openat2(parent, name, DIR_FLAGS, Mode::empty(), RESOLVE_FLAGS) {
            Ok(folder) => {
                if is_new && is_unfinished(&folder)? {
                    chown_to_sandbox(&folder, 0o755, uid)?;
                }
                return Ok(folder);
            }
            // A process of the workspace may put back what is removed here, but not for ever.
            Err(Errno::LOOP | Errno::NOTDIR)
                if obstacles == ObstaclePolicy::Remove && attempts < MAX_ATTEMPTS =>
            {
                remove_obstacle(parent, name)?;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Returns true if a directory is as `mkdirat` has made it: an agent can make no directory of this process's user, and
/// no directory of that user that is in use has this mode. So a directory that an agent has put in the place of the new
/// one keeps its owner.
fn is_unfinished(folder: &OwnedFd) -> Result<bool, Errno> {
    let found = fstat(folder)?;
    let mode = Mode::from_raw_mode(found.st_mode);
    Ok(found.st_uid == geteuid().as_raw() && mode == NEW_DIR_MODE)
}

/// Removes whatever has a name, without following it.
fn remove_obstacle(folder: &OwnedFd, name: &Path) -> Result<(), Errno> {
    // The kernel leads this path to the open directory, wherever its name is now.
    let path = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    tracing::warn!(name = %name.display(), "removing what an agent has put in the way of a run's files");
    dir_tree::remove_tree(&path).map_err(|error| to_errno(&error))
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

/// The mode of a new directory until it belongs to the sandbox's user. No other directory has this mode, in which its
/// owner cannot write.
const NEW_DIR_MODE: Mode = Mode::RUSR.union(Mode::XUSR);

/// The number of times that a directory's name is cleared of obstacles. Our choice.
const MAX_ATTEMPTS: usize = 3;

/// The flags of every opened directory.
const DIR_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The restrictions of path resolution below the workspace: no way out of it, no symlink, no other file system.
const RESOLVE_FLAGS: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    const PLACE: &str = ".cogni/messages.json";

    fn write(workspace: &Path, obstacles: ObstaclePolicy) -> Result<(), WorkspaceWriteError> {
        let uid = geteuid().as_raw();
        WorkspaceWriter::open(workspace, uid, obstacles)?.write_file(Path::new(PLACE), "hello")
    }

    /// R6: Nothing that an agent leaves in its workspace stops the next run or leads it out of the workspace.
    #[test]
    fn what_an_agent_puts_in_the_way_is_removed() {
        let place = tempfile::tempdir().expect("there is a place for it");
        let (outside, workspace) = (place.path().join("outside"), place.path().join("workspace"));
        fs::create_dir(&outside).expect("made");
        fs::write(outside.join("messages.json"), "not the agent's").expect("written");
        let cogni = workspace.join(".cogni");
        let obstacles: [&dyn Fn() -> io::Result<()>; 5] = [
            &|| symlink(&outside, &cogni),
            &|| symlink("nowhere", &cogni),
            &|| Ok(rustix::fs::mknodat(CWD, &cogni, rustix::fs::FileType::Fifo, Mode::RWXU, 0)?),
            &|| fs::write(&cogni, "a file"),
            &|| {
                fs::create_dir_all(cogni.join("messages.json/deep/er"))?;
                symlink(&outside, cogni.join("messages.json/link"))
            },
        ];
        for (number, put_obstacle) in obstacles.into_iter().enumerate() {
            fs::create_dir(&workspace).and_then(|()| put_obstacle()).expect("made");
            write(&workspace, ObstaclePolicy::Refuse).expect_err("the operator's is kept");
            write(&workspace, ObstaclePolicy::Remove).unwrap_or_else(|e| panic!("{number}: {e:?}"));
            let found = fs::read_to_string(workspace.join(PLACE)).expect("it is there");
            assert_eq!(found, "hello", "{number}");
            let kept = fs::read_to_string(outside.join("messages.json")).expect("it is there");
            assert_eq!(kept, "not the agent's");
            fs::remove_dir_all(&workspace).expect("removed");
        }
    }

    /// R6: An operator's file of an agent's entry is left out if the workspace has something else in its way.
    #[test]
    fn an_obstacle_of_a_file_that_may_exist_stays() {
        let workspace = tempfile::tempdir().expect("there is a place for it");
        symlink("elsewhere", workspace.path().join("config")).expect("made");
        let write = |obstacles| {
            WorkspaceWriter::open(workspace.path(), geteuid().as_raw(), obstacles)
                .and_then(|writer| writer.write_new_file(Path::new("config/agent.toml"), ""))
        };
        write(ObstaclePolicy::Refuse).expect_err("a symlink is in the way");
        assert!(!write(ObstaclePolicy::Remove).expect("it is no error"));
        assert!(workspace.path().join("config").is_symlink());
    }

    /// R6: A directory that was put in the place of a new one does not change its owner and mode.
    #[test]
    fn only_a_directory_as_it_was_made_is_given_away() {
        let place = tempfile::tempdir().expect("there is a place for it");
        let is_own = |mode| {
            fs::set_permissions(place.path(), fs::Permissions::from_mode(mode)).expect("changed");
            let folder =
                openat2(CWD, place.path(), DIR_FLAGS, Mode::empty(), ResolveFlags::empty());
            is_unfinished(&folder.expect("it is there")).expect("it is there")
        };
        assert!(is_own(0o500));
        assert!(!is_own(0o755));
        assert!(!is_own(0o700));
    }
}
