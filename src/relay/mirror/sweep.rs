//! Removes what nobody comes back to.

use std::fs::{self, DirEntry, File};
use std::io;
use std::path::Path;
use std::time::SystemTime;

use super::{MADE, id};
use crate::relay::{BranchKey, Error, Lease, Repository};

/// Removes the mirrors below `state` that nobody has come to since `before`, but not those of `kept`; the next run there
/// fetches everything again. What killed runs have left of their quarantine goes, too. Returns how many mirrors.
pub fn sweep(state: &Path, before: SystemTime, kept: &[Repository]) -> Result<usize, Error> {
    let kept: Vec<_> = kept.iter().map(id).collect();
    let mut removed = 0;
    for mirror in entries(&state.join("mirrors"))? {
        let path = mirror.path();
        let is_bare = path.extension().is_some_and(|ending| ending == "git");
        let name = path.file_stem().unwrap_or_default();
        if is_bare && !kept.iter().any(|id| name == id.as_str()) {
            let disk = |source| Error::Disk { path: path.clone(), source };
            removed += usize::from(remove(&path, before).map_err(disk)?);
        }
    }
    for repository in entries(&state.join("branches"))? {
        for branch in entries(&repository.path())? {
            let key = branch.file_name().into_string().ok();
            let key = key.and_then(|key| BranchKey::parse(&key).ok());
            // Whoever holds it lets go of it with nothing left behind; so do we.
            match key.map(|key| Lease::take(&repository.path(), &key)) {
                None | Some(Ok(_) | Err(Error::Busy { .. })) => (),
                Some(Err(error)) => return Err(error),
            }
        }
    }
    Ok(removed)
}

/// Under the lock that whoever comes to it takes: who comes later makes it anew.
fn remove(mirror: &Path, before: SystemTime) -> io::Result<bool> {
    let lock = File::create(mirror.with_extension("lock"))?;
    lock.lock()?;
    let used = fs::metadata(mirror.join(MADE)).and_then(|made| made.modified());
    let is_old = used.map_or(true, |used| used < before);
    if is_old {
        fs::remove_dir_all(mirror)?;
    }
    Ok(is_old)
}

fn entries(directory: &Path) -> Result<Vec<DirEntry>, Error> {
    let found = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        found => found.and_then(Iterator::collect),
    };
    found.map_err(|source| Error::Disk { path: directory.to_owned(), source })
}
