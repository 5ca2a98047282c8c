//! Removes what nobody comes back to, and packs what stays.

use std::fs::{self, DirEntry, File};
use std::io;
use std::path::Path;
use std::time::SystemTime;

use super::{COMPLETE_MARKER, FetchLimits, mirror_id, mirror_ref};
use crate::relay::git::GitProgram;
use crate::relay::repo::{BranchKey, BranchLease, RepoError, RepositoryUrl};

/// Removes the mirrors below `state` that nobody has come to since `before`, but not those of `kept`; the next run there
/// fetches everything again. Of the others, what was fetched for branches that nobody has come to goes, and the rest is
/// packed where that is worth it; but nothing goes of `kept`, whose work may build on it. What killed runs have left of
/// their quarantine goes, too. Returns how many mirrors.
pub fn remove_unused_mirrors(
    state: &Path,
    before: SystemTime,
    kept: &[RepositoryUrl],
) -> Result<usize, RepoError> {
    let kept: Vec<_> = kept.iter().map(mirror_id).collect();
    let mut removed = 0;
    for mirror in list_entries(&state.join("mirrors"))? {
        let path = mirror.path();
        let is_bare = path.extension().is_some_and(|ending| ending == "git");
        let name = path.file_stem().unwrap_or_default();
        let branches = state.join("branches").join(name);
        if !is_bare || kept.iter().any(|id| name == id.as_str()) {
            continue;
        }
        let disk = |source| RepoError::Disk { path: path.clone(), source };
        if remove_if_unused(&path, before).map_err(disk)? {
            removed += 1;
        } else {
            gc_mirror(&GitProgram::find(&state.join("home"))?, &path, (&branches, before))?;
        }
    }
    for repository in list_entries(&state.join("branches"))? {
        for branch in list_entries(&repository.path())? {
            let is_left = |entry: &DirEntry| entry.file_name() != "lease";
            let has_left = list_entries(&branch.path())?.iter().any(is_left);
            // Whoever holds it lets go of it with nothing left behind; so do we.
            drop(has_left.then(|| try_lease(&branch)).transpose()?);
        }
    }
    Ok(removed)
}

/// Lets go of the refs of old branches, and has git do what it thinks is needed.
fn gc_mirror(
    git: &GitProgram,
    mirror: &Path,
    (branches, before): (&Path, SystemTime),
) -> Result<(), RepoError> {
    for entry in list_entries(branches)? {
        // It is written by whoever takes it. Where somebody has removed it, that was when it was last used.
        let lease = entry.path().join("lease");
        let used = match fs::metadata(&lease) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::metadata(entry.path()),
            used => used,
        };
        let used = used.and_then(|used| used.modified());
        let used = used.map_err(|source| RepoError::Disk { path: lease, source })?;
        let taken = (used < before).then(|| try_lease(&entry)).transpose()?.flatten();
        let Some(lease) = taken else { continue };
        for name in ["base", "branch"] {
            let words = ["-d".to_owned(), mirror_ref(lease.branch(), name)];
            git.subcommand("update-ref").repository(mirror).args(words).execute()?;
        }
    }
    let call = git.subcommand("gc").repository(mirror).args(["--auto", "--quiet"]);
    let call = call.config("gc.autoDetach=false");
    let call = call.config(format!("gc.auto={MAX_LOOSE_OBJECTS}"));
    let call = call.config(format!("gc.autoPackLimit={MAX_PACKS}"));
    Ok(call.limits(FetchLimits::default().of_git()).execute()?)
}

/// The lease of the branch whose directory this is; `None` where somebody else has it, or it is none of a branch.
fn try_lease(branch: &DirEntry) -> Result<Option<BranchLease>, RepoError> {
    let key = branch.file_name().into_string().ok();
    let Some(key) = key.and_then(|key| BranchKey::parse(&key).ok()) else { return Ok(None) };
    let path = branch.path();
    match BranchLease::try_acquire(path.parent().unwrap_or(&path), &key) {
        Ok(lease) => Ok(Some(lease)),
        Err(RepoError::Busy { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Under the lock that whoever comes to it takes: who comes later makes it anew.
fn remove_if_unused(mirror: &Path, before: SystemTime) -> io::Result<bool> {
    let lock = File::create(mirror.with_extension("lock"))?;
    lock.lock()?;
    let used = fs::metadata(mirror.join(COMPLETE_MARKER)).and_then(|made| made.modified());
    let is_old = used.map_or(true, |used| used < before);
    if is_old {
        fs::remove_dir_all(mirror)?;
    }
    Ok(is_old)
}

fn list_entries(directory: &Path) -> Result<Vec<DirEntry>, RepoError> {
    let found = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        found => found.and_then(Iterator::collect),
    };
    found.map_err(|source| RepoError::Disk { path: directory.to_owned(), source })
}

/// Each fetch of less than a hundred objects leaves them loose, and each larger one a pack.
const MAX_LOOSE_OBJECTS: u32 = 2000;
const MAX_PACKS: u32 = 20;
