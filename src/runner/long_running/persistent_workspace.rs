//! The persistent workspace of a key, which stays on this machine from run to run.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::Context;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;

use crate::base::dir_tree;
use crate::runner::branch_delivery::{DeliveryTarget, StoredBranchRef};
use crate::runner::directory::{canonical_run_dir, remove_run_dir};
use crate::sandbox::{UserLease, UserRange};

/// A private directory that contains a key's workspace. No process prunes the directory as long as the value lives.
#[derive(Debug)]
pub(super) struct PersistentWorkspace {
    path: PathBuf,
    lock: WorkspaceLock,
    /// The lease of the sandbox's user, which is the same from run to run if that user is free.
    user: UserLease,
}

/// The owner of a persistent workspace, as the lock file stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkspaceOwner {
    pub agent: String,
    pub branch: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<String>,
    /// The billing account. Absent if an earlier version of this program wrote the file: that version shared a
    /// workspace between the accounts of a grant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<String>,
    /// The field of the request that contained `branch`, such as `branch_key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// The branch that received the last run's work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<StoredBranchRef>,
}

/// The locked lock file of a persistent workspace. The file contains the owner, and its modification time is the time
/// of the last use. The process that holds the lock may use the workspace.
#[derive(Debug)]
pub(super) struct WorkspaceLock(File);

impl PersistentWorkspace {
    /// Opens and locks a workspace for a sandbox with one of `users`. Makes the workspace if it does not exist. Returns
    /// `None` if another process or run holds the lock.
    pub(super) fn open(
        parent: &Path,
        name: &str,
        tenant: &WorkspaceOwner,
        users: UserRange,
    ) -> anyhow::Result<Option<Self>> {
        let cannot = || format!("the workspace below `{}` cannot be made", parent.display());
        let path = canonical_run_dir(parent).with_context(cannot)?.join(name);
        let opened = || -> anyhow::Result<Option<Self>> {
            DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
            // The lock comes before every change of the directory's content.
            let Some(label) = WorkspaceLock::try_lock(&path, true)? else { return Ok(None) };
            // The workspace's present user is preferred, so that its files do not have to change their owner.
            let present_uid =
                fs::symlink_metadata(path.join(WORKSPACE_DIR)).map(|found| found.uid());
            let user = users.lease_user(present_uid.ok(), &path)?;
            let home = Self { path: path.clone(), lock: label, user };
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
        // A process that is not root cannot change the owner, so it lets every user write to the workspace. Only the
        // process's own user can enter the directory above.
        if is_new { fs::set_permissions(&workspace, Permissions::from_mode(0o777)) } else { Ok(()) }
    }

    /// Returns the sandbox's user.
    pub(super) fn uid(&self) -> u32 {
        self.user.uid()
    }

    pub(super) fn workspace(&self) -> PathBuf {
        self.path.join(WORKSPACE_DIR)
    }

    /// Writes the owner and the present time into the lock file.
    pub(super) fn write_owner(&self, tenant: &WorkspaceOwner) -> io::Result<()> {
        self.lock.write_owner(tenant)?;
        self.lock.mark_used()
    }

    /// Sets the time of the last use to now.
    pub(super) fn mark_used(&self) {
        if let Err(error) = self.lock.mark_used() {
            tracing::warn!(%error, path = %self.path.display(), "cannot record a workspace's use");
        }
    }

    /// Replaces the content by the branch of `target`, except the names in `kept_names`, which stay.
    pub(super) async fn checkout_branch(
        self: &Arc<Self>,
        kept_names: Vec<String>,
        target: DeliveryTarget,
        max_workspace: u64,
    ) -> anyhow::Result<()> {
        let home = Arc::clone(self);
        let uid = self.uid();
        let checkout = move |incoming: &_| target.checkout_into(incoming, uid, max_workspace);
        let fill = move || home.replace_content(&kept_names, checkout);
        spawn_blocking(fill).await.context("the workspace was not filled")?
    }

    /// Replaces the content of the workspace, except the names in `kept_names`. The directory itself stays, because a
    /// sandbox has it mounted. The caller makes sure that no process of that sandbox runs.
    pub(super) fn replace_content(
        &self,
        kept_names: &[String],
        feed: impl FnOnce(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (workspace, incoming) = (self.workspace(), self.path.join("incoming"));
        let cannot = || format!("cannot replace the content of `{}`", workspace.display());
        // The new content is complete before the first old file is removed.
        remove_run_dir(&incoming).with_context(cannot)?;
        feed(&incoming)?;
        let fill = || -> io::Result<()> {
            for entry in fs::read_dir(&workspace)? {
                let entry = entry?;
                if !kept_names.iter().any(|name| entry.file_name() == name.as_str()) {
                    dir_tree::remove_tree(&entry.path())?;
                }
            }
            for entry in fs::read_dir(&incoming)? {
                let entry = entry?;
                let target = workspace.join(entry.file_name());
                // A kept name gives way to a file of the branch with the same name.
                dir_tree::remove_tree(&target)?;
                fs::rename(entry.path(), target)?;
            }
            fs::remove_dir(&incoming)
        };
        fill().with_context(cannot)
    }
}

/// Renames a workspace of an earlier version of this program to its present name, unless a workspace of that name
/// exists. A workspace whose last run had another branch keeps its old name, because it may not belong to this branch.
/// Logs errors: without the old workspace the run starts with a new one.
pub(super) fn adopt_legacy_workspace(
    parent: &Path,
    earlier: &str,
    name: &str,
    tenant: &WorkspaceOwner,
) {
    let (old, new) = (parent.join(earlier), parent.join(name));
    if new.exists() || !old.exists() {
        return;
    }
    let inherited = || -> io::Result<bool> {
        // As long as this function holds the lock, no other process renames or prunes the workspace.
        let Some(_label) = WorkspaceLock::try_lock(&old, false)? else { return Ok(false) };
        let is_of_line = WorkspaceLock::read_owner(&old)
            .is_some_and(|earlier_owner| earlier_owner.line == tenant.line);
        if is_of_line {
            fs::rename(&old, &new)?;
        }
        Ok(is_of_line)
    };
    let owner = tracing::field::display(tenant);
    match inherited() {
        Ok(true) => tracing::info!(
            of = owner,
            from = earlier,
            to = name,
            "a workspace of an earlier version has a new name"
        ),
        Ok(false) => tracing::info!(
            of = owner,
            id = earlier,
            "a workspace of an earlier version is kept, and not used"
        ),
        Err(error) => {
            tracing::warn!(of = owner, id = earlier, %error, "a workspace in the format of an earlier program version cannot be taken over");
        }
    }
}

/// Gives a workspace to the sandbox's present user. No process of the earlier user may run.
fn change_owner(workspace: &Path, uid: u32) -> io::Result<()> {
    match dir_tree::chown_tree(workspace, uid, uid) {
        // The paths are too deep for this tree. Every run reports that when it measures the workspace.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NAMETOOLONG) => Ok(()),
        result => result,
    }
}

impl WorkspaceLock {
    /// Locks a workspace's lock file. Returns `None` if another holder has the lock, or if the workspace was removed.
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
            locked => locked?,
        }
        // Between the open and the lock another process may have pruned the workspace, and a run may have made a new
        // one. Then this file is no longer the file at the path, and its lock protects nothing.
        let is_there = fs::metadata(&path).is_ok_and(|found| {
            file.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (found.dev(), found.ino()))
        });
        Ok(is_there.then_some(Self(file)))
    }

    pub(super) fn exists_in(home: &Path) -> bool {
        home.join(LOCK_FILE).exists()
    }

    /// Makes the lock file for a workspace of an earlier version of this program. The file gets the time of the last
    /// use, but no owner.
    pub(super) fn create_for_legacy(home: &Path, used: SystemTime) -> io::Result<()> {
        match File::options().write(true).create_new(true).mode(0o600).open(home.join(LOCK_FILE)) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            made => made?.set_modified(used),
        }
    }

    /// Returns the owner from the lock file, or `None` if the file is missing or incomplete.
    pub(super) fn read_owner(home: &Path) -> Option<WorkspaceOwner> {
        serde_json::from_slice(&fs::read(home.join(LOCK_FILE)).ok()?).ok()
    }

    /// Returns the time of a workspace's last use. Without a lock file, returns the time of the directory's last
    /// change.
    pub(super) fn last_used(home: &Path) -> io::Result<SystemTime> {
        fs::metadata(home.join(LOCK_FILE)).or_else(|_| fs::metadata(home))?.modified()
    }

    fn write_owner(&self, tenant: &WorkspaceOwner) -> io::Result<()> {
        let text = serde_json::to_string(tenant).expect("it has texts only");
        // One byte more than the text, so that a longer file does not compare equal.
        let mut found = vec![0; text.len() + 1];
        let read = self.0.read_at(&mut found, 0)?;
        if &found[..read] == text.as_bytes() {
            return Ok(());
        }
        // A crash between the two calls leaves an incomplete file, which `read_owner` treats as one without an owner.
        self.0.set_len(0)?;
        self.0.write_all_at(text.as_bytes(), 0)
    }

    fn mark_used(&self) -> io::Result<()> {
        self.0.set_modified(SystemTime::now())
    }
}

/// The name of the lock file, beside the workspace.
const LOCK_FILE: &str = "label.json";

/// The name of the workspace in its private directory.
const WORKSPACE_DIR: &str = "workspace";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// R6, R7: only the kept names of an agent's files remain, and files behind an agent's symlink are not touched.
    #[test]
    fn a_workspace_is_filled_anew_but_for_what_is_kept() {
        let temp_dir = tempfile::tempdir().expect("there is a place for it");
        let outside = temp_dir.path().join("outside");
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
        let homes = temp_dir.path().join("homes");
        let open = || PersistentWorkspace::open(&homes, "one", &tenant, UserRange::SHARED_USER);
        let home = open().expect("made").expect("the workspace is free");
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
