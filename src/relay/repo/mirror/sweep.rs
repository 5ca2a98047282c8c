//! The sweep of mirrors: removes unused mirrors and refs, and packs the rest.

use std::fs::{self, DirEntry, File};
use std::io;
use std::path::Path;
use std::time::SystemTime;

use super::fetch_lock::{FULL_MARKER, FetchLock};
use super::{COMPLETE_MARKER, FetchLimits, mirror_id, mirror_ref, note_ref};
use crate::relay::git::GitProgram;
use crate::relay::repo::{BranchKey, BranchLease, RepoError, RepositoryUrl};

/// Removes the mirrors below `state` that no run has used since `before`, except those of `kept`. The next run at such
/// a repository fetches everything again. In the other mirrors, the refs of unused branches are removed, and git packs
/// the objects if that is worthwhile. Mirrors of `kept` stay complete, because retained work may build on them.
/// Quarantine leftovers of killed runs are removed, too. Returns the number of removed mirrors.
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
        let disk = |source| RepoError::Io { path: path.clone(), source };
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
            // A lease removes the scratch directories on release, those of a killed run among them. So acquiring and
            // releasing the lease is enough. A branch that is held now cleans up by itself.
            drop(has_left.then(|| try_lease(&branch)).transpose()?);
        }
    }
    Ok(removed)
}

/// Removes the refs of unused branches, and lets git pack the mirror if git finds that needed.
fn gc_mirror(
    git: &GitProgram,
    mirror: &Path,
    (branches, before): (&Path, SystemTime),
) -> Result<(), RepoError> {
    for entry in list_entries(branches)? {
        // Every holder writes the lease file, so its time is the time of the last use. If the file is gone, the
        // directory's time is the time of its removal.
        let lease = entry.path().join("lease");
        let used = match fs::metadata(&lease) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::metadata(entry.path()),
            used => used,
        };
        let used = used.and_then(|used| used.modified());
        let used = used.map_err(|source| RepoError::Io { path: lease, source })?;
        // The lease is held while its refs are removed, so that no run begins at the branch in between.
        let lease_if_old = (used < before).then(|| try_lease(&entry)).transpose()?.flatten();
        let Some(lease) = lease_if_old else { continue };
        let [base, branch] = ["base", "branch"].map(|name| mirror_ref(lease.branch(), name));
        for name in [base, branch, note_ref(lease.branch())] {
            let words = ["-d".to_owned(), name];
            git.subcommand("update-ref").repository(mirror).args(words).execute()?;
        }
    }
    // A full mirror gives up everything that no ref leads to, which is safe only while nothing is fetched.
    let disk = |source| RepoError::Io { path: mirror.to_owned(), source };
    let full = mirror.join(FULL_MARKER);
    let alone = FetchLock::try_acquire_alone(mirror).map_err(disk)?;
    if let Some(alone) = &alone {
        alone.remove_unfinished(mirror).map_err(disk)?;
    }
    let is_full = alone.is_some() && fs::exists(&full).map_err(disk)?;
    // A full mirror is packed alone. Otherwise git itself keeps what a fetch is writing, and the lock is shared, so that
    // no run that begins removes what git is packing.
    let lock = match alone.filter(|_| is_full) {
        Some(alone) => Some(alone),
        None => FetchLock::try_acquire_shared(mirror).map_err(disk)?,
    };
    // Another sweep packs the mirror at this moment.
    let Some(_lock) = lock else { return Ok(()) };
    if is_full {
        fs::remove_file(&full).map_err(disk)?;
    }
    // `gc` runs in the foreground, so that its limits apply and no process outlives the sweep.
    let how = if is_full { "--prune=now" } else { "--auto" };
    let call = git.subcommand("gc").repository(mirror).args([how, "--quiet"]);
    let call = call.config("gc.autoDetach=false");
    let call = call.config(format!("gc.auto={MAX_LOOSE_OBJECTS}"));
    let call = call.config(format!("gc.autoPackLimit={MAX_PACKS}"));
    Ok(call.limits(FetchLimits::default().of_git()).execute()?)
}

/// Acquires the lease of a branch by its directory. Returns `None` if the lease is held, or if the directory's name is
/// not a key.
fn try_lease(branch: &DirEntry) -> Result<Option<BranchLease>, RepoError> {
    let key = branch.file_name().into_string().ok();
    let Some(key) = key.and_then(|key| BranchKey::parse(&key).ok()) else { return Ok(None) };
    let path = branch.path();
    match BranchLease::try_acquire(path.parent().unwrap_or(&path), &key) {
        Ok(lease) => Ok(Some(lease)),
        Err(RepoError::BranchInUse { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes a mirror if it is unused. The lock keeps a run from opening the mirror at the same time; a run that comes
/// later creates a new one.
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

/// Lists a directory. A missing directory is empty.
fn list_entries(directory: &Path) -> Result<Vec<DirEntry>, RepoError> {
    let found = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        found => found.and_then(Iterator::collect),
    };
    found.map_err(|source| RepoError::Io { path: directory.to_owned(), source })
}

/// The number of loose objects at which git packs them. A fetch of less than a hundred objects leaves them loose, and a
/// larger fetch leaves a pack.
const MAX_LOOSE_OBJECTS: u32 = 2000;
/// The number of packs at which git joins them. Our choice.
const MAX_PACKS: u32 = 20;
