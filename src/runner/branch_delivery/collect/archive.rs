//! The archiving of a workspace that other runs use, too: its content is copied or moved to a directory that they do
//! not use.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, fchown};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use tokio::process::Command;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::base::dir_tree;
use crate::relay::repo::ArtifactDir;

/// Copies the workspace, so that its next run still finds the state that the workspace keeps from run to run. If the
/// copy fails because the paths are too deep, or because the disk or the time does not suffice, moves the content
/// instead. Then the next run finds an empty workspace. An interrupted call may be repeated.
pub(super) async fn copy_or_move(workspace: &Path, artifacts: &ArtifactDir) -> anyhow::Result<()> {
    let archived = artifacts.workspace_path();
    // An existing directory is a complete copy, or the part of the content that an earlier call has moved.
    if !archived.try_exists()? {
        match copy_tree(workspace, &artifacts.directory().join("copy"), &archived).await {
            Ok(()) => return Ok(()),
            Err(error) => {
                tracing::warn!("a workspace is moved, for it cannot be copied: {error:#}");
            }
        }
    }
    let from = workspace.to_owned();
    spawn_blocking(move || move_entries(&from, &archived))
        .await?
        .context("the workspace cannot be moved")
}

/// Copies a tree. The name `to` exists only after the copy is complete: the copy is made under the name `half`.
async fn copy_tree(from: &Path, half: &Path, to: &Path) -> anyhow::Result<()> {
    remove_partial_copy(half).await?;
    let copied = timeout(COPY_TIMEOUT, run_cp(from, half)).await;
    let copied = copied.unwrap_or_else(|_| Err(anyhow!("it takes longer than {COPY_TIMEOUT:?}")));
    // A partial copy takes space on a disk that may be full.
    if copied.is_err() {
        remove_partial_copy(half).await?;
    }
    copied.and_then(|()| Ok(fs::rename(half, to)?))
}

/// Runs `cp -a`, which preserves links, owners and modes, follows no symlink, and executes none of the files.
async fn run_cp(from: &Path, to: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("cp");
    let output = command.args(["-aT", "--"]).arg(from).arg(to).kill_on_drop(true).output().await?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", stderr.lines().next_back().unwrap_or_default());
    Ok(())
}

async fn remove_partial_copy(half: &Path) -> anyhow::Result<()> {
    let half = half.to_owned();
    Ok(spawn_blocking(move || dir_tree::remove_tree(&half)).await??)
}

/// Moves the entries one by one, because the workspace directory itself is mounted in a sandbox. Then gives `to` the
/// owner and mode of `from`, as a copy has them, even if `to` existed before: git reads `to` as that owner.
fn move_entries(from: &Path, to: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(to) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => (),
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        match renameat_with(CWD, entry.path(), CWD, target, RenameFlags::NOREPLACE) {
            // The entry exists in `to` already, from an earlier call.
            Ok(()) | Err(Errno::EXIST) => (),
            Err(error) => return Err(error.into()),
        }
    }
    let source = fs::metadata(from)?;
    let directory = File::open(to)?;
    fchown(&directory, Some(source.uid()), Some(source.gid()))?;
    directory.set_permissions(source.permissions())
}

/// Gives a workspace to its repository's owner, if only root can enter the workspace. An earlier version of this
/// program did not set the owner when it moved a workspace. Blocks.
pub(super) fn restore_ownership(workspace: &Path) -> io::Result<()> {
    let Ok(repository) = fs::symlink_metadata(workspace.join(".git")) else { return Ok(()) };
    let directory = File::open(workspace)?;
    let found = directory.metadata()?;
    let is_closed = found.mode().trailing_zeros() >= 6; // neither the group nor others may enter
    if found.uid() == 0 && is_closed && repository.uid() != 0 {
        fchown(&directory, Some(repository.uid()), Some(repository.gid()))?;
    }
    Ok(())
}

/// The maximum time of a copy (our choice). A workspace has some gigabytes at most.
const COPY_TIMEOUT: Duration = Duration::from_mins(10);
