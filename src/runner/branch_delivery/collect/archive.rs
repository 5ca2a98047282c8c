//! A workspace that other runs come into, put where they do not.

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

/// Copies it, so that its next run finds what it keeps from run to run. Where that cannot be done, since names are too deep
/// for it, or too much for the disk or the time, it is moved, and the next run finds nothing. Whoever was cut off may begin
/// again.
pub(super) async fn copy_or_move(workspace: &Path, place: &ArtifactDir) -> anyhow::Result<()> {
    let kept = place.workspace_path();
    // What is there is a whole copy, or what was moved of it.
    if !kept.try_exists()? {
        match copy_tree(workspace, &place.directory().join("copy"), &kept).await {
            Ok(()) => return Ok(()),
            Err(error) => {
                tracing::warn!("a workspace is moved, for it cannot be copied: {error:#}");
            }
        }
    }
    let from = workspace.to_owned();
    spawn_blocking(move || move_entries(&from, &kept))
        .await?
        .context("the workspace cannot be moved")
}

/// Under its name there is all of it, or nothing.
async fn copy_tree(from: &Path, half: &Path, to: &Path) -> anyhow::Result<()> {
    remove_partial_copy(half).await?;
    let copied = timeout(COPY_TIMEOUT, run_cp(from, half)).await;
    let copied = copied.unwrap_or_else(|_| Err(anyhow!("it takes longer than {COPY_TIMEOUT:?}")));
    if copied.is_err() {
        remove_partial_copy(half).await?;
    }
    copied.and_then(|()| Ok(fs::rename(half, to)?))
}

/// As it is: it follows no link, and runs nothing of what it copies.
async fn run_cp(from: &Path, to: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("cp");
    let done = command.args(["-aT", "--"]).arg(from).arg(to).kill_on_drop(true).output().await?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{}", said.lines().next_back().unwrap_or_default());
    Ok(())
}

async fn remove_partial_copy(half: &Path) -> anyhow::Result<()> {
    let half = half.to_owned();
    Ok(spawn_blocking(move || dir_tree::remove_tree(&half)).await??)
}

/// Name by name: the directory itself is mounted where its runs are. Then it is given to whom the other belongs, as a copy
/// is, also where it was there already: git is to look into it as that user.
fn move_entries(from: &Path, to: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(to) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => (),
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let place = to.join(entry.file_name());
        match renameat_with(CWD, entry.path(), CWD, place, RenameFlags::NOREPLACE) {
            // It was copied.
            Ok(()) | Err(Errno::EXIST) => (),
            Err(error) => return Err(error.into()),
        }
    }
    let source = fs::metadata(from)?;
    let folder = File::open(to)?;
    fchown(&folder, Some(source.uid()), Some(source.gid()))?;
    folder.set_permissions(source.permissions())
}

/// Gives a workspace to whom its repository belongs, where it is root's alone: an earlier version did not when it moved one.
/// Blocks.
pub(super) fn restore_ownership(workspace: &Path) -> io::Result<()> {
    let Ok(repository) = fs::symlink_metadata(workspace.join(".git")) else { return Ok(()) };
    let folder = File::open(workspace)?;
    let found = folder.metadata()?;
    let is_closed = found.mode().trailing_zeros() >= 6; // neither the group nor others may enter
    if found.uid() == 0 && is_closed && repository.uid() != 0 {
        fchown(&folder, Some(repository.uid()), Some(repository.gid()))?;
    }
    Ok(())
}

/// A workspace has some gigabytes at most.
const COPY_TIMEOUT: Duration = Duration::from_mins(10);
