//! The removal of relay state that is old and that no row needs.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::DeliveryError;
use super::outbox::{DeliveryJob, DeliveryOutbox, DeliveryStep, WORK_DIR, WorkspaceRow};
use crate::base::dir_tree;
use crate::relay::repo::{self, mirror};

/// The numbers of removed items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RelaySweepReport {
    /// Removed rows of delivered work.
    pub delivered: usize,
    /// Removed directories that no row needs. They are of delivered work whose process ended early, of runs that never
    /// began, or workspaces that an earlier version kept.
    pub works: usize,
    pub mirrors: usize,
}

/// Removes state below the relay's directory that is older than `age` at `now` and that nothing needs. The artifacts of
/// delivered work are removed at any age. Work that is held, has failed, is in progress or is still in a workspace
/// stays, and so do its mirror and all audit logs. Blocks.
///
/// # Errors
/// Returns an error if the outbox or the directory cannot be used.
pub fn sweep_relay_state(
    state: &Path,
    outbox: &DeliveryOutbox,
    age: Duration,
    now: SystemTime,
) -> Result<RelaySweepReport, DeliveryError> {
    let before = now.checked_sub(age.max(MIN_AGE));
    let before = before.unwrap_or(SystemTime::UNIX_EPOCH);
    let delivered = outbox.remove_delivered(before)?;
    let rows = outbox.list_jobs(false)?;
    // Artifacts are compared by the last name only: the path of the state directory can be written in several ways.
    let workspaces = outbox.workspaces()?;
    let of_workspaces = workspaces.iter().map(|workspace| &workspace.plan.artifacts);
    let named = rows.iter().map(|job| &job.request.artifacts).chain(of_workspaces);
    let named: HashSet<_> = named.filter_map(|path| path.file_name()).collect();
    let works = remove_old_works(&state.join(WORK_DIR), before, &named)?
        + discard_delivered(&rows, &workspaces)?;
    let open = rows.iter().filter(|job| job.step != DeliveryStep::Done);
    let open = open.map(|job| &job.request.repository);
    let needed = open.chain(workspaces.iter().map(|workspace| &workspace.plan.repository)).cloned();
    let needed: Vec<_> = needed.collect();
    let mirrors = mirror::remove_unused_mirrors(state, before, &needed)?;
    Ok(RelaySweepReport { delivered, works, mirrors })
}

/// Removes the artifacts of delivered work, unless a retained workspace is in the same directory.
fn discard_delivered(
    rows: &[DeliveryJob],
    workspaces: &[WorkspaceRow],
) -> Result<usize, DeliveryError> {
    let needed: HashSet<_> = workspaces.iter().map(|workspace| &workspace.plan.artifacts).collect();
    let delivered = rows.iter().filter(|job| job.step == DeliveryStep::Done);
    let delivered =
        delivered.map(|job| &job.request.artifacts).filter(|path| !needed.contains(path));
    let mut removed = 0;
    for path in delivered.filter(|path| path.exists()) {
        let disk = |source| repo::RepoError::Io { path: path.clone(), source };
        dir_tree::remove_tree(path).map_err(disk)?;
        removed += 1;
    }
    Ok(removed)
}

/// Removes directories below `work` that no row names and that did not change since `before`.
fn remove_old_works(
    directory: &Path,
    before: SystemTime,
    named: &HashSet<&OsStr>,
) -> Result<usize, DeliveryError> {
    let disk = |source| repo::RepoError::Io { path: directory.to_owned(), source };
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries.map_err(disk)?,
    };
    let mut removed = 0;
    for entry in entries {
        let path = entry.map_err(disk)?.path();
        // `symlink_metadata` looks at the entry itself: a link must not lend its target's age.
        let changed = fs::symlink_metadata(&path).and_then(|found| found.modified());
        let is_named = path.file_name().is_some_and(|name| named.contains(name));
        if !is_named && changed.map_err(disk)? < before {
            dir_tree::remove_tree(&path).map_err(disk)?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// The minimum age of a directory that is removed. A younger one may be of a run that is collecting its work just now.
const MIN_AGE: Duration = Duration::from_hours(1);
