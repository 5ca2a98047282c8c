//! What there is of a key on this machine from run to run: the workspace that its runs have in common.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::runner::directory::{real, remove};
use crate::sandbox::spec::{GID, UID};

/// A directory that nobody else can enter, with the workspace in it.
#[derive(Clone, Debug)]
pub(super) struct Home {
    path: PathBuf,
}

impl Home {
    /// Makes it where it is not there.
    pub(super) fn open(place: &Path, name: &str) -> anyhow::Result<Self> {
        let cannot = || format!("the workspace below `{}` cannot be made", place.display());
        let place = real(place).with_context(cannot)?;
        let home = Self { path: place.join(name) };
        home.make().with_context(cannot)?;
        Ok(home)
    }

    fn make(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.path)?;
        let workspace = self.workspace();
        match DirBuilder::new().mode(0o700).create(&workspace) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
            made => made?,
        }
        // Whoever may not give it away opens it to all, behind a directory that only they can enter.
        if fs::metadata(&workspace)?.uid() == 0 {
            chown(&workspace, Some(UID), Some(GID))
        } else {
            fs::set_permissions(&workspace, Permissions::from_mode(0o777))
        }
    }

    pub(super) fn workspace(&self) -> PathBuf {
        self.path.join("workspace")
    }

    /// Puts something else into the workspace, but for what is kept. The directory stays the same, as it is mounted in a
    /// sandbox; none of that one's processes runs now.
    pub(super) fn fill(
        &self,
        kept: &[String],
        feed: impl FnOnce(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (workspace, incoming) = (self.workspace(), self.path.join("incoming"));
        let cannot = || format!("`{}` cannot be filled anew", workspace.display());
        remove(&incoming).with_context(cannot)?;
        feed(&incoming)?;
        let fill = || -> io::Result<()> {
            for entry in fs::read_dir(&workspace)? {
                let entry = entry?;
                if !kept.iter().any(|kept| entry.file_name() == kept.as_str()) {
                    remove_any(&entry.path())?;
                }
            }
            for entry in fs::read_dir(&incoming)? {
                let entry = entry?;
                let place = workspace.join(entry.file_name());
                // What a branch has is never hidden by what an agent has left.
                remove_any(&place)?;
                fs::rename(entry.path(), place)?;
            }
            fs::remove_dir(&incoming)
        };
        fill().with_context(cannot)
    }

    pub(super) fn remove(self) -> io::Result<()> {
        remove(&self.path)
    }
}

/// Follows no link; what is not there is as good as removed.
fn remove_any(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// R6, R7: nothing that an agent has left but what is kept, and nothing that a link of its leads to.
    #[test]
    fn a_workspace_is_filled_anew_but_for_what_is_kept() {
        let place = tempfile::tempdir().expect("there is a place for it");
        let outside = place.path().join("outside");
        fs::create_dir(&outside).and_then(|()| fs::write(outside.join("file"), "")).expect("made");
        let home = Home::open(&place.path().join("homes"), "one").expect("made");
        let workspace = home.workspace();
        let inode = fs::metadata(&workspace).expect("made").ino();
        for round in 0..2 {
            let file = |name: &str| fs::write(workspace.join(name), format!("left in {round}"));
            let left = fs::create_dir_all(workspace.join(".state"))
                .and_then(|()| file(".state/session"))
                .and_then(|()| fs::create_dir_all(workspace.join("deep/er")))
                .and_then(|()| file("deep/er/file"))
                .and_then(|()| file("README"))
                .and_then(|()| symlink(&outside, workspace.join("link")))
                .and_then(|()| symlink(&outside, workspace.join("src")));
            left.expect("the agent's own");
            let feed = |incoming: &Path| {
                fs::create_dir(incoming)?;
                fs::create_dir(incoming.join("src"))?;
                Ok(fs::write(incoming.join("README"), "of the branch")?)
            };
            home.fill(&[".state".to_owned()], feed).expect("filled");
            let mut names: Vec<_> = fs::read_dir(&workspace)
                .expect("it is there")
                .map(|entry| entry.expect("it is there").file_name())
                .collect();
            names.sort();
            assert_eq!(names, [".state", "README", "src"]);
            let read = |name: &str| fs::read_to_string(workspace.join(name)).expect("it is there");
            assert_eq!(read("README"), "of the branch");
            assert_eq!(read(".state/session"), format!("left in {round}"));
            assert!(outside.join("file").exists());
            fs::remove_dir(workspace.join("src")).expect("it is empty");
        }
        assert_eq!(fs::metadata(&workspace).expect("it is there").ino(), inode);
        home.remove().expect("removed");
        assert!(!workspace.exists());
    }
}
