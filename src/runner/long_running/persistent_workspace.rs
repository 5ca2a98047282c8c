//! What there is of a key on this machine from run to run: the workspace that its runs have in common.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use crate::base::dir_tree;
use crate::runner::directory::{canonical_run_dir, remove_run_dir};
use crate::sandbox::{UserLease, UserRange};

/// A directory that nobody else can enter, with the workspace in it. As long as this lives nobody forgets it.
#[derive(Debug)]
pub(super) struct PersistentWorkspace {
    path: PathBuf,
    label: WorkspaceLock,
    /// The sandbox's, from run to run.
    user: UserLease,
}

/// Whose a home is, for whoever looks at it from outside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkspaceOwner {
    pub agent: String,
    pub branch: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<String>,
    /// Who pays. An earlier version kept the workspaces of a grant's accounts together, and did not write it down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<String>,
    /// The field of the request that `branch` is of, such as `branch_key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Where the last run's work was to go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<StoredBranchRef>,
}

/// A branch, in the words of the outbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredBranchRef {
    pub repository: String,
    pub branch_key: String,
}

/// The file that says whose a home is, and by its time when that was used last. Who has it locked has the home.
#[derive(Debug)]
pub(super) struct WorkspaceLock(File);

impl PersistentWorkspace {
    /// Makes it where it is not there, and takes it, for a sandbox with one of these users. None where it is somebody
    /// else's for the moment.
    pub(super) fn open(
        place: &Path,
        name: &str,
        tenant: &WorkspaceOwner,
        users: UserRange,
    ) -> anyhow::Result<Option<Self>> {
        let cannot = || format!("the workspace below `{}` cannot be made", place.display());
        let path = canonical_run_dir(place).with_context(cannot)?.join(name);
        let opened = || -> anyhow::Result<Option<Self>> {
            DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
            let Some(label) = WorkspaceLock::try_lock(&path, true)? else { return Ok(None) };
            let had = fs::symlink_metadata(path.join(WORKSPACE_DIR)).map(|found| found.uid());
            let user = users.lease_user(had.ok(), &path)?;
            let home = Self { path: path.clone(), label, user };
            home.write_owner(tenant)?;
            home.create_dirs()?;
            Ok(Some(home))
        };
        opened().with_context(cannot)
    }

    fn create_dirs(&self) -> io::Result<()> {
        let (workspace, uid) = (self.workspace(), self.uid());
        let is_new = match DirBuilder::new().mode(0o700).create(&workspace) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
            made => made.map(|()| true)?,
        };
        if geteuid().is_root() {
            let is_its = fs::symlink_metadata(&workspace)?.uid() == uid;
            return if is_its { Ok(()) } else { change_owner(&workspace, uid) };
        }
        // Who may not give it away opens it to all, behind a directory that only they can enter.
        if is_new { fs::set_permissions(&workspace, Permissions::from_mode(0o777)) } else { Ok(()) }
    }

    /// The user of its sandbox.
    pub(super) fn uid(&self) -> u32 {
        self.user.uid()
    }

    pub(super) fn workspace(&self) -> PathBuf {
        self.path.join(WORKSPACE_DIR)
    }

    /// Writes down whose it is, and that it is used now.
    pub(super) fn write_owner(&self, tenant: &WorkspaceOwner) -> io::Result<()> {
        self.label.write_owner(tenant)?;
        self.label.mark_used()
    }

    /// Its time is that of its last run.
    pub(super) fn mark_used(&self) {
        if let Err(error) = self.label.mark_used() {
            tracing::warn!(%error, path = %self.path.display(), "it is not known when it was used");
        }
    }

    /// Puts something else into the workspace, but for what is kept. The directory stays the same, as it is mounted in
    /// a sandbox; none of that one's processes runs now.
    pub(super) fn replace_content(
        &self,
        kept: &[String],
        feed: impl FnOnce(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (workspace, incoming) = (self.workspace(), self.path.join("incoming"));
        let cannot = || format!("`{}` cannot be filled anew", workspace.display());
        remove_run_dir(&incoming).with_context(cannot)?;
        feed(&incoming)?;
        let fill = || -> io::Result<()> {
            for entry in fs::read_dir(&workspace)? {
                let entry = entry?;
                if !kept.iter().any(|kept| entry.file_name() == kept.as_str()) {
                    dir_tree::remove_tree(&entry.path())?;
                }
            }
            for entry in fs::read_dir(&incoming)? {
                let entry = entry?;
                let place = workspace.join(entry.file_name());
                // What a branch has is never hidden by what an agent has left.
                dir_tree::remove_tree(&place)?;
                fs::rename(entry.path(), place)?;
            }
            fs::remove_dir(&incoming)
        };
        fill().with_context(cannot)
    }
}

/// Gives a home that an earlier version made its name of now, for a tenant who is to have it, where there is none of
/// this name yet. A home whose last run was for another line of work stays as it is: its branch may not be this one's.
/// What goes wrong costs the run nothing but what was kept.
pub(super) fn adopt_legacy_workspace(
    place: &Path,
    earlier: &str,
    name: &str,
    tenant: &WorkspaceOwner,
) {
    let (old, new) = (place.join(earlier), place.join(name));
    if new.exists() || !old.exists() {
        return;
    }
    let inherited = || -> io::Result<bool> {
        // As long as the label is ours, nobody else moves or forgets the home.
        let Some(_label) = WorkspaceLock::try_lock(&old, false)? else { return Ok(false) };
        let is_of_line = WorkspaceLock::read_owner(&old).is_some_and(|had| had.line == tenant.line);
        if is_of_line {
            fs::rename(&old, &new)?;
        }
        Ok(is_of_line)
    };
    let of = tracing::field::display(tenant);
    match inherited() {
        Ok(true) => tracing::info!(
            of,
            from = earlier,
            to = name,
            "a workspace of an earlier version has a new name"
        ),
        Ok(false) => tracing::info!(
            of,
            id = earlier,
            "a workspace of an earlier version is kept, and not used"
        ),
        Err(error) => {
            tracing::warn!(of, id = earlier, %error, "a workspace of an earlier version cannot be used");
        }
    }
}

/// Gives a workspace to the sandbox's user of now; none of the earlier user's processes runs.
fn change_owner(workspace: &Path, uid: u32) -> io::Result<()> {
    match dir_tree::chown_tree(workspace, uid, uid) {
        // So deep that it is too much for every run, which is told to each.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NAMETOOLONG) => Ok(()),
        given => given,
    }
}

impl WorkspaceLock {
    /// None where somebody else has it, or the home has gone meanwhile.
    pub(super) fn try_lock(home: &Path, may_make: bool) -> io::Result<Option<Self>> {
        let path = home.join(LOCK_FILE);
        let file = File::options()
            .read(true)
            .write(true)
            .create(may_make)
            .truncate(false)
            .mode(0o600)
            .open(&path);
        let file = match file {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN) => return Ok(None),
            taken => taken?,
        }
        // Between the two another may have put the home away, and made a new one.
        let is_there = fs::metadata(&path).is_ok_and(|found| {
            file.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (found.dev(), found.ino()))
        });
        Ok(is_there.then_some(Self(file)))
    }

    pub(super) fn exists_in(home: &Path) -> bool {
        home.join(LOCK_FILE).exists()
    }

    /// Gives a home of an earlier version one, that says when it was used, and not whose it is.
    pub(super) fn create_for_legacy(home: &Path, used: SystemTime) -> io::Result<()> {
        match File::options().write(true).create_new(true).mode(0o600).open(home.join(LOCK_FILE)) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            made => made?.set_modified(used),
        }
    }

    /// What is not there, or was written by half, says nothing.
    pub(super) fn read_owner(home: &Path) -> Option<WorkspaceOwner> {
        serde_json::from_slice(&fs::read(home.join(LOCK_FILE)).ok()?).ok()
    }

    /// When a home was used last; of one that an earlier version made, when something in it has changed.
    pub(super) fn last_used(home: &Path) -> io::Result<SystemTime> {
        fs::metadata(home.join(LOCK_FILE)).or_else(|_| fs::metadata(home))?.modified()
    }

    fn write_owner(&self, tenant: &WorkspaceOwner) -> io::Result<()> {
        let text = serde_json::to_string(tenant).expect("it has texts only");
        let mut found = vec![0; text.len() + 1];
        let read = self.0.read_at(&mut found, 0)?;
        if &found[..read] == text.as_bytes() {
            return Ok(());
        }
        self.0.set_len(0)?;
        self.0.write_all_at(text.as_bytes(), 0)
    }

    fn mark_used(&self) -> io::Result<()> {
        self.0.set_modified(SystemTime::now())
    }
}

const LOCK_FILE: &str = "label.json";

const WORKSPACE_DIR: &str = "workspace";

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
        let tenant = WorkspaceOwner {
            agent: "agent".to_owned(),
            branch: "branch".to_owned(),
            grant: None,
            account: None,
            repository: None,
            kind: None,
            line: None,
        };
        let homes = place.path().join("homes");
        let open = || PersistentWorkspace::open(&homes, "one", &tenant, UserRange::SHARED_USER);
        let home = open().expect("made").expect("it is nobody's");
        assert!(open().expect("it is there").is_none());
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
            home.replace_content(&[".state".to_owned()], feed).expect("filled");
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
    }
}
