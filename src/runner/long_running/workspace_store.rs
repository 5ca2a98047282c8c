//! The store of the persistent workspaces of long-running sandboxes: listing, measuring and pruning.
//!
//! The service that keeps the workspaces uses the store, and so does an operator in another process. Each process that
//! uses a workspace locks the workspace's lock file. Pruning locks the file, too, and renames the workspace in one step
//! before the removal. So a run that starts at that moment finds the complete workspace or no workspace.
//!
//! **Invariant:** pruning removes no workspace that a run or a sandbox uses, and no workspace whose branch has pending
//! work of the relay.

use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use uuid::Uuid;

use super::persistent_workspace::WorkspaceLock;
pub use super::persistent_workspace::WorkspaceOwner;
use crate::base::dir_tree;
use crate::relay::delivery::outbox::{DeliveryJob, DeliveryOutbox, WorkspaceRow};
use crate::relay::repo::SandboxBranch;
use crate::relay::repo::repository::RepositoryUrl;
pub use crate::runner::branch_delivery::StoredBranchRef;
use crate::runner::directory;

/// The persistent workspaces below one directory.
#[derive(Clone, Debug)]
pub struct WorkspaceStore {
    directory: PathBuf,
}

/// A persistent workspace, its owner and the time of its last use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredWorkspace {
    /// The name of the workspace's directory.
    pub id: String,
    /// The owner; `None` if an earlier version of this program made the workspace and no run has used it since.
    pub owner: Option<WorkspaceOwner>,
    pub used: SystemTime,
}

/// The decision about a workspace, or the result of pruning it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PruneOutcome {
    /// A run or a sandbox uses the workspace.
    InUse,
    /// The relay has pending work of the workspace's branch.
    DeliveryPending,
    /// The workspace was used within the minimum age, or since it was listed.
    RecentlyUsed,
    /// The workspace may be removed.
    Unused,
    /// The workspace is removed.
    Removed,
    /// The workspace could not be locked or removed.
    RemoveFailed(String),
}

impl WorkspaceStore {
    /// Returns the store of the service with this state directory.
    pub fn in_state_dir(state_dir: &Path) -> Self {
        Self { directory: state_dir.join("workspaces") }
    }

    pub(super) fn root_dir(&self) -> &Path {
        &self.directory
    }

    /// Returns the workspaces; the workspace with the oldest use comes first. Blocks.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn list(&self) -> io::Result<Vec<StoredWorkspace>> {
        let names = self.list_names()?.into_iter().filter(|name| is_workspace_name(name));
        let workspaces = names.filter_map(|id| {
            let home = self.directory.join(&id);
            // A workspace without a time was removed since the names were read.
            Some(StoredWorkspace {
                owner: WorkspaceLock::read_owner(&home),
                used: WorkspaceLock::last_used(&home).ok()?,
                id,
            })
        });
        let mut workspaces: Vec<_> = workspaces.collect();
        workspaces.sort_by(|a, b| (a.used, &a.id).cmp(&(b.used, &b.id)));
        Ok(workspaces)
    }

    /// Returns the number of bytes that a workspace takes. Blocks.
    ///
    /// # Errors
    /// Returns an error if the workspace cannot be read.
    pub fn disk_usage(&self, workspace: &StoredWorkspace) -> io::Result<u64> {
        dir_tree::disk_usage(&self.directory.join(&workspace.id), u64::MAX)
    }

    /// Returns the decision that [`WorkspaceStore::prune`] would make now, without removing the workspace. A workspace
    /// stays if it was used within `age`, or if `is_awaited` is true for its branch. Blocks.
    pub fn prune_decision(
        &self,
        workspace: &StoredWorkspace,
        age: Duration,
        is_awaited: impl Fn(&StoredBranchRef) -> bool,
    ) -> PruneOutcome {
        let home = self.directory.join(&workspace.id);
        if !WorkspaceLock::exists_in(&home) {
            return self.unlocked_decision(workspace, age, is_awaited);
        }
        match WorkspaceLock::try_lock(&home, false) {
            Ok(Some(_label)) => self.unlocked_decision(workspace, age, is_awaited),
            Ok(None) => PruneOutcome::InUse,
            Err(error) => PruneOutcome::RemoveFailed(error.to_string()),
        }
    }

    /// Removes a workspace, unless a run uses it, it was used within `age`, or `is_awaited` is true for its branch.
    /// Blocks.
    pub fn prune(
        &self,
        workspace: &StoredWorkspace,
        age: Duration,
        is_awaited: impl Fn(&StoredBranchRef) -> bool,
    ) -> PruneOutcome {
        let home = self.directory.join(&workspace.id);
        // 1. Take the lock. A workspace of an earlier version gets its lock file first.
        let locked = WorkspaceLock::create_for_legacy(&home, workspace.used)
            .and_then(|()| WorkspaceLock::try_lock(&home, false));
        // 2. As long as this function holds the lock, no run can start in the workspace.
        let label = match locked {
            Ok(Some(label)) => label,
            Ok(None) => return PruneOutcome::InUse,
            // Another process has removed the workspace before.
            Err(error) if error.kind() == ErrorKind::NotFound => return PruneOutcome::Removed,
            Err(error) => return PruneOutcome::RemoveFailed(error.to_string()),
        };
        // 3. The decision is made again under the lock.
        match self.unlocked_decision(workspace, age, is_awaited) {
            PruneOutcome::Unused => (),
            other => return other,
        }
        // 4. The rename makes the name free in one step. If the process dies in the removal, the next pruning removes
        //    the rest by its prefix.
        let away = self.directory.join(format!("{TRASH_PREFIX}{}", Uuid::now_v7()));
        let removed = fs::rename(&home, &away).and_then(|()| {
            // The lock file has moved with the directory, so a new workspace of this name has its own lock.
            drop(label);
            directory::remove_run_dir(&away)
        });
        removed.map_or_else(
            |error| PruneOutcome::RemoveFailed(error.to_string()),
            |()| PruneOutcome::Removed,
        )
    }

    /// Removes the workspaces that were not used within `age` and are not awaited. First removes the leftovers of
    /// interrupted removals. Blocks.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn prune_expired(
        &self,
        age: Duration,
        is_awaited: impl Fn(&StoredBranchRef) -> bool,
    ) -> io::Result<Vec<(StoredWorkspace, PruneOutcome)>> {
        for name in self.list_names()?.into_iter().filter(|name| name.starts_with(TRASH_PREFIX)) {
            if let Err(error) = directory::remove_run_dir(&self.directory.join(&name)) {
                tracing::warn!(name, %error, "cannot finish an interrupted removal of a workspace");
            }
        }
        let is_old = |workspace: &StoredWorkspace| {
            workspace.used.elapsed().is_ok_and(|unused| unused >= age)
        };
        let old = self.list()?.into_iter().filter(is_old);
        Ok(old
            .map(|workspace| {
                let outcome = self.prune(&workspace, age, &is_awaited);
                (workspace, outcome)
            })
            .collect())
    }

    /// Decides about a workspace that no other process has locked.
    fn unlocked_decision(
        &self,
        workspace: &StoredWorkspace,
        age: Duration,
        is_awaited: impl Fn(&StoredBranchRef) -> bool,
    ) -> PruneOutcome {
        let home = self.directory.join(&workspace.id);
        // A run, perhaps with another branch, may have used the workspace since it was listed.
        let tenant = WorkspaceLock::read_owner(&home);
        if tenant != workspace.owner
            || WorkspaceLock::last_used(&home).is_ok_and(|used| used > workspace.used)
        {
            return PruneOutcome::RecentlyUsed;
        }
        if workspace.used.elapsed().unwrap_or_default() < age {
            return PruneOutcome::RecentlyUsed;
        }
        match tenant.and_then(|tenant| tenant.line) {
            Some(line) if is_awaited(&line) => PruneOutcome::DeliveryPending,
            _ => PruneOutcome::Unused,
        }
    }

    /// Returns the names in the directory, or no names if the directory does not exist.
    fn list_names(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(vec![]),
            entries => entries?,
        };
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }
}

impl fmt::Display for WorkspaceOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The client chose the branch's name, so control characters are escaped.
        match (self.agent.as_str(), self.branch.as_str()) {
            ("", _) => write!(f, "all agents that share a workspace")?,
            (agent, "") => write!(f, "all runs of {agent}")?,
            (agent, branch) => write!(f, "{agent} on {}", branch.escape_debug())?,
        }
        match self.repository.as_deref() {
            Some(repository) if !repository.is_empty() => write!(f, " of {repository}"),
            _ => Ok(()),
        }
    }
}

/// Returns true if the relay has pending deliveries of a branch, or uncollected work. Also returns true if the outbox
/// cannot be read. Blocks.
pub fn has_pending_delivery(outbox: &DeliveryOutbox, line: &StoredBranchRef) -> bool {
    let is_of = |repository: &RepositoryUrl, branch: &SandboxBranch| {
        repository.canonical_key() == line.repository && branch.key().as_str() == line.branch_key
    };
    let has_open_job = |jobs: Vec<DeliveryJob>| {
        jobs.iter().any(|job| is_of(&job.request.repository, job.request.branch()))
    };
    let has_open_workspace = |rows: Vec<WorkspaceRow>| {
        let open = rows.iter().filter(|row| row.needs_collection()).map(|row| &row.plan);
        open.into_iter().any(|plan| is_of(&plan.repository, &plan.state.branch))
    };
    outbox.list_jobs(true).map_or(true, has_open_job)
        || outbox.workspaces().map_or(true, has_open_workspace)
}

fn is_workspace_name(name: &str) -> bool {
    name.len() == super::key::NAME_DIGITS && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The prefix of a workspace that is being removed.
const TRASH_PREFIX: &str = ".forgotten-";
